"""Libraries that are wrong in one way, and the sections of the report that must notice."""

import subprocess
import sys

import numpy as np
import pytest

from experiments.report.mutants import judge_mutant, list_mutants, read_mutants, write_mutants
from experiments.report.mutate import MUTATIONS
from experiments.report.section import Claim, Findings, Scale, Section, exact
from experiments.report.sections import SECTIONS
from experiments.runner import Result, Run, write_state
from gossipjax.topology import Schedule, random_peer
from gossipjax.topology.schedule import Round

NODES = 13  # of schedules that no other test builds
FULL = Scale()


@pytest.fixture
def library(monkeypatch):
    """Mends the schedules when the test ends."""
    for owner, name in (
        (Round, "_set_entries"),
        (Schedule, "__init__"),
        (Schedule, "_require_connected"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def build(seed: int) -> np.ndarray:
    """The matrices of four rounds, in each of which nodes send to a random neighbor."""
    return random_peer(NODES, rounds=4, seed=seed).matrices()


def test_schedules_that_are_transposed(library):
    right = build(seed=90)
    assert not np.allclose(right.sum(2), 1)  # rows
    MUTATIONS["transposed"]()
    np.testing.assert_array_equal(build(seed=90), right.transpose(0, 2, 1))


@pytest.mark.parametrize("name", ["no-exchange", "hop-1"])
def test_schedules_with_too_few_rounds(library, name: str):
    right = build(seed=91)
    MUTATIONS[name]()
    expected = [np.eye(NODES)] if name == "no-exchange" else [right[0]]
    for matrix in build(seed=91):
        np.testing.assert_array_equal(matrix, expected[0])


SCRIPT = """
import jax, jax.numpy as jnp, optax
import gossipjax as gx
from experiments.report.mutate import MUTATIONS
from gossipjax import cost_model

def run(tx, steps):
    nodes = gx.Nodes(4)
    params, state = nodes.init(tx, jnp.zeros(()))
    params = jnp.arange(4.0)
    params, state = jax.vmap(lambda p: (p, tx.init(p)), axis_name="nodes")(params)
    for k in range(steps):
        def step(p, s):
            updates, s = tx.update(jnp.zeros(()), s, p, step=k)
            return optax.apply_updates(p, updates), s
        params, state = jax.vmap(step, axis_name="nodes")(params, state)
    return params.round(4).tolist()

gossip = lambda: gx.sgp(gx.topology.random_peer(4, rounds=8, seed=3))
outer = lambda: gx.outer(optax.sgd(0.1), optax.sgd(1.0), every=2)
right = run(gossip(), 40), run(outer(), 2)
assert set(right[0]) == {1.5} == set(right[1]), right
for name in ("no-de-biasing", "no-average"):
    MUTATIONS[name]()
wrong = run(gossip(), 40), run(outer(), 2)
assert len(set(wrong[0])) > 1, wrong
assert wrong[1] == [0.0, 1.0, 2.0, 3.0], wrong
work = cost_model.Workload(parameters=1e6, compute_seconds=0.5)
step = cost_model.predict_step(cost_model.allreduce(), work, cost_model.Network(1e6), 4)
assert step.seconds == 0.5, step
"""


def test_models_that_are_wrong():
    """In a process of their own: what they replace cannot be mended."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


def make_section(mutants):
    def find(scale, results):
        del scale
        rows = {name: exact(run["value"]) for name, x in results.items() for run in x.runs}
        return Findings([Claim("It is at least 1.", "1", rows, at_least=1.0)])

    return Section(
        name="made-up",
        title="",
        source="",
        text="",
        list_runs=lambda scale: [Run("one", "image", ("--nodes", "4"))],
        find=find,
        mutants=mutants,
    )


def finish(value: float) -> Result:
    return Result(status="finished", summary={"runs": [{"value": value}]})


def test_a_section_notices_or_does_not(tmp_path):
    section = make_section({"hop-1": ("one",), "no-average": ()})
    assert not list_mutants([section], FULL, tmp_path / "runs")  # nothing has been run
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    write_state(section.list_runs(FULL)[0], finish(2.0), folder)
    (folder / "summary.json").write_text('{"runs": [{"value": 2.0}]}')
    mutant, whole = list_mutants([section], FULL, tmp_path / "runs")
    (run,) = mutant.runs.values()
    assert run.command == "python -m experiments.report.mutate hop-1 image --nodes 4"
    verdicts = [
        judge_mutant(mutant, {run.name: result}, FULL)
        for result in (finish(0.5), finish(1.5), Result(status="diverged"))
    ]
    assert [verdict.is_noticed for verdict in verdicts] == [True, False, True]
    (run,) = whole.runs.values()
    assert run.arguments[:4] == ("no-average", "report", "--section", "made-up")
    claims = [{"statement": "It is at least 1.", "holds": False}]
    report = Result(status="finished", summary={"sections": [{"claims": claims}]})
    assert judge_mutant(whole, {run.name: report}, FULL).is_noticed
    path = tmp_path / "mutants.json"
    for verdict in verdicts[:2]:  # the second call replaces the first
        write_mutants([verdict], path)
    assert [list(one.failed) for one in read_mutants(path)] == [[]]


def test_sections_name_mutations_and_runs_that_are_there():
    for section in SECTIONS.values():
        assert set(section.mutants) <= set(MUTATIONS)
        names = {run.name for run in section.list_runs(FULL)}
        for runs in section.mutants.values():
            assert set(runs) <= names or not names, section.name
