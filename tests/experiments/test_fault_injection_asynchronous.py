"""Kills and stops of nodes that wait for nobody: what is required, the tables, and a small job."""

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

import gossipjax as gx
from experiments.fault_injection.asynchronous import __main__ as program
from experiments.fault_injection.asynchronous import kills, tables
from experiments.fault_injection.asynchronous.kills import Kill
from experiments.fault_injection.asynchronous.requirements import (
    check_kills,
    check_result,
    check_stops,
)
from experiments.fault_injection.asynchronous.stops import Stop

KILL = Kill(1, time=100.0, restarted=100.1, back=104.0, pause=0.2)
STOP = Stop(2, time=50.0, continued=80.0, back=80.1, step_before=0.05, step_during=0.051)
ACCOUNT = gx.asynchronous.Account(4.0, {0: 1.0, 1: 0.5, 2: 1.5}, 0.25, 0.75)
ACCURACY = "test_accuracy_average_model"
SHORT = ("--kills=1", "--stops=1", "--stop-seconds=2", "--processes=3", "--epochs=6", "--runs=1")
RUN = {ACCURACY: 0.97, "weight_nodes": [1.0, 0.5, 1.5], "places_nodes": [0, 1, 2]}


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({}, None),
        ({"back": 110.2}, "kill 1: back within 10 s, got 10.1"),
        ({"back": None}, "kill 1: back within 10 s, got inf"),
        ({"pause": 6.0}, "kill 1: no other node pauses, got 6.0 s"),
    ],
)
def test_what_a_kill_must_not_do(changes, violation):
    found = list(check_kills([dataclasses.replace(KILL, **changes)], 1))
    assert found == ([violation] if violation else [])


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({}, None),
        ({"back": 91.0}, "stop 1: back within 10 s, got 11.0"),
        ({"step_during": 0.053}, "got +6.0 %"),
        ({"step_during": 0.047}, "got -6.0 %"),
        ({"step_during": math.nan}, "got +nan %"),
    ],
)
def test_what_a_stop_must_not_do(changes, violation):
    found = list(check_stops([dataclasses.replace(STOP, **changes)], 1))
    assert len(found) == bool(violation)
    assert violation is None or violation in found[0]


def test_faults_after_the_end_are_missed():
    assert "2 kills, got 1" in next(check_kills([KILL], 2))
    assert "1 stops, got 0" in next(check_stops([], 1))


@pytest.mark.parametrize(
    ("run", "account", "violation"),
    [
        ({}, {}, None),
        ({ACCURACY: 0.959}, {}, "an accuracy of at least 0.9600, got 0.9590"),
        ({}, {"dead": 0.7501}, "the account closes to 1e-06"),
        ({"weight_nodes": [1.0, 0.5, 1.501]}, {}, "nodes hold what the account says"),
    ],
)
def test_what_a_disturbed_run_must_end_with(run, account, violation):
    undisturbed = [RUN, RUN | {ACCURACY: 0.98}]
    found = list(check_result("kills", RUN | run, undisturbed, ACCOUNT._replace(**account)))
    assert len(found) == bool(violation)
    assert violation is None or violation in found[0]


def test_a_pause_is_of_another_node_between_the_kill_and_the_return():
    kill = Kill(0, time=10.0, restarted=10.1)
    steps = {0: [9.9, 12.0], 1: [1.0, 9.8, 10.4, 10.5, 11.9, 20.0], 2: [9.0, 9.95, 10.05, 11.0]}
    kill.complete(steps)
    assert kill.back == 12.0
    assert kill.pause == pytest.approx(1.4)


def test_step_times_are_compared_over_intervals_as_long():
    stop = Stop(0, time=10.0, continued=12.0)
    others = [8.0, 8.5, 9.0, 9.5, 10.0, 10.6, 11.2, 11.8, 12.4, 12.9]
    stop.complete({0: [9.0, 12.3], 1: [0.0, *others]})
    assert stop.back == 12.3
    assert stop.step_before == pytest.approx(0.5)
    assert stop.step_during == pytest.approx(0.6)
    assert stop.change == pytest.approx(0.2)


def test_tables_fit_into_a_terminal():
    output = io.StringIO()
    console = Console(file=output, width=80)
    console.print(tables.make_kills_table([KILL, dataclasses.replace(KILL, back=None)], 90.0))
    console.print(tables.make_stops_table([STOP], 0.0))
    rows = [line.split() for line in output.getvalue().splitlines()]
    assert ["1", "10.0", "1", "0.1", "3.9", "0.20"] in rows
    assert ["2", "10.0", "1", "0.1", "never", "0.20"] in rows
    assert ["1", "50.0", "2", "30.0", "0.1", "50.00", "51.00", "+2.0"] in rows


def test_a_job_with_a_kill_and_one_with_a_stop(tmp_path, monkeypatch, capsys):
    """On a busy machine a node may be back later, and steps take longer: both are reported."""
    out = tmp_path / "out"
    monkeypatch.setattr(kills, "MAX_DELAY", 0.2)
    try:
        program.main([*SHORT, "--out", str(out)])
        violations = []
    except SystemExit as error:
        violations = str(error.code).splitlines()[1:]
    (record,) = json.loads((out / "summary.json").read_text())["runs"]
    assert violations == record["kills"]["violations"] + record["stops"]["violations"]
    allowed = ("back within", "steps take as long", "accuracy", "no other node pauses")
    assert not [text for text in violations if not any(part in text for part in allowed)]
    assert [fault["back"] is not None for fault in record["kills"]["faults"]] == [True]
    assert [fault["back"] is not None for fault in record["stops"]["faults"]] == [True]
    for name in ("kills", "stops"):
        assert abs(record[name]["account"]["difference"]) < 1e-6
        assert record[name]["run"][ACCURACY] > 0.9
    assert record["kills"]["account"]["dead"] > 0
    assert "1 kills in" in capsys.readouterr().out
