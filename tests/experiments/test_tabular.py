"""A task as a user writes it: one file, with nothing in it about algorithms or output."""

import json

from experiments.examples import tabular
from experiments.training import placement


def test_a_task_in_one_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(placement, "request_cpu_devices", lambda count: None)
    options = ("--nodes", "4", "--algorithm", "sgp", "2-osgp", "--checkpoint-every", "20")
    tabular.main([*options, "--test-fraction", "0.5", "--out", str(tmp_path)])
    for record in json.loads((tmp_path / "summary.json").read_text())["runs"]:
        assert record["test_accuracy_average_model"] > 0.9
        assert len(record["test_accuracy_nodes"]) == 4
    assert "89 wines, 89 for the test; 4 nodes" in capsys.readouterr().out
    assert (tmp_path / "test_accuracy.png").exists()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2
