"""Low-precision wires: half the bytes, weights in full, rounding errors kept by the sender.

Of values that a narrow type cannot hold, non-finite ones are seen and finite ones are not lost.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from modes import make_mesh, run

import gossipjax as gx
from gossipjax.wire import decode_each, encode_each

N = 8
NARROW = ["bfloat16", "float16"]
RELATIVE_ERROR = {"bfloat16": 2**-8, "float16": 2**-11}
ONE_PEER = gx.topology.one_peer_exponential(4)
COMPLETE = gx.topology.complete(4)


def test_the_sender_keeps_the_rounding_error():
    """Round by round to the last digit, for pairs: x_i <- x_i - m_i + m_j with m = bf16(x / 2)."""
    schedule = gx.topology.bipartite_exponential(N)
    x = np.random.default_rng(0).normal(size=(N, 33)).astype(np.float32)
    mixed = gx.spmd(
        lambda x, k: gx.mix(x, None, schedule, k, wire="bfloat16")[0],
        nodes=N,
        shared_argnums=1,
    )
    for k in range(6):
        partner = (schedule.round_at(k).matrix - np.eye(N) / 2).argmax(axis=0)
        message = (x / 2).astype(jnp.bfloat16).astype(np.float32)
        expected = x - message + message[partner]
        x = np.asarray(mixed(x, jnp.int32(k)))
        np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("wire", "words"), [(None, 10), ("float32", 10), ("float16", 14), (jnp.bfloat16, 12)]
)
def test_decode_reads_what_encode_wrote(wire, words):
    """Scalars in full precision, other values rounded to the type on the wire.

    Every array in float16 has a power of two.
    """
    codec = gx.wire.Wire.make("nodes", wire=wire).codec
    dtype = None if wire is None else jnp.dtype(wire)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=size), jnp.float32) for size in (1, 5, 0, 1, 3)]
    encoded = encode_each(arrays, codec)
    assert jnp.concatenate(encoded).shape == (words,)
    decoded = decode_each(encoded, codec, arrays)
    for actual, array in zip(decoded, arrays, strict=True):
        assert (actual.shape, actual.dtype) == (array.shape, array.dtype)
        rounded = array if dtype is None or array.size == 1 else array.astype(dtype)
        np.testing.assert_array_equal(actual, rounded.astype(jnp.float32))


@pytest.mark.parametrize(
    ("mode", "n", "length"),
    [
        ("vmap", 1, 33),
        ("vmap", 8, 5),
        ("shard_map_check_vma", 3, 33),
        ("shard_map", 8, 64),
    ],
)
def test_allreduce_in_low_precision(mode, n, length):
    """Rounded on the way to a float32 sum and on the way back; all nodes have the same."""
    g = np.random.default_rng(0).normal(size=(n, length)).astype(np.float32)

    def averages(g):
        transforms = [gx.allreduce(wire=wire) for wire in (jnp.bfloat16, "float32", None)]
        return [tx.update(g, tx.init(g))[0] for tx in transforms]

    actual, in_float32, in_full = map(np.asarray, run(mode, averages, n)(g))
    assert (actual == actual[0]).all()
    mean = g.astype(jnp.bfloat16).astype(np.float64).mean(axis=0)
    rounded = mean.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    exact = g.astype(np.float64).mean(axis=0)
    if n == 1 or length <= n:  # too short to be worth it
        np.testing.assert_allclose(actual[0], exact, rtol=1e-6, atol=1e-7)
    else:
        np.testing.assert_allclose(actual[0], rounded, rtol=2**-7, atol=1e-6)
    np.testing.assert_allclose(actual[0], exact, atol=0.02)
    np.testing.assert_array_equal(in_float32, in_full)


def test_words_of_a_low_precision_allreduce():
    tx = optax.chain(gx.allreduce(wire=jnp.bfloat16), optax.sgd(1.0))
    g = {"a": jnp.ones((N, 599)), "b": jnp.ones((N, 41))}
    program = gx.spmd(lambda g: tx.update(g, tx.init(g))[0], nodes=gx.Nodes(mesh=make_mesh(N)))
    text = program.lower(g).compile().as_text()
    collectives = set(re.findall(r" = (.*?)\{.*? (all-to-all|all-gather|all-reduce)\(", text))
    assert {kind for _, kind in collectives} == {"all-to-all", "all-gather"}
    assert {words for words, _ in collectives} <= {"u16[1,80]", "(u16[1,80]", "u16[8,80]"}


@pytest.mark.parametrize("large", [1e6, 2.0**20 - 1])
def test_values_too_large_for_the_type_are_scaled(large):
    """Also a value just below a power of two, to which it may be rounded up."""
    x = jnp.array([[0.0, large], [0.0, 2.0]])
    ring = gx.topology.ring(2)
    mixed = gx.spmd(lambda x: gx.mix(x, None, ring, 0, wire="float16")[0], nodes=2)(x)
    np.testing.assert_allclose(mixed[:, 1], [large / 2 + 1, large / 2 + 1], rtol=2**-11)
    assert mixed[:, 1].sum() == large + 2


def test_servers_of_several_devices():
    """Each device sends its share in low precision; weights stay exact."""
    schedule = gx.topology.from_matrices(oracle.column_stochastic(np.random.default_rng(0), 4))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 13)), jnp.float32)
    servers = make_mesh(4, 2)
    results = []
    for wire in (None, "bfloat16"):

        def mixed(x, w, wire=wire):
            return gx.mix(x, w, schedule, 0, axis_name="nodes", local_axis_name="local", wire=wire)

        results.append(gx.spmd(mixed, nodes=gx.Nodes(mesh=servers), check_vma=True)(x, jnp.ones(4)))
    P = schedule.matrices()[0]
    np.testing.assert_allclose(results[0][0], P @ x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[1][0], P @ x, atol=0.05)
    np.testing.assert_allclose(results[1][0].sum(axis=0), x.sum(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(results[1][1], results[0][1])


def test_float64_travels_as_float32_words():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5)))
        ring = gx.topology.ring(2)
        program = gx.spmd(lambda x, w: gx.mix(x, w, ring, 0, wire="float32"), nodes=2)
        mixed, _ = program(x, jnp.ones(2))
        assert mixed.dtype == jnp.float64
        np.testing.assert_allclose(mixed.sum(axis=0), x.sum(axis=0), rtol=1e-14)
        np.testing.assert_allclose(mixed, np.tile(x.mean(axis=0), (2, 1)), atol=1e-6)


@pytest.mark.parametrize(("mode", "value"), [("shard_map_check_vma", -np.inf), ("vmap", np.nan)])
@pytest.mark.parametrize("wire", NARROW)
def test_allreduce_keeps_what_is_not_finite(mode, wire, value):
    g = jnp.asarray(np.random.default_rng(0).normal(size=(4, 33)), jnp.float32).at[2, 5].set(value)
    tx = gx.allreduce(wire=wire)
    averaged = np.asarray(run(mode, lambda g: tx.update(g, tx.init(g))[0], 4)(g))
    np.testing.assert_array_equal(averaged[:, 5], np.full(4, value))
    finite = np.delete(averaged, 5, axis=1)
    np.testing.assert_allclose(
        finite, np.delete(g.mean(axis=0)[None].repeat(4, 0), 5, 1), atol=0.02
    )


@pytest.mark.parametrize("wire", NARROW)
def test_allreduce_of_any_size_of_values(wire):
    tx = gx.allreduce(wire=wire)
    average = run("vmap", lambda g: tx.update(g, tx.init(g))[0], 4)
    for size in (1e-30, 1e-7, 1.0, 1e6, 1e30):
        g = size * np.random.default_rng(0).normal(size=(4, 33)).astype(np.float32)
        error = np.abs(np.asarray(average(g)) - g.mean(axis=0))
        assert error.max() <= 2 * RELATIVE_ERROR[wire] * np.abs(g).max(), size


@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize("schedule", [ONE_PEER, COMPLETE], ids=["one peer", "complete"])
def test_gossip_delivers_what_is_not_finite(wire, schedule):
    x = jnp.ones((4, 33)).at[2, 5].set(jnp.inf)
    mixed, weight = run("vmap", lambda x: gx.mix(x, 1.0, schedule, 0, wire=wire), 4)(x)
    reached = schedule.round_at(0).matrix[:, 2] > 0
    np.testing.assert_array_equal(np.isfinite(mixed[:, 5]), ~reached)
    assert np.isfinite(np.delete(mixed, 5, axis=1)).all()
    np.testing.assert_allclose(weight, 1, rtol=1e-6)


@pytest.mark.parametrize("wire", NARROW)
@pytest.mark.parametrize("schedule", [ONE_PEER, COMPLETE], ids=["one peer", "complete"])
def test_nodes_that_agree_on_any_value_still_do(wire, schedule):
    """A clipped numerator with its whole weight would pull their estimates apart."""

    def mix_twice(x):
        z, weight = x, jnp.ones(())
        for step in range(2):
            z, weight = gx.mix(z, weight, schedule, step, wire=wire)
        return z, weight

    program = run("vmap", mix_twice, 4)
    for size in (1e-30, 1e-7, 1e6, 1e30):
        x = size * (1 + np.random.default_rng(0).random(33, np.float32))
        z, weights = map(np.asarray, program(np.tile(x, (4, 1))))
        error = np.abs(z / weights[:, None] - x).max() / size
        assert error <= 8 * RELATIVE_ERROR[wire], size
        np.testing.assert_allclose(z.sum(axis=0), 4 * x, rtol=1e-6)
