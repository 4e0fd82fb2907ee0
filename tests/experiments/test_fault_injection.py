"""The fault injection without a job: its plan, its requirements, its table and its options."""

import dataclasses
import io
import random
from collections import Counter

import pytest
from rich.console import Console

from experiments.fault_injection.__main__ import main, make_table
from experiments.fault_injection.kills import Kill, find_violations, plan_kills
from experiments.fault_injection.options import Options
from experiments.fault_injection.supervised_run import SupervisedRun

KILL = Kill(12.5, 1, "saving", True, logged_step=45, saved_step=40, resumed_from=40)
RUN = {"test_accuracy_average_model": 0.97, "final_loss": 0.1, "seconds_per_step": 0.01}
OTHER_SEED = {**RUN, "test_accuracy_average_model": 0.96, "final_loss": 0.2}


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
        (
            {},
            {"test_accuracy_average_model": 0.9},
            ["0.9, and 0.97 without kills", "outside the range of the uninterrupted runs"],
        ),
    ],
)
def test_violations(kill, killed, violations):
    kills = [dataclasses.replace(KILL, **kill)]
    descriptions = find_violations(Options(), kills, RUN | killed, [RUN, OTHER_SEED])
    assert len(descriptions) == len(violations)
    for description, violation in zip(descriptions, violations, strict=True):
        assert violation in description


def test_table_fits_into_a_terminal():
    console = Console(file=io.StringIO(), width=80)
    console.print(make_table([KILL, dataclasses.replace(KILL, saving=False, resumed_from=None)]))
    assert isinstance(console.file, io.StringIO)
    first, second = (
        line.split() for line in console.file.getvalue().splitlines() if "12.5" in line
    )
    assert first == ["1", "12.5", "1", "saving", "yes", "45", "40", "40", "5"]
    assert second == ["2", "12.5", "1", "saving", "45", "40", "-", "-"]


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
