"""The image program as its users run it: results, files, options and errors."""

import itertools
import json
import re
from typing import get_args

import jax
import numpy as np
import pytest
from small import make_small

from experiments import data, image, methods, training
from experiments.accuracy import Accuracy


@pytest.fixture(autouse=True)
def devices_are_there(monkeypatch):
    """The tests' process has its eight CPU devices already."""
    monkeypatch.setattr(training, "request_cpu_devices", lambda count: None)


@pytest.fixture(autouse=True)
def small(monkeypatch, request):
    """A tenth of the digits and a small model: these tests are of the program."""
    keywords = request.keywords
    make_small(monkeypatch.setattr, "real_model" not in keywords, "plots" in keywords)


def run(tmp_path, *arguments):
    """Runs the program with few steps; returns the summary and the lines of the metrics."""
    out = tmp_path / "out"
    short = ["--out", str(out), "--epochs", "2", "--nodes", "4", "--log-every", "3"]
    image.main([*short, *arguments])
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return summary, lines


@pytest.mark.real_model
@pytest.mark.plots
def test_writes_what_it_measured(tmp_path, capsys):
    summary, lines = run(tmp_path, "--seed", "0", "1", "--rate", "0.05")
    assert [(r["algorithm"], r["topology"], r["seed"]) for r in summary["runs"]] == [
        ("sgp", "one_peer_exponential", 0),
        ("sgp", "one_peer_exponential", 1),
        ("allreduce", "complete", 0),
        ("allreduce", "complete", 1),
    ]
    for record in summary["runs"]:
        assert record["nodes"] == 4
        assert record["steps"] == 2 * (512 // (4 * 32))
        assert record["seconds_per_step"] > 0
        assert record["examples_per_second"] == pytest.approx(128 / record["seconds_per_step"])
        assert 0 <= record["test_accuracy_average_model"] <= 1
        assert len(record["test_accuracy_nodes"]) == 4
        own = [line for line in lines if line["run"] == record["run"]]
        assert [x["step"] for x in own if "loss" in x] == [3, 4, 6, 8]
        assert [x["step"] for x in own if "test_accuracy_average_model" in x] == [4, 8]
        assert all(a["seconds"] <= b["seconds"] for a, b in itertools.pairwise(own))
        losses = [line["loss"] for line in own if "loss" in line]
        assert losses[-1] < losses[0]
        distances = [line["consensus_distance"] for line in own if "loss" in line]
        before = [line["consensus_distance_before_mixing"] for line in own if "loss" in line]
        if record["algorithm"] == "allreduce":
            assert not any(distances)
            assert not any(before)
        else:
            assert all(0 < after < early for after, early in zip(distances, before, strict=True))
    plots = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert {"loss.png", "consensus.png", "topology_one_peer_exponential.png"} <= plots
    printed = capsys.readouterr().out
    assert (
        "512 training and 101 test examples; 4 nodes, 8 steps; one CPU device per node" in printed
    )
    assert re.search(r"sgp +one peer exponential +4", printed)


EVERY_ALGORITHM = [name.replace("N-", "2-") for name in methods.ALGORITHMS]


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_mesh_and_vmap_train_the_same_model(tmp_path, algorithm):
    losses = {}
    for where in ("mesh", "vmap"):
        arguments = ("--algorithm", algorithm, "--where", where)
        _, lines = run(tmp_path / where, *arguments)
        losses[where] = [line["loss"] for line in lines if "loss" in line]
    np.testing.assert_allclose(losses["mesh"], losses["vmap"], rtol=2e-3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--precision", "bfloat16", "--optimizer", "sgd"),
        ("--precision", "mixed_bfloat16", "--optimizer", "adam", "--rate", "0.001"),
        ("--rate-schedule", "goyal", "--dirichlet", "0.1", "--batch-per-node", "7"),
        ("--nodes", "1"),
        ("--nodes", "12", "--topology", "two_peer_exponential"),  # more than there are devices
        ("--algorithm", "dpsgd", "--topology", "bipartite_exponential"),
        ("--algorithm", "dpsgd", "--rate-schedule", "constant", "--weight-decay", "0"),
    ],
)  # fmt: skip
def test_options(tmp_path, arguments):
    summary, lines = run(tmp_path, "--algorithm", "sgp", *arguments)
    assert np.isfinite(summary["runs"][0]["final_loss"])
    assert all(np.isfinite(line["loss"]) for line in lines if "loss" in line)


@pytest.mark.plots
def test_every_topology_by_name(tmp_path):
    names = [f"sgp@{name}" for name in get_args(methods.Topology)]
    hybrids = ["1-osgp@complete/one_peer_exponential", "2-osgp@two_peer_exponential/ring"]
    options = ("--epochs", "1", "--where", "vmap")  # compiled for one device
    summary, _ = run(tmp_path, *options, "--algorithm", *names, *hybrids)
    assert [f"{r['algorithm']}@{r['topology']}" for r in summary["runs"]] == names + hybrids
    assert all(np.isfinite(r["final_loss"]) for r in summary["runs"])
    drawn = {path.name for path in (tmp_path / "out").glob("topology_*.png")}
    assert drawn == {f"topology_{n}.png" for n in get_args(methods.Topology) if n != "complete"} | {
        "topology_complete.png"
    }


def test_a_hybrid_switches_after_its_share_of_the_steps(tmp_path):
    """All-reduce first: the consensus distance is 0 until the switch, and never after it."""
    arguments = ("--algorithm", "sgp@complete/ring", "--switch-at", "0.5", "--log-every", "1")
    _, lines = run(tmp_path, *arguments)
    distances = [line["consensus_distance"] for line in lines if "loss" in line]
    assert len(distances) == 8
    assert max(distances[:4]) < 1e-6 < min(distances[4:])


def test_local_steps_exchange_rarely(tmp_path):
    arguments = ("--algorithm", "sgp@complete", "--local-steps", "4", "--log-every", "1")
    _, lines = run(tmp_path, *arguments)
    distances = [line["consensus_distance"] for line in lines if "loss" in line]
    assert [distance < 1e-6 for distance in distances] == [True, False, False, False] * 2


def test_layers_are_measured_by_name(tmp_path):
    summary, _ = run(tmp_path, "--algorithm", "sgp@ring")
    (record,) = summary["runs"]
    layers = record["consensus_distance_by_layer"]
    assert set(layers) == {"Dense_0/kernel", "Dense_0/bias"}
    # Means over nodes of the parts of each node's distance.
    assert max(layers.values()) <= record["consensus_distance"] <= sum(layers.values())


@pytest.mark.parametrize("policy", ["local", "mix", "average"])
def test_statistics_of_batch_normalization(tmp_path, policy):
    """On uneven data the nodes' own statistics differ, and so do what the policies evaluate."""
    arguments = ("--normalization", "batch", "--statistics", policy, "--dirichlet", "0.1")
    summary, _ = run(tmp_path, "--algorithm", "sgp", "dpsgd", *arguments)
    for record in summary["runs"]:
        assert np.isfinite(record["final_loss"])


def test_a_schedule_of_many_rounds_takes_a_traced_step(tmp_path, monkeypatch):
    losses = []
    for most in (32, 1):
        monkeypatch.setattr("gossipjax.loop.MOST_PROGRAMS", most)
        _, lines = run(tmp_path / str(most), "--algorithm", "sgp")
        losses.append([line["loss"] for line in lines if "loss" in line])
    np.testing.assert_allclose(*losses, rtol=1e-4)


def losses_of(tmp_path, *arguments):
    one_device = ("--where", "vmap")
    _, lines = run(tmp_path / "_".join(arguments), *one_device, "--algorithm", *arguments)
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def losses_without_options(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch.setattr)
        return losses_of(tmp_path_factory.mktemp("plain"), "sgp")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--seed", "1"),
        ("--optimizer", "sgd"),
        ("--optimizer", "adam"),
        ("--rate", "0.03"),
        ("--rate-schedule", "constant"),
        ("--rate-schedule", "goyal"),
        ("--weight-decay", "0.1"),
        ("--dirichlet", "0.1"),
        ("--batch-per-node", "16"),
        ("--precision", "bfloat16"),
        ("--precision", "mixed_bfloat16"),
        ("--topology", "ring"),
        ("--local-steps", "2"),
        ("--wire-dtype", "bfloat16"),
        ("--normalization", "batch"),
    ],
    ids="".join,
)
def test_every_option_does_something(tmp_path, arguments, losses_without_options):
    assert losses_of(tmp_path, "sgp", *arguments) != losses_without_options


def test_staleness_is_that_of_adpsgd(tmp_path):
    fresh, stale = (losses_of(tmp_path, "adpsgd", "--staleness", s) for s in ("0", "2"))
    assert fresh != stale
    prompt = losses_of(tmp_path, "dpsgd@bipartite_exponential")
    np.testing.assert_allclose(fresh, prompt, rtol=1e-5)


def test_the_orders_of_dpsgd_are_two_algorithms(tmp_path):
    names = ("sgp", "dpsgd", "dpsgd-adapt-then-combine")
    sgp, before, after = (losses_of(tmp_path, name, "--topology", "ring") for name in names)
    assert before != after
    np.testing.assert_allclose(after, sgp, rtol=1e-5)  # on a symmetric graph


def test_the_same_seed_gives_the_same_run(tmp_path):
    first, second = (run(tmp_path / name)[0]["runs"] for name in ("a", "b"))
    for a, b in zip(first, second, strict=True):
        assert a["final_loss"] == b["final_loss"]
        assert a["test_accuracy_nodes"] == b["test_accuracy_nodes"]


class TestBadInput:
    def fails(self, capsys, *arguments):
        with pytest.raises(SystemExit) as stop:
            image.main(arguments)
        assert stop.value.code not in (0, None)
        captured = capsys.readouterr()
        return f"{stop.value.code} {captured.out} {captured.err}"

    def test_unknown_algorithm_names_the_known_ones(self, capsys):
        said = self.fails(capsys, "--algorithm", "sgd")
        for name in methods.ALGORITHMS:
            assert name in said

    def test_unknown_dataset_names_the_known_ones(self, capsys):
        said = self.fails(capsys, "--dataset", "cifar")
        assert "mnist5k" in said
        assert "fashion_mnist" in said

    def test_folder_without_the_files_names_them(self, capsys, tmp_path):
        said = self.fails(capsys, "--dataset", "fashion_mnist", "--data-dir", str(tmp_path))
        assert "train-images-idx3-ubyte" in said

    def test_more_nodes_than_examples(self, capsys):
        said = self.fails(capsys, "--nodes", "513", "--where", "vmap")
        assert "513" in said
        assert "512" in said

    @pytest.mark.plots
    def test_another_runs_folder_is_never_overwritten_silently(self, capsys, tmp_path):
        run(tmp_path, "--algorithm", "sgp")
        kept = (tmp_path / "out" / "summary.json").read_text()
        said = self.fails(capsys, "--out", str(tmp_path / "out"))
        assert "holds another run (metrics.jsonl, summary.json)" in said
        assert "--overwrite" in said
        assert (tmp_path / "out" / "summary.json").read_text() == kept
        run(tmp_path, "--algorithm", "sgp@ring", "--overwrite", "--seed", "5")
        assert not (tmp_path / "out" / "topology_one_peer_exponential.png").exists()

    def test_a_loss_that_is_not_finite_stops_and_names_node_and_step(self, capsys, tmp_path):
        said = self.fails(capsys, "--out", str(tmp_path), "--rate", "1e30", "--nodes", "4")
        assert re.search(r"the loss of node \d is (nan|inf) at step \d+", said)
        assert "Lower --rate" in said

    def test_impossible_topologies(self, capsys):
        said = self.fails(capsys, "--topology", "bipartite_exponential", "--nodes", "7")
        assert "needs an even n; given 7" in said

    def test_too_few_devices(self, capsys):
        said = self.fails(capsys, "--where", "mesh", "--nodes", "9")
        assert "9 nodes, 8 CPU devices" in said
        assert "--where vmap" in said

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--rate", "nan"), "--rate is positive and finite, not nan"),
            (("--rate", "-1"), "--rate is positive and finite, not -1.0"),
            (("--weight-decay", "-1"), "--weight-decay is at least 0"),
            (("--dirichlet", "0"), "--dirichlet is positive and finite, not 0.0"),
            (("--seed", "-1"), "--seed is at least 0, not -1"),
            (("--seed", "0", "0"), "--seed takes one or several different values"),
            (("--algorithm", "sgp", "sgp"), "--algorithm takes one or several different values"),
            (("--download",), "--data-dir and --download are for fashion_mnist"),
            (("--topology", "two_peer_exponential", "--nodes", "2"), "needs two peers"),
            (("--topology", "hypercube", "--nodes", "6"), "Use 4 or 8 nodes"),
            (("--topology", "cube"), "no topology is named 'cube'; known: one_peer_exponential"),
            (("--algorithm", "sgp@ring/ring/ring"), "a hybrid has two topologies, FIRST/THEN"),
            (("--algorithm", "sgp@"), "no topology is named ''"),
            (("--algorithm", "osgp"), "no algorithm is named 'osgp'"),
            (("--algorithm", "N-osgp"), "no algorithm is named 'N-osgp'"),
            (("--algorithm", "1000-osgp@complete/ring"), "complete/ring would never switch"),
            (("--algorithm", "easgd@ring"), "easgd has a topology of its own"),
            (("--algorithm", "dpsgd@star"), "dpsgd needs a doubly stochastic schedule"),
            (("--algorithm", "sgp", "sgp@one_peer_exponential"), "asks for the same twice"),
            (("--wire-dtype", "bfloat16", "--algorithm", "easgd"), "easgd travels in full width"),
            (("--switch-at", "1"), "--switch-at is a share between 0 and 1, not 1.0"),
            (("--staleness", "-1"), "--staleness is at least 0"),
            (("--statistics", "mix"), "--statistics mix needs --normalization batch"),
        ],
    )
    def test_values(self, capsys, arguments, said):
        assert said in self.fails(capsys, *arguments)

    def test_a_model_that_ends_non_finite_is_no_result(self, capsys, tmp_path, monkeypatch):
        """The last update can spoil it, after the last loss was still finite."""
        monkeypatch.setattr(training, "require_finite", lambda losses, step: None)
        said = self.fails(capsys, "--out", str(tmp_path), "--rate", "1e30", "--nodes", "2")
        assert re.search(r"params/.* of node \d is not finite after step \d+", said)
        assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()

    @pytest.mark.parametrize(
        "name", ["nodes", "epochs", "batch-per-node", "log-every", "local-steps"]
    )
    def test_counts_below_one(self, capsys, name):
        assert f"--{name} is at least 1, not 0" in self.fails(capsys, f"--{name}", "0")

    def test_a_folder_that_cannot_be_made(self, capsys, tmp_path):
        (tmp_path / "file").write_text("")
        assert "file" in self.fails(capsys, "--out", str(tmp_path / "file" / "out"))


@pytest.mark.plots
def test_interrupted_runs_keep_what_was_finished(tmp_path, monkeypatch, capsys):
    """Ctrl-C in the second run: the first one's results are there."""
    trained = []

    def interrupted(job, run_):
        if trained:
            raise KeyboardInterrupt
        trained.append(run_)
        yield from train(job, run_)

    train = image.train
    monkeypatch.setattr(image, "train", interrupted)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        image.main(["--out", str(out), "--epochs", "1", "--nodes", "2"])
    assert stop.value.code == 130
    said = capsys.readouterr()
    assert f"interrupted; {out} holds what was measured" in said.err
    assert "one peer exponential" in said.out, "the finished run is reported"
    assert len(json.loads((out / "summary.json").read_text())["runs"]) == 1
    assert (out / "loss.png").exists()


def test_average_and_node_accuracies_agree_for_equal_models():
    """The two ways of dividing the test set count every example once."""
    dataset = data.load("mnist5k")
    placement = training.place("auto", 4)
    model = image.models.SmallCNN()
    accuracy = Accuracy(model, dataset, 4, placement)
    params = model.init(jax.random.key(0), dataset.test_images[:1])
    stacked = jax.tree.map(lambda x: np.stack([x] * 4), (params["params"], {}))
    predicted = np.asarray(model.apply(params, dataset.test_images)).argmax(axis=1)
    expected = (predicted == dataset.test_labels).mean()
    assert accuracy.of_average(stacked) == pytest.approx(expected)
    assert accuracy.of_nodes(stacked) == pytest.approx([expected] * 4)
