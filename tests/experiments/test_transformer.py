"""The blocks of Transformers: positions, masks, attention, the shared embedding."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import transformer


def test_sinusoids_are_the_papers():
    width = 6
    encodings = transformer.make_sinusoids(jnp.array([0, 7, 300]), width)
    for row, position in zip(encodings, [0, 7, 300], strict=True):
        for i in range(width // 2):
            angle = position / 10_000 ** (2 * i / width)
            assert row[2 * i] == pytest.approx(math.sin(angle), abs=1e-4)
            assert row[2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-4)


def test_rotation_depends_on_the_difference_of_positions():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 2, 8))

    def product(query_position, key_position):
        rotated_query = transformer.rotate(query, jnp.array([query_position]))
        rotated_key = transformer.rotate(key, jnp.array([key_position]))
        return (rotated_query * rotated_key).sum(axis=-1)

    np.testing.assert_allclose(product(5, 2), product(1005, 1002), rtol=1e-3)
    np.testing.assert_allclose(product(3, 3), (query * key).sum(axis=-1), rtol=1e-5)
    assert not np.allclose(product(5, 2), product(5, 3), rtol=1e-3)


def test_rotation_of_bfloat16_counts_beyond_256():
    x = jnp.ones((1, 2, 1, 4), jnp.bfloat16)
    rotated = transformer.rotate(x, jnp.array([512, 513]))
    assert rotated.dtype == jnp.bfloat16
    exact = transformer.rotate(x.astype(jnp.float32), jnp.array([512, 513]))
    np.testing.assert_allclose(rotated.astype(jnp.float32), exact, atol=0.01)


def test_masks():
    causal = transformer.make_causal_mask(jnp.array([2, 3]), jnp.arange(4))
    assert causal.tolist() == [[[[True, True, True, False], [True, True, True, True]]]]
    padding = transformer.make_padding_mask(jnp.array([[5, 6, 0], [0, 6, 7]]), padding_id=0)
    assert padding.tolist() == [[[[True, True, False]]], [[[False, True, True]]]]
