"""What a node holds: shares need no memory beside it, and no array changes that others have."""

import jax.numpy as jnp
import numpy as np
import pytest

from gossipjax.asynchronous._messages import Mass, make_key
from gossipjax.asynchronous._model import Holding
from gossipjax.wire import bfloat16, int8

EXACT = (None,)


def make_holding(value=4.0):
    return Holding(Mass((jnp.full(100, value),), 1.0))


def make_arrived(value, is_fresh=False):
    return Mass((np.full(100, value, np.float32),), 0.5, is_fresh=is_fresh)


def test_an_exact_share_has_the_memory_of_what_is_kept_and_stays_as_it_was():
    holding = make_holding()
    half = holding.move((jnp.full(100, 2.0),), None, EXACT)
    assert half is not None
    assert np.shares_memory(half.x[0], np.asarray(holding.mass.x[0]))
    for wires in (None, EXACT):
        holding.add(make_arrived(1.0, is_fresh=True))
        holding.move((jnp.full(100, 2.0),), None, wires)
    assert (half.x[0] == 3.0).all()


@pytest.mark.parametrize("wires", [EXACT, (bfloat16(),), (int8(block=8),)])
def test_halves_that_come_back_are_the_whole(wires):
    holding = make_holding(1 / 3)
    key = make_key(wires, 0, 0)
    for _ in range(2):
        # Two return before the next step.
        halves = [holding.move((jnp.zeros(100),), None, wires, key) for _ in range(2)]
        assert holding.total.w == 0.25
        for half in halves:
            assert half is not None
            holding.add(half)
        np.testing.assert_allclose(holding.read().x[0], np.float32(1 / 3), rtol=2e-7)
        assert holding.total.w == 1.0


def test_nothing_is_shared_of_what_is_not_finite():
    holding = make_holding(np.inf)
    assert holding.move((jnp.zeros(100),), None, EXACT) is None
    assert holding.total.w == 1.0


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_changes_are_added_in_arrays_that_nobody_else_has(first, second):
    holding = make_holding()
    arrived = [make_arrived(1.0, first), make_arrived(2.0, second), make_arrived(3.0)]
    for mass in arrived:
        holding.add(mass)
    assert holding.read().x[0][0] == 10.0
    assert holding.total.w == 2.5
    for mass, value in zip(arrived, (1.0, 2.0, 3.0), strict=True):
        assert mass.is_fresh or (mass.x[0] == value).all()
    change = holding._change
    assert change is not None
    assert (first or second) == any(change.x[0] is mass.x[0] for mass in arrived)
