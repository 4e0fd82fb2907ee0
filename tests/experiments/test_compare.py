"""Grids of runs: their cells and their table."""

import json

import pytest
from fake_program import read_calls, write_program

from experiments.compare import __main__ as program
from experiments.compare.grids import GRIDS, Grid, Line
from experiments.compare.options import CompareOptions, make_grid
from experiments.compare.table import format_markdown, summarize
from experiments.runner import Result

GRID = Grid(
    title="a title",
    program="image",
    arguments=("--epochs", "3"),
    rows=(Line("sgp", ("--algorithm", "sgp")), Line("a_b & c", ("--algorithm", "dpsgd"))),
    columns=(Line("alpha 1", ("--dirichlet-alpha", "1")), Line("even", ())),
    seeds=(0, 1),
    cells={("sgp", "even"): ("--learning-rate", "0.2")},
    figures={("sgp", "alpha 1"): "87.4"},
)
DIVERGED = Result(status="diverged", error="loss")


def finish(value, metric="accuracy"):
    runs = [{f"test_{metric}_average_model": value}]
    return Result(status="finished", summary={"runs": runs})


LACKING = ("a_b & c", "even")  # as if Ctrl-C had come before
OUTCOMES = dict(
    zip(
        [cell for cell in GRID.list_cells() if (cell.row, cell.column) != LACKING],
        [
            *(finish(0.80), finish(0.9), finish(0.85)),  # seed 0
            *(finish(0.82), DIVERGED, finish(0.87)),
        ],
        strict=True,
    )
)
ENTRIES = summarize(GRID, OUTCOMES, "accuracy")


def list_best(entries):
    return [key for key, entry in entries.items() if entry.is_best]


def test_cells_have_the_options_of_row_column_and_their_own():
    cells = list(GRID.list_cells())
    assert len({cell.name for cell in cells}) == len(cells) == 8
    assert cells[1].arguments == (
        *("--epochs", "3", "--algorithm", "sgp", "--learning-rate", "0.2", "--seed", "0"),
    )
    assert cells[2].arguments[2:-2] == ("--algorithm", "dpsgd", "--dirichlet-alpha", "1")
    for grid in GRIDS.values():
        cells = list(grid.list_cells())
        assert len({cell.name for cell in cells}) == len(cells)
        titles = {(cell.row, cell.column) for cell in cells}
        assert grid.figures.keys() | grid.cells.keys() <= titles


def test_mean_spread_and_the_best_of_a_column():
    entry = ENTRIES["sgp", "alpha 1"]
    assert (entry.mean, entry.spread) == pytest.approx((81.0, 2**0.5))
    assert list_best(ENTRIES) == [("a_b & c", "alpha 1")]  # nobody is beside the other column's
    markdown = format_markdown(GRID, ENTRIES, "a caption")
    assert "|  | alpha 1 | paper | even |" in markdown
    assert "| a_b & c | **86.00 ± 1.41** | - | - |" in markdown
    losses = zip(OUTCOMES, [2.0, 1, 3, 2, 1, 3], strict=True)
    entries = summarize(GRID, {cell: finish(loss, "loss") for cell, loss in losses}, "loss")
    assert list_best(entries) == [("sgp", "alpha 1")]  # the smallest loss
    equal = summarize(GRID, {cell: finish(0.5) for cell in OUTCOMES}, "accuracy")
    assert list_best(equal) == [("sgp", "alpha 1"), ("a_b & c", "alpha 1")]


def test_what_has_diverged_or_was_interrupted_is_shown_and_is_never_the_best():
    both = {cell: DIVERGED for cell in OUTCOMES if cell.row == "a_b & c"}
    entries = summarize(GRID, OUTCOMES | both, "accuracy")
    assert list_best(entries) == []
    markdown = format_markdown(GRID, entries, "")
    assert "| sgp | 81.00 ± 1.41 | 87.4 | 90.00 (1 of 2, 1 diverged) |" in markdown
    assert "| a_b & c | diverged | - | - |" in markdown
    entries = summarize(GRID, dict(list(OUTCOMES.items())[:4]), "accuracy")  # a seed, and a run
    assert list_best(entries) == []
    assert "| a_b & c | 85.00 (1 of 2) | - | - |" in format_markdown(GRID, entries, "")


def test_rows_are_algorithms_by_topologies_momentum_and_wires():
    options = CompareOptions(
        algorithm=("sgp", "dpsgd@complete", "allreduce"),
        topology=("ring", "exponential"),
        momentum=("local", "quasi-global"),
        wire=("int8",),
        dirichlet_alpha=(0.1,),
        seed=(5,),
    )
    grid = make_grid(options, ["--epochs", "2"])
    assert [row.title for row in grid.rows][::2] == [
        "sgp@ring, local momentum, int8",
        "sgp@exponential, local momentum, int8",
        "dpsgd@complete, local momentum, int8",
        "allreduce, local momentum, int8",
    ]
    assert next(grid.list_cells()).arguments == (
        *("--epochs", "2", "--algorithm", "sgp@ring", "--momentum", "local"),
        *("--wire", "int8", "--dirichlet-alpha", "0.1", "--seed", "5"),
    )


def test_a_comparison_from_the_command_line(tmp_path, monkeypatch, capsys):
    write_program(tmp_path, monkeypatch)
    monkeypatch.setattr(program, "find_devices", lambda jobs: [{}] * (jobs or 1))
    out = tmp_path / "out"
    line = ["--algorithm", "sgp", "dpsgd", "--seed", "0", "--out", str(out), "--", "--epochs", "1"]
    with pytest.raises(SystemExit, match="error: no luck"):
        program.main(line)
    (out / "cells" / "mended").touch()
    program.main(line)
    assert "50.00" in (out / "table.md").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert [run["mean"] for run in summary["runs"]] == [50.0, 50.0]
    assert len(read_calls(out / "cells")) == 3
    assert not (out / "metrics.jsonl").exists()
    assert (out / "curves.png").exists()
    with pytest.raises(SystemExit, match="2"):
        program.main(["--metric", "loss", *line])
    assert "--metric must be one of accuracy, got 'loss'" in capsys.readouterr().err


def test_a_changed_algorithm_of_the_user_is_another_run(tmp_path, monkeypatch, capsys):
    write_program(tmp_path, monkeypatch)
    monkeypatch.setattr(program, "find_devices", lambda jobs: [{}])
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "algorithm_of_a_user.py"
    source.write_text("from gossipjax import sgp as mine\n")
    names = ["--algorithm", "algorithm_of_a_user:mine", "--topology", "torus"]
    line = [*names, "--seed", "0", "--out", str(tmp_path / "out")]
    for _ in range(2):
        program.main(line)
    cells = tmp_path / "out" / "cells"
    assert read_calls(cells) == ["algorithm_of_a_user-mine-torus--even-data--0"]
    source.write_text(source.read_text().replace("sgp", "dpsgd"))
    with pytest.raises(SystemExit, match="2"):
        program.main(line)
    assert "--out must be the folder of the same runs" in capsys.readouterr().err
