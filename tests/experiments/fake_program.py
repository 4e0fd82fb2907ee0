"""A program that takes no time, instead of one that trains."""

import inspect
import time
from pathlib import Path

PROGRAM = """
import json, pathlib, subprocess, sys, time

out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
with (out.parent / "calls").open("a") as calls:
    calls.write(out.name + "\\n")
if "wait" in sys.argv:
    child = subprocess.Popen(["sleep", "600"])
    (out.parent / "child").write_text(str(child.pid))
    time.sleep(600)
if "diverge" in sys.argv:
    sys.exit("error: the loss of node 0 must be finite, got nan after 3 steps")
if "dpsgd" in sys.argv and not (out.parent / "mended").exists():
    sys.exit("error: no luck")
run = {"run": "a", "algorithm": "sgp", "topology": "ring", "nodes": 2,
       "seconds_per_step": 1.0, "examples_per_second": 1.0, "consensus_distance": 0.0,
       "test_accuracy_average_model": 0.5, "test_accuracy_nodes": [0.5, 0.5]}
summary = {"options": {}, "environment": {}, "runs": [run]}
(out / "summary.json").write_text(json.dumps(summary))
shared = {"run": "a", "step": 4, "epoch": 1.0, "seconds": 2.0}
lines = [shared | {"loss": 0.5, "consensus_distance_before_mixing": 1.0, "consensus_distance": 0.5},
         shared | {"test_accuracy_average_model": 0.5}]
(out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


def write_program(folder, monkeypatch):
    """Writes a package `experiments` with a program `image`.

    It counts its calls in the file `calls` beside `--out`. With `dpsgd` among its arguments it
    fails until there is a file `mended` beside `calls`; with `wait` it never ends, and writes the
    number of a process that it has started into the file `child` beside `calls`.
    """
    package = folder / "fake" / "experiments"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "image.py").write_text(inspect.cleandoc(PROGRAM))
    monkeypatch.setenv("PYTHONPATH", str(folder / "fake"))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")


def read_calls(folder):
    """The names of the folders of all calls so far, in their order."""
    path = folder / "calls"
    return path.read_text().split() if path.exists() else []


def are_gone(processes, seconds=60):
    """Whether these processes end; one that was killed takes a moment."""
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{process}").exists() for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
