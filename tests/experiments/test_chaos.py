"""Asynchronous nodes that are disturbed: short runs of three, and what a scenario must end with."""

import io
import itertools
import json
import os
import shutil

import jax
import pytest
from rich.console import Console

from experiments.fault_injection import small_disk
from experiments.fault_injection.__main__ import main
from experiments.fault_injection.chaos import (
    ChaosOptions,
    Row,
    check,
    count_missing,
    run_scenario,
    show_rows,
)
from experiments.fault_injection.small_disk import make_room, mount_small_disk

UNDISTURBED = Row("undisturbed", 8, 30.0, 3000, 0, 8, 8, 1e-16, 8.0, 0.9, 0)
DEATHS = Row("deaths", 8, 499.0, 123_456, 9_999, 10_007, 10_007, -6.9e-17, 1.67e-57, 0.892, 0)
CAN_MOUNT = os.geteuid() == 0 and shutil.which("mount")
needs_mount = pytest.mark.skipif(not CAN_MOUNT, reason="a small disk needs root and mount")
QUICK = {"nodes": 3, "seconds": 2.0, "deaths": 2, "patience": 3.0}


@pytest.mark.parametrize(
    ("changes", "violation"),
    [
        ({}, None),
        ({"accuracy": 0.869}, "deaths: an accuracy of 0.870, got 0.869"),
        ({"difference": -2e-9}, "deaths: the account closes, got -2e-09"),
        ({"lives": 10_008}, "deaths: nobody that lives is declared dead, got 10008"),
        ({"threads": 1}, "deaths: all nodes end, got 1"),
        ({"faults": 0}, "deaths: faults, got 0"),
    ],
)
def test_what_a_scenario_must_end_with(changes, violation):
    assert check(UNDISTURBED, UNDISTURBED) == []
    assert check(DEATHS._replace(**changes), UNDISTURBED) == ([violation] if violation else [])


def test_the_table_fits_into_a_terminal():
    output = io.StringIO()
    Console(file=output, width=80).print(show_rows([UNDISTURBED, DEATHS]))
    assert "…" not in output.getvalue()
    cells = "2 deaths 8 499 123,456 9,999 10,007 10,007 -6.9e-17 1.67e-57 89.2"
    assert cells in [" ".join(line.split()) for line in output.getvalue().splitlines()]


@pytest.fixture
def promotion_of_ranks():
    """In all threads: the regression adds a bias to rows."""
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", "raise")


def run(scenario, tmp_path):
    return run_scenario(ChaosOptions(**QUICK), scenario, tmp_path / scenario)


def require_intact(row):
    """Whatever the accuracy of so short a run is."""
    assert check(row._replace(accuracy=1.0), UNDISTURBED) == []
    assert row.accuracy > 0.5


@pytest.mark.usefixtures("promotion_of_ranks")
@pytest.mark.parametrize("scenario", ["nan", "strangers"])
def test_sick_updates_and_strangers_change_no_account(tmp_path, scenario):
    require_intact(run(scenario, tmp_path))


@pytest.mark.usefixtures("promotion_of_ranks")
def test_clocks_that_go_back_are_like_deaths(tmp_path):
    row = run("clock", tmp_path)
    require_intact(row)
    assert row.faults == 2
    texts = [path.read_text() for path in tmp_path.rglob("*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    times = sorted(line["time"] for line in lines if "time" in line)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert sum(gap > 3500 for gap in gaps) == 2


@needs_mount
@pytest.mark.usefixtures("promotion_of_ranks")
@pytest.mark.filterwarnings("ignore:.*cannot be written")
def test_nodes_whose_disk_is_full_train_on(tmp_path):
    row = run("disk", tmp_path)
    require_intact(row)
    disk = tmp_path / "disk" / "disk"
    assert row.faults == count_missing(disk / "1.jsonl") > 0
    assert count_missing(tmp_path / "disk" / "0.jsonl") == 0
    assert not disk.is_mount()


@needs_mount
def test_a_small_disk_is_full_until_it_has_room(tmp_path):
    file = tmp_path / "disk" / "file"
    with mount_small_disk(file.parent, kilobytes=8):
        with pytest.raises(OSError, match="No space left"):
            file.write_bytes(bytes(100_000))
        make_room(file.parent)
        file.write_bytes(bytes(100_000))
    assert file.stat().st_size == 100_000
    assert not file.parent.is_mount()
    assert os.listdir(tmp_path) == ["disk"]


def test_a_small_disk_needs_root(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(small_disk.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as stopped:
        main(["chaos", "--scenario", "disk", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "needs root" in capsys.readouterr().err
