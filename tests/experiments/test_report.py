"""The frame of the report: its runs, its pages, and what it does with errors."""

import json
import signal

import pytest
from fake_program import read_calls, write_program

from experiments.report import __main__ as program
from experiments.report.section import Claim, Figure, Findings, Section, Table, exact
from experiments.runner import Run


def list_first_runs(scale):
    steps = "1" if scale.is_quick else "9"
    return [
        Run("good", "image", ("--steps", steps)),
        Run("bad", "image", ("dpsgd",)),
        Run("alone", "image", ("--steps", steps), is_alone=True),
        Run("lost", "image", ("diverge",)),
    ]


def find_first(scale, results):
    accuracies = {
        name: exact(run["test_accuracy_average_model"])
        for name, result in results.items()
        for run in result.runs
    }
    claims = [
        Claim("`||x||` < 2 | it holds", "0.5", accuracies, at_most=2.0),
        Claim("This fails.", "1", {"": exact(2.0)}, at_most=1.0, if_not="The cause."),
        Claim("Nobody knows.", "1", {}),
    ]
    rows = [(name, result.status, "75.0") for name, result in results.items()]
    table = Table("Accuracy", ("row|column", "ours", "paper, in %"), rows, note="A note.")
    return Findings(claims, [table], [Figure("curve", "A caption with <b> and a | in it.", draw)])


def draw(figure):
    axes = figure.subplots()
    axes.plot([0, 1, 2], [0, 1, 0], label="ours")
    axes.legend()


def raise_error(*_):
    raise KeyError("no such row")


def make_section(name, list_runs=list_first_runs, find=find_first, needs=()):
    return Section(
        name=name,
        title=f"A title of {name}",
        source="Nobody, 2026",
        text="What the paper did | and what is done here.",
        list_runs=list_runs,
        find=find,
        needs=needs,
        judges_when_quick=True,
    )


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


@pytest.fixture(autouse=True)
def frame(tmp_path, monkeypatch):
    """Made-up sections and programs, on one or two places."""
    write_program(tmp_path, monkeypatch)
    monkeypatch.setattr(program, "SECTIONS", SECTIONS)
    monkeypatch.setattr(program, "find_devices", lambda jobs: [{}] * (jobs or 2))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    signal.signal(signal.SIGTERM, handlers[0])
    signal.signal(signal.SIGINT, handlers[1])


def make_report(out, *arguments):
    """Makes it; returns how it exits ("" for 0), the page and the summary."""
    status = ""
    try:
        program.main([*arguments, "--out", str(out)])
    except SystemExit as stop:
        status = f"{stop.code}"
    summary = json.loads((out / "summary.json").read_text())
    return status, (out / "report.md").read_text(), summary


def list_statuses(summary):
    return {run["run"]: run["status"] for run in summary["runs"]}


def test_the_page_has_claims_runs_and_figures(tmp_path):
    """With a run that fails and one that diverges, sections with bugs, and one without its data."""
    out = tmp_path / "out"
    status, markdown, summary = make_report(out, "--quick")
    assert "bad: error: no luck" in status
    assert "bug: KeyError: 'no such row'" in status
    assert "undrawn: KeyError: 'no such row'" in status
    assert [section["verdict"] for section in summary["sections"]] == [
        *("agrees in part (1 of 3, 1 not judged)", "error", "not judged", "left out")
    ]
    assert [claim["holds"] for claim in summary["sections"][0]["claims"]] == [True, False, None]
    assert summary["sections"][0]["sentence"] == "The cause."
    assert list_statuses(summary) == {
        "good": "finished",
        "bad": "failed",
        "alone": "finished",
        "lost": "diverged",
    }
    figures = "0.5 | good +0.50<br>alone +0.50"
    assert f"| `\\|\\|x\\|\\|` < 2 \\| it holds | {figures} | yes |" in markdown
    assert "error: no luck" in markdown
    assert "python -m experiments.image --steps 1" in markdown
    assert "](first-curve.png)" in markdown
    assert "(#a-title-of-first)" in markdown
    assert (out / "first-curve.png").exists()


def test_it_goes_on_where_it_stopped(tmp_path):
    out = tmp_path / "out"
    make_report(out, "--section", "first", "--quick", "--jobs", "1")
    assert read_calls(out / "runs") == ["good", "bad", "lost", "alone"]
    (out / "runs" / "mended").touch()
    path = out / "runs" / "good" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": "abc1234"}))
    status, _, summary = make_report(out, "--section", "first", "--quick")
    assert status == ""  # what has diverged is a result
    assert read_calls(out / "runs")[4:] == ["bad"]
    assert "failed" not in list_statuses(summary).values()
    assert "abc1234 (1)" in summary["environment"]["code"]
    make_report(out, "--section", "first", "--jobs", "1")  # other sizes
    assert read_calls(out / "runs")[5:] == ["good", "alone"]


def test_a_report_is_made_again_from_what_was_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "KEPT", tmp_path / "kept")
    out = tmp_path / "out"
    _, _, summary = make_report(out, "--section", "first", "--keep", "--jobs", "1")
    assert sorted(path.name for path in (tmp_path / "kept" / "runs").iterdir()) == [
        *("alone.json", "good.json", "lost.json")
    ]
    for path in (tmp_path / "kept" / "runs").iterdir():  # made elsewhere
        record = json.loads(path.read_text())
        record["state"]["machine"] = "a machine"
        path.write_text(json.dumps(record))
    other = tmp_path / "other"
    status, _, again = make_report(other, "--section", "first", "--kept")
    assert (status, read_calls(other / "runs")) == ("", [])
    assert again["sections"][0]["claims"] == summary["sections"][0]["claims"]
    assert list_statuses(again) == list_statuses(summary) | {"bad": "missing"}
    origin = again["environment"]
    assert (origin["machine"], origin["versions"]) == ("a machine", "")
    page = (other / "results.md").read_text()
    assert "- This fails. **No.**" in page
    assert "The cause." in page
    assert "`--section first`" in page
    assert "python -m experiments.image --steps 9" in (other / "report.md").read_text()
    with pytest.raises(SystemExit):
        program.main(["--kept", "--quick", "--out", str(tmp_path / "third")])
