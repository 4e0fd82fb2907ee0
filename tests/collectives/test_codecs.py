"""Codecs: what they say of an array, in how many bytes, and exact sums whatever they leave out."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from modes import make_mesh, run

import gossipjax as gx
from gossipjax.wire import decode_each, encode_each, encode_pieces

N = 4
DENSE = [gx.wire.bfloat16(), gx.wire.float16(), gx.wire.int8(), gx.wire.int4(block=16)]
INTEGERS = [gx.wire.int8(), gx.wire.int4(), gx.wire.int8(block=8), gx.wire.int4(block=16)]
SPARSE = [gx.wire.top_k(0.1), gx.wire.random_k(0.1)]
BLOCKS = [gx.wire.block_top_k(), gx.wire.block_top_k(5, block=24)]
ALL = [*DENSE, *SPARSE, *BLOCKS, gx.wire.top_k(1), gx.wire.random_k(0.7)]
SCHEDULES = {
    "one peer": gx.topology.one_peer_exponential(N),
    "complete": gx.topology.complete(N),
    "irregular": gx.topology.from_matrices(oracle.column_stochastic(np.random.default_rng(0), N)),
}


def make_key(number=0):
    return gx.wire.as_key(jax.random.key(number))


@functools.partial(jax.jit, static_argnums=0)
def encode_and_decode(codec, x, key):
    words = codec.encode(x, key)
    return words, codec.decode(words, x)


def send(codec, x, key=None):
    """What arrives of `x`."""
    key = make_key() if key is None else key
    return np.asarray(encode_and_decode(codec, jnp.asarray(x, jnp.float32), key)[1])


@pytest.mark.parametrize("codec", ALL, ids=str)
def test_the_words_are_counted(codec):
    arrays = [jnp.ones(size) for size in (0, 2, 33, 1000)]

    @jax.jit
    def encode_all(arrays):
        words = [codec.encode(x, make_key()) for x in arrays]
        decoded = [codec.decode(w, x) for w, x in zip(words, arrays, strict=True)]
        # What a node gets that no message reaches.
        nothing = [codec.decode(0 * w, x) for w, x in zip(words, arrays, strict=True)]
        return words, decoded, nothing

    for x, words, decoded, nothing in zip(arrays, *encode_all(arrays), strict=True):
        assert (words.shape, words.dtype) == ((codec.count_words(x),), codec.word)
        assert codec.count_bytes(x.size) == words.nbytes
        assert decoded.shape == x.shape
        assert not np.any(nothing)
        assert not np.signbit(nothing).any()
    assert hash(codec) == hash(type(codec)(**vars(codec)))  # static data of a program


@pytest.mark.parametrize("codec", DENSE, ids=str)
def test_the_words_of_pieces_are_those_of_the_whole(codec):
    """Pieces of one value, too, each of which alone would travel in full precision."""
    x = jnp.array([1.0, 3e5, 2.0])
    words = encode_pieces([x[:1], x[1:2], x[2:]], codec, make_key())
    np.testing.assert_array_equal(words, codec.encode(x, make_key()))


@pytest.mark.parametrize("codec", [gx.wire.int8(), *DENSE[::3], gx.wire.top_k(0.5)], ids=str)
def test_small_arrays_share_a_message_and_no_scale(codec):
    """Each is rounded as it is alone, but for other random numbers, in as many words."""
    rng = np.random.default_rng(0)
    sizes = (10, 700, 1, 0, 13, 256, 700, 33_000, 5)
    arrays = [
        jnp.asarray(rng.normal(size=size) * 10.0 ** (-3 * i), jnp.float32)
        for i, size in enumerate(sizes)
    ]
    arrays.append(arrays[7])

    @jax.jit
    def send_all(arrays):
        words = encode_each(arrays, codec, make_key())
        alone = [codec.decode(codec.encode(x, make_key()), x) for x in arrays]
        return words, decode_each(words, codec, arrays), alone

    words, arrived, alone = send_all(arrays)
    assert sum(part.size for part in words) == sum(
        codec.count_words(x) if x.size > 1 else x.nbytes // codec.word.itemsize for x in arrays
    )
    assert np.array_equal(arrived[7], arrived[-1]) == (not codec.needs_key)
    is_joined = isinstance(codec, gx.wire.IntegerCodec)
    assert (len(words) < len(arrays)) == is_joined
    for x, together, by_itself in zip(arrays, arrived, alone, strict=True):
        if x.size == 1:
            assert together == x
        elif not is_joined:
            np.testing.assert_array_equal(together, by_itself)
        elif x.size:
            blocks, length = codec._cut(x.size)
            rows = np.pad(x, (0, blocks * length - x.size)).reshape(blocks, length)
            step = np.abs(rows).max(axis=1, keepdims=True) / (2 ** (codec.bits - 1) - 1)
            step = np.broadcast_to(step, rows.shape).ravel()[: x.size]
            assert (np.abs(together - x) <= step * (1 + 1e-5)).all()


@pytest.mark.parametrize(
    "codec", [gx.wire.int8(), gx.wire.int4(block=16), gx.wire.top_k(0.5), BLOCKS[1]], ids=str
)
def test_values_in_float64(codec):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=100) * 1e100)
        words, arrived = map(np.asarray, encode_and_decode(codec, x, make_key()))
        assert words.size == codec.count_words(x)
    is_sent = arrived != 0
    assert arrived.dtype == np.float64
    np.testing.assert_allclose(arrived[is_sent], x[is_sent], atol=1e100)


@pytest.mark.parametrize("codec", [gx.wire.int8(block=8), gx.wire.int4(block=16)], ids=str)
def test_rounding_is_right_on_average_and_off_by_less_than_a_step(codec):
    x = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32)
    keys = jax.random.split(make_key(), 4000)
    arrived = jax.jit(jax.vmap(lambda key: codec.decode(codec.encode(x, key), x)))(keys)
    errors = np.asarray(arrived, np.float64) - np.asarray(x)
    step = np.abs(x).max() / (2 ** (codec.bits - 1) - 1)
    assert np.abs(errors).max() <= step * (1 + 1e-5)
    # Of 4,000 draws, each with a standard deviation of half a step at most: five of the mean's.
    assert np.abs(errors.mean(axis=0)).max() <= 5 * step / 2 / np.sqrt(4000)
    if codec.block > 1:
        assert errors.std() > step / 10, "values must be rounded"


def test_noise_is_uniform_and_of_no_pattern():
    """Neighbours, the halves of a word, nodes and updates draw independent numbers."""
    codec = gx.wire.int8(block=256)
    x = np.full(40 * 1024, 0.5, np.float32)
    x[::64] = 127  # so that a step is 1 in every block, and 0.5 lies between two
    draws = [send(codec, x, gx.wire.fold_in(make_key(), k))[x < 1] for k in range(3)]
    assert set(draws[0]) == {0, 1}
    others = [np.roll(draws[0], shift) for shift in (1, 2, 100)] + draws[1:]
    for other in others:
        assert abs(np.corrcoef(draws[0], other)[0, 1]) < 0.03
    assert abs(draws[0].mean() - 0.5) < 0.02


@pytest.mark.parametrize("codec", INTEGERS, ids=str)
def test_zeros_integers_and_what_is_not_finite(codec):
    x = np.zeros(2048, np.float32)  # whole blocks in every part
    np.testing.assert_array_equal(send(codec, x), x)
    limit = 2 ** (codec.bits - 1) - 1
    x[:] = np.arange(2048) % (2 * limit + 1) - limit
    if codec.block >= 16:
        np.testing.assert_allclose(send(codec, x), x, rtol=1e-6)
    for value in (np.nan, np.inf, -np.inf):
        x = np.ones(2048, np.float32)
        x[700] = value
        arrived = send(codec, x)
        assert not np.isfinite(arrived[700])
        assert (~np.isfinite(arrived)).sum() <= codec.block
    tiny = np.full(2048, 1e-39, np.float32)  # subnormal
    assert np.abs(send(codec, tiny)).max() <= 2e-39


def test_top_k_takes_the_largest():
    x = np.random.default_rng(0).normal(size=1000)
    np.testing.assert_array_equal(
        send(gx.wire.top_k(0.05), x), oracle.largest(x, 50).astype(np.float32)
    )
    x[3] = np.nan
    assert np.isnan(send(gx.wire.top_k(0.001), x)[3])


@pytest.mark.parametrize(("count", "block", "size"), [(64, 4096, 9000), (5, 24, 71), (8, 8, 20)])
def test_block_top_k_equals_its_definition(count, block, size):
    """Of values of very different magnitudes by block: each has a table of its own."""
    codec = gx.wire.block_top_k(count, block)
    x = np.random.default_rng(0).normal(size=size) * 10.0 ** np.linspace(-20, 10, size)
    x = x.astype(np.float32).astype(np.float64)
    arrived = send(codec, x)
    np.testing.assert_allclose(arrived, oracle.block_top_k(x, count, block), rtol=2e-5, atol=0)
    blocks = -(-size // block)
    length = -(-size // blocks)
    assert (arrived != 0).sum() == min(size, blocks * min(count, length))
    x[3] = np.nan
    arrived = send(codec, x)
    assert np.isnan(arrived[3])
    assert np.isfinite(arrived[length:]).all()


@pytest.mark.parametrize("fraction", [0.003, 0.7])
def test_random_k_takes_every_value_equally_often(fraction):
    codec = gx.wire.random_k(fraction)
    x = jnp.arange(1.0, 101)
    keys = jax.random.split(make_key(), 2000)
    apply = jax.jit(jax.vmap(lambda key: codec.decode(codec.encode(x, key), x)))
    arrived = np.asarray(apply(keys))
    assert ((arrived == 0) | (arrived == np.asarray(x))).all()
    count = codec.count_values(100)
    assert ((arrived != 0).sum(axis=1) == count).all()
    share = (arrived != 0).mean(axis=0)
    deviation = np.sqrt(count / 100 * (1 - count / 100) / 2000)
    assert np.abs(share - count / 100).max() <= 5 * deviation


@pytest.mark.parametrize(
    ("graph", "mode", "codec"),
    [
        ("irregular", "vmap", gx.wire.int8()),
        ("one peer", "vmap", gx.wire.int4(block=16)),
        ("irregular", "shard_map_check_vma", gx.wire.int8()),
        ("complete", "shard_map_check_vma", gx.wire.float16()),
        ("complete", "pmap", gx.wire.int8()),
    ],
    ids=str,
)
def test_values_are_near_and_sums_exact(graph, mode, codec):
    """The weight is 1 beside small values, which must not be rounded by its scale."""
    schedule = SCHEDULES[graph]
    x = np.random.default_rng(0).normal(size=(N, 70)).astype(np.float32) * 1e-3
    P = schedule.matrices()[0]

    def mix(x, w):
        return gx.mix({"a": x[:3], "b": x[3:]}, w, schedule, 0, wire=codec, key=make_key())

    mixed, weights = run(mode, mix, N)(jnp.asarray(x), jnp.ones(N))
    mixed = np.concatenate([mixed["a"], mixed["b"]], axis=1)
    step = np.abs(x).max() / (7 if codec == DENSE[-1] else 100)
    np.testing.assert_allclose(mixed, P @ x, atol=3 * step)
    assert np.abs(mixed - P @ x).max() > 1e-7, "messages must be rounded"
    np.testing.assert_allclose(mixed.sum(axis=0), x.sum(axis=0), atol=1e-8)
    np.testing.assert_allclose(weights, P.sum(axis=1), rtol=1e-6)


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        (None, "f32[600]"),
        ("f4", "f32[600]"),
        (jnp.bfloat16, "u16[601]"),  # a weight of two words
        ("float16", "u16[603]"),  # and a power of two for each leaf
        (gx.wire.int8(), f"u32[{1 + (128 + 2) + (26 + 1)}]"),
        (gx.wire.int4(block=64), f"u32[{1 + (64 + 8) + (14 + 2)}]"),
        (gx.wire.top_k(0.1), f"u32[{2 * 60}]"),
        (gx.wire.random_k(0.1), f"u32[{2 + 60}]"),
    ],
    ids=str,
)
def test_one_message_of_these_words(wire, words):
    """599 values in two leaves, and the weight of push-sum in full precision."""
    if wire in SPARSE:
        tx = gx.choco(gx.topology.directed_ring(N), wire, 0.1)
    else:
        tx = gx.sgp(SCHEDULES["one peer"], wire=wire)
    z = {"a": jnp.ones((N, 500)), "b": jnp.ones((N, 99))}
    state = gx.spmd(tx.init, nodes=gx.Nodes(mesh=make_mesh(N)))(z)
    program = gx.spmd(lambda z, s: tx.update(z, s, z, step=0), nodes=gx.Nodes(mesh=make_mesh(N)))
    text = program.lower(z, state).compile().as_text()
    assert re.findall(r" = (\S+)\{0\} collective-permute\(", text) == [words]


class TestAllreduce:
    """With error feedback: what a codec leaves out comes later."""

    @pytest.mark.parametrize(
        ("mode", "codec", "n", "length"),
        [
            ("vmap", gx.wire.top_k(0.1), 3, 33),
            ("vmap", gx.wire.int8(block=8), 1, 33),
            ("vmap", gx.wire.top_k(0.1), 8, 5),
            ("shard_map_check_vma", gx.wire.int8(block=8), 3, 33),
            ("pmap", gx.wire.random_k(0.1), 8, 64),
        ],
        ids=str,
    )
    def test_the_sum_of_gradients_is_that_of_averages_and_errors(self, mode, codec, n, length):
        tx = gx.allreduce(wire=codec)
        g = np.random.default_rng(0).normal(size=(n, 4, length)).astype(np.float32)

        def averages(g):
            def body(state, g):
                result: Any = tx.update({"g": g}, state)
                mean, state = result
                return state, mean["g"]

            state = tx.init({"g": g[0]})
            # As an error that differs between nodes, which is what the state becomes.
            state = jax.tree.map(lambda x: x + jnp.asarray(0 * g[0, 0], x.dtype), state)
            return jax.lax.scan(body, state, g)

        result: Any = run(mode, averages, n)(jnp.asarray(g))
        state, means = result
        means = np.asarray(means)
        assert (means == means[0]).all()
        total = n * means[0].sum(axis=0) + np.asarray(state.error["g"]).sum(axis=0)
        np.testing.assert_allclose(total, g.sum(axis=(0, 1)), rtol=1e-5, atol=1e-4)
        if n == 1 or length <= n:
            np.testing.assert_allclose(means[0], g.mean(axis=0), rtol=1e-6, atol=1e-6)
        assert int(state.count[0]) == 4

    @pytest.mark.parametrize("codec", [gx.wire.int8(block=8), gx.wire.top_k(0.1)], ids=str)
    def test_what_is_not_finite_is_that_of_one_step(self, codec):
        tx = gx.allreduce(wire=codec)
        g = jnp.ones((2, 20)).at[1, 3].set(jnp.nan)
        update: Any = gx.spmd(tx.update, nodes=2)
        mean, state = update(g, gx.spmd(tx.init, nodes=2)(g))
        assert not np.isfinite(mean).all()
        for _ in range(3):
            mean, state = update(jnp.ones((2, 20)), state)
            assert np.isfinite(mean).all()
            assert np.isfinite(state.error).all()
