"""The fault injection without a job: its plan, its requirements, its table and its options."""

import dataclasses
import io
import os
import random
import subprocess
import sys
import time
from collections import Counter

import pytest
from rich.console import Console

from experiments.fault_injection import kills
from experiments.fault_injection.__main__ import main, make_table
from experiments.fault_injection.kills import Kill, find_violations, plan_kills
from experiments.fault_injection.launched_job import JobError
from experiments.fault_injection.options import Options
from experiments.fault_injection.supervised_run import SupervisedRun

KILL = Kill(12.5, 1, "saving", True, logged_step=45, saved_step=40, resumed_from=40)
RUN = {
    "run": "sgp, seed 0",
    "seed": 0,
    "test_accuracy_average_model": 0.97,
    "final_loss": 0.1,
    "seconds_per_step": 0.01,
}
OTHER_SEED = RUN | {"run": "sgp, seed 1", "seed": 1, "final_loss": 0.2}


def test_kills_are_planned_in_each_part_of_the_run():
    options = Options(kills=12)
    plan = plan_kills(options, random.Random(0))
    steps = [step for step, _ in plan]
    part = (options.steps - 5 * options.checkpoint_every) / 12
    for number, step in enumerate(steps):
        assert -1 <= step - 2 * options.checkpoint_every - number * part <= part + 1
    assert Counter(phase for _, phase in plan) == {"training": 6, "saving": 4, "starting": 2}
    assert plan[0][1] == "saving"
    assert plan == plan_kills(options, random.Random(0)) != plan_kills(options, random.Random(1))


@pytest.mark.parametrize(
    ("kill", "killed", "violations"),
    [
        ({}, {}, []),
        ({}, {"seconds_per_step": 0.02}, []),
        ({"resumed_from": 30}, {}, ["was that of step 40, and the run resumed after step 30"]),
        ({"resumed_from": None}, {}, ["was that of step 40, and the run resumed after step None"]),
        ({"logged_step": 61}, {}, ["kill 1: lost 21 steps"]),
        ({}, {"final_loss": 0.11}, ["final_loss: 0.11, and 0.1 without kills"]),
        ({"saved_step": 500, "logged_step": 500, "resumed_from": None}, {}, []),
        (
            {"saved_step": 500, "logged_step": 500, "resumed_from": 40},
            {},
            ["was that of step 500, and the run resumed after step 40"],
        ),
    ],
)
def test_violations(kill, killed, violations):
    sent = [dataclasses.replace(KILL, **kill)]
    descriptions = find_violations(Options(), sent, RUN | killed, [RUN, OTHER_SEED])
    assert len(descriptions) == len(violations)
    for description, violation in zip(descriptions, violations, strict=True):
        assert violation in description


def test_equal_results_prove_nothing_if_another_seed_has_the_same():
    same = OTHER_SEED | {"final_loss": RUN["final_loss"], "seconds_per_step": 0.02}
    violations = find_violations(Options(), [KILL], RUN, [RUN, OTHER_SEED, same | {"seed": 2}])
    assert violations == ["seed 2: the same results as with seed 0"]


def test_a_run_without_kills_proves_nothing():
    (violation,) = find_violations(Options(), [], RUN, [RUN, OTHER_SEED])
    assert "no process was killed" in violation


class QuickRun(SupervisedRun):
    """A job whose processes are done, with a step number that is as far as one likes."""

    def __init__(self, tmp_path, script, step=0):
        super().__init__(Options(), tmp_path, [0], max_restarts=3)
        self._command = [sys.executable, "-c", script]
        self._step = step

    def logged_step(self):
        return self._step


@pytest.mark.parametrize("phase", ["training", "saving", "starting"])
@pytest.mark.parametrize("step", [0, 10**6])
def test_a_moment_after_the_end_is_no_violation(tmp_path, monkeypatch, phase, step):
    """The run is complete before the step or the checkpoint, or has no process to kill any more."""
    monkeypatch.setattr(kills, "plan_kills", lambda options, rng: [(20, phase)] * 3)
    sent = []
    with QuickRun(tmp_path, "import time; time.sleep(0.8)", step) as run:
        kills.inject_kills(Options(), run, random.Random(0), sent, lambda kill: None)
    assert sent == []


def test_a_kill_that_hits_a_process_that_is_done_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "plan_kills", lambda options, rng: [(20, "training")])
    sent = []
    with QuickRun(tmp_path, "import time; time.sleep(1)", 30) as run:
        done = subprocess.Popen([sys.executable, "-c", ""])
        os.waitid(os.P_PID, done.pid, os.WEXITED | os.WNOWAIT)  # its number is not free yet
        monkeypatch.setattr(run, "pids", lambda: {0: done.pid})
        kills.inject_kills(Options(), run, random.Random(0), sent, lambda kill: None)
        done.wait()
    assert sent == []


def test_a_run_that_fails_before_a_kill_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(kills, "plan_kills", lambda options, rng: [(20, "training")])
    with (
        QuickRun(tmp_path, "raise SystemExit(3)") as run,
        pytest.raises(JobError, match="ended with status 3 before step 20"),
    ):
        kills.inject_kills(Options(), run, random.Random(0), [], lambda kill: None)


def test_a_kill_while_processes_start_does_not_wait_until_they_are_done(tmp_path):
    run = SupervisedRun(Options(), tmp_path, [0], max_restarts=3)
    run.pids = lambda: dict.fromkeys(range(4), 1)
    run._lines.put("[launch] restart 1 of 3, with 4 processes")
    run._lines.put("[0] sgp resumes after step 20")
    started = time.monotonic()
    run.restarts = 1
    run._last_progress = started
    assert run.wait_for_startup(60)
    assert time.monotonic() - started < 10


def test_table_fits_into_a_terminal():
    console = Console(file=io.StringIO(), width=80)
    console.print(make_table([KILL, dataclasses.replace(KILL, saving=False, resumed_from=None)]))
    assert isinstance(console.file, io.StringIO)
    first, second = (
        line.split() for line in console.file.getvalue().splitlines() if "12.5" in line
    )
    assert first == ["1", "12.5", "1", "saving", "yes", "45", "40", "40", "5", "0.0"]
    assert second == ["2", "12.5", "1", "saving", "45", "40", "-", "-", "0.0"]


def test_a_kill_resumes_at_the_first_message_after_its_restart(tmp_path):
    run = SupervisedRun(Options(), tmp_path, [0], max_restarts=3)
    lines = {
        "[launch] restart 1 of 3, with 4 processes": False,
        "[launch] restart 2 of 3, with 4 processes": False,
        "[1] sgp resumes after step 90": False,
        "[0] sgp resumes after step 20": True,
        "[launch] restart 3 of 3, with 4 processes": False,
    }
    assert run.is_training()
    for line, is_training in lines.items():
        run._handle_line(line)
        assert run.is_training() == is_training
    assert [run.resumed_from(number) for number in (1, 2, 3)] == [20, 20, None]


def test_newest_checkpoint_and_last_logged_step(tmp_path):
    run = SupervisedRun(Options(), tmp_path, [0], max_restarts=0)
    assert run.newest_checkpoint() == run.logged_step() == 0
    for name in ("10", "20", "30.orbax-checkpoint-tmp", "40.superseded"):
        (tmp_path / "checkpoints" / "sgp" / name).mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 20}\n{"step": 25}\n{"st')
    assert run.newest_checkpoint() == 20
    assert run.logged_step() == 25
    assert run.is_saving()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kills", "0"], "--kills must be an integer >= 1, got 0"),
        (["--checkpoint-every", "7"], "--checkpoint-every must be a multiple of 5, got 7"),
        (["--epochs", "1"], "got 31 steps with one every 10: give more --epochs"),
    ],
)
def test_bad_options(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not (tmp_path / "out").exists()
