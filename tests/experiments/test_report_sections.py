"""All sections of the report: the commands of their runs, and how they judge made-up results."""

import dataclasses
import functools
import importlib
import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

from experiments.averaging import __main__ as averaging_program
from experiments.options import find_option_name
from experiments.rates import problem
from experiments.rates.__main__ import RatesOptions
from experiments.report.chapters import list_runs
from experiments.report.keep import KEPT, KEPT_RUNS, name_data
from experiments.report.pages import make_anchor
from experiments.report.section import Findings, Sample, Scale, judge
from experiments.report.sections import (
    SECTIONS,
    deviations,
    hours,
    merging,
    rare,
    sgp19,
    texts,
    theory,
    times,
)
from experiments.report.sections import rand20 as rand20_section
from experiments.results import AFTER_MIXING, BEFORE_MIXING
from experiments.runner import Result, Run
from experiments.training.methods import MethodOptions, make_method
from experiments.training.optimization import make_lr_schedule

FULL = Scale(**dict.fromkeys(("fashion_mnist", "speech", "translation"), Path("data")))
SCALES = {
    "full": FULL,
    "quick": dataclasses.replace(FULL, is_quick=True),
    "full without data": Scale(),
    "quick without data": Scale(is_quick=True),
}
STEPS = 90
Values = Mapping[str, Mapping[str, object]]
"""`RUN/ALGORITHM`, `RUN`, `RUN` without its rate, or `*` -> fields of the entries of a summary."""


def list_option(run: Run, name: str) -> list[str]:
    """The values of an option of a call."""
    rest = run.arguments[run.arguments.index(name) + 1 :]
    return list(itertools.takewhile(lambda text: not text.startswith("--"), rest))


def make_result(run: Run, folder: Path, values: Values) -> Result:
    """A finished run with its lines: distances follow the rate, twice as large with one peer."""
    entries = []
    lines = []
    for name in list_option(run, "--algorithm"):
        algorithm, _, graph = name.partition("@")
        graph = graph or {"allreduce": "complete", "sgp": "one_peer_exponential"}.get(name, "any")
        shared = {"algorithm": name if name.startswith("async") else algorithm, "topology": graph}
        method = run.name.rpartition("-")[0]  # without its rate
        keys = (f"{run.name}/{name}", run.name, method, "*")
        fields = next((values[key] for key in keys if key in values), {})
        for seed in list_option(run, "--seed"):
            label = f"{name}, seed {seed}"
            entries.append({**shared, "run": label, "steps": 600, **fields})
            for step in range(1, STEPS + 1):
                rate = 0.1 ** sum(step / STEPS > part for part in deviations.DECAYS)
                is_dense = graph == "complete"
                distances = {BEFORE_MIXING: rate if is_dense else 2 * rate}
                distances[AFTER_MIXING] = 0.0 if is_dense else rate
                lines.append({"run": label, "step": step, "loss": 1 / step} | distances)
    out = folder / run.name
    out.mkdir(exist_ok=True)
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (out / "metrics.jsonl").write_text(text + '{"run": "sgp, a line that is cut')
    return Result(status="finished", folder=out, summary={"runs": entries})


def find(name: str, folder: Path, values: Values, scale: Scale = FULL) -> list[bool | None]:
    """Judges the runs of a section with these values, and draws its figures."""
    runs = SECTIONS[name].list_runs(scale)
    results = {run.name: make_result(run, folder, values) for run in runs}
    return check(SECTIONS[name].find(scale, results))


def finish(name: str, summary: dict[str, object], folder: Path | None = None) -> list[bool | None]:
    """Judges a section that has one run, with this summary."""
    (run,) = SECTIONS[name].list_runs(FULL)
    result = Result(status="finished", summary=summary, folder=folder)
    return check(SECTIONS[name].find(FULL, {run.name: result}))


def check(findings: Findings) -> list[bool | None]:
    """The verdicts; tables must be rectangular, and figures can be drawn."""
    for table in findings.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    for figure in findings.figures:
        drawn = Figure(layout="constrained")
        figure.draw(drawn)
        assert drawn.axes or None in map(judge, findings.claims)
    assert all(claim.paper and "nan" not in claim.ours for claim in findings.claims)
    return [judge(claim) for claim in findings.claims]


@pytest.fixture(params=[True, False], ids=["root", "no-root"])
def can_limit(request, monkeypatch):
    monkeypatch.setattr(times, "can_limit_links", lambda: request.param)
    return request.param


SPEED_OPTIONS = {"wire": "rows", "stragglers": "stragglers"}


def find_options(run: Run) -> set[str]:
    """The names of the options of a run's program."""
    place = {
        "averaging": ("averaging.__main__", "AveragingOptions"),
        "rates": ("rates.__main__", "RatesOptions"),
        "steps_to_loss": ("steps_to_loss", "StepsOptions"),
        "speed": (f"speed.wire.{SPEED_OPTIONS.get(run.arguments[0])}", "Options"),
        "gossipjax.launch": ("fault_injection.slow", "SlowImageOptions"),
    }.get(run.program, (run.program, "Options"))
    options = getattr(importlib.import_module(f"experiments.{place[0]}"), place[1])
    return {find_option_name(options, field.name) for field in dataclasses.fields(options)}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_runs_are_commands_of_the_programs(scale: Scale, can_limit: bool):
    runs = list(itertools.chain(*list_runs(list(SECTIONS.values()), scale).values()))
    for run in runs:
        assert re.fullmatch(r"[A-Za-z0-9.-]+", run.name), run.name
        arguments = run.arguments
        if run.program == "gossipjax.launch":
            assert list_option(run, "--processes") == list_option(run, "--nodes")
            arguments = arguments[arguments.index("-m") :]
        names = {name for name in arguments if name.startswith("--")}
        assert names <= find_options(run), run.command
        assert run.is_alone == (run.program == "speed")
        assert can_limit or run.program != "speed" or "--bandwidth" not in arguments


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_texts_have_their_numbers(scale: Scale):
    assert len({make_anchor(section.title) for section in SECTIONS.values()}) == len(SECTIONS)
    for section in SECTIONS.values():
        assert not re.search(r"[{}]|  |\bNone\b", section.write_text(scale))


def test_every_run_is_kept(monkeypatch):
    """`--kept` of a fresh clone shows the whole report."""
    monkeypatch.setattr(times, "can_limit_links", lambda: True)
    scale = name_data()
    calls = {r.name: r.call for section in SECTIONS.values() for r in section.list_runs(scale)}
    files = (KEPT / KEPT_RUNS).iterdir()
    assert {path.stem: json.loads(path.read_text())["state"]["command"] for path in files} == calls


@pytest.mark.parametrize("status", ["failed", "missing"])
@pytest.mark.parametrize("scale", list(SCALES.values())[:2], ids=["full", "quick"])
def test_runs_that_did_not_finish_leave_gaps(scale: Scale, status):
    for name, section in SECTIONS.items():
        results = {run.name: Result(status=status) for run in section.list_runs(scale)}
        findings = section.find(scale, results)
        verdicts = check(findings)
        if name != "cost-model":
            modelled = [claim.is_modelled for claim in findings.claims]
            assert all(
                is_model or v is None for is_model, v in zip(modelled, verdicts, strict=True)
            )


def accuracy(percent: float) -> dict[str, object]:
    value = percent / 100
    return {"test_accuracy_average_model": value, "test_window_accuracy_average_model": value}


SLOWMO = {
    "slowmo-baselines/allreduce": accuracy(76.0),
    "slowmo-baselines/sgp": accuracy(75.15),
    "slowmo-baselines/1-osgp": accuracy(74.96),
    "slowmo-sgp/sgp": accuracy(75.73),
    "slowmo-sgp/1-osgp": accuracy(75.54),
    "slowmo-local-baseline/local": accuracy(69.94),
    "slowmo-local/local": accuracy(73.24),
}


def test_slowmo(tmp_path):
    assert find("slowmo", tmp_path, SLOWMO) == [True] * 5  # its paper's figures
    assert find("slowmo", tmp_path, SLOWMO, Scale(is_quick=True)) == [None, None, True, None, None]
    no_gain = SLOWMO | {"slowmo-local/local": accuracy(69.0)}
    assert find("slowmo", tmp_path, no_gain) == [True, True, False, False, True]
    best = SLOWMO | {"slowmo-baselines/allreduce": accuracy(75.0)}
    assert find("slowmo", tmp_path, best) == [True, True, True, True, False]


@pytest.mark.parametrize(("fall", "falls"), [(30.0, True), (2.0, False)])
def test_relaysgd(tmp_path, fall: float, falls: bool):
    """D-PSGD and D2 fall from 87 % at Dirichlet 0.01, the others by a point."""
    values = {"*": accuracy(86.0), "relaysgd-0.1-momentum-dpsgd": accuracy(70.0)}
    for run in SECTIONS["relaysgd"].list_runs(FULL):
        if list_option(run, "--optimizer") == ["sgd"]:
            alpha = float(list_option(run, "--dirichlet-alpha")[0])
            for name in list_option(run, "--algorithm"):
                lost = fall if name.startswith(("dpsgd", "d2")) else 1.0
                values[f"{run.name}/{name}"] = accuracy(87.0 - lost * (alpha == 0.01))
    assert find("relaysgd", tmp_path, values) == [falls, falls, *[True] * 7]


def losses(value: float) -> dict[str, object]:
    return {"test_loss_average_model": value, "test_loss_nodes": [value + 1.0] * 8}


def test_diloco(tmp_path):
    paper = {
        "diloco-alone": losses(2.7868 - 1.0),
        "diloco-large-batch": losses(2.7279),
        "diloco": losses(2.7094),
        "diloco-streaming": losses(2.71),
        "diloco-every-step": losses(2.72),
    }
    assert find("diloco", tmp_path, paper) == [True] * 5
    behind = paper | {"diloco": losses(3.5)}
    assert find("diloco", tmp_path, behind)[:3] == [False, False, False]
    adam = behind | {"diloco-every-step": losses(3.4)}  # it is behind, too
    assert find("diloco", tmp_path, adam)[:3] == [False, False, True]
    late = paper | {"diloco-streaming": losses(2.9)}
    assert find("diloco", tmp_path, late) == [True, True, True, False, True]
    tuned = texts.tune_diloco(FULL)[texts.DILOCO]
    better = paper | {tuned.name_run(2.0): losses(2.6)}  # at twice the rate
    assert find("diloco", tmp_path, better) == [True, True, True, True, False]


def find_merging(folder: Path, nodes: Mapping[str, float], average: float) -> list[bool | None]:
    """Judges accuracies of the nodes' models, in %, by schedule; `average` of what never merges."""
    runs = SECTIONS["merging"].list_runs(FULL)
    averages = {**nodes, merging.NEVER: average}
    values = {}
    for title, (place, _) in merging.SCHEDULES.items():
        algorithm = "@".join(part for part in (place.algorithm, place.topology) if part)
        values[f"{place.run}/{algorithm}"] = {
            "test_accuracy_nodes": [nodes[title] / 100 + x for x in (-0.01, 0.01)],
            "test_accuracy_average_model": averages[title] / 100,
        }
    results = {run.name: make_result(run, folder, values) for run in runs}
    path = folder / "merging" / "metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()[:-1]]
    for line in lines:
        line.update(values["merging/dpsgd-adapt-then-combine@random_pairs"])
    path.write_text("\n".join(map(json.dumps, lines)))
    return check(SECTIONS["merging"].find(FULL, results))


def test_merging(tmp_path):
    """As the paper has it: a merge after no exchange at all is worth nothing."""
    percent = {
        **{merging.ALONE: 40.0, merging.NEVER: 65.0, merging.EARLY: 67.0},
        **{merging.LATE: 78.0, merging.LAST: 74.0, merging.ALL: 78.5},
    }
    assert find_merging(tmp_path, percent, 74.0) == [True] * 8
    no_gain = percent | {merging.LAST: 66.0}
    assert find_merging(tmp_path, no_gain, 66.0)[:3] == [False, False, False]
    early = percent | {merging.EARLY: 79.0}
    assert find_merging(tmp_path, early, 74.0)[3:6] == [False, False, False]


def test_the_schedules_of_merging_are_exact_averages_where_they_say():
    """Counted from the rounds of the method that a call means; the last step has an exchange."""
    runs = {run.name: run for run in SECTIONS["merging"].list_runs(FULL)}
    exchanges = list(range(0, merging.STEPS, merging.EVERY))
    assert len(exchanges) == merging.EXCHANGES
    assert exchanges[-1] == merging.STEPS - 1
    for title, (place, merges) in merging.SCHEDULES.items():
        if title == merging.ALONE:
            continue
        (switch_at,) = list_option(runs[place.run], "--switch-at")
        options = MethodOptions(
            nodes=merging.NODES,
            steps=merging.STEPS,
            local_steps=merging.EVERY,
            switch_at=float(switch_at),
        )
        method = make_method(f"{place.algorithm}@{place.topology}", options, optax.sgd(0.1))
        matrices = method.schedule.matrices(merging.STEPS)
        steps = [step for step, matrix in enumerate(matrices) if np.allclose(matrix, 1 / 16)]
        last = exchanges[len(exchanges) - merges :]
        assert steps == (exchanges[:merges] if title == merging.EARLY else last), title


def make_rare(fall: float) -> dict[str, dict[str, object]]:
    """DiLoCo loses a point from 1 to 16 workers, MuLoCo a part of it, SparseLoCo from 5 to 50."""
    values: dict[str, dict[str, object]] = {}
    for (title, every), method in rare.tune_sparse(FULL).items():
        lost = math.log(every / 5) / math.log(10)
        percent = 88.0 - lost * fall if title == rare.SPARSE else 87.0
        values[method.name] = {rare.FIELD: [percent / 100] * 8}
    for (title, every), method in rare.list_causes(FULL).items():
        lost = math.log(every / 5) / math.log(10)
        percent = 86.0 if title == rare.PLAIN else 90.0 - lost * fall / 4
        values[method.name] = {rare.FIELD: [percent / 100] * 8}
    for (title, workers), method in rare.tune_workers(FULL).items():
        lost = math.log2(workers) / 4
        percent = 87.0 - lost if title == rare.ADAM else 88.0 - lost * fall
        values[method.name] = {rare.FIELD: [percent / 100] * workers}
    return values


def test_rare(tmp_path):
    paper = make_rare(0.5)
    assert find("rare", tmp_path, paper) == [True] * 9
    steep = find("rare", tmp_path, make_rare(4.0))
    assert steep[1] is steep[3] is steep[5] is steep[7] is False
    assert steep[2]  # a quarter of that with more averages
    method = rare.tune_workers(FULL)[rare.MUON, 16]
    twice = paper | {method.name_run(2.0): {rare.FIELD: [0.95]}}
    assert find("rare", tmp_path, twice)[8] is False


def test_runs_of_rare_end_with_an_outer_step():
    for scale in (FULL, Scale()):
        for (_, every), method in rare.tune_sparse(scale).items():
            assert rare.SPARSE_STEPS % every == 0, method.name
    assert rare.WORKER_STEPS % rare.WORKER_EVERY == 0
    assert all(rare.TOTAL_BATCH % workers == 0 for workers in rare.WORKERS)


def rand20(small: Mapping[int, tuple[int, ...]], large: tuple[int, ...]) -> Values:
    """Accuracies by learners, of the methods of a batch; of the large batch AllReduce and D1D."""
    own = {64: (*large, 89), 16: (*large, 91)}  # D-PSGD all to all has small batches, too
    batches = ((rand20_section.SMALL, small), (rand20_section.LARGE, own))
    values = {}
    for batch, table in batches:
        for learners, row in table.items():
            for title, value in zip(batch.rates, row, strict=True):
                values[batch.name_run(title, learners)] = accuracy(value)
    return values


def test_rand20(tmp_path):
    small = {16: (93, 93, 92, 94), 64: (82, 91, 80, 94)}
    paper = rand20(small, (88, 93))
    assert find("rand20", tmp_path, paper) == [True] * 11
    assert find("rand20", tmp_path, paper, SCALES["quick"]) == [None] * 11
    late = {16: (93, 93, 90, 89), 64: (82, 91, 78, 89)}
    assert find("rand20", tmp_path, rand20(late, (88, 93)))[4] is False  # D1D behind RAND
    assert find("rand20", tmp_path, rand20(small, (93, 92)))[6] is False
    assert find("rand20", tmp_path, rand20(small, (93, 80)))[6:9] == [False, False, True]


def test_translation(tmp_path):
    """Each method at the rate that is best by the validation loss, not by the test score."""

    def bleu(loss: float, score: float) -> dict[str, object]:
        return {"valid_loss_average_model": loss, "test_bleu_average_model": score}

    values = {"translation-allreduce": bleu(2.0, 20.0), "translation-sgp": bleu(2.02, 20.5)}
    values["translation-sgp-complete"] = bleu(2.0, 20.0)
    assert find("translation", tmp_path, values) == [True] * 4
    worse = values | {"translation-sgp": bleu(2.4, 15.0)}
    assert find("translation", tmp_path, worse) == [False, False, False, True]
    adam = worse | {"translation-sgp-complete": bleu(2.39, 15.0)}  # exact averages lose as much
    assert find("translation", tmp_path, adam) == [False, True, False, True]
    twice = texts.tune_translation(FULL)[texts.SGP].name_run(2.0)
    better = values | {twice: bleu(1.9, 10.0)}
    assert find("translation", tmp_path, better) == [True, True, True, False]
    bad = {"*": bleu(5.0, 0.4)}  # too bad to be compared
    assert find("translation", tmp_path, bad) == [True, True, None, True]


def sgp19_values(name: str, scale: Scale) -> Values:
    """Gossip loses as the paper's, from 16 nodes on; long runs gain 2 points."""
    best = {"allreduce": 88.0, "async-adpsgd@bipartite": 87.8, "adpsgd": 87.5}
    best |= {"1-osgp": 87.9, "biased-1-osgp": 87.0}
    lost = {"bipartite_exponential": 1.6, "one_peer_exponential": 1.2, "": 1.2}
    lost |= {"two_peer_exponential/one_peer_exponential": 1.0, "two_peer_exponential": 0.4}
    values = {}
    for run in SECTIONS[name].list_runs(scale):
        share = {"16": 0.3, "32": 1.0}.get(list_option(run, "--nodes")[0], 0.0)
        for algorithm in list_option(run, "--algorithm"):
            kind, _, graph = algorithm.partition("@")
            loss = lost.get(graph, 0.0) * share * (kind.startswith(("sgp", "dpsgd")))
            gain = 2.0 * run.name.endswith("-long")
            values[f"{run.name}/{algorithm}"] = accuracy(best.get(algorithm, 88.0) - loss + gain)
    return values


@pytest.mark.parametrize("scale", [FULL, Scale(), Scale(is_quick=True)])
def test_sgp19_agrees_with_the_order_of_its_paper(tmp_path, scale: Scale):
    for name in [name for name in SECTIONS if name.startswith("sgp19")]:
        verdicts = find(name, tmp_path, sgp19_values(name, scale), scale)
        assert False not in verdicts, name
        assert scale.is_quick or verdicts.count(None) == (name == "sgp19-figure2"), name


def test_sgp19_disagrees_where_methods_are_too_near_or_too_far(tmp_path):
    values = dict(sgp19_values("sgp19-table1", FULL))
    worse = {f"sgp19-{n}/allreduce": accuracy(83.0) for n in (8, 32)}
    assert find("sgp19-table1", tmp_path, values | worse)[3] is False
    values = dict(sgp19_values("sgp19-table4", FULL))
    for points in (-2, 2):
        other = {"sgp19-16/1-osgp": accuracy(87.9 + points)}
        assert find("sgp19-table4", tmp_path, values | other)[0] is False
    runs = SECTIONS["sgp19-table4"].list_runs(FULL)
    results = {run.name: make_result(run, tmp_path, values) for run in runs}
    results["sgp19-16-biased-1-osgp"] = Result(status="diverged")
    assert check(SECTIONS["sgp19-table4"].find(FULL, results)) == [True, None, True, True]
    runs = SECTIONS["sgp19-table1"].list_runs(FULL)
    values = sgp19_values("sgp19-table1", FULL)
    results = {run.name: make_result(run, tmp_path, values) for run in runs}
    results["sgp19-8"].summary["runs"].pop()  # losses are differences of the same seed
    assert check(SECTIONS["sgp19-table1"].find(FULL, results))[-1] is None


def test_distances_that_are_too_near(tmp_path):
    (run,) = SECTIONS["sgp19-figure2"].list_runs(FULL)
    result = make_result(run, tmp_path, {})
    path = tmp_path / run.name / "metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()[:-1]]
    for line in lines:
        if "complete" not in line["run"]:
            line[BEFORE_MIXING] /= 1.8
    path.write_text("\n".join(map(json.dumps, lines)))
    findings = SECTIONS["sgp19-figure2"].find(FULL, {run.name: result})
    assert check(findings) == [True, None, False, True]
    # Averages of 1, 2, 4 and 8 independent updates lose half of their squares each time.
    expected = math.sqrt(sum((1 / 2**k - 1 / 16) / (1 - 1 / 16) for k in range(5)))
    assert deviations.bound_ratio(16, persists=False) == pytest.approx(expected)


def test_calls_of_sgp19():
    """Each method is in the call where it is looked for, and the rate warms up as the text says."""
    for scale in SCALES.values():
        sizes = sgp19.find_sizes(scale)
        for table, cells in sgp19.list_cells(scale).items():
            runs = {run.name: run for run in sgp19.list_runs(scale, table)}
            for cell in cells:
                place = sgp19.find_place(cell, scale)
                algorithms = list_option(runs[place.run], "--algorithm")
                assert list_option(runs[place.run], "--nodes") == [f"{cell.nodes}"]
                assert any(name.startswith(place.algorithm) for name in algorithms)
        for nodes in sizes.nodes:
            steps = sizes.count_steps(nodes, sizes.epochs)
            rate = make_lr_schedule("step", sizes.rate, steps, nodes * sizes.batch)
            assert bool(np.less(rate(0), rate(steps // 3 - 1))) == (nodes * sizes.batch > 256)


def test_the_delays_of_the_real_processes_are_shown(tmp_path):
    runs = SECTIONS["sgp19-table1"].list_runs(FULL)
    values = {**sgp19_values("sgp19-table1", FULL), "sgp19-4-adpsgd": {"gradient_delay": 2 / 3}}
    values.pop("sgp19-4-adpsgd/async-adpsgd@bipartite")
    results = {run.name: make_result(run, tmp_path, values) for run in runs}
    _, delays = SECTIONS["sgp19-table1"].find(FULL, results).tables
    assert [row[1:] for row in delays.rows[:3]] == [
        *(("real", "0.67 ± 0.00"), ("real", "-"), ("simulated", "0.1"))
    ]


@functools.cache
def make_averages() -> str:
    """The tables of the program, over few seeds."""
    return json.dumps(
        {
            "options": {"seeds": 60},
            "sgp18_appendix_a": averaging_program.compute_sgp18_factors(60),
            "rand20_rings": averaging_program.compute_rand20_rings(5),
        }
    )


def test_averaging(tmp_path):
    curve = averaging_program.measure_curve("ring", 8, 6, 2)
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, curve.lines()))[:-9])
    summary = json.loads(make_averages())
    assert False not in finish("averaging", summary, tmp_path)
    for record in summary["sgp18_appendix_a"]:
        record["mean"] += 0.2
    for ring in summary["rand20_rings"]:
        ring["second_eigenvalue"] += 1e-6
        ring["means_by_round"][-1] = 2 * ring["paper_bounds_by_round"][-1]
    summary["runs"] = [{"topology": "random_peer_exponential", "final_error": 0.2}]
    assert finish("averaging", summary) == [False] * 7


def make_rates(
    exponent: float = -0.5, ring: float = 1.0, noise: float = 0.01
) -> list[dict[str, object]]:
    """Runs that obey the theorems, with an excess that shrinks with K, if the exponent is -1/2."""
    rng = np.random.default_rng(0)
    runs = []
    for nodes, steps in itertools.product((4, 8, 16), (512, 2048, 8192, 32768)):
        rate = 15 * (nodes * steps) ** exponent
        drawn = 1 + noise * rng.uniform(-1, 1, 3)
        excess = {theory.SGP: nodes / steps, theory.RING: ring * nodes / math.sqrt(steps)}
        runs += [
            {
                "label": label,
                "nodes": nodes,
                "steps": steps,
                "squared_gradient": (rate * (1 + excess.get(label, 0.0)) * drawn).tolist(),
                "squared_distance": (10 * nodes / steps * drawn).tolist(),
                "bound": problem.bound_of_theorem(nodes, steps),
            }
            for label in theory.TITLES
        ]
    return runs


def test_rates():
    options = RatesOptions()
    assert (options.nodes, options.steps) == (theory.NODES, theory.STEPS)
    assert finish("rates", {"runs": make_rates()}) == [True] * 8
    assert finish("rates", {"runs": make_rates(-0.35)})[1:5] == [False, False, False, True]
    assert finish("rates", {"runs": make_rates(ring=0.0)})[-1] is False
    alone = [run for run in make_rates() if run["label"] == theory.SGP]
    assert finish("rates", {"runs": alone}) == [True] * 6 + [None] * 2


def test_slopes_and_means_are_left_open_near_the_bound():
    """Their limits reach over it."""
    assert finish("rates", {"runs": make_rates(-0.46, noise=0.2)})[1] is None
    record = {"mean": 0.445, "standard_deviation": 0.1}
    few, many = (theory.estimate_mean(record, seeds) for seeds in (100, 10_000))
    assert few.high > 0.45 > many.high
    near = [Sample((value,), single_spread=0.5) for value in (1.0, 0.4)]
    assert (near[0] - near[1]).low < 0 < (near[0] - near[1]).high


def timed(algorithm: str, seconds: float, modelled: float | None, bandwidth: str) -> dict:
    ratio = None if modelled is None else modelled / seconds
    return {
        **{"algorithm": algorithm, "bandwidth": bandwidth, "seconds": seconds},
        **{"seconds_p10": seconds, "seconds_p90": seconds, "exchange_cpu_seconds": 0.1},
        **{"modelled_seconds": modelled, "modelled_ratio": ratio, "computation_seconds": 0.3},
        **{"link_bytes": 20e6, "goodput": 100e6},
    }


def judge_runs(name: str, **runs: list[dict]) -> list[bool | None]:
    results = {
        run.replace("_", "-"): Result(status="finished", summary={"runs": entries})
        for run, entries in runs.items()
    }
    return check(SECTIONS[name].find(FULL, results))


def test_step_times():
    fast = [timed("allreduce", 0.5, 0.54, "1gbit"), timed("sgp@a/b", 0.4, None, "1gbit")]
    slow = [timed("allreduce", 0.9, 0.9, "200mbit"), timed("sgp", 0.7, 0.6, "200mbit")]
    slow.append(timed("1-osgp", 0.8, 0.8, "200mbit"))
    verdicts = judge_runs("step-time", times_1gbit=fast, times_200mbit=slow)
    assert verdicts == [True, None, None, False, True, False]


def test_stragglers():
    runs = [
        {
            **{"algorithm": algorithm, "slowness": slowness, "nodes": 4},
            **{"examples_per_second": 1000.0, "modelled_examples_per_second": modelled},
            **{"modelled_ratio": modelled / 1000, "ratio_to_none": ratio},
            "ideal_ratio_to_none": 0.25 if algorithm == "allreduce" else 0.8125,
        }
        for algorithm, slowness, ratio, modelled in (
            ("allreduce", "none", 1.0, 1000.0),
            ("allreduce", "4x", 0.26, 1000.0),
            ("async-sgp", "4x", 0.7, 1200.0),
            ("allreduce", "random", 0.30, 1000.0),
            ("sgp", "random", 0.31, 1000.0),
            ("1-osgp", "random", 0.36, 1000.0),
        )
    ]
    assert judge_runs("stragglers", stragglers_4=runs) == [False, True, False, False, True]


def test_bandwidths_of_dpsgd17():
    slowest = {"allreduce": 1.0, "centralized": 5.0, "dpsgd@ring": 0.9}
    runs = [timed(name, 0.31, 0.3, "1gbit") for name in slowest]
    runs += [timed(name, x, x, "20mbit") for name, x in slowest.items()]
    assert judge_runs("dpsgd17", dpsgd17_bandwidth=runs) == [True] * 5
    runs[-2] |= {"seconds": 1.2}  # of the parameter server
    assert judge_runs("dpsgd17", dpsgd17_bandwidth=runs)[1] is False


def test_the_cost_model_is_judged_by_the_published_figures():
    verdicts = check(SECTIONS["cost-model"].find(FULL, {}))
    assert verdicts == [*[True] * 5, False, False, *[True] * 4]


def judge_hours(factors: Mapping[str, float]) -> tuple[list[bool | None], Findings]:
    """Judges steps that are so many times those of AllReduce; 1-OSGP never has the loss."""
    records = [
        {"method": name, "nodes": nodes, "steps": [98.0 * factor, 100 * factor, 102 * factor]}
        for nodes in hours.NODES
        for name, factor in factors.items()
    ]
    records += [{"method": "1-osgp", "nodes": 4, "steps": [None] * 3}]
    result = Result(status="finished", summary={"runs": records})
    findings = SECTIONS["hours"].find(FULL, {hours.RUN: result})
    return check(findings), findings


def test_hours():
    factors = dict.fromkeys(hours.TITLES, 1.2)
    del factors["1-osgp"]
    factors[hours.ALL_REDUCE] = 1.0
    verdicts, findings = judge_hours(factors)
    assert verdicts == [True] * 4
    assert findings.tables[0].rows[2][1] == "not reached"
    assert findings.tables[0].rows[1][1].startswith("x 1.20")
    slow = {name: 1.0 if name == hours.ALL_REDUCE else 30.0 for name in factors}
    assert judge_hours(slow)[0] == [False] * 4
    # a ring of 8 sends its eighths 14 times
    ring = hours.cost_model.allreduce("ring")
    network = hours.Network(bandwidth=1e6, latency=hours.LATENCY)
    seconds = hours.predict_step(ring, hours.WORKLOAD, network, 8).seconds
    assert seconds == pytest.approx(0.228 + 14 * (5e-5 + 4 * 25.6e6 / 8 / 1e6))
    lead = (hours.BANDWIDTHS / 4e9) ** -0.5
    crossing = hours.find_crossing(lead, math.log(2.0))
    assert crossing == pytest.approx((4.0, 1.0, 16.0), rel=1e-3)
    assert hours.find_last(lead + 9, 0.0) == 100.0  # it never gets ahead


def test_links_cannot_be_limited_everywhere(monkeypatch):
    def refuse() -> None:
        raise ValueError("--bandwidth needs network namespaces and tc.")

    monkeypatch.setattr(times.links, "require_tools", refuse)
    assert not times.can_limit_links()
