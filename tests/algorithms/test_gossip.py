"""Algorithms of one's own: published ones in a few lines equal the library's."""

import inspect
from functools import partial

import jax
import numpy as np
import optax
import pytest
from algorithms import published
from algorithms.problems import momentum_sgd, train

import gossipjax as gx

RATE = optax.cosine_decay_schedule(0.1, 8)
DIRECTED = gx.topology.random_peer(4, 3, seed=1)
PAIRS = {
    "dpsgd": (published.dpsgd, gx.dpsgd, gx.topology.bipartite_exponential(4)),
    "DSGD-AC": (
        partial(published.dsgd_ac, rate=RATE),
        partial(gx.dpsgd, strength=gx.contrib.adaptive_consensus(RATE)),
        gx.topology.ring(4),
    ),
    "gradient_tracking": (published.gradient_tracking, gx.gradient_tracking, gx.topology.ring(4)),
    "Push-DIGing": (published.gradient_tracking, gx.gradient_tracking, DIRECTED),
}


@pytest.fixture(autouse=True)
def promotion():
    """Schedules of optax promote types."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def count_lines(function):
    """Lines of code: neither blank, nor the docstring."""
    lines = [line for line in inspect.getsource(function).splitlines() if line.strip()]
    return len([line for line in lines if not line.strip().startswith('"""')])


@pytest.mark.parametrize("name", PAIRS)
def test_a_published_algorithm_in_a_few_lines_is_the_library_s(name):
    own, library, schedule = PAIRS[name]
    models = [
        train(optax.chain(momentum_sgd(), make(schedule)), 4, "vmap", equal_starts=False)
        for make in (own, library)
    ]
    np.testing.assert_allclose(*models, rtol=1e-6, atol=1e-6)


def test_the_lines_that_are_counted():
    assert count_lines(published.dpsgd) == 4
    assert count_lines(published.dsgd_ac) == 5
    assert count_lines(published.gradient_tracking) == 6
