"""D-PSGD refuses what would let the average drift."""

import pytest

import gossipjax as gx


def test_a_round_that_is_not_doubly_stochastic():
    schedule = gx.topology.from_matrices([[0.5, 0.25], [0.5, 0.75]])
    with pytest.raises(ValueError, match=r"got a round 0 whose row 0 sums to 0.75. Use sgp"):
        gx.dpsgd(schedule)


def test_every_round_is_checked():
    schedule = gx.topology.from_matrices([[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.25], [0.5, 0.75]]])
    with pytest.raises(ValueError, match=r"got a round 1 whose row 0 sums to 0.75"):
        gx.dpsgd(schedule)


def test_an_unknown_order():
    with pytest.raises(ValueError, match="'adapt-then-combine', got 'adapt'"):
        gx.dpsgd(gx.topology.ring(3), order="adapt")  # pyright: ignore[reportArgumentType]
