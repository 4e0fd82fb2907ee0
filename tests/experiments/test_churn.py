"""Churn: who dies when, the clock of what runs in lockstep, and a job of two nodes."""

import json
import math
import os
from pathlib import Path

import pytest

from experiments.fault_injection import churn
from experiments.fault_injection.__main__ import main
from experiments.fault_injection.churn import ChurnOptions, draw_deaths, replay_clock
from experiments.speed.wire import links

OPTIONS = ChurnOptions(
    nodes=4,
    bandwidth="8mbit",
    slow=4,
    step_seconds=0.5,
    outer_every=2,
    checkpoint_every=2,
    restart_seconds=5,
    minutes=0.5,
)
LOSSES = [float(step) for step in range(20)]
EXCHANGE = 1.5  # seconds of 1.5 models of 1e6 bytes


@pytest.fixture(scope="module")
def can_limit_links():
    try:
        links.require_tools()
    except ValueError:
        return False
    return True


def test_deaths_are_one_in_each_part_of_a_minute():
    deaths = list(draw_deaths(ChurnOptions(minutes=3), 2.0))
    assert [int(when // 30) for when, _ in deaths] == list(range(6))
    assert {place for _, place in deaths} <= set(range(8))
    assert deaths == list(draw_deaths(ChurnOptions(minutes=3), 2.0))
    assert deaths != list(draw_deaths(ChurnOptions(minutes=3, seed=1), 2.0))
    assert not list(draw_deaths(ChurnOptions(), 0.0))


def test_the_clock_of_a_job_in_lockstep_waits_for_the_slowest_and_the_wire():
    record = replay_clock(OPTIONS, "diloco", LOSSES, 10**6, [])
    times = [when for when, _ in record["curve"]]
    assert OPTIONS.find_period("diloco") == 3  # as many bytes per step as every 2 by gossip
    assert times[:4] == pytest.approx([2, 4, 6 + EXCHANGE, 8 + EXCHANGE])
    assert [loss for _, loss in record["curve"]] == LOSSES[: record["steps"]]
    assert times[-1] <= OPTIONS.seconds < times[-1] + 2 + EXCHANGE
    assert record["bytes_per_second"] == pytest.approx(record["steps"] // 3 * 1.5e6 / 30)


def test_a_slow_link_is_waited_for_by_all():
    slow = ChurnOptions(**{**vars(OPTIONS), "slow_link": "4mbit"})
    times = [when for when, _ in replay_clock(slow, "allreduce", LOSSES, 10**6, [])["curve"]]
    assert times[:2] == pytest.approx([2 + 2 * EXCHANGE, 4 + 4 * EXCHANGE])


def test_a_death_costs_the_restart_and_the_steps_since_the_checkpoint():
    """One comes while the job starts again, which begins anew."""
    deaths = [(7.0, 0), (10.0, 3)]
    record = replay_clock(OPTIONS, "diloco", LOSSES, 10**6, deaths)
    points = record["curve"]
    assert points[:2] == [(2.0, 0.0), (4.0, 1.0)]
    assert points[2] == pytest.approx((10 + 5 + 2 + EXCHANGE, 2.0))
    assert record["deaths"] == 2
    late = replay_clock(OPTIONS, "diloco", LOSSES, 10**6, [(100.0, 0)])
    assert late["deaths"] == 0


def test_losses_of_the_table_are_means_of_the_last_seconds(monkeypatch):
    monkeypatch.setattr(churn, "MEAN_SECONDS", 2.0)
    curve = [(1.0, 8.0), (8.5, 4.0), (9.0, 2.0), (12.0, 1.0)]
    assert churn.average_end(curve, 10.0) == 3.0
    assert churn.average_end(curve, 5.0) == 8.0  # the newest, if there is none
    assert math.isnan(churn.average_end(curve, 0.5))
    assert churn.average_by_time(curve, 6.0) == ([0.1, 0.2, 0.3], [8.0, 3.0, 1.0])


def test_two_nodes_of_which_one_dies(tmp_path, monkeypatch, capsys, can_limit_links):
    """Nodes that only write losses and journals. Without root the program says what it needs."""
    monkeypatch.setattr(churn, "PROGRAM", "fake_node")
    path = [f"{Path(__file__).parent}", os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setattr(churn, "LANGUAGE", ("--sequence-length", "8", "--vocabulary-size", "300"))
    out = tmp_path / "out"
    arguments = ["churn", "--nodes", "2", "--minutes", "0.03", "--deaths-per-minute", "40"]
    arguments += ["--algorithm", "async-sgp", "--step-seconds", "0.05", "--out", f"{out}"]
    arguments += ["--bandwidth", "100mbit"]
    if not can_limit_links:
        with pytest.raises(SystemExit):
            main(arguments)
        assert "--bandwidth needs network namespaces" in capsys.readouterr().err
        return
    main(arguments)
    (record,) = json.loads((out / "summary.json").read_text())["runs"]
    assert record["deaths"] == 1
    assert record["account"]["difference"] == 0
    assert record["steps"] > 5
    assert record["loss"] == 0.5
    assert (out / "loss.png").stat().st_size > 10_000
    assert os.getpid() not in links.list_created()
    assert "async-sgp" in capsys.readouterr().out
