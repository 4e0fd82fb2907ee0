"""Derivatives through a narrow wire: those of the exchange in full precision."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from modes import run

import gossipjax as gx

N = 4
SCHEDULES = {
    "one peer": gx.topology.one_peer_exponential(N),
    "complete": gx.topology.complete(N),
    "irregular": gx.topology.from_matrices(oracle.column_stochastic(np.random.default_rng(0), N)),
}


def averaged(x, wire):
    tx = gx.allreduce(wire=wire)
    return tx.update(x, tx.init(x))[0]


def mixed(schedule):
    def apply(x, wire):
        x, w = gx.mix(x, 1 + x.mean(), schedule, 0, wire=wire)
        return x / w

    return apply


EXCHANGES = {"allreduce": averaged, **{name: mixed(s) for name, s in SCHEDULES.items()}}


CASES = [("vmap", name, "bfloat16") for name in EXCHANGES]
CASES += [("shard_map_check_vma", "allreduce", "bfloat16")]
CASES += [("shard_map_check_vma", "irregular", "float16")]


@pytest.mark.parametrize(("mode", "name", "wire"), CASES)
def test_the_derivatives_are_those_of_full_precision(mode, name, wire):
    apply = EXCHANGES[name]
    rng = np.random.default_rng(0)
    x, tangents, cotangents = jnp.asarray(rng.normal(size=(3, N, 9)), jnp.float32)

    def derivatives(wire):
        def all_of_them(x, t, c):
            y, forward = jax.jvp(lambda x: apply(x, wire), (x,), (t,))
            _, pull = jax.vjp(lambda x: apply(x, wire), x)
            if mode == "shard_map_check_vma" and name == "allreduce":  # the same on all nodes
                c = jax.lax.psum(c, "nodes")
            return y, forward, *pull(c)

        return run(mode, all_of_them, N)(x, tangents, cotangents)

    full, narrow = derivatives(None), derivatives(wire)
    assert np.abs(full[0] - narrow[0]).max() > 1e-6, "messages must be rounded"
    np.testing.assert_allclose(narrow[0], full[0], atol=0.1)
    for actual, expected in zip(narrow[1:], full[1:], strict=True):
        np.testing.assert_allclose(actual, expected, atol=0.05)
    if name == "allreduce":
        np.testing.assert_allclose(narrow[1], np.tile(tangents.mean(axis=0), (N, 1)), atol=1e-6)


def test_the_derivative_of_a_linear_exchange_is_its_matrix():
    schedule = SCHEDULES["irregular"]
    mix = jax.vmap(lambda x: gx.mix(x, None, schedule, 0, wire="bfloat16")[0], axis_name="nodes")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.float32)
    for jacobian in (jax.jacfwd, jax.jacrev):
        derivative = jax.jit(jacobian(mix))(x)
        expected = np.einsum("ij,ab->iajb", schedule.matrices()[0], np.eye(3))
        np.testing.assert_allclose(derivative, expected, atol=1e-6)
    second = jax.jit(jax.jacfwd(jax.jacrev(lambda x: (mix(x) ** 2).sum())))(x)
    P = schedule.matrices()[0]
    np.testing.assert_allclose(second, np.einsum("ij,ab->iajb", 2 * P.T @ P, np.eye(3)), atol=1e-5)
