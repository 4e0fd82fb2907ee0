"""All sections of the report: their names, and the names and programs of their runs."""

import importlib.util
import itertools
import re

import pytest

from experiments.report.chapters import list_runs
from experiments.report.pages.markdown import make_anchor
from experiments.report.section import Scale
from experiments.report.sections import MODULES, load_section


@pytest.fixture(scope="module")
def sections():
    return [load_section(name) for name in MODULES]


def test_names_and_titles(sections):
    assert [section.name for section in sections] == list(MODULES)
    anchors = [make_anchor(section.title) for section in sections]
    assert len(set(anchors)) == len(anchors)


@pytest.mark.parametrize("is_quick", [True, False])
@pytest.mark.parametrize("has_data", [True, False])
def test_runs_have_names_and_programs(sections, tmp_path, is_quick, has_data):
    data = dict.fromkeys(("fashion_mnist", "speech", "translation"), tmp_path) if has_data else {}
    runs = list_runs(sections, Scale(is_quick=is_quick, **data))
    for run in itertools.chain.from_iterable(runs.values()):
        assert re.fullmatch(r"[A-Za-z0-9.-]+", run.name), run.name
        assert importlib.util.find_spec(run.module), run.command
        assert "--out" not in run.arguments
        assert all(isinstance(argument, str) for argument in run.arguments), run
