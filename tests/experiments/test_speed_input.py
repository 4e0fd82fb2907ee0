"""The measurement of the input as its users run it, on a stand-in for CIFAR-10."""

import json
from pathlib import Path

import pytest
from original_files import CIFAR_PER_FILE, write_cifar
from test_speed_readme import read_fields

from experiments.data.preparation import ORIGINALS, prepare
from experiments.speed.__main__ import main


def test_the_input_of_a_prepared_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(ORIGINALS["cifar10"](write_cifar(tmp_path / "from"), 0), tmp_path)
    arguments = ["input", "--dataset", "cifar10", "--data-dir", str(tmp_path), "--turns", "3"]
    short = ["--turn-seconds", "0.01", "--batch-size-per-node", "5", "--nodes", "2"]
    main([*arguments, *short, "--out", str(tmp_path / "out")])
    (run,) = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert (run["dataset"], run["images"]) == ("cifar10", 5 * CIFAR_PER_FILE)
    assert 0 < run["images_per_second_p10"] <= run["images_per_second"]
    assert run["images_per_second"] <= run["images_per_second_p90"]
    assert 3000 < run["encoded_bytes"] < 4000  # noise is not compressed
    assert run["ratio"] > 0
    assert run["corrupt_images"] == 0
    assert read_fields("input") <= set(run)
    assert "cifar10" in capsys.readouterr().out


def test_a_set_that_is_not_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["input", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "experiments.data prepare cifar10 --from FOLDER" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
