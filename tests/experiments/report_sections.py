"""Sections of a report of made-up runs: one that finds something, and some that do not."""

import math

from experiments.report.estimates import exact
from experiments.report.section import Claim, Figure, Findings, Section, Table
from experiments.runner import Run


def list_runs(scale):
    steps = "1" if scale.is_quick else "9"
    return [
        Run("good", "image", ("--steps", steps)),
        Run("bad", "image", ("dpsgd",)),
        Run("alone", "image", ("--steps", steps), is_alone=True),
        Run("lost", "image", ("diverge",)),
    ]


def find(scale, results):
    statuses = {name: result.status for name, result in results.items()}
    accuracies = {
        name: exact(run["test_accuracy_average_model"])
        for name, result in results.items()
        for run in result.runs
    }
    cause = "It fails, as $n$ is small."
    claims = [
        Claim("`||x||` < 2 | it holds", "0.5", accuracies, at_most=2.0),
        Claim("This fails.", "1", {"": exact(2.0)}, at_most=1.0, is_modelled=True, if_not=cause),
        Claim("Nobody knows.", "1", {}),
    ]
    rows = tuple((name, status, "75.0") for name, status in statuses.items())
    table = Table("Accuracy", ("row|column", "ours", "paper, in %"), rows, note="A note.")
    figure = Figure("curve", "A caption with <b> and a | in it.", draw)
    return Findings(claims, [table], [figure])


def draw(figure):
    axes = figure.subplots()
    axes.plot([0, 1, 2], [math.cos(x) for x in range(3)], label="ours")
    axes.set(title="A curve", xlabel="steps", ylabel="loss")
    axes.legend()


def raise_error(*_):
    raise KeyError("no such row")


def make_section(name, **changes):
    fields = {
        "title": f"A title of {name}",
        "source": "Nobody, 2026",
        "text": "What the paper did | and what is done here.",
        "list_runs": list_runs,
        "find": find,
    }
    return Section(name=name, **(fields | changes))


SECTIONS = {
    "first": make_section("first"),
    "bug": make_section("bug", find=raise_error),
    "undrawn": make_section(
        "undrawn",
        list_runs=lambda scale: [],
        find=lambda scale, results: Findings([], figures=[Figure("x", "", raise_error)]),
    ),
    "spoken": make_section("spoken", list_runs=raise_error, needs=("speech",)),
}
