"""An outer optimizer around the algorithms of the training programs, by options."""

import numpy as np
import optax
import pytest
from report_files import read_run
from small import make_small

import gossipjax as gx
from experiments import image
from experiments.training.methods import ALGORITHMS, MethodOptions, make_method, spell_name
from experiments.training.outer import OuterOptions
from experiments.training.train import count_sent_bytes

PARAMS = {"w": np.zeros((10, 100), np.float32)}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch.setattr)


def train(out, *arguments):
    short = ["--epochs", "2", "--nodes", "4", "--model", "linear", "--log-every", "1"]
    image.main([*short, "--placement", "vmap", "--out", str(out), *arguments])
    summary, lines = read_run(out)
    return summary["runs"][0], [line for line in lines if "loss" in line]


@pytest.mark.parametrize("algorithm", ["local", "1-osgp"])
def test_nodes_agree_after_every_outer_step_and_at_no_other(tmp_path, algorithm):
    slowmo = ("--outer-every", "4", "--outer-momentum", "0.5", "--outer-rate", "0.9")
    run, lines = train(tmp_path, "--algorithm", algorithm, *slowmo)
    assert run["algorithm"] == algorithm
    distances = {line["step"]: line["consensus_distance"] for line in lines}
    assert {step for step, distance in distances.items() if distance < 1e-5} == {4, 8}
    assert all(line["consensus_distance_before_mixing"] > 1e-5 for line in lines[:-1])
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_gossip_in_the_place_of_an_average(tmp_path):
    """Two nodes of the exponential graph agree after a round; four need two of them."""
    average = ("--outer-average", "gradient-tracking@random_peer_exponential")
    _, lines = train(tmp_path, "--algorithm", "local", "--outer-every", "4", *average)
    distances = [line["consensus_distance"] for line in lines]
    assert max(distances[4:]) > distances[4] > 1e-5
    assert distances[3] < distances[2]
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_outer_steps_over_neighbours(tmp_path):
    """A pair agrees after a round where the pull is 1; with NoLoCo's it goes on apart."""
    noloco = ("--algorithm", "local", "--outer-every", "4", "--outer-rate", "0.7")
    average = ("--outer-average", "neighbours@random_pairs", "--outer-pull", "1.43")
    run, lines = train(tmp_path, *noloco, "--outer-momentum", "0.5", *average)
    distances = [line["consensus_distance"] for line in lines]
    assert 1e-5 < distances[3] < distances[2]
    assert lines[-1]["loss"] < lines[0]["loss"]
    parameters = 784 * 10 + 10
    assert run["sent_bytes_per_step"] == 2 * 4 * parameters / 4  # two models in four steps
    options = MethodOptions(
        nodes=4, outer=OuterOptions(4, outer_average=average[1], outer_wire="int8")
    )
    method = make_method("local", options, optax.sgd(0.1))
    assert method.outer_average == gx.topology.random_pairs(4, 100, 0)
    sent = count_sent_bytes(method, PARAMS, gx.Nodes(4), 8)
    assert sent == pytest.approx(1000 * 65 / 64 / 4, rel=0.03)  # one model, as the pull is 1


def test_factors_of_rank_4_are_averaged():
    """Of a matrix of 10 by 100, in every step, or in every fourth."""
    outer = OuterOptions(4, outer_wire="low_rank", outer_error_feedback=1.0)
    for name, options, every in (
        ("allreduce", MethodOptions(4, wire="low_rank"), 1),
        ("local", MethodOptions(4, outer=outer), 4),
    ):
        method = make_method(name, options, optax.sgd(0.1))
        sent = count_sent_bytes(method, PARAMS, gx.Nodes(4), 8)
        assert sent == 2 * 3 / 4 * 4 * (10 + 100) * 4 / every


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_stands_around_what_keeps_nothing_but_models(name):
    def make():
        options = MethodOptions(nodes=4, steps=100, outer=OuterOptions(4))
        optimizer = optax.sgd
        return make_method(spell_name(name, 1), options, optimizer(0.1))

    if ALGORITHMS[name].takes_outer:
        make()
        return
    with pytest.raises(ValueError, match="the algorithm of --outer-every"):
        make()
