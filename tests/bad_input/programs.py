"""Bad command lines of all programs, and of the papers' workloads."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optax
from report_files import LINES, RUNS, write_run

from bad_input.rows import Line


def stay_alone(schedule: object) -> optax.GradientTransformation:
    """An algorithm that exchanges nothing."""
    return optax.identity()


SHORT = "--model linear --epochs 1 --algorithm sgp --out OUT"


def summary(content: Any, metrics: bytes | None = None) -> Callable[[Path], object]:
    """Writes a run with another `summary.json`, an object or the bytes of the file."""

    def write(folder: Path) -> None:
        write_run(folder, RUNS, LINES)
        is_raw = isinstance(content, bytes)
        (folder / "summary.json").write_bytes(content if is_raw else json.dumps(content).encode())
        if metrics is not None:
            (folder / "metrics.jsonl").write_bytes(metrics)

    return write


def metrics(content: bytes) -> Callable[[Path], object]:
    """Writes a run with another `metrics.jsonl`."""
    return summary({"options": {}, "environment": {}, "runs": RUNS}, content)


ROWS = [
    Line("plots", "OUT", "summary.json must be JSON", summary(b"{")),
    Line("plots", "OUT", "line 1 must be JSON", metrics(b"{")),
    Line("plots", "OUT", "no summary.json in", status=1),
    Line("plots", "OUT", "must list one run or more", summary({"runs": []})),
    Line("plots", "", "out", parsed=True),
    Line("image", "--dataset x", "mnist5k", parsed=True),
    Line("image", "--unknown 1", "--unknown", parsed=True),
    Line("image", f"--resume {SHORT}", "summary.json must be JSON", summary(b"{")),
    Line("image", f"--resume {SHORT}", "must have environment, options", summary({"runs": []})),
    Line(
        "image",
        f"--resume {SHORT}",
        "--epochs must be None",
        summary({"runs": [], "options": {"epochs": None}, "environment": {}}),
    ),
]

OUTER = "--outer-every 2"
LOCAL = f"{OUTER} --algorithm local"
TRACKING = "--outer-average gradient-tracking@directed_ring"
IMAGE = [
    ("--nodes 0", "--nodes must be an integer >= 1, got 0"),
    ("--nodes 1000000", "--nodes must be at most the number of training examples, 512"),
    ("--seed 0 0", "--seed must be one or several different values"),
    ("--learning-rate 0", "--learning-rate must be positive and finite"),
    ("--algorithm adpsgd --delays-of no/such", "--delays-of must be a folder of journals"),
    ("--shuffle global --dirichlet-alpha 0.1", "--dirichlet-alpha needs --shuffle local"),
    ("--dataset fashion_mnist --data-dir OUT", "must hold"),
    ("--placement mesh --nodes 9", "--placement mesh needs a device per node"),
    ("--fsdp 2", "--nodes * --fsdp must be at most the number of devices, got 8 * 2 and 8 CPU"),
    ("--topology ring/ring", "two different topologies"),
    ("--topology hypercube --nodes 6", "must be a power of two"),
    ("--algorithm 0-osgp", "--algorithm must overlap 1 step or more"),
    ("--algorithm sgp sgp@one_peer_exponential", "must be different"),
    ("--algorithm easgd --wire-dtype bfloat16", "must be float32"),
    ("--algorithm choco --wire low_rank", "low_rank, which needs averages over all nodes"),
    ("--algorithm dpsgd@star", "doubly stochastic"),
    ("--algorithm osgp", "no algorithm is named 'osgp'"),
    ("--algorithm no_such:mine", "--algorithm no_such:mine must be one that can be imported"),
    ("--algorithm bad_input.programs:stay_alone", "must exchange by gossip that its state shows"),
    ("--algorithm algorithms.published:dpsgd --outer-every 2", "which keeps more than models"),
    ("--algorithm relay@ring", "must be an undirected tree"),
    ("--decay-epochs 3", "--decay-epochs needs --lr-schedule step, got cosine"),
    ("--lr-schedule step --warmup-steps 3", "--warmup-steps must be 0"),
    ("--lr-schedule step --decay-epochs 9 6 --epochs 15", "got 9 6 for"),
    ("--lr-schedule step --decay-epochs 6 15 --epochs 15", "got 6 15 for"),
    ("--lr-schedule step --warmup-epochs 6 --epochs 15", "for a warm-up of 6 of 15"),
    ("--outer-momentum 0.5", "--outer-momentum needs --outer-every"),
    ("--outer-every 99", "--outer-every must be at most the updates of a run, 2, got 99"),
    (f"{OUTER} --momentum quasi-global --algorithm sgp@ring", "--momentum must"),
    (f"{LOCAL} --outer-error-feedback 0.9", "unless average is 'exact', delay 0 and wire a codec"),
    (f"{OUTER} --outer-average d2", "--outer-average must be exact, none, or neighbours"),
    (f"{LOCAL} --outer-average sgp --outer-delay 1", "which moves whole models at once"),
    (f"{OUTER} --algorithm sgp --outer-average sgp", "got gossip where average is one"),
    (f"{LOCAL} --outer-rate 1.5 --outer-momentum 0.9 {TRACKING}", "outer must be stable"),
    ("--algorithm local --local-steps 2", "give --outer-every 2 instead"),
    ("--resume", "--resume needs --out"),
]
ROWS += [
    Line(
        "image",
        f"{'--model linear --epochs 1 ' if '--epochs' not in given else ''}{given}",
        message,
    )
    for given, message in IMAGE
]
ROWS += [
    Line("image", f"{SHORT} --init-from /nowhere", "init_from must be a folder of checkpoints"),
    Line("image", SHORT, "must be a folder without another run", metrics(b"")),
]
OTHERS = [
    ("averaging", "--nodes 1", "--nodes must be an integer >= 2"),
    ("rates", "--nodes 3", "--nodes must be an even integer >= 2"),
    ("speed", "wire --bandwidth x", "--bandwidth must be"),
    ("speed", "wire --hosts 4 4", "--hosts must be one or several different values"),
    ("speed", "wire --hosts 3 --algorithm sgp@hypercube", "nothing to measure with 3 hosts"),
    ("speed", "wire --hosts 2 8 --megabytes 1e6", "the models of 8 hosts must fit into"),
    ("speed", "stragglers --nodes 65", "--nodes must be from 2 to 64, got 65"),
    ("speed", "stragglers --slowness none -2x", "as 4x, got '-2x'"),
    ("speed", "stragglers --algorithm async-x", "--algorithm must be one of async-sgp"),
    ("fault_injection", "--checkpoint-every 7", "--checkpoint-every must be"),
    ("fault_injection", "asynchronous --processes 2", "--processes must be at least 3, got 2"),
    ("compare", "--grid no-such", "--grid must be one of relaysgd-table2, methods-mini"),
    ("compare", "--grid methods-mini --algorithm d2", "--algorithm must be left out with --grid"),
    ("compare", "-- --seed=3", "got --seed: give it before --"),
    ("report", "--section no-such", "--section must be one of scaling, hours, "),
    ("report", "--fashion-mnist OUT", "--fashion-mnist must be a folder that holds the four files"),
    ("launch", "--processes 0 -- true", "--processes must be at least 1, got 0"),
    ("launch", "--processes 1 --stall-slow 9 -- true", "--stall-slow must come with --stall"),
]
ROWS += [Line(program, given, message) for program, given, message in OTHERS]
LINK = "--bandwidth 10gbit"
PLAN = [
    ("", "--bandwidth, as 10gbit, or --network must be given"),
    (f"{LINK} --network tpu-v5e-dcn", "or --network must be given, and not both"),
    ("--network tpu-v5e-dcn --latency 1ms", "--latency must be left out with --network"),
    ("--network nvlink-h100", "--nodes must be at most 8 for --network nvlink-h100, got 32"),
    ("--bandwidth 10gbps", "bits or bytes per second, as in 10gbit, 200mbit or 450GB/s, got"),
    (f"{LINK} --nodes 100000", "--nodes must be at most 4096, got 100000"),
    (f"{LINK} --parameters many", "--parameters must be a positive number"),
    (f"{LINK} --compute 1h", "--compute must be a positive time"),
    (f"{LINK} --outer-every 200000", "--outer-every must be at most 12800 for 32 nodes"),
    (f"{LINK} --slowness slow", "--slowness must be none, random, lognormal"),
]
ROWS += [Line("plan", given, message) for given, message in PLAN]


def write_notes(folder: Path) -> None:
    """A folder that is no comparison, and no report."""
    for name in ("cells", "runs"):
        (folder / name).mkdir()
        (folder / name / "biology.csv").write_text("")


ROWS += [
    Line("compare", "--out OUT --overwrite", "biology.csv: move it", write_notes),
    Line("report", "--out OUT --overwrite", "biology.csv: move it", write_notes),
]

PAIRS = b"one\teins\ntwo\tzwei\nthree\tdrei\n" * 4


def files(contents: dict[str, bytes]) -> Callable[[Path], object]:
    """Writes files by name."""
    return lambda folder: [(folder / name).write_bytes(data) for name, data in contents.items()]


SPLITS = dict.fromkeys(("train.tsv", "valid.tsv", "test.tsv"), PAIRS)
TEXTS = files({"train.txt": b"one two three\n" * 9, "test.txt": b"\n \n"})
OUT = "--placement vmap --data-dir OUT"
OF_FILES = "--placement vmap --dataset files"
ROWS += [
    Line(
        "translation",
        OUT,
        "no test.tsv or test.tsv.gz",
        files({"train.tsv": PAIRS, "valid.tsv": PAIRS}),
    ),
    Line(
        "translation",
        OUT,
        "train.tsv, line 1 must be a sentence",
        files(SPLITS | {"train.tsv": b"one\n"}),
    ),
    Line(
        "translation",
        f"{OUT} --vocabulary-size 258",
        "--vocabulary-size must be >= 259",
        files(SPLITS),
    ),
    Line("translation", f"{OUT} --nodes 13", "at most 128 tokens, got 12", files(SPLITS)),
    Line("speech", "", "--data-dir must be a folder that holds speech_languages.npz, got none"),
    Line("language", OF_FILES, "--data-dir must be a folder with files of texts"),
    Line("language", "--sequence-length 1025", "--sequence-length must be at most 1024"),
    Line("language", f"{OF_FILES} --data-dir OUT", "--data-dir must hold a file train*"),
    Line("language", f"{OF_FILES} --data-dir OUT", "the test texts of files must not be", TEXTS),
    Line("image", "--preset sgp19-mimi", "got 'sgp19-mimi': did you mean sgp19-mini"),
    Line("image", "--preset rand20-mini", "must be a preset of experiments.image"),
    Line("data", "prepare cifar10", "--from must be the original files of cifar10, got none"),
    Line("data", "prepare cifar10 --from OUT", "--from must be cifar-10-python.tar.gz"),
]
