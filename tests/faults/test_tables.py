"""The laws of the tables, their replay, and what a `Faults` reads of them."""

import numpy as np
import pytest

import gossipjax as gx

F = gx.faults
N = 12
STEPS = 3000
DRAWN = {
    "independent_drops": lambda steps, seed: F.independent_drops(N, steps, seed, 0.1),
    "gilbert_elliott": lambda steps, seed: F.gilbert_elliott(
        N, steps, seed, 0.8, bad_to_good=0.3, good_to_bad=0.1
    ),
    "markov_activity": lambda steps, seed: F.markov_activity(N, steps, seed, wake=0.3, sleep=0.1),
    "poisson_activity": lambda steps, seed: F.poisson_activity(N, steps, seed, mean=2.0),
    "uniform_delays": lambda steps, seed: F.uniform_delays(N, steps, seed, 3),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_row_depends_on_seed_and_step_alone(name):
    draw = DRAWN[name]
    table = draw(50, 4)
    np.testing.assert_array_equal(table, draw(50, 4))
    np.testing.assert_array_equal(table, draw(90, 4)[:50])
    assert (table != draw(50, 5)).any()


def test_independent_drops():
    lost = ~DRAWN["independent_drops"](STEPS, 0)
    assert lost.shape == (STEPS, N, N)
    assert lost.mean() == pytest.approx(0.1, abs=0.002)
    assert (lost[1:] & lost[:-1]).mean() == pytest.approx(0.01, abs=0.001)  # no memory
    assert (lost[:, 0, 1] & lost[:, 2, 1]).mean() == pytest.approx(0.01, abs=0.006)


def test_gilbert_elliott():
    """Bad is 1/4 of the time; given a loss, the next step is bad with 0.7, and a link loses 0.8."""
    lost = ~DRAWN["gilbert_elliott"](STEPS, 0)
    assert lost.mean() == pytest.approx(0.8 / 4, abs=0.02)
    both = (lost[1:] & lost[:-1]).mean() / lost.mean()
    assert both == pytest.approx(0.7 * 0.8, abs=0.02)
    of_one_sender = (lost[:, 0] & lost[:, 1]).mean() / lost.mean()  # share its chain
    assert of_one_sender == pytest.approx(0.8, abs=0.03)
    of_one_receiver = (lost[:, :, 0] & lost[:, :, 1]).mean() / lost.mean()
    assert of_one_receiver == pytest.approx(0.2, abs=0.06)
    many = ~F.gilbert_elliott(400, 1, 0, rate=1.0, bad_to_good=0.3, good_to_bad=0.1)
    assert many.mean() == pytest.approx((0.7 + 0.1) / 2, abs=0.08)  # from an even start, one move


def test_markov_activity():
    active = DRAWN["markov_activity"](STEPS, 0)
    assert active[0].all()
    assert active.mean() == pytest.approx(0.75, abs=0.02)
    fell = (active[:-1] & ~active[1:]).sum() / active[:-1].sum()
    woke = (~active[:-1] & active[1:]).sum() / (~active[:-1]).sum()
    assert (fell, woke) == (pytest.approx(0.1, abs=0.01), pytest.approx(0.3, abs=0.02))


def test_poisson_activity():
    active = DRAWN["poisson_activity"](STEPS, 0)
    sleeps = np.concatenate(
        [np.diff(np.flatnonzero(column), prepend=-1) - 1 for column in active.T]
    )
    assert sleeps.mean() == pytest.approx(2, abs=0.06)
    assert sleeps.var() == pytest.approx(2, abs=0.12)
    assert (sleeps == 0).mean() == pytest.approx(np.exp(-2), abs=0.01)


def test_cyclic_activity():
    active = F.cyclic_activity(5, on=3, off=1, offsets=[0, 1, 2, 3, 8])
    expected = [[(k + offset) % 4 < 3 for offset in (0, 1, 2, 3, 8)] for k in range(4)]
    assert active.tolist() == expected


def test_uniform_delays():
    counts = np.bincount(DRAWN["uniform_delays"](STEPS, 0).ravel())
    np.testing.assert_allclose(counts / counts.sum(), [0.25] * 4, atol=0.003)


def test_faults_read_tables_by_the_step_and_deaths_are_for_ever():
    arrives = F.independent_drops(3, 5, 0, 0.5)
    active = F.markov_activity(3, 4, 0)
    faults = F.Faults(3, arrives=arrives, active=active, deaths={2: 6}, delays=2)
    for step in range(40):
        np.testing.assert_array_equal(faults.arrives_at(step), arrives[step % 5])
        alive = [True, True, step < 6]
        np.testing.assert_array_equal(faults.active_at(step), active[step % 4] & alive)
    assert faults.max_delay == 2
    plain = F.Faults(3)
    assert plain.arrives_at(9).all()
    assert plain.active_at(9).all()
    assert plain.max_delay == 0
