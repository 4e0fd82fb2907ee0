"""The table of faults, with few of its methods and faults."""

import json

import pytest

from experiments import survival


@pytest.fixture
def few_examples(monkeypatch):
    images, labels = survival.load_examples()
    monkeypatch.setattr(survival, "load_examples", lambda: (images[:, ::25], labels[:, ::25]))


@pytest.mark.usefixtures("few_examples")
def test_two_methods_and_two_faults(tmp_path, capsys):
    out = tmp_path / "out"
    methods = ["--method", "sgp, lossy", "relay"]
    survival.main([*methods, "--fault", "drops", "death", "--steps", "8", "--out", str(out)])
    runs = json.loads((out / "summary.json").read_text())["runs"]
    cells = {(run["method"], run["fault"]): run for run in runs}
    assert list(cells) == [(m, f) for m in ("sgp, lossy", "relay") for f in ("", "drops", "death")]
    lossy = [cells["sgp, lossy", fault] for fault in ("", "drops", "death")]
    assert all(cell["mass"] < 1e-9 for cell in lossy)
    assert [cell["lost_weight"] > 0.05 for cell in lossy] == [False, True, False]
    assert lossy[1]["loss"] != lossy[0]["loss"]
    assert cells["relay", ""]["loss"] > 0
    for fault, reason in (("drops", "messages of relay"), ("death", "must exchange nothing")):
        assert cells["relay", fault]["word"] == "refused"
        assert reason in cells["relay", fault]["reason"]
    written = (out / "survival.md").read_text()
    printed = capsys.readouterr().out
    for text in ("Mass that is missing", "refused", "relay"):
        assert text in written
        assert text in printed
    assert "messages of relay" in written
