"""Bad command lines of all programs."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optax
from report_files import LINES, RUNS, write_run

from bad_input.rows import Line

Write = Callable[[Path], object]


def stay_alone(schedule: object) -> optax.GradientTransformation:
    """An algorithm that exchanges nothing."""
    return optax.identity()


SHORT = "--model linear --epochs 1 --algorithm sgp --out OUT"


def write_summary(folder: Path, summary: Any) -> None:
    """A run with another `summary.json`: an object, or the bytes of the file."""
    write_run(folder, RUNS, LINES)
    is_raw = isinstance(summary, bytes)
    (folder / "summary.json").write_bytes(summary if is_raw else json.dumps(summary).encode())


def write_metrics(folder: Path, metrics: bytes) -> None:
    """A run with another `metrics.jsonl`."""
    run = {"options": {}, "environment": {}, "runs": RUNS}
    write_summary(folder, run)
    (folder / "metrics.jsonl").write_bytes(metrics)


def summary_of(run: dict[str, Any]) -> Write:
    summary = {"options": {}, "environment": {}, "runs": [run]}
    return functools.partial(write_summary, summary=summary)


def summary(content: Any) -> Write:
    return functools.partial(write_summary, summary=content)


def metrics(content: bytes) -> Write:
    return functools.partial(write_metrics, metrics=content)


def line(**fields: Any) -> Write:
    return metrics(json.dumps(LINES[0] | fields).encode())


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in RUNS[0].items() if key != name}


BROKEN_FILES: list[tuple[Write, str]] = [
    (summary(b""), "summary.json must be JSON"),
    (summary(b"{"), "summary.json must be JSON"),
    (summary(b"[" * 100_000), "summary.json must be JSON"),
    (summary(None), "summary.json must be a JSON object, got null"),
    (summary({}), "must have"),
    (summary({"options": {}, "environment": {}, "runs": None}), "runs must be a list, got null"),
    (summary({"options": {}, "environment": {}, "runs": [3]}), "runs[0] must be a JSON object"),
    *((summary_of(without(name)), f"runs[0] must have {name}") for name in ("run", "nodes")),
    (summary_of(RUNS[0] | {"run": 3}), "run must be text, got 3"),
    (summary_of(RUNS[0] | {"nodes": "four"}), 'nodes must be an integer >= 0, got "four"'),
    (summary_of(RUNS[0] | {"seconds_per_step": None}), "seconds_per_step must be a finite number"),
    (
        summary_of(RUNS[0] | {"consensus_distance": float("nan")}),
        "must be a finite number, got NaN",
    ),
    (summary_of(RUNS[0] | {"test_accuracy_nodes": 0.5}), "must be a list of one or several"),
    (summary_of(RUNS[0] | {"test_accuracy_average_model": None}), "must be a finite number"),
    (
        summary({"options": {}, "environment": {}, "runs": [RUNS[0]] * 2}),
        "names of runs must differ",
    ),
    (metrics(b"\xff"), "metrics.jsonl must be text in UTF-8"),
    (metrics(b"null"), "line 1 must be a JSON object, got null"),
    (metrics(b"{}"), "line 1 must have epoch, run, seconds, step"),
    (line(step="one"), 'step must be an integer >= 0, got "one"'),
    (line(loss=None), "loss must be a finite number, got null"),
]
ROWS = [Line("plots", "OUT", message, write) for write, message in BROKEN_FILES]
ROWS += [Line("image", f"--resume {SHORT}", *reversed(row)) for row in BROKEN_FILES[::6]]
ROWS += [
    Line("image", f"--resume {SHORT}", message, summary({"runs": [], **parts}))
    for parts, message in (
        ({"environment": {}}, "must have options"),
        ({"options": {}}, "must have environment"),
        ({"options": [], "environment": {}}, "options must be an object"),
        ({"options": {}, "environment": None}, "environment must be an object"),
        ({"options": {}, "environment": {"resumed": 3}}, "resumed must be a list of texts"),
        (
            {"options": {"nodes": "x"}, "environment": {}},
            'nodes must be an integer >= 0, got "x": restore the file',
        ),
        (
            {"options": {"nodes": 0}, "environment": {}},
            "--nodes must be an integer >= 1, got 0",
        ),
        ({"options": {"epochs": None}, "environment": {}}, "--epochs must be None"),
        ({"options": {"seed": "x"}, "environment": {}}, "--seed must be x"),
    )
]
ROWS += [
    Line("plots", "OUT", "no summary.json in", status=1),
    Line("plots", "OUT/nowhere", "no summary.json in", status=1),
    Line("plots", "OUT", "must list one run or more", summary({"runs": []})),
    Line("plots", "OUT", "must have a training line of run", metrics(b"")),
    Line("plots", "OUT", "line 1 must be JSON", metrics(b"{")),
    Line("plots", "", "out", parsed=True),
]

IMAGE = [
    ("--nodes 0", "--nodes must be an integer >= 1, got 0"),
    ("--nodes 1000000", "--nodes must be at most the number of training examples, 512"),
    ("--batch-size-per-node 0", "--batch-size-per-node must be an integer >= 1"),
    ("--batch-size-per-node 1000000", "--batch-size-per-node must be at most 64"),
    ("--epochs 0", "--epochs must be an integer >= 1"),
    ("--log-every 0", "--log-every must be an integer >= 1"),
    ("--checkpoint-every -1", "--checkpoint-every must be an integer >= 1"),
    ("--local-steps 0", "--local-steps must be an integer >= 1"),
    ("--seed -1", "--seed must be an integer >= 0, got -1"),
    ("--seed 4294967296", "--seed must be at most 4294967295"),
    ("--seed 0 0", "--seed must be one or several different values"),
    ("--learning-rate 0", "--learning-rate must be positive and finite"),
    ("--learning-rate 1e300", "--learning-rate must be at most 3.4e+38"),
    ("--weight-decay -1", "--weight-decay must be finite and >= 0"),
    ("--switch-at 0", "--switch-at must be between 0 and 1"),
    ("--staleness -1", "--staleness must be finite and >= 0"),
    ("--staleness 1000", "--staleness must be at most 4"),
    ("--algorithm adpsgd --delays-of no/such", "--delays-of must be a folder of journals"),
    ("--dirichlet-alpha 0", "--dirichlet-alpha must be positive and finite"),
    ("--shuffle global --dirichlet-alpha 0.1", "--dirichlet-alpha needs --shuffle local"),
    ("--evaluate-every 0", "--evaluate-every must be an integer >= 1"),
    ("--max-hours 0", "--max-hours must be positive and finite"),
    ("--max-steps 3 --accumulate 2", "--max-steps must be a multiple of --accumulate, 2 steps"),
    ("--batch-stats mix", "--batch-stats mix needs --normalization batch"),
    ("--data-dir OUT", "need another --dataset"),
    ("--download", "need another --dataset"),
    ("--dataset fashion_mnist --data-dir OUT", "must hold"),
    ("--dataset fashion_mnist --data-dir /etc/passwd", "must hold"),
    ("--placement mesh --nodes 9", "--placement mesh needs a device per node"),
    ("--fsdp 0", "--fsdp must be an integer >= 1, got 0"),
    ("--fsdp 2", "--nodes * --fsdp must be at most the number of devices, got 8 * 2 and 8 CPU"),
    ("--fsdp 2 --placement vmap", "--fsdp must be 1 with --placement vmap"),
    (
        "--nodes 2 --fsdp 4 --batch-size-per-node 6",
        "--batch-size-per-node must give each of the 4 devices of a node as many examples",
    ),
    ("--topology ring/ring", "two different topologies"),
    ("--topology center", "must be one of"),
    ("--topology hypercube --nodes 6", "must be a power of two"),
    ("--algorithm 0-osgp", "--algorithm must overlap 1 step or more"),
    ("--algorithm 1000-osgp", "--algorithm must overlap fewer steps than the 2"),
    (f"--algorithm {10**20}-osgp", "--algorithm must overlap fewer steps than the 2"),
    ("--algorithm sgd", "must be one of"),
    ("--algorithm sgp sgp", "must be one or several different values"),
    ("--algorithm sgp sgp@one_peer_exponential", "must be different"),
    ("--algorithm easgd@ring", "must be center"),
    ("--algorithm easgd --wire-dtype bfloat16", "must be float32"),
    ("--algorithm dpsgd@star", "doubly stochastic"),
    ("--algorithm osgp", "no algorithm is named 'osgp'"),
    ("--algorithm 1-sgp", "no algorithm is named '1-sgp'"),
    ("--algorithm no_such:mine", "--algorithm no_such:mine must be one that can be imported"),
    ("--algorithm math:pi", "pi of --algorithm math:pi must be a function of a schedule"),
    ("--algorithm math:", "no algorithm is named 'math:'"),
    ("--algorithm builtins:repr", "must return an optax.GradientTransformation, got str"),
    ("--algorithm bad_input.programs:stay_alone", "must exchange by gossip that its state shows"),
    ("--algorithm algorithms.published:dpsgd --wire int8", "must be float32"),
    ("--algorithm algorithms.published:dpsgd --outer-every 2", "which keeps more than models"),
    ("--algorithm sgp@ring/ring/ring", "a hybrid must have two topologies"),
    ("--algorithm 1000-osgp@complete/ring", "it would never switch"),
    ("--topology two_peer_exponential --nodes 2", "must be at most 1, got 2"),
    ("--download --dataset cifar10", "--download needs --dataset fashion_mnist"),
    ("--remat", "--remat needs a deep --model, such as resnet20, got linear"),
    ("--model resnet20 --normalization none", "--normalization must be batch for resnet20"),
    ("--resume", "--resume needs --out"),
    ("--checkpoint-every 2", "--checkpoint-every needs --out"),
    ("--resume --overwrite --out OUT", "--resume needs what --overwrite removes"),
    ("--out /etc/passwd", "--out must be a folder"),
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
    Line("image", f"{SHORT} --init-from OUT/x --overwrite", "must be elsewhere"),
    Line("image", f"{SHORT} --init-from /nowhere", "init_from must be a folder of checkpoints"),
    Line("image", SHORT, "must be a folder without another run", metrics(b"")),
    Line("image", "--out /dev/null/x --model linear", "--out must be a folder", status=1),
]
PARSED = [
    ("image", "--out ''", "a path must not be empty"),
    ("image", "--seed 1.5", "--seed"),
    ("image", "--dataset x", "mnist5k"),
    ("image", "--precision float16", "mixed_bfloat16"),
    ("image", "--wire-dtype float16", "bfloat16"),
    ("image", "--unknown 1", "--unknown"),
    ("averaging", "--out ''", "a path must not be empty"),
    ("averaging", "--topology x", "one_peer_exponential"),
    ("rates", "--out ''", "a path must not be empty"),
    ("speed", "", "wire"),
    ("speed", "x", "x"),
    ("speed", "wire --out ''", "must not be empty"),
    ("speed", "wire --wire-dtype x", "bfloat16"),
    ("speed", "compiled schedule --target x", "tpu"),
    ("speed", "local step --unknown 1", "--unknown"),
    ("speed", "stragglers --out ''", "must not be empty"),
    ("fault_injection", "--fault hang", "--fault"),
    ("speed", "local simulation --out ''", "must not be empty"),
    ("speed", "compiled schedule --out ''", "must not be empty"),
    ("speed", "local step --out ''", "must not be empty"),
    ("fault_injection", "--out ''", "must not be empty"),
    ("fault_injection", "asynchronous --algorithm sgp", "--algorithm"),
    ("compare", "--out ''", "must not be empty"),
    ("report", "--out ''", "must not be empty"),
    ("launch", "", "--processes"),
    ("launch", "--processes x -- true", "--processes"),
    ("launch", "--processes 1 --unknown -- true", "--unknown"),
]
ROWS += [Line(program, given, message, parsed=True) for program, given, message in PARSED]
OTHERS = [
    ("averaging", "--nodes 1", "--nodes must be an integer >= 2"),
    ("averaging", "--nodes 4 4", "--nodes must be one or several different values"),
    ("averaging", "--topology ring ring", "--topology must be one or several different values"),
    ("averaging", "--topology hypercube --nodes 6", "must be a power of two"),
    ("averaging", "--rounds 0", "--rounds must be an integer >= 1"),
    ("averaging", "--seeds 0", "--seeds must be an integer >= 1"),
    ("averaging", "--out /etc/passwd", "--out must be a folder"),
    ("rates", "--nodes 3", "--nodes must be an even integer >= 2"),
    ("rates", "--nodes 4 4", "--nodes must be one or several different values"),
    ("rates", "--steps 100", "--steps must be a multiple of 64"),
    ("rates", "--steps 64 --nodes 128", "--steps must be at least the number of nodes"),
    ("rates", "--seeds 0", "--seeds must be an integer >= 1"),
    ("rates", "--algorithm nobody", "no algorithm is named 'nobody'"),
    ("rates", "--algorithm sgp sgp@one_peer_exponential", "--algorithm must be different methods"),
    ("rates", "--algorithm sgp@hypercube --nodes 6", "must be a power of two"),
    ("rates", "--out /etc/passwd", "--out must be a folder"),
    ("speed", "wire --bandwidth x", "--bandwidth must be"),
    ("speed", "wire --hosts 1", "--hosts must be"),
    ("speed", "wire --megabytes nan", "--megabytes must be"),
    ("speed", "wire --iterations 0", "--iterations must be"),
    ("speed", "wire --outer-every 0", "--outer-every must be"),
    ("speed", "wire --outer-delay -1", "--outer-delay must be"),
    ("speed", "wire --compute-seconds -1", "--compute-seconds must be"),
    ("speed", "wire --algorithm x --out OUT", "must be one of"),
    ("speed", "wire --algorithm sgp@hypercube --hosts 6 --out OUT", "must be a power of two"),
    ("speed", "local simulation --nodes 0", "--nodes must be"),
    ("speed", "local simulation --algorithm x --out OUT", "must be one of"),
    ("speed", "local simulation --batch-size-per-node 1000000000 --out OUT", "must fit into"),
    ("speed", "local step --nodes 0", "--nodes must be"),
    ("speed", "compiled schedule --layers 0", "--layers must be"),
    ("fault_injection", "--kills 0", "--kills must be"),
    ("fault_injection", "--processes 0", "--processes must be"),
    ("fault_injection", "--seed -1", "--seed must be an integer >= 0, got -1"),
    ("fault_injection", "--checkpoint-every 7", "--checkpoint-every must be"),
    ("fault_injection", "--epochs 0", "--epochs must be"),
    ("fault_injection", "--runs -1", "--runs must be"),
    ("fault_injection", "--fault stop --stall 0", "--stall must be"),
    ("fault_injection", "--out /etc/passwd", "--out must be a folder"),
    ("fault_injection", "asynchronous --kills 0 --stops 0", "must be at least 1, got 0 of both"),
    ("fault_injection", "asynchronous --processes 2", "--processes must be at least 3, got 2"),
    ("fault_injection", "asynchronous --stop-seconds nan", "--stop-seconds must be"),
    ("fault_injection", "asynchronous --step-seconds 0", "--step-seconds must be"),
    ("fault_injection", "asynchronous --out /etc/passwd", "--out must be a folder"),
    ("compare", "--grid no-such", "--grid must be the name of a grid"),
    ("compare", "--algorithm nobody", "no algorithm is named 'nobody'"),
    ("compare", "--algorithm sgp sgp", "--algorithm must be different values"),
    ("compare", "--rows sgp", "--rows must come with --grid"),
    ("compare", "--grid diloco-mini --algorithm d2", "--algorithm must be left out with --grid"),
    ("compare", "--grid diloco-mini --program image", "--program must be left out with --grid"),
    ("compare", "--grid diloco-mini -- --outer-every 9", "got --outer-every: leave it out"),
    ("compare", "--grid slowmo-table1-mini -- --no-outer-reset", "got --no-outer-reset"),
    ("compare", "-- --seed=3", "got --seed: give it before --"),
    ("compare", "-- --algorithm d2", "got --algorithm: give it before --"),
    ("compare", "--wire int8 -- --wire-dtype int4", "got --wire-dtype: give it before --"),
    ("compare", "-- --out OUT", "got --out: give it before --"),
    ("compare", "--jobs 0", "--jobs must be an integer >= 1"),
    ("compare", "--dirichlet-alpha 0", "--dirichlet-alpha must be positive and finite"),
    ("compare", "--out /etc/passwd", "--out must be a folder"),
    ("report", "--section no-such", "--section must be the name of a section, got 'no-such'"),
    ("report", "--jobs 0", "--jobs must be an integer >= 1"),
    ("report", "--runs OUT", "--runs must be folders of reports"),
    ("report", "--fashion-mnist OUT", "--fashion-mnist must be a folder that holds the four files"),
    ("report", "--speech OUT", "--speech must be a folder that holds speech_languages.npz"),
    ("report", "--translation OUT", "without train.tsv, valid.tsv, test.tsv"),
    ("report", "--out /etc/passwd", "--out must be a folder"),
    ("launch", "--processes 0 -- true", "--processes must be from 1 to 1024, got 0"),
    ("launch", "--processes 1 --local-devices 100000 -- true", "--local-devices must be"),
    ("launch", "--processes 1 --max-restarts -1 -- true", "--max-restarts must be"),
    ("launch", "--processes 1 --restart-delay -1 -- true", "--restart-delay must be"),
    ("launch", "--processes 1 --stall 0 -- true", "--stall must be from 0.1 to 1e+06, got 0"),
    ("launch", "--processes 1 --stall 9 --stall-slow 8 -- true", "--stall-slow must be from 9 to"),
    ("launch", "--processes 1 --stall-slow 9 -- true", "--stall-slow must come with --stall"),
    ("launch", "--processes 1", "must end with -- and a command, got no command"),
    ("launch", "--processes 1 -- ''", "the command must be a program"),
    ("launch", "--processes 1 -- /nowhere/at/all", "the command must be a program"),
]
ROWS += [Line(program, given, message) for program, given, message in OTHERS]


def write_notes(folder: Path) -> None:
    """A folder that is no comparison, and no report."""
    for name in ("cells", "runs"):
        (folder / name).mkdir()
        (folder / name / "biology.csv").write_text("")


ROWS += [
    Line("compare", "--out OUT --overwrite", "biology.csv: move it", write_notes),
    Line("report", "--out OUT --overwrite", "biology.csv: move it", write_notes),
]

SUBPROCESSES = [
    Line("experiments.plots", "/nowhere", "no summary.json in", status=1),
    Line("experiments.averaging", "--nodes 1", "--nodes must be an integer >= 2"),
    Line("experiments.image", "--model linear --topology ring/ring", "two different topologies"),
    Line("gossipjax.launch", "--processes 0 -- true", "--processes must be from 1 to 1024"),
]
"""Run as users run them."""
