"""The sections on theory: what they say of results that agree or not, or are missing."""

import functools
import json
import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments.averaging import __main__ as averaging_program
from experiments.rates import problem
from experiments.rates.__main__ import Options as RatesOptions
from experiments.report.drawing import draw_figures, read_lines
from experiments.report.section import Scale, judge
from experiments.report.sections import averaging, rates
from experiments.runner import Result

SECTIONS = [averaging, rates]


@functools.cache
def make_averages():
    """The tables of the program, over few seeds."""
    return {
        "options": {"seeds": 60},
        "sgp18_appendix_a": averaging_program.compute_sgp18_factors(60),
        "rand20_rings": averaging_program.compute_rand20_rings(5),
    }


def make_run(label, nodes, steps, gradient, distance):
    return {
        "label": label,
        "nodes": nodes,
        "steps": steps,
        "squared_gradient": (gradient * np.array([0.99, 1, 1.01])).tolist(),
        "squared_distance": (distance * np.array([0.99, 1, 1.01])).tolist(),
        "bound": problem.bound_of_theorem(nodes, steps),
    }


def make_rates(exponent=-0.5, ring=1.0):
    """Runs that obey the theorems, with an excess that shrinks with K, if the exponent is -1/2."""
    runs = []
    for nodes in (4, 8, 16):
        for steps in (512, 2048, 8192, 32768):
            rate = 15 * (nodes * steps) ** exponent
            excess = {
                rates.SGP: nodes / steps,
                rates.RING: ring * nodes / math.sqrt(steps),
                rates.ALL_REDUCE: 0,
            }
            runs += [
                make_run(label, nodes, steps, rate * (1 + one), 10 * nodes / steps)
                for label, one in excess.items()
            ]
    return {"runs": runs}


def find(section, summary, scale=None, folder=None):
    result = Result(status="finished", summary=summary, folder=folder)
    return section.find(scale or Scale(), {section.RUN: result})


def draw(findings, tmp_path):
    drawings = draw_figures("theory", findings.figures, tmp_path)
    assert all(one.png.stat().st_size > 10_000 for one in drawings)
    return len(drawings)


def holds(findings):
    return [judge(claim) for claim in findings.claims]


class TestAveraging:
    def test_agrees_with_the_papers(self, tmp_path):
        curve = averaging_program.measure_curve("ring", 8, 6, 2)
        lines = "\n".join(json.dumps(line) for line in curve.lines())
        (tmp_path / "metrics.jsonl").write_text(lines)
        findings = find(averaging, make_averages(), folder=tmp_path)
        assert len(findings.claims) == 6
        assert False not in holds(findings)
        assert findings.verdict == "agrees"
        assert draw(findings, tmp_path) == 1
        assert [len(table.rows) for table in findings.tables] == [4, 4]

    def test_a_line_that_is_cut_short_is_left_out(self, tmp_path):
        curve = averaging_program.measure_curve("ring", 8, 6, 2)
        lines = [json.dumps(line) for line in curve.lines()]
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines)[:-9])
        result = Result(status="finished", summary=make_averages(), folder=tmp_path)
        assert len(read_lines(result.folder)) == len(lines) - 1
        assert draw(averaging.find(Scale(), {averaging.RUN: result}), tmp_path) == 1

    def test_other_values_disagree(self):
        summary = json.loads(json.dumps(make_averages()))
        for record in summary["sgp18_appendix_a"]:
            record["mean"] += 0.2
        for ring in summary["rand20_rings"]:
            ring["second_eigenvalue"] += 1e-6
            ring["means_by_round"][-1] = 2 * ring["paper_bounds_by_round"][-1]
        findings = find(averaging, summary)
        assert holds(findings) == [False] * 6

    def test_a_mean_whose_error_reaches_over_the_bound_is_left_open(self):
        record = {"mean": 0.445, "standard_deviation": 0.1}
        few = averaging.judge_factor("random_peer_exponential", record, 100)
        many = averaging.judge_factor("random_peer_exponential", record, 10_000)
        assert (judge(few), judge(many)) == (None, True)


class TestRates:
    def test_agree_with_the_theorems(self, tmp_path):
        findings = find(rates, make_rates())
        assert holds(findings) == [True] * 8
        assert draw(findings, tmp_path) == 2

    def test_another_slope_disagrees(self):
        findings = find(rates, make_rates(-0.35))
        assert holds(findings)[1:4] == [False] * 3
        assert holds(findings)[4] is True  # still a function of nK
        assert findings.verdict == "agrees in part"

    def test_a_ring_that_gains_nothing_by_more_nodes(self):
        runs = [
            run | {"squared_gradient": [run["nodes"] ** 0.5 * x for x in run["squared_gradient"]]}
            if run["label"] == rates.RING
            else run
            for run in make_rates()["runs"]
        ]
        findings = find(rates, {"runs": runs})
        assert holds(findings)[-1] is True

    def test_methods_have_their_titles_in_the_figure(self):
        drawn = Figure(layout="constrained")
        find(rates, make_rates()).figures[0].draw(drawn)
        texts = [text.get_text() for legend in drawn.legends for text in legend.get_texts()]
        assert set(rates.TITLES.values()) <= set(texts)

    def test_sizes_are_those_of_the_program(self):
        options = RatesOptions()
        assert (options.nodes, options.steps) == (rates.NODES, rates.STEPS)

    def test_a_ring_that_is_no_worse_disagrees(self):
        findings = find(rates, make_rates(ring=0.0))
        assert holds(findings)[-1] is False

    def test_slopes_are_left_open_near_the_bound(self):
        points = rates.select_points(make_rates(-0.45)["runs"], rates.SGP, "squared_gradient")
        rng = np.random.default_rng(0)
        noisy = [one._replace(values=one.values * rng.uniform(0.8, 1.2, 3)) for one in points]
        assert judge(rates.judge_slopes(noisy, 0.05)[0]) is None
        assert judge(rates.judge_slopes(points, 0.1)[0]) is True

    def test_one_method_alone_is_judged_where_it_can_be(self, tmp_path):
        runs = [run for run in make_rates()["runs"] if run["label"] == rates.SGP]
        findings = find(rates, {"runs": runs})
        assert holds(findings) == [True] * 6 + [None] * 2
        assert draw(findings, tmp_path) == 2


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("is_quick", [False, True])
def test_one_call_each(section, is_quick):
    (run,) = section.SECTION.list_runs(Scale(is_quick=is_quick))
    assert run.name == section.RUN
    assert not run.is_alone
