"""The division of the data over nodes, and the batches of each node."""

import itertools

import numpy as np
import pytest

from experiments import data
from experiments.data.sharding import count_passes

LABELS = np.repeat(np.arange(10), 100)


def test_even_split():
    for nodes in (1, 3, 8, 1000):
        shards = data.split_examples(LABELS, nodes, None, seed=0)
        np.testing.assert_array_equal(np.sort(np.concatenate(shards)), np.arange(1000))
        sizes = [len(shard) for shard in shards]
        assert len(shards) == nodes
        assert max(sizes) - min(sizes) <= 1
        if nodes == 8:
            assert all(len(np.unique(LABELS[shard])) == 10 for shard in shards)  # shuffled


def take(shards, size, seed, count):
    return np.stack(list(itertools.islice(data.draw_batches(shards, size, seed), count)))


def test_batches_run_through_each_shard_pass_after_pass():
    shards = [np.arange(10), np.arange(100, 107), np.array([42])]
    drawn = take(shards, 4, seed=0, count=70)
    assert drawn.shape == (70, 3, 4)
    for node, shard in enumerate(shards):
        passes = drawn[:, node].reshape(-1, len(shard))
        for order in passes:
            np.testing.assert_array_equal(np.sort(order), shard)
        assert len(shard) == 1 or len(np.unique(passes, axis=0)) > 20  # fresh orders


def test_a_seed_gives_these_numbers():
    shards = data.split_examples(np.arange(20) % 4, 3, 0.5, seed=1)
    assert [shard.tolist() for shard in shards] == [
        [16, 0, 4, 5, 13, 1, 9, 6, 14, 10, 18, 19],
        [8, 12, 17, 2],
        [3, 11, 15, 7],
    ]
    first = next(data.draw_batches(shards, 4, seed=2))
    assert first.tolist() == [[1, 14, 5, 19], [8, 2, 12, 17], [11, 7, 3, 15]]


def test_a_global_shuffle_deals_every_example_once_an_epoch_and_to_others_each_time():
    """Steps do not end with epochs here, and a node's part of an epoch has no fixed size."""
    division = data.divide_examples(np.arange(103), 4, None, 0, "global")
    drawn = list(itertools.islice(data.draw_batches(division, 5, seed=1), 60))
    numbers = np.concatenate([rows.ravel() for rows in drawn])
    passes = np.concatenate(
        [count_passes(division, step, 5, range(4)).ravel() for step in range(60)]
    )
    nodes = np.tile(np.repeat(np.arange(4), 5), 60)
    shares = []
    for epoch in range(11):
        np.testing.assert_array_equal(np.sort(numbers[passes == epoch]), np.arange(103))
        shares.append(
            [set(numbers[(passes == epoch) & (nodes == node)].tolist()) for node in range(4)]
        )
    for node in range(4):
        common = [len(a & b) for a, b in itertools.pairwise(share[node] for share in shares)]
        assert np.mean(common) == pytest.approx(103 / 16, rel=0.5)  # as of independent shares
    for part, rows in zip(data.draw_batches(division, 5, 1, nodes=[2, 0]), drawn, strict=False):
        np.testing.assert_array_equal(part, rows[[2, 0]])  # whichever process asks
    assert not np.array_equal(next(data.draw_batches(division, 5, seed=2)), drawn[0])
