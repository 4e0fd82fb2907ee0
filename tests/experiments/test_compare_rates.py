"""Rates of a comparison that are chosen by one rule, and bytes."""

import dataclasses
import json
import math

import pytest
from fake_program import read_calls, write_program
from report_files import make_run, write_run

from experiments.compare import __main__ as program
from experiments.compare.costs import SENT, choose_rates, find_costs, format_costs, measure_run
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
    assert "| loss | rate | mean of nodes | worst node | distance | MB sent per node |" in text
    nodes = "4.750 ± 0.707 | 5.000 ± 0.707 | 0.012"
    assert f"| often | 4.500 ± 0.707 | 0.4 (largest) | {nodes} | 160 |" in text
    assert f"| rare | 4.500 ± 0.707 | 0.2 (largest) | {nodes} | 80 |" in text
    assert f"| fixed | 4.500 ± 0.707 | - | {nodes} | 640 |" in text
    assert "widen it" in text
    nothing = format_costs(find_costs(GRID, {}, trials, "loss"), "loss")
    assert "| often | diverged | none of 3 |" in nothing
    fixed = dataclasses.replace(GRID, rates={})
    unknown = {cell: finish(1.0) for cell in fixed.list_cells()}
    text = format_costs(find_costs(fixed, unknown, {}, "loss"), "loss")
    assert "| often | 1.000 ± 0.000 | 1.250 | 1.500 | 0.012 |" in text
    assert "MB" not in text


def test_a_run_is_measured_at_its_end_and_at_its_best(tmp_path):
    nodes = [{"test_accuracy_nodes": values} for values in ([0.5, 0.7], [0.8, 0.2])]
    ends = [{"test_accuracy_average_model": value} for value in (0.9, 0.6)]
    run = make_run("sgp", "ring", 0, **ends[1], **nodes[1], sharpness=3.0, spectral_gap=None)
    shared = {"run": run["run"], "step": 1, "loss": 1.0}
    lines = [shared | end | of_nodes for end, of_nodes in zip(ends, nodes, strict=True)]
    write_run(tmp_path, [run], lines)
    result = Result(status="finished", summary={"runs": [run]}, folder=tmp_path)
    expected = {"average": 60.0, "average_best": 90.0, "nodes_mean": 50.0, "nodes_worst": 20.0}
    expected |= {"nodes_mean_best": 60.0, "nodes_worst_best": 50.0, "sharpness": 3.0}
    measured = measure_run(result, "accuracy")
    assert measured == pytest.approx(expected | {"consensus_distance": 0.0123})


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
