"""Choices by name: algorithms, optimizers, learning-rate schedules; and the checks of options."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

from experiments.training.methods import (
    ALGORITHM_HELP,
    ALGORITHMS,
    MethodOptions,
    make_method,
    parse_name,
    spell_name,
)
from experiments.training.options import Optimizer, StepEpochs, TrainingOptions
from experiments.training.plan import TrainingPlan, make_lr_schedule
from experiments.training.topologies import TOPOLOGIES

LEARNING_RATE = 0.1
DECAY = 0.01


def make_optimizer(name: Optimizer) -> optax.GradientTransformation:
    options = TrainingOptions(optimizer=name, weight_decay=DECAY)
    return TrainingPlan(options, 512).make_optimizer(LEARNING_RATE)


def test_optimizers():
    """Three steps on `z^2 / 2` per coordinate."""
    steps: list[tuple[Optimizer, Any]] = [
        ("sgd", oracle.sgd(LEARNING_RATE, decay=DECAY)),
        ("nesterov", oracle.sgd(LEARNING_RATE, 0.9, nesterov=True, decay=DECAY)),
        ("adam", oracle.adamw(LEARNING_RATE, decay=DECAY)),
    ]
    for name, step in steps:
        tx = make_optimizer(name)
        expected = np.array([1.0, -2.0])
        z = jnp.asarray(expected, jnp.float32)
        memory = {}
        state = tx.init(z)
        for k in range(3):
            expected = expected + step(memory, k, expected, expected)
            updates, state = tx.update(z, state, z)
            z = jnp.asarray(optax.apply_updates(z, updates))
        np.testing.assert_allclose(z, expected, rtol=1e-5)


def test_muon_steps_matrices_and_adam_the_rest():
    """Its steps are orthogonal, with the root mean square of Adam's."""
    params = {
        "embedding": jnp.ones((9, 4)),
        "layer": {"kernel": jnp.ones((6, 4))},
        "b": jnp.ones(4),
    }
    grads = jax.tree.map(
        lambda x: jnp.asarray(np.random.default_rng(x.size).normal(size=x.shape)), params
    )
    updates = {}
    for name in ("adam", "muon"):
        tx = make_optimizer(name)
        updates[name], _ = tx.update(grads, tx.init(params), params)
    for name in ("embedding", "b"):
        np.testing.assert_allclose(updates["muon"][name], updates["adam"][name], rtol=1e-6)
    step = np.asarray(updates["muon"]["layer"]["kernel"]) / LEARNING_RATE + DECAY
    singular = np.linalg.svd(step / (0.2 * np.sqrt(6)), compute_uv=False)
    assert 0.6 < singular.min() < singular.max() < 1.3  # what five steps of Newton-Schulz leave


def learning_rates(name, global_batch_size, steps=(0, 50, 299, 300, 600, 800, 899)):
    schedule = make_lr_schedule(name, LEARNING_RATE, 900, global_batch_size)
    return [float(np.asarray(schedule(step))) for step in steps]


def test_learning_rates():
    assert learning_rates("constant", 1024) == pytest.approx([0.1] * 7)
    cosine = [0.05 * (1 + np.cos(np.pi * k / 900)) for k in (0, 50, 299, 300, 600, 800, 899)]
    assert learning_rates("cosine", 1024) == pytest.approx(cosine, rel=1e-4, abs=1e-6)
    falls = np.array([1, 1, 1, 0.1, 0.01, 1e-3, 1e-3])
    warm = falls * [0.25, 1, 1, 1, 1, 1, 1]
    assert learning_rates("step", 1024) == pytest.approx(0.4 * warm)
    # Fewer than 256 examples per step never warm up downwards.
    assert learning_rates("step", 32) == pytest.approx(0.0125 * falls)
    assert TrainingOptions(epochs=9).step_epochs == StepEpochs()
    options = TrainingOptions(lr_schedule="step", epochs=180, warmup_epochs=3)
    assert options.step_epochs == (3, (60, 120, 160), 180, 0.1)


def test_learning_rates_with_a_warm_up():
    """The formulas of Vaswani et al. (section 5.3), width 512, and of a cosine after the rise."""
    steps = np.array([0, 1, 99, 100, 101, 250, 899])
    paper = 512**-0.5 * np.minimum((steps + 1) ** -0.5, (steps + 1) * 100**-1.5)
    schedule = make_lr_schedule("inverse_sqrt", (512 * 100) ** -0.5, 900, 1024, warmup_steps=100)
    np.testing.assert_allclose(jax.vmap(schedule)(steps), paper, rtol=1e-5)
    cosine = make_lr_schedule("cosine", LEARNING_RATE, 900, 1024, warmup_steps=100)
    fall = 0.05 * (1 + np.cos(np.pi * (steps - 100) / 800))
    expected = np.where(steps < 100, 0.1 * (steps + 1) / 100, fall)
    rates = jax.vmap(cosine)(steps)
    np.testing.assert_allclose(rates, expected, rtol=1e-4, atol=1e-8)  # float32 near 0
    constant = make_lr_schedule("constant", LEARNING_RATE, 900, 1024, warmup_steps=100)
    expected = np.minimum(0.1, 0.1 * (steps + 1) / 100)
    np.testing.assert_allclose(jax.vmap(constant)(steps), expected, rtol=1e-5)


def test_a_warm_up_ends_within_the_run():
    """Two epochs of 512 examples are 4 updates of 256."""
    options = TrainingOptions(epochs=2, accumulate=2, nodes=4, warmup_steps=4)
    plan = TrainingPlan(options, 512)
    assert plan.learning_rate_at(2) == pytest.approx(0.75 * options.learning_rate)
    assert plan.learning_rate_at(3) == pytest.approx(options.learning_rate)
    options = dataclasses.replace(options, warmup_steps=5)
    with pytest.raises(ValueError, match=r"--warmup-steps must be at most the .* run, 4, got 5:"):
        TrainingPlan(options, 512)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_of_the_table(name):
    """A name is spelled and parsed; what a method says of itself is what its state says."""
    row = ALGORITHMS[name]
    spelled = spell_name(name, 2)
    overlap = 2 if row.overlaps else 0
    assert parse_name(spelled) == (name, overlap, None)
    assert spell_name(name) in ALGORITHM_HELP
    local_steps = 3 if row.skips_steps and row.exchanges else 1
    options = MethodOptions(4, local_steps=local_steps)
    optimizer = optax.sgd
    method = make_method(spelled, options, optimizer(LEARNING_RATE))
    assert (method.algorithm, method.topology) == (spelled, row.topology)
    assert row.topology in TOPOLOGIES or row.fixed_topology
    state = method.state()
    if row.goes_first or not row.exchanges:
        assert state is None
        assert len(method.canonical_steps()) == 1
    else:
        assert state is not None
        assert state.overlap == overlap
        if row.overlaps:
            assert (state.weight is None) == ("biased" in name)
        assert state.schedule in (None, method.schedule)
        # Of three steps, with an exchange and without.
        assert (len(method.canonical_steps()) > 1) == row.skips_steps
    if not row.skips_steps:
        with pytest.raises(ValueError, match=f"{name} must exchange at every update: .* 1, got 2"):
            make_method(name, MethodOptions(4, local_steps=2), optax.sgd(LEARNING_RATE))


def test_a_topology_is_that_of_the_name_the_option_or_the_paper():
    def topology(name, default=None):
        return make_method(name, MethodOptions(4), optax.sgd(0.1), default).topology

    assert topology("dpsgd") == "ring"
    assert topology("dpsgd", "complete") == "complete"
    assert topology("dpsgd@exponential", "complete") == "exponential"
    assert topology("rand-psgd", "complete") == "random_ring"
