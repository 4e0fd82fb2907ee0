"""Bad command lines of the planner."""

from bad_input.rows import Line

LINK = "--bandwidth 10gbit"
PLAN = [
    ("", "--bandwidth must be given, as 10gbit, got none"),
    ("--bandwidth=-1gbit", "--bandwidth must be a positive bandwidth"),
    (f"{LINK} --parameters 1B", "--compute must be given beside the other one of a model"),
    (f"{LINK} --steps 0", "--steps must be an integer >= 1, got 0"),
    ("--bandwidth 10gbps", "bits or bytes per second, as in 10gbit, 200mbit or 450GB/s, got"),
    ("--bandwidth fast", "--bandwidth must be a positive bandwidth"),
    (f"{LINK} --nodes 0", "--nodes must be an integer >= 1, got 0"),
    (f"{LINK} --nodes 100000", "--nodes must be at most 4096, got 100000"),
    (f"{LINK} --parameters 0", "--parameters must be a positive number"),
    (f"{LINK} --parameters many", "--parameters must be a positive number"),
    (f"{LINK} --compute 0", "--compute must be a positive time"),
    (f"{LINK} --compute 1h", "--compute must be a positive time"),
    (f"{LINK} --latency=-1ms", "--latency must be 0 or a positive time"),
    (f"{LINK} --parameters 1e300", "give one from 1 to 1e+15"),
    (f"{LINK} --compute 1e308", "give one from 1e-09 to 1e+06 s"),
    (f"{LINK} --examples {10**12}", "--examples must be at most 1000000000"),
    (f"{LINK} --outer-every 200000", "--outer-every must be at most 12800 for 32 nodes"),
    (f"{LINK} --examples 0", "--examples must be an integer >= 1, got 0"),
    (f"{LINK} --slowness slow", "--slowness must be none, random, lognormal"),
    (f"{LINK} --wire float32 float32", "--wire must be one or several different forms"),
    (f"{LINK} --outer-every 0", "--outer-every must be an integer >= 1, got 0"),
    (f"{LINK} --late-price=-1", "--late-price must be finite and >= 0"),
    (f"{LINK} --network tpu-v5e-dcn", "--bandwidth must be left out beside --network"),
    ("--network tpu-v5e-dcn --latency 1ms", "--latency must be left out beside --network"),
    ("--network tpu-v5e-dcn --fabric star", "--fabric must be left out beside --network"),
    (
        "--network tpu-v5e-dcn --island-bandwidth 450GB/s",
        "--island-bandwidth must be left out beside",
    ),
    ("--network nvlink-h100", "--nodes must be at most 8 for --network nvlink-h100, got 32"),
    (f"{LINK} --model mlp", "--model must be left out unless --measure"),
    (
        "--measure --model mlp --parameters 1M --compute 1ms",
        "--model must be left out unless --measure",
    ),
    (f"{LINK} --overwrite", "--out must be given with --overwrite, got none"),
    (
        f"{LINK} --measure --parameters 1M --compute 1ms",
        "--measure must have something to measure",
    ),
    (
        "--network tpu-v5e-dcn --measure --parameters 1M --compute 1ms",
        "--measure must have something to measure",
    ),
    (f"{LINK} --fabric torus", "--torus must be given with --fabric torus"),
    (f"{LINK} --torus 4x8", "--torus must be given with --fabric torus"),
    (f"{LINK} --fabric torus --torus 4by8", "--torus must be nodes along each dimension"),
    (f"{LINK} --fabric torus --torus 4x4", "--nodes must fit the links: nodes must be 16 on Torus"),
    (f"{LINK} --fabric islands --island-size 8", "--island-bandwidth must be given"),
    (
        f"{LINK} --fabric islands --island-size 5 --island-bandwidth 450GB/s",
        "nodes must be a multiple of the 5 of an island, got 32",
    ),
    (
        f"{LINK} --fabric islands --island-size 8 --island-bandwidth=-1GB/s",
        "--island-bandwidth must be a positive bandwidth",
    ),
    (f"{LINK} --allreduce two-level", "--fabric must be islands for --allreduce two-level"),
    ("--network tpu-v5e-ici", "nodes must be 256 on Torus((16, 16)), got 32"),
]
PARSED = [
    (f"{LINK} --network carrier-pigeon", "--network"),
]
ROWS = [Line("plan", arguments, message) for arguments, message in PLAN]
ROWS += [Line("plan", arguments, message, parsed=True) for arguments, message in PARSED]
