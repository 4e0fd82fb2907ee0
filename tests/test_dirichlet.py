"""`gx.dirichlet_split`: partitions that go from one node per class to even."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gossipjax as gx

LABELS = np.repeat(np.arange(10), 100)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
    st.integers(1, 20),
    st.floats(1e-9, 1e9),
    st.integers(0, 2**32 - 1),
    st.integers(0, 5),
)
@settings(deadline=None)
def test_every_split_is_a_partition_of_large_enough_parts(labels, nodes, alpha, seed, min_size):
    split = partial(
        gx.dirichlet_split, np.array(labels), nodes, alpha, seed=seed, min_size=min_size
    )
    if nodes * min_size > len(labels):
        with pytest.raises(ValueError, match="give fewer nodes, a smaller min_size"):
            split()
        return
    parts = split()
    assert len(parts) == nodes
    assert min(map(len, parts)) >= min_size
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    for part, again in zip(parts, split(), strict=True):
        np.testing.assert_array_equal(part, again)


def test_it_goes_from_one_node_per_class_to_even():
    def counts(alpha):
        parts = gx.dirichlet_split(LABELS, 5, alpha, seed=1)
        return np.array([np.bincount(LABELS[part], minlength=10) for part in parts])

    assert np.all(np.abs(counts(1e7) - 20) <= 1)
    # Each class is on one node, except for single examples that nodes without a class took.
    assert np.all(counts(1e-6).max(axis=0) >= 100 - 5)
    spread = [counts(alpha).std() for alpha in (0.1, 1.0, 10.0)]
    assert spread[0] > spread[1] > spread[2]
