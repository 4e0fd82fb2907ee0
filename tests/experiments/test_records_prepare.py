"""Data sets that are prepared from stand-ins of the original files, and read by TFDS."""

import pickle
import re
import socket
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import tensorflow_datasets as tfds
from original_files import (
    CIFAR_PER_FILE,
    CLASSES,
    MNIST,
    idx,
    make_cifar_image,
    write_cifar,
    write_idx,
    write_imagenet,
)

from experiments import data
from experiments.data import __main__ as program
from experiments.data.idx import IDX_FILES


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every connection fail."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError("network unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def read_splits(name: str, data_dir: Path, test: str = "test") -> Any:
    """The training and test examples, as a user of TensorFlow Datasets reads them."""
    return tfds.data_source(name, split=["train", test], data_dir=data_dir, download=False)


def prepare(name: str, source: Path, out: Path, *arguments: str) -> None:
    program.main(["prepare", name, "--from", str(source), "--data-dir", str(out), *arguments])


def fail(
    capsys: pytest.CaptureFixture[str], name: str, source: Path, out: Path, *arguments: str
) -> str:
    """Prepares in vain; returns what was printed to stderr."""
    with pytest.raises(SystemExit) as stop:
        prepare(name, source, out, *arguments)
    assert stop.value.code == 2
    assert not list(out.glob("*/*/dataset_info.json"))
    return capsys.readouterr().err


@pytest.mark.parametrize(("name", "gz"), [("mnist", True), ("fashion_mnist", False)])
def test_idx_files(tmp_path: Path, name: str, gz: bool) -> None:
    prepare(name, write_idx(tmp_path / "from", gz), tmp_path / "out")
    train, test = read_splits(name, tmp_path / "out")
    for source, images, labels in ((train, *MNIST[:2]), (test, *MNIST[2:])):
        read = {(e["image"].tobytes(), int(e["label"])) for e in source}
        assert read == {(i.tobytes(), int(x)) for i, x in zip(images, labels, strict=True)}
    written = data.load(name, tmp_path / "from")
    loaded = data.load(name, tmp_path / "out")
    assert loaded.name == name
    assert sorted(loaded.train_labels) == sorted(written.train_labels)
    assert loaded.test_images.shape == written.test_images.shape


@pytest.mark.parametrize("archive", [False, True])
def test_cifar10(tmp_path: Path, archive: bool, capsys: pytest.CaptureFixture[str]) -> None:
    prepare("cifar10", write_cifar(tmp_path / "from", archive), tmp_path / "out")
    folder = tmp_path / "out" / "cifar10" / "3.0.2"
    assert str(folder) in capsys.readouterr().out
    train, test = read_splits("cifar10", tmp_path / "out")
    assert train.dataset_info.features["label"].names[:2] == ["airplane", "automobile"]
    assert (len(train), len(test)) == (5 * CIFAR_PER_FILE, CIFAR_PER_FILE)
    for source, prefix, first in ((train, "train", 0), (test, "test", len(train))):
        for example in source:
            index = int(example["id"].decode().removeprefix(f"{prefix}_"))
            np.testing.assert_array_equal(example["image"], make_cifar_image(first + index))
            assert example["label"] == (first + index) % 10


def test_imagenet(tmp_path: Path) -> None:
    prepare("imagenet2012", write_imagenet(tmp_path / "from"), tmp_path / "out")
    train, test = read_splits("imagenet2012", tmp_path / "out", "validation")
    assert (len(train), len(test)) == (18, 6)
    # By its name, TensorFlow Datasets gives it the official 1,000 classes.
    builder: Any = tfds.builder_from_directory(tmp_path / "out" / "imagenet2012" / "5.1.0")
    assert list(builder.info.features["label"].names) == list(CLASSES)
    for example in train:
        name = example["file_name"].decode()
        assert name.startswith(CLASSES[example["label"]])
        index = int(name.removesuffix(".JPEG")[-1])
        assert example["image"].shape[:2] == (240, 260 + 20 * index)
        if index != 1:
            color = (40 * index, 80 * int(example["label"]), 100)
            assert np.abs(example["image"].astype(int) - color).max() <= 4


def test_corrupt_images_are_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_imagenet(tmp_path / "from")
    broken = [source / "train" / CLASSES[0] / f"{CLASSES[0]}_{index}.JPEG" for index in (0, 3)]
    broken[0].write_bytes(broken[0].read_bytes()[:400])
    broken[1].write_bytes(b"<html>")
    message = fail(capsys, "imagenet2012", source, tmp_path / "o", "--max-corrupt-images", "1")
    assert "at most 1 images must be corrupt, got 2" in message
    prepare("imagenet2012", source, tmp_path / "out")
    message = capsys.readouterr().err
    assert all(str(path) in message for path in broken)
    assert "2 so far" in message
    train, _ = read_splits("imagenet2012", tmp_path / "out", "validation")
    assert len(train) == 16


def test_files_that_are_no_images_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_imagenet(tmp_path / "from")
    first = source / "train" / CLASSES[0] / "a.webp"
    for path in (first, source / "val" / CLASSES[1] / "b.JPEG.part"):
        path.write_bytes(b"")
    prepare("imagenet2012", source, tmp_path / "out")
    message = capsys.readouterr().err
    assert f"2 files or folders among the images were not read, such as {first}:" in message


def test_nothing_is_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_idx(tmp_path / "from")
    prepare("mnist", source, tmp_path / "out")
    info = tmp_path / "out" / "mnist" / "3.0.1" / "dataset_info.json"
    before = info.stat().st_mtime_ns
    with pytest.raises(SystemExit) as stop:
        prepare("mnist", source, tmp_path / "out")
    assert stop.value.code == 2
    assert f"which has {info.parent}: pass --overwrite to replace it" in capsys.readouterr().err
    assert info.stat().st_mtime_ns == before
    (source / IDX_FILES[1]).write_bytes(idx(MNIST[1][::-1]))
    prepare("mnist", source, tmp_path / "out", "--overwrite")
    train, _ = read_splits("mnist", tmp_path / "out")
    read = {(e["image"].tobytes(), int(e["label"])) for e in train}
    assert read == {(i.tobytes(), int(x)) for i, x in zip(MNIST[0], MNIST[1][::-1], strict=True)}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mnist"]


def test_a_stopped_preparation_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a new data set nor anything else; what a kill leaves is no data set, and is named."""
    source = write_idx(tmp_path / "from")
    out = tmp_path / "out"
    for error in (KeyboardInterrupt(), OSError("no space left on device")):

        def stop(image: object, error: BaseException = error) -> NoReturn:
            raise error

        monkeypatch.setattr("experiments.data.originals.to_png", stop)
        with pytest.raises(SystemExit):
            prepare("mnist", source, out)
        assert not list(out.iterdir())
    left = out / "mnist.incomplete-123" / "mnist" / "3.0.1"
    left.mkdir(parents=True)
    (left / "dataset_info.json").write_text("{}")
    with pytest.raises(data.MissingDataError):
        data.load("mnist", out)
    monkeypatch.undo()
    prepare("mnist", source, out)
    assert f"{out / 'mnist.incomplete-123'} is left of a preparation" in capsys.readouterr().err
    assert data.load("mnist", out).num_train == len(MNIST[0])


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (eval, ("1",))


def test_a_broken_file_of_cifar10(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_cifar(tmp_path / "from")
    file = source / "cifar-10-batches-py" / "data_batch_2"
    for content, message in (
        (pickle.dumps(Malicious()), "builtins.eval is not allowed"),
        (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}), "same number"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]}), "from 0 to 9"),
        (None, "got no .*data_batch_2"),
    ):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        assert re.search(message, fail(capsys, "cifar10", source, tmp_path / "out"))


def test_a_broken_archive_of_cifar10(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = write_cifar(tmp_path / "from", archive=True) / "cifar-10-python.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-5000])
    printed = fail(capsys, "cifar10", archive, tmp_path / "out")
    assert f"{archive} is corrupt or cut short" in printed
