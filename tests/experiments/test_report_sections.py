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
import pytest
from matplotlib.figure import Figure

from experiments.averaging import __main__ as averaging_program
from experiments.options import option_name
from experiments.rates import problem
from experiments.rates.__main__ import RatesOptions
from experiments.report.chapters import list_runs
from experiments.report.keep import KEPT, KEPT_RUNS, name_data
from experiments.report.pages import make_anchor
from experiments.report.section import Findings, Sample, Scale, judge
from experiments.report.sections import (
    SECTIONS,
    theory,
    times,
)
from experiments.runner import Result, Run

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
    """A finished run with its lines."""
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
            steps = range(1, STEPS + 1)
            lines += [{"run": label, "step": step, "loss": 1 / step} for step in steps]
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


SPEED_OPTIONS = {
    "wire": ("speed.wire.rows", "WireOptions"),
    "stragglers": ("speed.wire.stragglers", "StragglerOptions"),
}


def find_options(run: Run) -> set[str]:
    """The names of the options of a run's program."""
    place = {
        "averaging": ("averaging.__main__", "AveragingOptions"),
        "rates": ("rates.__main__", "RatesOptions"),
        "steps_to_loss": ("steps_to_loss", "StepsOptions"),
        "speed": SPEED_OPTIONS.get(run.arguments[0], ("", "")),
        "gossipjax.launch": ("fault_injection.slow", "SlowImageOptions"),
    }.get(run.program, (run.program, "Options"))
    options = getattr(importlib.import_module(f"experiments.{place[0]}"), place[1])
    names = {option_name(field.name) for field in dataclasses.fields(options)}
    return names | {"--tokens-per-batch"}  # of translation, where the field has another name


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
        assert scale.is_quick or None not in verdicts, name


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


def test_the_cost_model_is_judged_by_the_published_figures():
    verdicts = check(SECTIONS["cost-model"].find(FULL, {}))
    assert verdicts == [*[True] * 5, False, False, *[True] * 4]


def test_links_cannot_be_limited_everywhere(monkeypatch):
    def refuse() -> None:
        raise ValueError("--bandwidth needs network namespaces and tc.")

    monkeypatch.setattr(times.links, "require_tools", refuse)
    assert not times.can_limit_links()
