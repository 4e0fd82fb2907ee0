"""Data sets that are prepared from stand-ins of the original files, and read by TFDS."""

import pickle
import re
import socket
from typing import Any, NoReturn

import numpy as np
import pytest
import tensorflow_datasets as tfds
from original_files import CIFAR_PER_FILE, CLASSES, make_cifar_image, write_cifar, write_imagenet

from experiments.data import __main__ as program
from experiments.data.local import find_prepared


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Makes every connection fail."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError("network unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def read_splits(name, data_dir, test="test") -> Any:
    """The training and test examples, as a user of TensorFlow Datasets reads them."""
    return tfds.data_source(name, split=["train", test], data_dir=data_dir, download=False)


def prepare(name, source, out, *arguments):
    program.main(["prepare", name, "--from", str(source), "--data-dir", str(out), *arguments])


def fail(capsys, name, source, out):
    """Prepares in vain; returns what was printed to stderr."""
    with pytest.raises(SystemExit) as stop:
        prepare(name, source, out)
    assert stop.value.code == 2
    assert not list(out.glob("*/*/dataset_info.json"))
    return capsys.readouterr().err


def test_cifar10(tmp_path, capsys):
    prepare("cifar10", write_cifar(tmp_path / "from", archive=True), tmp_path / "out")
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


def test_imagenet(tmp_path, capsys):
    """Corrupt images are named and left out."""
    source = write_imagenet(tmp_path / "from")
    broken = [source / "train" / CLASSES[0] / f"{CLASSES[0]}_{index}.JPEG" for index in (0, 3)]
    broken[0].write_bytes(broken[0].read_bytes()[:400])
    broken[1].write_bytes(b"<html>")
    prepare("imagenet2012", source, tmp_path / "out")
    message = capsys.readouterr().err
    assert all(str(path) in message for path in broken)
    train, test = read_splits("imagenet2012", tmp_path / "out", "validation")
    assert (len(train), len(test)) == (18 - 2, 6)
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


def test_nothing_is_overwritten_unasked(tmp_path, capsys):
    source = write_cifar(tmp_path / "from")
    prepare("cifar10", source, tmp_path / "out")
    info = tmp_path / "out" / "cifar10" / "3.0.2" / "dataset_info.json"
    before = info.stat().st_mtime_ns
    with pytest.raises(SystemExit):
        prepare("cifar10", source, tmp_path / "out")
    assert f"which has {info.parent}: pass --overwrite to replace it" in capsys.readouterr().err
    assert info.stat().st_mtime_ns == before
    prepare("cifar10", source, tmp_path / "out", "--overwrite")
    assert info.stat().st_mtime_ns > before
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["cifar10"]


def test_a_stopped_preparation_leaves_what_was_there(tmp_path, monkeypatch):
    """Neither a new data set nor anything else; what a kill leaves is no data set."""
    source = write_cifar(tmp_path / "from")
    out = tmp_path / "out"

    def stop(image: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.data.originals.to_png", stop)
    with pytest.raises(SystemExit):
        prepare("cifar10", source, out)
    assert not list(out.iterdir())
    left = out / "cifar10.incomplete-123" / "cifar10" / "3.0.2"
    left.mkdir(parents=True)
    (left / "dataset_info.json").write_text("{}")
    assert find_prepared("cifar10", out) is None
    monkeypatch.undo()
    prepare("cifar10", source, out)
    assert find_prepared("cifar10", out) is not None


class Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (eval, ("1",))


def test_a_broken_file_of_cifar10(tmp_path, capsys):
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
    archive = write_cifar(tmp_path / "archive", archive=True) / "cifar-10-python.tar.gz"
    archive.write_bytes(archive.read_bytes()[:-5000])
    printed = fail(capsys, "cifar10", archive, tmp_path / "out")
    assert f"{archive} is corrupt or cut short" in printed
