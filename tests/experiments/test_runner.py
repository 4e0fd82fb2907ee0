"""Calls of programs: how they end, which are run again, and that none of them is left behind."""

import pytest
from fake_program import are_gone, read_calls, write_program

from experiments import runner
from experiments.runner import Run, judge, run_all

TWO = [{}, {}]


class Recorder(runner.ProgressBar):
    """Keeps what it is told."""

    def __init__(self):
        self.begun = []
        self.ended = []

    def begin(self, run):
        self.begun.append(run.name)

    def end(self, run, result):
        self.ended.append((run.name, result.status))


def make_runs(**arguments):
    return [Run(name, "image", tuple(given.split())) for name, given in arguments.items()]


@pytest.mark.parametrize(
    ("status", "log", "expected"),
    [
        (2, "error: the loss of node 0 must be finite, got nan after 3 steps", "diverged"),
        (2, "error: --epochs must be an integer >= 1, got 0", "failed"),
        (0, "done", "failed"),  # without a summary
        (-9, "", "failed"),
    ],
)
def test_how_a_run_ended(tmp_path, status, log, expected):
    (tmp_path / runner.LOG).write_text(log)
    result = judge(tmp_path, status, 1.0)
    assert result.status == expected
    assert result.error
    assert result.runs == []


def test_only_what_is_not_finished_is_run_again(tmp_path, monkeypatch):
    write_program(tmp_path, monkeypatch)
    runs = make_runs(a="sgp", b="dpsgd", c="diverge")

    def run(runs, **options):
        recorder = Recorder()
        results = run_all(runs, tmp_path / "runs", TWO, recorder, **options)
        assert sorted(recorder.ended) == sorted((name, r.status) for name, r in results.items())
        return [result.status for result in results.values()]

    assert run(runs) == ["finished", "failed", "diverged"]
    assert sorted(read_calls(tmp_path / "runs")) == ["a", "b", "c"]
    (tmp_path / "runs" / "mended").touch()
    (tmp_path / "runs" / "b" / "rest of the run that failed").touch()
    assert run(runs) == ["finished", "finished", "diverged"]
    assert read_calls(tmp_path / "runs")[3:] == ["b"]
    assert not (tmp_path / "runs" / "b" / "rest of the run that failed").exists()
    (tmp_path / "runs" / "b" / "summary.json").write_text("{")  # damaged
    assert run(runs) == ["finished", "finished", "diverged"]
    assert read_calls(tmp_path / "runs")[4:] == ["b"]
    others = make_runs(a="sgp --epochs 4")
    with pytest.raises(ValueError, match="--out must be the folder of the same runs"):
        run(others)
    assert run(others, replaces=True) == ["finished"]
    assert read_calls(tmp_path / "runs")[5:] == ["a"]


def test_what_is_alone_comes_last_and_one_at_a_time(tmp_path, monkeypatch):
    write_program(tmp_path, monkeypatch)
    runs = [Run(name, "image", (), is_alone=name < "c") for name in "abcd"]
    recorder = Recorder()
    assert list(run_all(runs, tmp_path, TWO, recorder)) == list("abcd")
    assert recorder.begun[2:] == ["a", "b"]
    assert recorder.ended[2:] == [("a", "finished"), ("b", "finished")]


def test_a_run_that_does_not_end_is_stopped(tmp_path, monkeypatch):
    write_program(tmp_path, monkeypatch)
    results = run_all(make_runs(a="wait"), tmp_path, TWO, Recorder(), max_seconds=1)
    assert results["a"].status == "failed"
    assert "must end within 1 s" in results["a"].error
    assert are_gone([(tmp_path / "child").read_text()])
