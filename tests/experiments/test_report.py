"""The frame of the report: its runs, its pages, and what it does with errors."""

import html
import json
import re
import signal

import numpy as np
import pytest
from fake_program import read_calls, write_program
from report_sections import SECTIONS, make_section

from experiments import runner
from experiments.report import __main__ as program
from experiments.report import sections
from experiments.report.chapters import list_runs
from experiments.report.drawing import draw_figures
from experiments.report.section import Figure, Scale
from experiments.runner import Devices, Run


@pytest.fixture(autouse=True)
def frame(tmp_path, monkeypatch):
    """Made-up sections and programs, on one or two places."""
    write_program(tmp_path, monkeypatch)
    monkeypatch.setattr(program, "SECTIONS", SECTIONS)
    monkeypatch.setattr(sections, "SECTIONS", SECTIONS)
    monkeypatch.setattr(program, "find_devices", lambda jobs: Devices(({},) * (jobs or 2)))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    signal.signal(signal.SIGTERM, handlers[0])
    signal.signal(signal.SIGINT, handlers[1])


def make_report(out, *arguments):
    """Makes it; returns how it exits ("" for 0), Markdown, HTML and the summary."""
    status = ""
    try:
        program.main([*arguments, "--out", str(out)])
    except SystemExit as stop:
        status = f"{stop.code}"
    texts = [(out / name).read_text() for name in ("report.md", "report.html", "summary.json")]
    return status, texts[0], texts[1], json.loads(texts[2])


def test_a_report_of_a_section(tmp_path, capsys):
    out = tmp_path / "out"
    status, markdown, page, summary = make_report(out, "--section", "first", "--quick")
    assert "bad: error: no luck" in status
    assert "| claim | paper | ours | holds |" in markdown
    assert "| `\\|\\|x\\|\\|` < 2 \\| it holds | 0.5 | good +0.50; alone +0.50 | yes |" in markdown
    assert "| This fails. | 1 | +2.00 *(modelled)* | no |" in markdown
    assert "**Verdict: agrees in part (1 of 3, 1 not judged).** It fails, as $n$" in markdown
    assert "| bad | failed | 75.0 |" in markdown
    assert "Run `bad` has failed.\n\n```text\nerror: no luck\n```" in markdown
    assert "Run `lost` has diverged." in markdown
    assert "python -m experiments.image --steps 1" in markdown
    assert "](figures/first-curve.png)" in markdown
    assert "[A title of first](#a-title-of-first)" in markdown
    assert 'id="a-title-of-first"' in page
    assert "<b>" not in page
    assert page.count("data:image/svg+xml;base64,") == 1
    assert "figures/" not in page
    assert '<td class="part">agrees in part (1 of 3, 1 not judged)</td>' in page
    assert "<details><summary>Commands of its 4 run(s)" in page
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    assert (out / "figures" / "first-curve.svg").stat().st_size < 50_000
    assert {run["run"]: run["status"] for run in summary["runs"]} == {
        "good": "finished",
        "bad": "failed",
        "alone": "finished",
        "lost": "diverged",
    }
    assert summary["sections"][0]["claims"][0]["holds"] is True
    assert (out / "runs" / "good" / "summary.json").exists()
    assert "agrees in part" in capsys.readouterr().out


def test_it_goes_on_where_it_stopped(tmp_path):
    out = tmp_path / "out"
    make_report(out, "--section", "first", "--quick", "--jobs", "1")
    assert read_calls(out / "runs") == ["good", "bad", "lost", "alone"]
    (out / "runs" / "mended").touch()
    status, _, _, summary = make_report(out, "--section", "first", "--quick")
    assert status == ""  # what has diverged is a result
    assert read_calls(out / "runs")[4:] == ["bad"]
    assert all(run["status"] != "failed" for run in summary["runs"])
    make_report(out, "--section", "first", "--jobs", "1")  # other sizes
    assert read_calls(out / "runs")[5:] == ["good", "alone"]
    other = tmp_path / "other"
    status, markdown, _, _ = make_report(other, "--section", "first", "--runs", str(out))
    assert status == ""
    assert read_calls(other / "runs") == []
    assert "taken from other reports: 4 runs" in markdown


def test_sections_are_added_to_a_report(tmp_path, capsys):
    out = tmp_path / "out"
    make_report(out, "--section", "first", "--quick")
    (out / "runs" / "mended").touch()
    make_report(out, "--section", "first", "--quick")
    (out / "figures" / "mine.png").touch()
    _, markdown, _, summary = make_report(out, "--section", "undrawn", "--quick")
    assert [entry["section"] for entry in summary["sections"]] == ["first", "undrawn"]
    assert {run["run"]: run["status"] for run in summary["runs"]}["good"] == "finished"
    assert "## A title of first" in markdown
    assert (out / "figures" / "first-curve.png").exists()
    assert (out / "figures" / "mine.png").exists()
    capsys.readouterr()
    _, _, _, summary = make_report(out, "--section", "undrawn")  # other sizes
    assert [entry["section"] for entry in summary["sections"]] == ["undrawn"]
    assert "not shown, their runs had other options: first" in capsys.readouterr().out
    assert not (out / "figures" / "first-curve.png").exists()


def test_what_other_programs_have_left_is_kept(tmp_path, capsys):
    plot = tmp_path / "runs" / "image-1" / "plot.png"
    plot.parent.mkdir(parents=True)
    plot.touch()
    with pytest.raises(SystemExit):
        program.main(["--section", "first", "--out", str(tmp_path)])
    assert "nothing but its own runs in runs/, got" in capsys.readouterr().err
    assert plot.exists()


def test_the_code_of_every_run_is_told(tmp_path):
    out = tmp_path / "out"
    make_report(out, "--section", "first", "--quick")
    path = out / "runs" / "good" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": "abc1234"}))
    _, markdown, _, _ = make_report(out, "--section", "first", "--quick")
    assert re.search(r"- code: .*; runs: .*abc1234 \(1\)", markdown)


def test_bugs_of_sections_and_missing_data_are_shown(tmp_path):
    status, markdown, page, summary = make_report(tmp_path / "out")
    assert "bug: KeyError: 'no such row'" in status
    assert "undrawn: KeyError: 'no such row'" in status
    assert [section["verdict"] for section in summary["sections"]] == [
        "agrees in part (1 of 3, 1 not judged)",
        "error",
        "not judged",
        "left out",
    ]
    assert "Left out: it needs --speech" in markdown
    assert "A bug of this section" in markdown
    assert (
        "4 section(s): 1 agrees in part, 1 not judged, 1 left out, 1 error; 1 of 3 claims"
        in markdown
    )
    assert '<td class="error">error</td>' in page
    assert "KeyError: 'no such row'" in html.unescape(page)


def test_after_an_interrupt_the_report_has_what_is_there(tmp_path, monkeypatch):
    def interrupt(self, run, result):
        self.results[run.name] = result
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.report.grid.GridProgress.end", interrupt)
    status, markdown, _, summary = make_report(
        tmp_path / "out", "--section", "first", "--quick", "--jobs", "1"
    )
    assert status == "130"
    assert [run["status"] for run in summary["runs"]] == ["finished", *["missing"] * 3]
    assert "Not begun, or interrupted: `bad`, `alone`, `lost`." in markdown


def test_runs_of_one_name_are_one_call():
    first = make_section("a", list_runs=lambda scale: [Run("x", "image", ("1",))])
    other = make_section("b", list_runs=lambda scale: [Run("x", "image", ("2",))])
    with pytest.raises(RuntimeError, match="a name must be that of one run, got x"):
        list_runs([first, other], Scale())


def test_equal_figures_are_equal_files(tmp_path):
    def draw(figure):
        figure.subplots().fill_between(range(3), np.zeros(3), np.ones(3), label="a label")

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        draw_figures("s", [Figure("x", "", draw)], tmp_path / name)
    svg = [(tmp_path / name / "s-x.svg").read_bytes() for name in ("a", "b")]
    assert svg[0] == svg[1]


def test_the_list_of_sections(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    program.main(["--list-sections"])
    printed = capsys.readouterr().out
    assert "A title of first" in printed
    assert not list(tmp_path.glob("runs"))


def test_no_commit_outside_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    assert runner.find_commit() == ""
