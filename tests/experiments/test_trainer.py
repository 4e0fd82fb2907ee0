"""The programs of a run: measurements, metrics, and no hidden transfers in a step."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

import gossipjax as gx
from experiments.training.evaluation import Evaluator
from experiments.training.methods import Method, MethodOptions, make_method
from experiments.training.placement import place_nodes
from experiments.training.task import Metric, Task
from experiments.training.trainer import Trainer

LEARNING_RATE = 0.1


class Quadratic(Task):
    """Every node is drawn to its targets; without a data set."""

    description = "a quadratic"
    num_examples = 1

    def batches(self, nodes, batch_size_per_node, seed, start):
        return iter(())

    def test_batches(self):
        return []

    def metrics(self, variables, batch):
        return {}

    def init(self, seed):
        return {"params": jnp.zeros(3)}

    def loss(self, variables, batch) -> tuple[jax.Array, Any]:
        return jnp.sum((variables["params"] - batch) ** 2) / 2, None


def make_trainer(task, schedule):
    inner = optax.with_extra_args_support(optax.sgd(LEARNING_RATE))
    method = Method("given", "given", schedule, inner, gx.sgp(schedule))
    return Trainer(task, method, gx.Nodes(schedule.size))


def mean_distance(models):
    return np.linalg.norm(models - models.mean(axis=0), axis=1).mean()


def test_distances_before_and_after_mixing_at_weights_other_than_one():
    rng = np.random.default_rng(0)
    schedule = gx.topology.from_matrices(oracle.column_stochastic(rng, 3))
    targets = rng.normal(size=(9, 3, 3))
    trainer = make_trainer(Quadratic(), schedule)
    state = trainer.init(0)
    z = np.zeros((3, 3))
    w = np.ones(3)
    expected = oracle.train_sgp(
        schedule.matrices(), z, lambda z, k: z - targets[k], oracle.sgd(LEARNING_RATE), 7
    )
    for k, (after, after_weight) in enumerate(expected):
        batch = jax.device_put(targets[k].astype(np.float32))
        local = z - LEARNING_RATE * (z - targets[k]) / w[:, None]
        before = trainer.measure_distance_before_mixing(state, batch)
        assert before == pytest.approx(mean_distance(local), rel=1e-4)
        state, _ = trainer.run_steps(state, [batch])
        assert trainer.measure_distance(state) == pytest.approx(mean_distance(after), rel=1e-4)
        z = after
        w = after_weight
    assert state.step == 7
    assert np.abs(w - 1).max() > 0.1


def sleep(z):
    time.sleep(0.1)
    return np.zeros((), np.float32)


class Slow(Quadratic):
    def loss(self, variables, batch):
        z = variables["params"]
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        still = jax.lax.stop_gradient(z)
        waited = jax.pure_callback(sleep, scalar, still, vmap_method="sequential")
        return jnp.sum(z * batch) + waited, None


def test_run_steps_waits_for_the_devices():
    """It measures the work, not its dispatch."""
    trainer = make_trainer(Slow(), gx.topology.ring(2))
    state = trainer.init(0)
    batch = jnp.ones((2, 3))
    trainer.compile(state, [batch])
    started = time.perf_counter()
    _, losses = trainer.run_steps(state, [batch] * 3)
    assert time.perf_counter() - started >= 3 * 2 * 0.1
    assert trainer.fetch_losses(losses, 0).shape == (3, 2)


class WithStats(Quadratic):
    """Its statistics are the sum of the targets."""

    def init(self, seed):
        return {"params": jnp.zeros(3), "batch_stats": {"sum": jnp.zeros(3)}}

    def loss(self, variables, batch):
        loss, _ = super().loss(variables, batch)
        return loss, {"sum": variables["batch_stats"]["sum"] + batch}


@pytest.mark.parametrize("placement", ["mesh", "vmap"])
@pytest.mark.parametrize("is_traced", [False, True])
def test_a_step_transfers_nothing(placement, is_traced, monkeypatch):
    """The guard of `run_steps` would raise; only a traced step is put there, explicitly."""
    puts = []
    put_shared = gx.Nodes.put_shared
    monkeypatch.setattr(
        gx.Nodes, "put_shared", lambda self, tree: puts.append(tree) or put_shared(self, tree)
    )
    if is_traced:
        monkeypatch.setattr("experiments.training.trainer.MAX_PROGRAMS", 1)
    nodes = place_nodes(placement, 4)
    method = make_method("sgp", MethodOptions(4), optax.adam(LEARNING_RATE))
    trainer = Trainer(WithStats(), method, nodes, "mix")
    state = trainer.init(0)
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    batch = nodes.put(rows)
    trainer.compile(state, [batch])
    state, losses = trainer.run_steps(state, [batch] * 2)
    assert trainer.fetch_losses(losses, 0).shape == (2, 4)
    assert bool(puts) == (is_traced or placement == "vmap")
    # Those of step 0 are mixed before step 1, whose hop is 2.
    stats = trainer.node_variables(state)["batch_stats"]["sum"]
    np.testing.assert_allclose(stats, (rows + np.roll(rows, 2, axis=0)) / 2 + rows)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        trainer.run_steps(state, (batch + rows for _ in range(1)))  # made in the step


@pytest.mark.parametrize("policy", ["local", "mix", "average"])
def test_the_statistics_that_models_are_evaluated_with(policy):
    nodes = gx.Nodes(2)
    method = make_method("sgp@complete", MethodOptions(2), optax.sgd(LEARNING_RATE))
    trainer = Trainer(WithStats(), method, nodes, policy)
    batch = jnp.asarray([[2.0] * 3, [4.0] * 3])
    state, _ = trainer.run_steps(trainer.init(0), [batch] * 2)
    expected = {"local": [4.0, 8.0], "mix": [5.0, 7.0], "average": [6.0, 6.0]}[policy]
    assert trainer.node_variables(state)["batch_stats"]["sum"][:, 0].tolist() == expected
    assert trainer.average_variables(state)["batch_stats"]["sum"][:, 0].tolist() == [6.0, 6.0]


class Words(Quadratic):
    """A test set in two batches; examples of different lengths; a function of a mean."""

    def test_batches(self):
        costs = np.arange(1.0, 8.0, dtype=np.float32)
        lengths = np.array([1, 2, 1, 3, 1, 2, 2], np.int32)
        return [(costs[:5], lengths[:5]), (costs[5:], lengths[5:])]

    def metrics(self, variables, batch):
        costs, lengths = batch
        scale = variables["params"][0]
        return {"is_long": Metric(lengths > 1), "perplexity": Metric(scale * costs, lengths)}

    def summarize(self, means):
        return {**means, "perplexity": float(np.exp(means["perplexity"]))}


class Averaged(Words):
    def metrics(self, variables, batch):
        return {"cost": Metric(batch[0].mean())}


@pytest.mark.parametrize("placement", ["mesh", "vmap"])
def test_metrics_count_every_example_once(placement):
    """Five and two examples over three nodes: parts of unequal sizes, and an empty one."""
    evaluator = Evaluator(Words(), place_nodes(placement, 3))
    scales = np.array([1.0, 0.5, 0.0], np.float32)
    metrics = evaluator.evaluate_nodes({"params": np.stack([scales] * 3, axis=1)})
    assert metrics["test_is_long_nodes"] == pytest.approx([4 / 7] * 3)
    assert metrics["test_perplexity_nodes"] == pytest.approx(list(np.exp(scales * 28 / 12)))
    average = evaluator.evaluate_average({"params": np.full((3, 3), 0.5, np.float32)})
    assert average["test_is_long_average_model"] == pytest.approx(4 / 7)
    assert average["test_perplexity_average_model"] == pytest.approx(np.exp(0.5 * 28 / 12))
    with pytest.raises(ValueError, match="metric 'cost' must have a value per example"):
        Evaluator(Averaged(), gx.Nodes(2)).evaluate_average({"params": np.zeros((2, 3))})
