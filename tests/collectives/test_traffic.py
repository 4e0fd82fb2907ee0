"""Bytes on the wire and in memory, counted in the compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_bytes import count_bytes
from modes import make_mesh

import gossipjax as gx
from experiments.speed.compiled.hlo import count_traffic, parse_module

N = 8
SIZE = 4000
ONE_PEER = gx.topology.one_peer_exponential(N)
AR_THEN_ONE_PEER = gx.topology.piecewise({0: gx.topology.complete(N), 1: ONE_PEER})


def compiled(fn, *args):
    """The module of `fn(*args)`, one node per device, optimized as it is for users."""
    lowered = gx.spmd(fn, mesh=make_mesh(N)).lower(*args)
    return parse_module(lowered.compile({"xla_backend_optimization_level": 3}).as_text())


def count_sent_bytes(module):
    """Bytes that a node sends, and the number of the program's collectives."""
    (sent,) = set(count_bytes(module, N)[0])
    return sent, len(list(module.list_collectives()))


def mixed(schedule, step, wire):
    def apply(x, w):
        return gx.mix(
            {"a": x[: SIZE // 3], "b": x[SIZE // 3 :]}, w, schedule, step, "nodes", None, wire
        )

    return compiled(apply, jnp.ones((N, SIZE)), jnp.ones(N))


@pytest.mark.parametrize("wire", ["float32", "float64"])
def test_an_exact_average_that_is_not_narrowed_is_one_all_reduce(wire):
    assert count_sent_bytes(mixed(AR_THEN_ONE_PEER, 0, wire)) == count_sent_bytes(
        mixed(AR_THEN_ONE_PEER, 0, None)
    )


@pytest.mark.parametrize(("name", "wire"), [("sgp", jnp.bfloat16), ("dpsgd", None)])
def test_a_round_without_exchange_does_no_passes(name, wire):
    """A step reads the parameters and the updates and writes the update, as without gossip."""
    schedule = ONE_PEER.every(2)
    tx = {"sgp": gx.sgp, "dpsgd": gx.dpsgd}[name](schedule, wire=wire)
    z = {"a": jnp.ones((N, SIZE)), "b": jnp.ones((N, 40, SIZE // 40))}
    state = gx.spmd(tx.init, nodes=N)(z)
    module = compiled(lambda u, s, z: tx.update(u, s, z, step=1)[0], z, state, z)
    assert count_sent_bytes(module) == (0, 0)
    assert sum(count_traffic(module).values()) <= 1.01 * 3 * 4 * 2 * SIZE


def test_mixing_in_a_round_without_exchange_does_nothing():
    """Compiled, not even a copy: outputs are inputs."""
    x = jax.ShapeDtypeStruct((N, SIZE), np.float32)
    text = gx.spmd(
        lambda x: gx.mix(x, None, ONE_PEER.every(2), 1, wire="bfloat16")[0],
        mesh=make_mesh(N),
        donate_argnums=0,
    ).lower(x)
    module = parse_module(text.compile().as_text())
    assert count_traffic(module) == {}
