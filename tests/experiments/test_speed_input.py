"""The measurement of the input as its users run it, on a stand-in for CIFAR-10."""

import json
from pathlib import Path

import pytest
from original_files import CIFAR_PER_FILE, write_cifar
from test_speed_readme import read_fields

from experiments.data.originals import ORIGINALS
from experiments.data.preparation import prepare
from experiments.speed.__main__ import main


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cifar")
    prepare(ORIGINALS["cifar10"](write_cifar(folder / "from"), 0), folder)
    return folder


def test_the_input_of_a_prepared_set(
    cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["local", "input", "--dataset", "cifar10", "--data-dir", str(cifar), "--turns", "3"]
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--turns", "0"], "--turns must be an integer >= 1, got 0"),
        (["--turn-seconds", "nan"], "--turn-seconds must be positive and finite, got nan"),
        (["--dataset", "cifar10", "cifar10"], "must be one or several different data sets"),
        (["--nodes", "41"], "40 examples cannot be divided over 41 nodes"),
        (["--batch-size-per-node", "10000000000"], "the batches must fit into"),
    ],
)
def test_wrong_options(
    cifar: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    given = ["--dataset", "cifar10", *arguments, "--data-dir", str(cifar)]
    with pytest.raises(SystemExit) as stop:
        main(["local", "input", *given, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert message in " ".join(f"{captured.out} {captured.err}".split())
    assert not (tmp_path / "out").exists()


def test_a_set_that_is_not_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["local", "input", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert "experiments.data prepare cifar10 --from FOLDER" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
