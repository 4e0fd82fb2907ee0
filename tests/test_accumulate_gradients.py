"""Gradients of a large batch in parts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.rows import ROWS
from modes import run

import gossipjax as gx

N = 4
EVERY = 3
SCHEDULE = gx.topology.from_matrices(oracle.column_stochastic(np.random.default_rng(0), N))
NODES = gx.Nodes(N)
START = jnp.asarray(np.random.default_rng(1).normal(size=(N, 5)), jnp.float32)


def chain(gossip):
    return optax.chain(optax.sgd(0.1, 0.9), gossip)


def loss(params, batch, keys=None):
    del keys
    return jnp.mean(jnp.square(batch["x"] @ params - batch["y"])), batch["y"].sum()


BATCH = {
    "x": jnp.asarray(np.random.default_rng(4).normal(size=(N, 12, 5)), jnp.float32),
    "y": jnp.asarray(np.random.default_rng(5).normal(size=(N, 12)), jnp.float32),
}


class TestAccumulateGradients:
    @pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
    def test_is_the_gradient_of_the_whole_batch(self, mode):
        gradients = jax.grad(loss, has_aux=True)
        accumulated = gx.accumulate_gradients(gradients, EVERY)
        grads, aux = run(mode, accumulated, N)(START, BATCH)
        expected, total = jax.vmap(gradients)(START, BATCH)
        np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-6)
        assert aux.shape == (N, EVERY)
        np.testing.assert_allclose(aux.sum(axis=1), total, rtol=1e-5, atol=1e-6)

    def test_a_key_for_each_part(self):
        def draw(z, batch, keys):
            return z * 0, jax.random.uniform(keys[0], ())

        keys = jax.random.split(jax.random.key(0), 3)
        _, drawn = gx.accumulate_gradients(draw, 3)(jnp.zeros(2), jnp.zeros(6), keys)
        np.testing.assert_array_equal(drawn, jax.vmap(jax.random.uniform)(keys))

    def test_sums_of_bfloat16_are_float32(self):
        def gradients(z, batch):
            return batch.sum(axis=0), None

        batch = jnp.array([[256.0]] + [[1.0]] * 8, jnp.bfloat16)
        grads: Any
        grads, _ = gx.accumulate_gradients(gradients, 9)(jnp.zeros(1, jnp.bfloat16), batch)
        assert grads.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(grads, np.float32), 264 / 9, rtol=2**-8)

    @pytest.mark.parametrize(
        ("name", "overlap_in_thread"), [("gradient_tracking", None), ("osgp 2", True)]
    )
    def test_before_any_chain(self, name, overlap_in_thread):
        """A thread's exchange then runs beside all parts of the batch."""
        tx = chain(ROWS[name].transform(SCHEDULE))
        gradients = jax.grad(loss, has_aux=True)
        results = []
        for fn in (gradients, gx.accumulate_gradients(gradients, EVERY)):
            in_thread = None if fn is gradients else overlap_in_thread
            train_step = gx.TrainStep(fn, tx, nodes=NODES, overlap_in_thread=in_thread)
            z, state = NODES.init(tx, jnp.zeros(5))
            for k in range(5):
                z, state, _ = train_step(k, z, state, BATCH)
            results.append(z)
        np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)

    def test_errors(self):
        accumulated = gx.accumulate_gradients(jax.grad(loss, has_aux=True), 5)
        message = r"input 0\['x'\] of accumulated gradients must have a leading axis of examples "
        with pytest.raises(ValueError, match=message + r"that every = 5 divides, got shape \[12"):
            accumulated(START[0], jax.tree.map(lambda x: x[0], BATCH))
        with pytest.raises(ValueError, match=r"input 1 of .* got shape \[\]: give batches"):
            gx.accumulate_gradients(loss, 3)(START[0], jnp.zeros(3), jax.random.key(0))
        with pytest.raises(ValueError, match="every of accumulate_gradients must be an integer"):
            gx.accumulate_gradients(loss, 0)
        with pytest.raises(ValueError, match=r"gradients must return a pair \(grads, aux\)"):
            gx.accumulate_gradients(lambda z, x: z, 3)(START[0], jnp.zeros(3))
