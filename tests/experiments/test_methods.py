"""The optimizers and learning rates by name, against steps made by hand; the trainer's measures."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest

import gossipjax as gx
from experiments import methods, training

RATE, DECAY = 0.1, 0.01


def three_steps(name):
    """Parameters after three steps on `z^2 / 2` per coordinate."""
    tx = methods.optimizer(name, RATE, DECAY)
    z = jnp.asarray([1.0, -2.0])
    state = tx.init(z)
    for _ in range(3):
        updates, state = tx.update(z, state, z)
        z = jnp.asarray(optax.apply_updates(z, updates))
    return np.asarray(z)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("sgd", oracle.sgd(RATE, decay=DECAY)),
        ("nesterov", oracle.sgd(RATE, 0.9, nesterov=True, decay=DECAY)),
        ("adam", oracle.adamw(RATE, decay=DECAY)),
    ],
)
def test_optimizers(name, step):
    z, memory = np.array([1.0, -2.0]), {}
    for k in range(3):
        z = z + step(memory, k, z, z)
    np.testing.assert_allclose(three_steps(name), z, rtol=1e-5)


def rates(name, total_batch, steps=(0, 50, 299, 300, 600, 800, 899)):
    schedule = methods.learning_rate(name, 0.1, 900, total_batch)
    return [float(np.asarray(schedule(step))) for step in steps]


def test_learning_rates():
    assert rates("constant", 1024) == pytest.approx([0.1] * 7)
    cosine = [0.05 * (1 + np.cos(np.pi * k / 900)) for k in (0, 50, 299, 300, 600, 800, 899)]
    assert rates("cosine", 1024) == pytest.approx(cosine, rel=1e-4, abs=1e-6)
    assert rates("goyal", 1024) == pytest.approx([0.1, 0.4, 0.4, 0.04, 0.004, 4e-4, 4e-4])


def test_goyal_never_warms_up_downwards():
    """With fewer than 256 examples per step the scaled rate is below the reference rate."""
    assert rates("goyal", 32) == pytest.approx(
        [v * 0.0125 for v in (1, 1, 1, 0.1, 0.01, 1e-3, 1e-3)]
    )


def a_trainer(gossip, schedule, loss, batches):
    inner = optax.with_extra_args_support(optax.sgd(RATE))
    method = methods.Method("given", "given", schedule, 0, inner, gossip)
    start = jnp.zeros(3)
    return training.Trainer(method, loss, training.place("vmap", schedule.size), start, batches)


def test_distances_before_and_after_mixing_at_weights_other_than_one():
    rng = np.random.default_rng(0)
    schedule = gx.topology.from_matrices(oracle.column_stochastic(rng, 3))
    targets = rng.normal(size=(9, 3, 3))
    trainer = a_trainer(
        gx.sgp(schedule),
        schedule,
        lambda z, statistics, target: (jnp.sum((z - target) ** 2) / 2, statistics),
        iter(targets.astype(np.float32)),
    )

    def distance(models):
        return np.linalg.norm(models - models.mean(axis=0), axis=1).mean()

    z, w = np.zeros((3, 3)), np.ones(3)
    expected = oracle.train_sgp(
        schedule.matrices(), z, lambda z, k: z - targets[k], oracle.sgd(RATE), 7
    )
    for k, (after, after_weight) in enumerate(expected):
        local = z - RATE * (z - targets[k]) / w[:, None]
        assert trainer.distance_before_mixing() == pytest.approx(distance(local), rel=1e-4)
        trainer.advance(range(k, k + 1))
        assert trainer.distance(k + 1) == pytest.approx(distance(after), rel=1e-4)
        z, w = after, after_weight
    assert np.abs(w - 1).max() > 0.1


def test_advance_waits_for_the_devices():
    """The seconds are those of the work, not of its dispatch."""

    def slow(z):
        time.sleep(0.1)
        return np.zeros((), np.float32)

    def loss(z, statistics, batch):
        waited = jax.pure_callback(
            slow,
            jax.ShapeDtypeStruct((), jnp.float32),
            jax.lax.stop_gradient(z),
            vmap_method="sequential",
        )
        return jnp.sum(z * batch) + waited, statistics

    ring = gx.topology.ring(2)
    trainer = a_trainer(gx.sgp(ring), ring, loss, iter(np.ones((9, 2, 3), np.float32)))
    trainer.warm_up()
    losses, seconds = trainer.advance(range(3))
    assert losses.shape == (3, 2)
    assert seconds >= 3 * 2 * 0.1


def test_narrow_parameters_by_name():
    ring = gx.topology.ring(2)
    method = methods.method("sgp@ring", methods.Setting(2), optax.sgd(RATE))
    assert method.schedule == ring
    state = gx.spmd(method.transform.init, nodes=2)(jnp.ones((2, 3), jnp.bfloat16))
    assert state[1].numerator.dtype == jnp.float32
