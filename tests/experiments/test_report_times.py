"""The sections of times: what they say of runs that are made up, failed or missing."""

import pytest
from matplotlib.figure import Figure as MatplotlibFigure

from experiments.report.section import Scale, judge
from experiments.report.sections import cost_model, dpsgd17, step_time, stragglers, timing
from experiments.runner import Result
from experiments.speed.network.measure import Options as NetworkOptions
from experiments.speed.stragglers.measure import Options as StragglerOptions

FULL = Scale()
QUICK = Scale(is_quick=True)
TIMED = (step_time.SECTION, stragglers.SECTION, dpsgd17.SECTION)


@pytest.fixture(params=[True, False], ids=["root", "no-root"])
def can_limit(request, monkeypatch):
    for module in (step_time, dpsgd17):
        monkeypatch.setattr(module, "can_limit_links", lambda: request.param)
    return request.param


def draw(findings):
    for figure in findings.figures:
        figure.draw(MatplotlibFigure())


def make_network_run(algorithm, seconds, modelled, bandwidth="1gbit"):
    return {
        "algorithm": algorithm,
        "bandwidth": bandwidth,
        "seconds": seconds,
        "seconds_p10": seconds,
        "seconds_p90": seconds,
        "modelled_seconds": modelled,
        "modelled_ratio": None if modelled is None else modelled / seconds,
        "computation_seconds": 0.3,
        "link_bytes": 20e6,
        "goodput": 100e6,
        "exchange_cpu_seconds": 0.1,
    }


def make_straggler_run(algorithm, slowness, ratio, modelled=1000.0, nodes=4):
    return {
        "algorithm": algorithm,
        "slowness": slowness,
        "nodes": nodes,
        "examples_per_second": 1000.0,
        "modelled_examples_per_second": modelled,
        "modelled_ratio": modelled / 1000,
        "ratio_to_none": ratio,
        "ideal_ratio_to_none": 0.25 if algorithm == "allreduce" else 0.8125,
    }


def finish(*runs):
    return Result(status="finished", summary={"runs": list(runs)})


@pytest.mark.parametrize("scale", [FULL, QUICK], ids=["full", "quick"])
@pytest.mark.parametrize("section", TIMED, ids=lambda section: section.name)
def test_commands_are_those_of_the_program(section, scale, can_limit):
    """Alone, as they measure time; without root no links are limited."""
    for run in section.list_runs(scale):
        assert run.is_alone
        assert run.program == "speed"
        options = NetworkOptions if run.arguments[0] == "network" else StragglerOptions
        names = {name for name in run.arguments if name.startswith("--")}
        assert names <= {f"--{field.replace('_', '-')}" for field in options.__dataclass_fields__}
        assert can_limit or "--bandwidth" not in run.arguments


def find_claims(findings):
    return [(judge(claim), claim.ours) for claim in findings.claims]


def test_seconds_are_judged_by_the_model():
    fast = [make_network_run("allreduce", 0.5, 0.54), make_network_run("sgp@a/b", 0.4, None)]
    slow = [
        make_network_run(name, seconds, modelled, "200mbit")
        for name, seconds, modelled in (
            ("allreduce", 0.9, 0.9),
            ("sgp", 0.7, 0.6),
            ("1-osgp", 0.8, 0.8),
        )
    ]
    results = {step_time.FAST: finish(*fast), step_time.SLOW: finish(*slow)}
    findings = step_time.find(FULL, results)
    assert find_claims(findings) == [
        (True, "1gbit allreduce +8.0%"),
        (None, "-"),
        (None, "-"),
        (False, "200mbit allreduce +0.0%; 200mbit sgp -14.3%; 200mbit 1-osgp +0.0%"),
        (True, "sgp less allreduce, s -0.200"),
        (False, "1-osgp less sgp, s +0.100"),
    ]
    assert findings.verdict == "agrees in part"
    assert [row[4] for row in findings.tables[0].rows[:2]] == ["0.540", "-"]
    draw(findings)


def test_slow_nodes_are_judged_by_arithmetic_and_simulation():
    runs = [
        make_straggler_run("allreduce", "none", 1.0),
        make_straggler_run("allreduce", "4x", 0.26),
        make_straggler_run("async-sgp", "4x", 0.7, 1200.0),
        make_straggler_run("allreduce", "random", 0.30),
        make_straggler_run("sgp", "random", 0.31),
        make_straggler_run("1-osgp", "random", 0.36),
    ]
    findings = stragglers.find(FULL, {stragglers.FOUR: finish(*runs)})
    simulated, *others = find_claims(findings)
    assert simulated[0] is False
    assert others == [
        (True, "26.0%"),
        (False, "70.0%"),
        (False, "31.0% against 30.0%: +1.0%"),
        (True, "36.0% against 30.0%: +6.0%"),
    ]
    draw(findings)


def test_bandwidths_of_dpsgd17():
    slowest = {"allreduce": 1.0, "centralized": 5.0, "dpsgd@ring": 0.9}
    runs = [make_network_run(name, 0.31, 0.3) for name in slowest]
    runs += [make_network_run(name, x, x, "20mbit") for name, x in slowest.items()]
    findings = dpsgd17.find(FULL, {dpsgd17.RUN: finish(*runs)})
    assert find_claims(findings)[:2] == [
        (True, "slowest over fastest 1.00"),
        (True, "times 5.56"),
    ]
    assert [claim.is_modelled for claim in findings.claims] == [False, False, True, False, True]
    assert [judge(claim) for claim in findings.claims[2:]] == [True, True, True]
    assert findings.claims[3].ours == "AllReduce 3.23; parameter server 16.13"
    draw(findings)


def test_the_cost_model_is_judged_by_the_published_figures():
    findings = cost_model.find(FULL, {})
    assert all(claim.is_modelled for claim in findings.claims)
    by_table = {claim.statement.partition(":")[0]: judge(claim) for claim in findings.claims}
    for table in ("SGP-18 Table 2", "SGP-19 Table 1", "SGP-19 Table 3", "SGP-19 Table 4"):
        assert by_table[table]
    assert by_table["SlowMo Table 2"]
    assert by_table["Streaming DiLoCo Table 4"]
    assert all(len(row) == len(table.columns) for table in findings.tables for row in table.rows)
    draw(findings)


def test_links_cannot_be_limited_everywhere(monkeypatch):
    def refuse():
        raise ValueError("--bandwidth needs network namespaces and tc.")

    monkeypatch.setattr(timing.links, "require_tools", refuse)
    assert not timing.can_limit_links()
