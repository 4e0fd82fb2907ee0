"""A permutation of nodes as permutations of devices that hold several nodes each."""

import numpy as np
import pytest

from gossipjax.topology.permutations import plan_block_exchange


def deliver(plan, values, devices):
    """What the devices do by the plan: `[N]` -> `[N]`, zeros where nothing arrives."""
    blocks = values.reshape(devices, -1)
    candidates = [list(block) for block in blocks]
    for transfer in plan.transfers:
        senders, receivers = np.array(transfer.pairs).T
        assert len(set(senders)) == len(set(receivers)) == len(transfer.pairs)
        assert (senders != receivers).all()
        arrived = np.zeros((devices, transfer.rows.shape[1]))
        for sender, receiver in transfer.pairs:
            arrived[receiver] = blocks[sender, transfer.rows[sender]]
        for device in range(devices):
            candidates[device].extend(arrived[device])
    rows = np.take_along_axis(np.array(candidates), plan.sources, axis=1)
    return np.where(plan.arrives, rows, 0).ravel()


@pytest.mark.parametrize(("size", "devices"), [(4, 1), (4, 4), (6, 2), (12, 4), (64, 8), (60, 5)])
def test_at_most_as_many_permutations_as_nodes_per_device(size, devices):
    rng = np.random.default_rng(size)
    values = rng.normal(size=size)
    for fraction in [1] * 15 + [0.6] * 15 + [0]:
        senders = rng.permutation(size)[: int(size * fraction)]
        receivers = rng.permutation(size)[: len(senders)]
        plan = plan_block_exchange(receivers, senders, size, devices)
        expected = np.zeros(size)
        expected[receivers] = values[senders]
        np.testing.assert_array_equal(deliver(plan, values, devices), expected)
        assert len(plan.transfers) <= size // devices


@pytest.mark.parametrize(("size", "devices"), [(4, 2), (12, 4), (64, 8)])
def test_a_shift_takes_two_and_sends_no_row_twice(size, devices):
    nodes = np.arange(size)
    rows = size // devices
    for hop in range(size):
        plan = plan_block_exchange((nodes + hop) % size, nodes, size, devices)
        assert len(plan.transfers) <= (1 if hop % rows == 0 or hop == 1 else 2)
        sent = sum(transfer.rows.shape[1] for transfer in plan.transfers)
        leaves = ((nodes + hop) % size // rows != nodes // rows).sum()
        assert sent * devices == leaves
        for transfer in plan.transfers:  # the same rows on all devices: no table is looked up
            assert (transfer.rows == transfer.rows[0]).all()
