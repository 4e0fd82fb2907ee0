"""Bad command lines of the planner."""

from bad_input.rows import Line

LINK = "--bandwidth 10gbit"
PLAN = [
    ("", "--bandwidth, as 10gbit, or --network must be given"),
    (f"{LINK} --network tpu-v5e-dcn", "or --network must be given, and not both"),
    ("--network tpu-v5e-dcn --latency 1ms", "--latency must be left out beside --network"),
    ("--network nvlink-h100", "--nodes must be at most 8 for --network nvlink-h100, got 32"),
    ("--bandwidth 10gbps", "bits or bytes per second, as in 10gbit, 200mbit or 450GB/s, got"),
    (f"{LINK} --nodes 100000", "--nodes must be at most 4096, got 100000"),
    (f"{LINK} --parameters many", "--parameters must be a positive number"),
    (f"{LINK} --compute 1h", "--compute must be a positive time"),
    (f"{LINK} --outer-every 200000", "--outer-every must be at most 12800 for 32 nodes"),
    (f"{LINK} --slowness slow", "--slowness must be none, random, lognormal"),
]
ROWS = [Line("plan", arguments, message) for arguments, message in PLAN]
