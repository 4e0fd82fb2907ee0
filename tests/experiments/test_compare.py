"""Grids of runs: their cells and their table."""

import csv
import dataclasses
import io
import json

import pytest
from fake_program import write_program
from rich.console import Console

from experiments.compare import __main__ as program
from experiments.compare.grid import Grid, Line
from experiments.compare.named import GRIDS
from experiments.compare.options import Options, make_grid
from experiments.compare.table import (
    format_csv,
    format_latex,
    format_markdown,
    make_tables,
    summarize,
)
from experiments.runner import Devices, Result

ROWS = (Line("sgp", ("--algorithm", "sgp")), Line("a_b & c", ("--algorithm", "dpsgd")))
COLUMNS = (Line("alpha 1", ("--dirichlet-alpha", "1")), Line("even", ()))
GRID = Grid(
    title="a title",
    program="image",
    arguments=("--epochs", "3"),
    rows=ROWS,
    columns=COLUMNS,
    seeds=(0, 1),
    cells={("sgp", "even"): ("--learning-rate", "0.2")},
    figures={("sgp", "alpha 1"): "87.4"},
)
FIELD = "test_accuracy_average_model"


DIVERGED = Result(status="diverged", error="loss")


def finish(value, field=FIELD):
    return Result(status="finished", summary={"runs": [{field: value}]})


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


def test_a_cell_has_the_options_of_its_row_column_and_its_own():
    cells = list(GRID.list_cells())
    assert len(cells) == 8
    assert len({cell.name for cell in cells}) == 8
    assert cells[1].arguments == (
        *("--epochs", "3", "--algorithm", "sgp", "--learning-rate", "0.2", "--seed", "0"),
    )
    assert cells[2].arguments[2:-2] == ("--algorithm", "dpsgd", "--dirichlet-alpha", "1")
    assert [cell.seed for cell in cells] == [0] * 4 + [1] * 4


def test_mean_spread_and_the_best_of_a_column():
    entry = ENTRIES["sgp", "alpha 1"]
    assert entry.mean == pytest.approx(81.0)
    assert entry.spread == pytest.approx(2**0.5)
    assert not entry.is_best
    assert ENTRIES["a_b & c", "alpha 1"].is_best
    assert not ENTRIES["sgp", "even"].is_best  # it has nobody beside it


def test_what_has_diverged_is_shown_and_is_never_the_best():
    assert ENTRIES["sgp", "even"].diverged == 1
    both = {cell: DIVERGED for cell in OUTCOMES if cell.row == "a_b & c"}
    entries = summarize(GRID, OUTCOMES | both, "accuracy")
    assert not any(entry.is_best for entry in entries.values())
    markdown = format_markdown(GRID, entries, "")
    assert "| sgp | 81.00 ± 1.41 | 87.4 | 90.00 (1 diverged) |" in markdown
    assert "| a_b & c | diverged | - | - |" in markdown


def test_what_was_interrupted_says_so_and_is_never_the_best():
    entries = summarize(GRID, dict(list(OUTCOMES.items())[:4]), "accuracy")  # a seed, and a run
    assert not any(entry.is_best for entry in entries.values())
    markdown = format_markdown(GRID, entries, "")
    assert "| sgp | 81.00 ± 1.41 | 87.4 | 90.00 (1 of 2) |" in markdown
    assert "| a_b & c | 85.00 (1 of 2) | - | - |" in markdown


def test_equal_means_are_all_the_best():
    equal = summarize(GRID, {cell: finish(0.5) for cell in OUTCOMES}, "accuracy")
    assert [entry.is_best for entry in equal.values()] == [True, False, True]
    assert "alpha 1,accuracy,50.0,0.0,2" in format_csv(GRID, equal, "accuracy")


def test_of_a_loss_the_smallest_is_the_best():
    losses = {
        cell: finish(loss, "test_loss_average_model")
        for cell, loss in zip(OUTCOMES, [2.0, 1, 3, 2, 1, 3], strict=True)
    }
    entries = summarize(GRID, losses, "loss")
    assert entries["sgp", "alpha 1"].is_best
    assert entries["sgp", "alpha 1"].mean == 2.0


def test_the_table_in_all_forms():
    markdown = format_markdown(GRID, ENTRIES, "a caption")
    assert "|  | alpha 1 | paper | even |" in markdown
    assert "| a_b & c | **86.00 ± 1.41** | - | - |" in markdown
    latex = format_latex(GRID, ENTRIES, "in %")
    assert "a\\_b \\& c & \\textbf{86.00 $\\pm$ 1.41} & - & - \\\\" in latex
    assert "in \\%" in latex
    assert r"mean $\pm$ \textbackslash{}x\textasciitilde{}" in format_latex(GRID, {}, "mean ± \\x~")
    assert r"\label{tab:a-title}" in latex
    rows = list(csv.DictReader(io.StringIO(format_csv(GRID, ENTRIES, "accuracy"))))
    assert [row["diverged"] for row in rows] == ["0", "1", "0"]
    assert rows[0]["paper"] == "87.4"
    assert [float(value) for value in rows[0]["values"].split()] == [80.0, 82.0]
    assert "90.00 (1 diverged)" in print_tables(GRID, ENTRIES)
    assert "paper 87.4" in print_tables(GRID, ENTRIES)


def print_tables(grid, entries, width=80):
    output = io.StringIO()
    console = Console(file=output, width=width)
    for table in make_tables(grid, entries, "a caption", console):
        console.print(table, crop=False)
    return output.getvalue()


WIDE = dataclasses.replace(
    GRID,
    columns=tuple(Line(f"Dirichlet {alpha}", ()) for alpha in (1, 0.5, 0.1, 0.05, 0.01, 0.005)),
    figures={},
)


@pytest.mark.parametrize("grid", [*GRIDS.values(), WIDE], ids=[*GRIDS, "wide"])
@pytest.mark.parametrize("width", [44, 80])
def test_numbers_and_titles_are_whole_in_a_narrow_terminal(grid, width):
    entry = ENTRIES["sgp", "alpha 1"]
    whole = {(row.title, column.title): entry for row in grid.rows for column in grid.columns}
    printed = print_tables(grid, whole, width)
    assert "…" not in printed
    assert printed.count("81.00 ± 1.41") == len(whole)
    assert all(column.title in printed for column in grid.columns)
    # A title may take several lines, but no word of it any letters of another.
    assert all(word in printed for row in grid.rows for word in row.title.split())
    assert max(map(len, printed.splitlines())) <= width
    assert printed.count("a caption") == 1


def test_rows_are_algorithms_by_topologies_momentum_and_wires():
    options = Options(
        algorithm=("sgp", "dpsgd@complete", "allreduce"),
        topology=("ring", "exponential"),
        momentum=("local", "mixed"),
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
    cell = next(grid.list_cells())
    assert cell.arguments == (
        *("--epochs", "2", "--algorithm", "sgp@ring", "--momentum", "local"),
        *("--wire", "int8", "--dirichlet-alpha", "0.1", "--seed", "5"),
    )


def test_named_grids_have_cells_of_different_names():
    for grid in GRIDS.values():
        cells = list(grid.list_cells())
        assert len({cell.name for cell in cells}) == len(cells)
        titles = {(cell.row, cell.column) for cell in cells}
        assert grid.figures.keys() <= titles
        assert grid.cells.keys() <= titles


def test_a_comparison_from_the_command_line(tmp_path, monkeypatch, capsys):
    write_program(tmp_path, monkeypatch)
    monkeypatch.setattr(program, "find_devices", lambda jobs: Devices(({},) * (jobs or 1)))
    out = tmp_path / "out"
    line = ["--algorithm", "sgp", "dpsgd", "--seed", "0", "--out", str(out), "--", "--epochs", "1"]
    with pytest.raises(SystemExit, match="error: no luck"):
        program.main(line)
    assert "failed" in capsys.readouterr().out
    (out / "cells" / "mended").touch()
    program.main(line)
    assert "50.00" in (out / "table.md").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert [run["mean"] for run in summary["runs"]] == [50.0, 50.0]
    assert len((out / "cells" / "calls").read_text().split()) == 3
    assert not (out / "metrics.jsonl").exists()
    with pytest.raises(SystemExit, match="2"):
        program.main(["--metric", "loss", *line])
    assert "--metric must be one of accuracy, got 'loss'" in capsys.readouterr().err
