"""The image program as its users run it: results, files, options and errors."""

import itertools
import json
import re

import flax.linen as nn
import numpy as np
import pytest
from original_files import write_cifar
from report_files import read_run
from resumed_runs import require_resumable_to_the_bit
from small import make_small

from experiments import image, models
from experiments.data.originals import ORIGINALS
from experiments.data.preparation import prepare
from experiments.training import main, placement, train, trainer


@pytest.fixture(autouse=True)
def small(monkeypatch, request):
    """A tenth of the digits: these tests are of the program."""
    make_small(monkeypatch.setattr, "plots" in request.keywords)


def run(tmp_path, *arguments):
    """Runs the program for a few steps; returns the summary and the lines of the metrics."""
    out = tmp_path / "out"
    short = ["--out", str(out), "--epochs", "2", "--nodes", "4", "--log-every", "3"]
    image.main([*short, "--model", "linear", *arguments])
    return read_run(out)


def training_lines(lines):
    return [line for line in lines if "loss" in line]


@pytest.mark.plots
def test_writes_what_it_measured(tmp_path, capsys):
    summary, lines = run(tmp_path, "--seed", "1", "--learning-rate", "0.05")
    assert [(r["algorithm"], r["topology"], r["seed"]) for r in summary["runs"]] == [
        ("sgp", "one_peer_exponential", 1),
        ("allreduce", "complete", 1),
    ]
    for record in summary["runs"]:
        assert record["nodes"] == 4
        assert record["steps"] == 2 * (512 // (4 * 32))
        assert record["seconds_per_step"] > 0
        assert record["examples_per_second"] == pytest.approx(128 / record["seconds_per_step"])
        assert 0 <= record["test_accuracy_average_model"] <= 1
        layers = record["consensus_distance_by_layer"]
        assert set(layers) == {"Dense_0/kernel", "Dense_0/bias"}
        # Means over nodes of the parts of each node's distance.
        assert max(layers.values()) <= record["consensus_distance"] <= sum(layers.values())
        assert len(record["test_accuracy_nodes"]) == 4
        lines_of_run = [line for line in lines if line["run"] == record["run"]]
        trained = training_lines(lines_of_run)
        evaluated = [line for line in lines_of_run if "test_accuracy_average_model" in line]
        assert [line["step"] for line in trained] == [3, 4, 6, 8]
        assert [line["step"] for line in evaluated] == [4, 8]
        assert all(a["seconds"] <= b["seconds"] for a, b in itertools.pairwise(lines_of_run))
        losses = [line["loss"] for line in trained]
        assert losses[-1] < losses[0]
        distances = [line["consensus_distance"] for line in trained]
        before = [line["consensus_distance_before_mixing"] for line in trained]
        if record["algorithm"] == "allreduce":
            assert not any(distances)
            assert not any(before)
        else:
            assert all(0 < after < early for after, early in zip(distances, before, strict=True))
    plots = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert {"loss.png", "consensus.png"} <= plots
    printed = capsys.readouterr().out
    assert (
        "512 training and 101 test examples; 4 nodes, 8 steps; one CPU device per node" in printed
    )
    assert re.search(r"sgp +one peer exponential +4", printed)


def test_more_nodes_than_devices(tmp_path):
    options = ("--algorithm", "sgp", "--nodes", "12", "--topology", "two_peer_exponential")
    summary, _ = run(tmp_path, *options)
    assert np.isfinite(summary["runs"][0]["final_loss"])


def test_a_hybrid_switches_after_its_fraction_of_the_steps(tmp_path):
    """All-reduce first: the consensus distance is 0 until the switch, and never after it."""
    arguments = ("--algorithm", "sgp@complete/ring", "--switch-at", "0.5", "--log-every", "1")
    summary, lines = run(tmp_path, *arguments, "--dirichlet-alpha", "0.1", "--evaluate-nodes")
    distances = [line["consensus_distance"] for line in training_lines(lines)]
    assert len(distances) == 8
    assert max(distances[:4]) < 1e-6 < min(distances[4:])
    agreed, apart = (line for line in lines if "test_accuracy_nodes" in line)
    assert agreed["step"] == 4
    assert set(agreed["test_accuracy_nodes"]) == {agreed["test_accuracy_average_model"]}
    assert apart["test_accuracy_nodes"] == summary["runs"][0]["test_accuracy_nodes"]
    assert len(set(apart["test_accuracy_nodes"])) > 1


def train_four_steps(tmp_path, *arguments):
    """Returns the losses of two nodes in their first steps, by the step's programs alone."""
    arguments = [*arguments, "--out", str(tmp_path / "_".join(arguments)), "--nodes", "2"]
    arguments += ["--model", "linear", "--placement", "vmap"]
    options = main.parse_options("experiments.image", image.ImageOptions, arguments)
    experiment = main.prepare(options, image.ImageClassification, "image")
    (run,) = experiment.runs
    nodes = experiment.nodes
    steps = trainer.Trainer(experiment.task, run.method, nodes, options.batch_stats)
    rows = experiment.task.batches(nodes, options.examples_per_node, run.seed, start=0)
    batches = map(placement.make_put(nodes), itertools.islice(rows, 4))
    return np.array(steps.run_steps(steps.init(run.seed), batches)[1]).tolist()


def require_effects(tmp_path, *options):
    plain = train_four_steps(tmp_path, "--algorithm", "sgp")
    for given in options:
        losses = train_four_steps(tmp_path, "--algorithm", "sgp", *given.split())
        assert losses != plain, given


def test_options_of_data_and_optimizer_do_something(tmp_path):
    require_effects(tmp_path, "--seed 1", "--dirichlet-alpha 0.1", "--local-steps 2")


@pytest.mark.lab
def test_all_other_options_do_something(tmp_path):
    require_effects(
        tmp_path,
        "--optimizer adam --lr-schedule step",
        "--weight-decay 0.1",
        "--shuffle global",
        "--precision mixed_bfloat16",
        "--momentum quasi-global",
        "--wire-dtype bfloat16",
        "--normalization batch --batch-stats mix",
        "--no-decay-on-norm-and-bias --weight-decay 0.5",
        "--algorithm adpsgd --staleness 2",
    )


def test_accumulated_gradients_are_those_of_one_large_batch(tmp_path):
    """Of as many examples, in the same order."""
    options = ("--algorithm", "sgp", "--optimizer", "adam", "--local-steps", "2")
    large = train_four_steps(tmp_path, *options, "--batch-size-per-node", "32")
    parts = ("--batch-size-per-node", "16", "--accumulate", "2")
    np.testing.assert_allclose(train_four_steps(tmp_path, *options, *parts), large, rtol=1e-4)


def test_what_is_not_finite_ends_the_program(tmp_path, monkeypatch, capsys):
    """A loss; and a model that the last update spoils, after the last loss was still finite."""
    arguments = ("--model", "linear", "--learning-rate", "1e30", "--nodes", "2", "--overwrite")
    for message in (
        r"the loss of node \d must be finite, got (nan|inf) at step \d+: lower --learning-rate",
        r"params/.* of node \d must be finite, got NaN or infinity after step \d+",
    ):
        with pytest.raises(SystemExit) as stop:
            image.main([*arguments, "--out", str(tmp_path)])
        assert stop.value.code == 2
        assert re.search(message, " ".join(capsys.readouterr().err.split()))
        assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
        monkeypatch.setattr(trainer, "require_finite", lambda losses, step: None)


@pytest.mark.plots
def test_interrupted_runs_keep_what_was_finished(tmp_path, monkeypatch, capsys):
    """Ctrl-C in the second run: the results of the first one are there."""
    trained = []
    train = main.train

    def train_one(experiment, run_, log):
        if trained:
            raise KeyboardInterrupt
        trained.append(run_)
        return train(experiment, run_, log)

    monkeypatch.setattr(main, "train", train_one)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        image.main(["--out", str(out), "--epochs", "1", "--nodes", "2", "--model", "linear"])
    assert stop.value.code == 130
    printed = capsys.readouterr()
    assert f"interrupted; {out} holds what was measured" in printed.err
    assert "one peer exponential" in printed.out, "the finished run is reported"
    assert len(json.loads((out / "summary.json").read_text())["runs"]) == 1
    assert (out / "loss.png").exists()


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """The options of a run, and of its records."""
    folder = tmp_path_factory.mktemp("cifar")
    prepare(ORIGINALS["cifar10"](write_cifar(folder / "from")), folder)
    options = ("--dataset", "cifar10", "--data-dir", str(folder), "--placement", "vmap")
    return (*options, "--nodes", "2", "--batch-size-per-node", "4", "--algorithm", "sgp")


class LinearWithDropout(models.Linear):
    """As VGG-11 it needs a key in training, and it compiles in no time."""

    @nn.compact
    def __call__(self, images, train=False):
        images = nn.Dropout(0.5, deterministic=not train)(images)
        return nn.Dense(self.classes)(images.reshape(images.shape[0], -1))


@pytest.mark.lab
def test_records_resume_to_the_bit(tmp_path, cifar, monkeypatch):
    """In the middle of an epoch and of an update, with AdamW and with dropout."""
    monkeypatch.setitem(models.MODELS, "vgg11", LinearWithDropout)
    arguments = [*cifar, "--model", "vgg11", "--shuffle", "global", "--accumulate", "2"]
    arguments += ["--epochs", "2", "--optimizer", "adam", "--weight-decay", "0.1"]
    run = require_resumable_to_the_bit(image.main, arguments, 3, tmp_path)
    assert run["steps"] == 5
    assert 0 <= run["test_accuracy_average_model"] <= 1
    summary, _ = read_run(tmp_path / "once")
    assert "cifar10, 40 training and 8 test examples" in summary["environment"]["dataset"]


@pytest.mark.lab
def test_evaluations_and_the_end_of_a_budget(tmp_path, monkeypatch, capsys):
    """Every second epoch and the end; the schedule is that of all epochs, budget or not."""
    options = ("--algorithm", "sgp", "--epochs", "5", "--evaluate-every", "2", "--log-every", "1")
    runs = {}
    for name, budget in {
        "epochs": (),
        "max_steps": ("--max-steps", "10"),
        "max_hours": ("--max-hours", "0.001"),
    }.items():
        with monkeypatch.context() as patch:
            if name == "max_hours":  # each interval, of one step, takes a second: 3.6 seconds
                patch.setattr(train.Clock, "lap", lambda self: 1.0)
            summary, lines = run(tmp_path / name, *options, *budget)
        (record,) = summary["runs"]
        assert record["ended_by"] == name
        evaluated = [line for line in lines if "test_accuracy_average_model" in line]
        assert [line["step"] for line in training_lines(lines)] == [*range(1, record["steps"] + 1)]
        field = "test_accuracy_average_model"
        assert evaluated[-1][field] == record[field]
        runs[name] = training_lines(lines), [line["step"] for line in evaluated]
    whole, steps = runs["epochs"]
    assert steps == [8, 16, 20]
    for name, expected in {"max_steps": [8, 10], "max_hours": [4]}.items():
        trained, steps = runs[name]
        assert steps == expected
        for line, same in zip(trained, whole, strict=False):
            assert line["loss"] == same["loss"]
            assert line["learning_rate"] == same["learning_rate"]
    printed = capsys.readouterr().out
    assert "sgp ends after step 10 of 20, by --max-steps" in printed
    assert "sgp ends after step 4 of 20, by --max-hours" in printed
    assert printed.count("sgp ends after") == 2
