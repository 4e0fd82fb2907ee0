"""What each codec leaves out, computed under `jit` on the default device, and by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gossipjax as gx

CODECS = [gx.wire.int8()]
if jax.default_backend() != "cpu":
    CODECS += [gx.wire.bfloat16(), gx.wire.float16(), gx.wire.int8(block=8)]
    CODECS += [gx.wire.int4(), gx.wire.int4(block=16)]
    CODECS += [gx.wire.top_k(0.1), gx.wire.random_k(0.1), gx.wire.block_top_k(5, block=24)]
SIZES = (7, 256, 1000)
# The largest error, in parts of the largest value.
LARGEST_ERRORS = {"bfloat16": 2**-8, "float16": 2**-11, "int8": 1 / 127, "int4": 1 / 7}


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_rest_under_jit_is_what_did_not_arrive(codec):
    """XLA may drop a conversion to a narrow type and back: `rest` would be 0."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=size), jnp.float32) for size in SIZES]
    key = gx.wire.as_key(jax.random.key(1))

    @jax.jit
    def send(arrays):
        words = [codec.encode(x, key) for x in arrays]
        return words, [x - codec.decode(w, x) for x, w in zip(arrays, words, strict=True)]

    @jax.jit
    def receive(words):  # a program by itself, in which nothing can be taken back
        return [codec.decode(w, x) for x, w in zip(arrays, words, strict=True)]

    all_words, rests = send(arrays)
    if not codec.is_sparse:  # op by op, nothing is fused
        np.testing.assert_array_equal(all_words[-1], codec.encode(arrays[-1], key))
    for x, arrived, rest in zip(arrays, receive(all_words), rests, strict=True):
        np.testing.assert_allclose(rest, np.asarray(x) - np.asarray(arrived), rtol=0, atol=1e-6)
        largest = np.abs(x).max()
        assert (np.asarray(arrived) != 0).any()
        # What is sparse leaves out whole values.
        part = LARGEST_ERRORS.get(str(codec).partition("(")[0], 1.0)
        assert np.abs(rest).max() <= part * largest * (1 + 1e-5)
        assert np.abs(rest).max() > 1e-5 * largest, "values must be rounded"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_floats_are_those_of_numpy(dtype):
    """Bit for bit, with zeros, the smallest and the largest values."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=1000).astype(np.float32) * 10.0 ** rng.integers(-4, 4, 1000)
    x = np.concatenate([x, [0, -0.0, 1e-3, 3e4, -3e4]]).astype(np.float32)
    codec = getattr(gx.wire, dtype)()

    @jax.jit
    def send(x):
        arrived = codec.decode(codec.encode(x), x)
        return arrived, x - arrived

    arrived, rest = send(jnp.asarray(x))
    np.testing.assert_array_equal(rest, x - np.asarray(arrived))
    if dtype == "bfloat16":
        expected = x.astype(jnp.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(arrived, expected)
    else:
        np.testing.assert_allclose(arrived, x, rtol=2**-11, atol=np.abs(x).max() * 2**-24)
