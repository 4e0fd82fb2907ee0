"""Short runs of the image program, and their results without what depends on the clock."""

import itertools
import json
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments import image
from gossipjax.checkpoint import Checkpoints

STEPS = 8
SGP = "sgp-one_peer_exponential-seed-0"  # folder of its checkpoints
CLOCK_FIELDS = {
    "seconds",
    "examples_per_second",
    "seconds_per_step",
    "input_wait",
}


def train(out, *arguments):
    """Trains four nodes for eight steps, with a checkpoint after every third one."""
    short = ["--epochs", "2", "--nodes", "4", "--log-every", "1", "--algorithm", "sgp"]
    short += ["--model", "linear", "--placement", "vmap", "--checkpoint-every", "3"]
    image.main([*short, "--out", str(out), *map(str, arguments)])
    return read_results(out)


def without_clock(record):
    return {key: value for key, value in record.items() if key not in CLOCK_FIELDS}


def read_results(out):
    """The runs of the summary and the lines of the metrics, without what depends on the clock."""
    runs = json.loads((out / "summary.json").read_text())["runs"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return list(map(without_clock, runs)), list(map(without_clock, lines))


def train_interrupted(out, monkeypatch, step, number, *arguments, run=0):
    """Trains, with a signal after this step of this run; returns the exit status."""
    after = Checkpoints.after
    steps = []

    def after_signal(self, state, last=False):
        steps.append(state.step)
        runs_before = sum(a >= b for a, b in itertools.pairwise(steps))
        if state.step == step and runs_before == run:
            signal.raise_signal(number)
        after(self, state, last)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "after", after_signal)
        with pytest.raises(SystemExit) as stop:
            train(out, *arguments)
    return stop.value.code


def folders(out):
    return sorted((out / "checkpoints").iterdir())


def read_checkpoint(folder):
    """The arrays of a checkpoint by their paths, and the metadata without the clock."""
    manifest = json.loads((folder / "manifest" / "metadata").read_text())
    manifest = json.loads(manifest["json"])
    specs = {str(i): spec for i, spec in enumerate(manifest["leaves"]) if 0 not in spec[1]}
    item = {i: np.empty(shape, dtype) for i, (_, shape, dtype) in specs.items()}
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        args = ocp.args.PyTreeRestore(item, restore_args)
        arrays = reader.restore(folder / "state", args=args)
    metadata = without_clock(manifest["metadata"])
    metadata["metrics"] = without_clock(metadata["metrics"])
    return {specs[i][0]: array for i, array in arrays.items()}, metadata


def assert_same_end(one, other):
    """The same results and last checkpoints, bit for bit."""
    assert read_results(one) == read_results(other)
    assert [folder.name for folder in folders(one)] == [folder.name for folder in folders(other)]
    for first, second in zip(folders(one), folders(other), strict=True):
        arrays, metadata = read_checkpoint(first / str(STEPS))
        other_arrays, other_metadata = read_checkpoint(second / str(STEPS))
        assert metadata == other_metadata
        assert arrays.keys() == other_arrays.keys()
        for path in arrays:
            assert arrays[path].tobytes() == other_arrays[path].tobytes(), path
