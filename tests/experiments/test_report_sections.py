"""All sections of the report: names, runs, texts, and what they find where runs are missing."""

import importlib.util
import itertools
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments.report.chapters import list_runs
from experiments.report.pages import make_anchor
from experiments.report.section import Scale, judge
from experiments.report.sections import SECTIONS
from experiments.runner import Result

DATA = dict.fromkeys(("fashion_mnist", "speech", "translation"), Path("data"))
SCALES = [Scale(**DATA, is_quick=is_quick) for is_quick in (False, True)]
SCALES += [Scale(is_quick=is_quick) for is_quick in (False, True)]
IDS = ["full", "quick", "full without data", "quick without data"]


def check_findings(findings):
    """Tables are rectangular, figures are drawn, and claims are whole."""
    for table in findings.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    for figure in findings.figures:
        drawn = Figure(layout="constrained")
        figure.draw(drawn)
        assert drawn.axes
    for claim in findings.claims:
        assert claim.statement.endswith(".")
        assert claim.paper
        assert "nan" not in claim.ours


def test_names_and_titles():
    assert len(SECTIONS) == 16
    anchors = [make_anchor(section.title) for section in SECTIONS.values()]
    assert len(set(anchors)) == len(anchors)


@pytest.mark.parametrize("scale", SCALES, ids=IDS)
def test_runs_have_names_and_programs(scale):
    runs = list_runs(list(SECTIONS.values()), scale)
    for run in itertools.chain.from_iterable(runs.values()):
        assert re.fullmatch(r"[A-Za-z0-9.-]+", run.name), run.name
        assert importlib.util.find_spec(run.module), run.command
        assert "--out" not in run.arguments
        assert all(isinstance(argument, str) for argument in run.arguments), run


@pytest.mark.parametrize("scale", SCALES, ids=IDS)
@pytest.mark.parametrize("name", SECTIONS)
def test_texts_have_their_numbers(name, scale):
    text = SECTIONS[name].write_text(scale)
    assert not re.search(r"[{}]|  |\bNone\b", text)


@pytest.mark.parametrize("status", ["failed", "diverged", "missing"])
@pytest.mark.parametrize("scale", SCALES[:2], ids=IDS[:2])
@pytest.mark.parametrize("name", [name for name in SECTIONS if name != "cost-model"])
def test_runs_that_did_not_finish_leave_gaps(name, scale, status):
    section = SECTIONS[name]
    results = {run.name: Result(status=status) for run in section.list_runs(scale)}
    findings = section.find(scale, results)
    check_findings(findings)
    assert all(judge(claim) is None for claim in findings.claims if not claim.is_modelled)
    cells = {cell for table in findings.tables for row in table.rows for cell in row}
    if results and name != "sgp19-figure2":
        assert ("-" if status == "missing" else status) in cells or name == "dpsgd17"
