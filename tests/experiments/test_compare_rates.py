"""Rates of a comparison that are chosen by one rule, and bytes."""

import dataclasses
import json
import math

import pytest
from fake_program import read_calls, write_program
from report_files import make_run

from experiments.compare import __main__ as program
from experiments.compare.costs import SENT, choose_rates, find_costs, format_costs
from experiments.compare.grids import GRIDS, Grid, Line
from experiments.compare.options import CompareOptions, make_grid
from experiments.runner import Result

GRID = Grid(
    title="a title",
    program="image",
    rows=(Line("often", ()), Line("rare", ()), Line("fixed", ())),
    columns=(Line("loss", ()),),
    seeds=(3, 4),
    rates={"often": (0.1, 0.2, 0.4), "rare": (0.1, 0.2)},
)
DIVERGED = Result(status="diverged", error="loss")
FAILED = Result(status="failed", error="no luck")


def finish(loss, per_step=None):
    losses = {"test_loss_average_model": loss, "test_loss_nodes": [loss, loss + 0.5]}
    made = make_run("sgp", "ring", 0, steps=8, **losses)
    run = {name: value for name, value in made.items() if "accuracy" not in name}
    if per_step is not None:
        run[SENT] = per_step
    return Result(status="finished", summary={"runs": [run]})


def test_the_best_rate_of_the_first_seed_is_that_of_all_seeds():
    trials = list(GRID.list_trials())
    assert [(cell.row, cell.seed, cell.rate) for cell in trials[2:4]] == [
        ("often", 3, 0.4),
        ("rare", 3, 0.1),
    ]
    results = [finish(2.0), finish(1.0), DIVERGED, FAILED, finish(math.nan)]
    chosen = choose_rates(GRID, dict(zip(trials, results, strict=True)))
    assert chosen == {("often", "loss"): 0.2}
    cells = list(GRID.list_cells(chosen))
    assert [(cell.row, cell.seed) for cell in cells] == [
        (row, seed) for seed in (3, 4) for row in ("often", "fixed")
    ]
    assert cells[0] == trials[1]
    assert cells[2].arguments == ("--learning-rate", "0.2", "--seed", "4")
    assert cells[1].arguments == ("--seed", "3")
    accuracies = [{"test_accuracy_average_model": value} for value in (0.3, 0.2)]
    more = [Result(status="finished", summary={"runs": [run]}) for run in accuracies]
    assert choose_rates(GRID, dict(zip(trials[3:], more, strict=True))) == {("rare", "loss"): 0.1}
    assert choose_rates(GRID, dict(zip(trials[3:4], more[:1], strict=True))) == {}  # interrupted


def test_what_rows_cost():
    trials = dict.fromkeys(GRID.list_trials(), DIVERGED)
    chosen = {("often", "loss"): 0.4, ("rare", "loss"): 0.2}
    per_step = {"often": 20e6, "rare": 10e6, "fixed": 80e6}
    ends = {cell: finish(1.0 + cell.seed, per_step[cell.row]) for cell in GRID.list_cells(chosen)}
    costs = find_costs(GRID, ends, trials, "loss")
    text = format_costs(costs, "loss")
    assert "| often | 4.500 ± 0.707 | 0.4 (largest) | 160 |" in text
    assert "| rare | 4.500 ± 0.707 | 0.2 (largest) | 80 |" in text
    assert "| fixed | 4.500 ± 0.707 | - | 640 |" in text
    assert "widen it" in text
    nothing = format_costs(find_costs(GRID, {}, trials, "loss"), "loss")
    assert "| often | diverged | none of 3 | - |" in nothing
    fixed = dataclasses.replace(GRID, rates={})
    unknown = {cell: finish(1.0) for cell in fixed.list_cells()}
    assert format_costs(find_costs(fixed, unknown, {}, "loss"), "loss") == ""


def test_rates_from_the_command_line_are_tried_once(tmp_path, monkeypatch):
    write_program(tmp_path, monkeypatch)
    monkeypatch.setattr(program, "find_devices", lambda jobs: [{}] * (jobs or 1))
    out = tmp_path / "out"
    line = ["--algorithm", "sgp", "--seed", "0", "1", "--rates", "0.2", "0.1", "--out", str(out)]
    for _ in range(2):
        program.main(line)
    assert read_calls(out / "cells") == [
        f"sgp--even-data--{cell}" for cell in ("0.1--0", "0.2--0", "0.1--1")
    ]
    assert "| sgp | 50.000 ± 0.000 | 0.1 (smallest) |" in (out / "table.md").read_text()
    (record,) = json.loads((out / "summary.json").read_text())["runs"]
    assert (record["rate"], record["rate_is_end"]) == (0.1, True)


def test_rates_are_chosen_or_fixed():
    with pytest.raises(ValueError, match="--rates must be left out where a grid"):
        make_grid(CompareOptions(grid="relaysgd-table2", rates=(0.1,)), [])
    with pytest.raises(ValueError, match="got --learning-rate: leave it out"):
        make_grid(CompareOptions(rates=(0.1,)), ["--learning-rate", "1"])
    grid = GRIDS["methods-mini"]
    assert {row.title for row in grid.rows} == grid.rates.keys()
    wider = make_grid(CompareOptions(grid="methods-mini", rates=(0.2, 0.1)), [])
    assert set(wider.rates.values()) == {(0.1, 0.2)}
