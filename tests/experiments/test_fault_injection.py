"""Fault injection: its plan, its requirements and tables; jobs whose program takes no time."""

import dataclasses
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from experiments.fault_injection import asynchronous, lockstep
from experiments.fault_injection.__main__ import main
from experiments.fault_injection.asynchronous import AsynchronousJob, Fault
from experiments.fault_injection.job import JobError
from experiments.fault_injection.lockstep import Kill, LockstepJob, plan_kills
from experiments.fault_injection.options import AsynchronousOptions, LockstepOptions

ACCURACY = "test_accuracy_average_model"
KILL = Kill(1, "saving", True, logged_step=45, saved_step=40, resumed_from=40)
RUN = {"run": "sgp, seed 0", "seed": 0, ACCURACY: 0.97, "final_loss": 0.1, "seconds_per_step": 0.01}
OTHER_SEED = RUN | {"run": "sgp, seed 1", "seed": 1, "final_loss": 0.2}


def test_kills_are_planned_in_each_part_of_the_run():
    options = LockstepOptions(kills=12)
    plan = plan_kills(options, random.Random(0))
    steps = [step for step, _ in plan]
    part = (options.steps - 5 * options.checkpoint_every) / 12
    for number, step in enumerate(steps):
        assert -1 <= step - 2 * options.checkpoint_every - number * part <= part + 1
    assert Counter(phase for _, phase in plan) == {"training": 6, "saving": 4, "starting": 2}
    assert plan[0][1] == "saving"
    assert plan == plan_kills(options, random.Random(0)) != plan_kills(options, random.Random(1))


@pytest.mark.parametrize(
    ("kill", "killed", "violation"),
    [
        ({}, {}, None),
        ({"resumed_from": 30}, {}, "was that of step 40, and the run resumed after step 30"),
        ({"logged_step": 61}, {}, "kill 1: lost 21 steps"),
        ({}, {"final_loss": 0.11}, "final_loss: 0.11, and 0.1 without kills"),
        ({"saved_step": 500, "logged_step": 500, "resumed_from": None}, {}, None),
    ],
)
def test_violations(kill, killed, violation, tmp_path):
    sent = [dataclasses.replace(KILL, **kill)]
    job = LockstepJob(LockstepOptions(), tmp_path, [0], restarts=3)
    found = list(job.find_violations(sent, RUN | killed, [RUN, OTHER_SEED]))
    assert len(found) == bool(violation)
    assert violation is None or violation in found[0]


def test_a_run_that_ends_before_a_kill(tmp_path, monkeypatch):
    """A moment after its end is left out; if it has failed, that is an error."""
    monkeypatch.setattr(lockstep, "plan_kills", lambda options, rng: [(20, "training")])
    for script in ("import time; time.sleep(0.2)", "raise SystemExit(3)"):
        run = LockstepJob(LockstepOptions(), tmp_path, [0], restarts=3)
        run._command = [sys.executable, "-c", script]
        with run:
            if "Exit" in script:
                with pytest.raises(JobError, match="ended with status 3 before step 20"):
                    list(run.inject_faults())
            else:
                assert list(run.inject_faults()) == []


def test_a_kill_resumes_at_the_first_message_after_its_restart(tmp_path):
    run = LockstepJob(LockstepOptions(), tmp_path, [0], restarts=3)
    lines = {
        "[launch] restart 1 of 3": False,
        "[launch] restart 2 of 3": False,
        "[1] sgp resumes after step 90": False,
        "[0] sgp resumes after step 20": True,
        "[launch] restart 3 of 3": False,
    }
    assert run.is_training()
    for line, is_training in lines.items():
        run._handle_line(line)
        assert run.is_training() == is_training
    assert [run.resumed_from(number) for number in (1, 2, 3)] == [20, 20, None]


NODE_KILL = Fault("kill", 1, time=100.0, since=100.1, back=104.0, pause=0.2)
ACCOUNT = {"founded": 4.0, "living": {0: 1.0, 1: 0.5, 2: 1.5}, "difference": 0.0}
NODE_RUN = {ACCURACY: 0.97, "weight_nodes": [1.0, 0.5, 1.5], "places_nodes": [0, 1, 2]}


@pytest.mark.parametrize(
    ("fault", "run", "account", "violation"),
    [
        ({}, {}, {}, None),
        ({"back": None}, {}, {}, "kill 1: back within 10 s, got inf"),
        ({"pause": 6.0}, {}, {}, "kill 1: no other node pauses, got 6.0 s"),
        ({}, {ACCURACY: 0.959}, {}, "an accuracy of at least 0.9600, got 0.9590"),
        ({}, {}, {"difference": 1e-4}, "the account closes to 1e-06"),
        ({}, {"weight_nodes": [1.0, 0.5, 1.501]}, {}, "nodes hold what the account says"),
    ],
)
def test_what_asynchronous_nodes_must_do(fault, run, account, violation, tmp_path):
    job = AsynchronousJob(AsynchronousOptions(kills=1), tmp_path, [0], restarts=1)
    faults = [dataclasses.replace(NODE_KILL, **fault)]
    undisturbed = [NODE_RUN, NODE_RUN | {ACCURACY: 0.98}]
    found = list(job.find_violations(faults, NODE_RUN | run, undisturbed, ACCOUNT | account))
    assert len(found) == bool(violation)
    assert violation is None or violation in found[0]


@pytest.mark.parametrize(("fault", "dead"), [("kill", 1), ("stop", 0)])
def test_a_job_with_a_kill_or_a_stop(fault, dead, tmp_path, monkeypatch, capsys):
    """Of nodes that only write journals; `test_asynchronous.py` kills one that trains.

    On a busy machine a node may be back later, which is reported.
    """
    monkeypatch.setattr(asynchronous, "MAX_DELAY", 0.2)
    monkeypatch.setattr(asynchronous, "SLOW", "fake_node")
    path = [f"{Path(__file__).parent}", os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    options = (f"--fault={fault}", "--kills=1", "--stop-seconds=1", "--processes=3", "--runs=1")
    try:
        main(["asynchronous", *options, "--out", str(tmp_path / "out")])
        violations = []
    except SystemExit as error:
        violations = str(error.code).splitlines()[1:]
    (record,) = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert violations == record["violations"]
    allowed = ("back within", "no other node pauses")
    assert not [text for text in violations if not any(part in text for part in allowed)]
    assert record["faults"][0]["back"] is not None
    assert record["account"]["dead"] == dead
    assert record["account"]["difference"] == 0
    assert f"1 of 1 {fault}s. Accuracy 90.00 %" in capsys.readouterr().out
