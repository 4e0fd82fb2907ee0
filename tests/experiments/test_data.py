"""The image data sets; no test uses a network."""

import gzip
import hashlib
import io
import json
import re
import socket
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import requests
import tensorflow_datasets as tfds
from damaged_records import damage
from original_files import MNIST, idx, write_idx
from requests.adapters import HTTPAdapter
from tensorflow_datasets.core.download import checksums
from tensorflow_datasets.core.units import Size

from experiments import data
from experiments.data.idx import IDX_FILES
from experiments.data.originals import ORIGINALS
from experiments.data.preparation import prepare

TRAIN, TEST = MNIST[:2], MNIST[2:]
ARRAYS = dict(zip(IDX_FILES, MNIST, strict=True))
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = IDX_FILES


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Makes every connection fail, and hides proxies and the data of the user."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError("network unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(HTTPAdapter, "send", refuse)
    for variable in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "TFDS_DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def standardized(images: np.ndarray) -> np.ndarray:
    pixels = TRAIN[0].astype(np.float64) / 255
    return ((images.astype(np.float64) / 255 - pixels.mean()) / pixels.std())[..., np.newaxis]


def check_is_written_set(loaded: data.Dataset) -> None:
    assert (loaded.name, loaded.classes) == ("fashion_mnist", 10)
    np.testing.assert_allclose(loaded.train_images, standardized(TRAIN[0]), atol=1e-5)
    np.testing.assert_allclose(loaded.test_images, standardized(TEST[0]), atol=1e-5)
    np.testing.assert_array_equal(loaded.train_labels, TRAIN[1])
    np.testing.assert_array_equal(loaded.test_labels, TEST[1])


@pytest.fixture(scope="module")
def digits() -> data.Dataset:
    return data.load("mnist5k")


def test_mnist5k_is_standardized_and_balanced(digits: data.Dataset) -> None:
    assert (digits.name, digits.classes) == ("mnist5k", 10)
    assert digits.train_images.shape == (4000, 28, 28, 1)
    assert digits.test_images.shape == (1000, 28, 28, 1)
    assert {array.dtype.name for array in digits[1:5]} == {"float32", "int32"}
    assert digits.train_images.mean() == pytest.approx(0, abs=1e-5)
    assert digits.train_images.std() == pytest.approx(1, abs=1e-5)
    np.testing.assert_array_equal(np.bincount(digits.train_labels), np.full(10, 400))
    np.testing.assert_array_equal(np.bincount(digits.test_labels), np.full(10, 100))
    assert len(np.unique(digits.train_labels[:100])) == 10  # not in order of class
    images = np.concatenate([digits.train_images, digits.test_images]).reshape(5000, 784)
    assert len(np.unique(images, axis=0)) == 5000  # none is in both
    for again, before in zip(data.load("mnist5k"), digits, strict=True):
        np.testing.assert_array_equal(again, before)


def test_reads_idx_files(tmp_path: Path) -> None:
    for gz in (False, True):
        loaded = data.load("fashion_mnist", write_idx(tmp_path / f"{gz}", gz))
        check_is_written_set(loaded)
        assert [array.dtype.name for array in loaded[1:5]] == ["float32", "int32"] * 2


def test_a_broken_idx_file_is_named(tmp_path: Path) -> None:
    for file, content, message in (
        (TRAIN_IMAGES, idx(TRAIN[0])[:-1], "cut short.*9,408 values.*got 9,407"),
        (TEST_LABELS, idx(TEST[0]), "must start with the number 2049 .*got 2051"),
        (f"{TEST_IMAGES}.gz", b"<html>not found</html>", "corrupt"),
        (f"{TRAIN_IMAGES}.gz", gzip.compress(idx(TRAIN[0]))[:-20], "cut short"),
        (TRAIN_LABELS, idx(TRAIN[1][:-1]), "must hold the same number"),
        (TRAIN_LABELS, idx(TRAIN[1] + np.uint8(10)), "must hold the same number"),
    ):
        write_idx(tmp_path)
        (tmp_path / file.removesuffix(".gz")).unlink()
        (tmp_path / file).write_bytes(content)
        with pytest.raises(data.DataError, match=f"{file}.* {message}"):
            data.load("fashion_mnist", tmp_path)


def test_the_folder_without_data_dir_is_that_of_tensorflow_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = re.escape(str(tmp_path / "home" / "tensorflow_datasets"))
    with pytest.raises(data.MissingDataError, match=f"in {home}: no train-images"):
        data.load("fashion_mnist")
    monkeypatch.setenv("TFDS_DATA_DIR", str(write_idx(tmp_path / "elsewhere")))
    check_is_written_set(data.load("fashion_mnist"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set in the form of TensorFlow Datasets, named like the official one."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(ORIGINALS["fashion_mnist"](write_idx(folder / "from"), 0), folder)
    return folder


def test_reads_what_tensorflow_datasets_prepared(prepared: Path) -> None:
    loaded = data.load("fashion_mnist", prepared, download=True)  # there: nothing is fetched
    assert [array.dtype.name for array in loaded[1:5]] == ["float32", "int32"] * 2
    # TensorFlow Datasets shuffles: bring both into the order of their first pixels.
    for images, labels, (raw, raw_labels) in (
        (loaded.train_images, loaded.train_labels, TRAIN),
        (loaded.test_images, loaded.test_labels, TEST),
    ):
        order, raw_order = (np.lexsort(x.reshape(len(x), -1)[:, :3].T) for x in (images, raw))
        np.testing.assert_allclose(images[order], standardized(raw[raw_order]), atol=1e-5)
        np.testing.assert_array_equal(labels[order], raw_labels[raw_order])


def test_a_corrupt_image_of_a_prepared_set_is_named_and_left_out(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its pixels cannot be decoded, or its record cannot be read."""
    whole = data.load("fashion_mnist", prepared)
    assert (whole.num_train, whole.count_corrupt()) == (12, 0)
    with monkeypatch.context() as patch:
        damage(patch, {1, 4})
        loaded = data.load("fashion_mnist", prepared, max_corrupt=4)
        printed = capsys.readouterr().err
        assert printed.count("is corrupt") == 4
        assert f"image 4 of train in {prepared / 'fashion_mnist' / '3.0.1'} is corrupt" in printed
        assert (loaded.num_train, loaded.num_test, loaded.count_corrupt()) == (10, 3, 4)
        np.testing.assert_array_equal(loaded.train_labels, np.delete(whole.train_labels, [1, 4]))
        with pytest.raises(data.DataError, match=r"at most 3 images must be corrupt.*test in"):
            data.load("fashion_mnist", prepared, max_corrupt=3)
        damage(patch, set(range(12)))
        with pytest.raises(data.DataError, match="images of the split train, got none that can"):
            data.load("fashion_mnist", prepared)
    damage(monkeypatch, set(), {2: 10})
    with pytest.raises(data.DataError, match=r"from 0 to 9, got 10 for image 2 of train"):
        data.load("fashion_mnist", prepared)


def test_idx_files_come_before_a_prepared_set(prepared: Path, tmp_path: Path) -> None:
    (write_idx(tmp_path) / "fashion_mnist").symlink_to(prepared / "fashion_mnist")
    check_is_written_set(data.load("fashion_mnist", tmp_path))


def test_a_prepared_set_that_needs_tensorflow_is_refused(prepared: Path, tmp_path: Path) -> None:
    version = tmp_path / "fashion_mnist" / "3.0.1"
    version.mkdir(parents=True)
    for file in (prepared / "fashion_mnist" / "3.0.1").iterdir():
        (version / file.name).write_bytes(file.read_bytes())
    info = json.loads((version / "dataset_info.json").read_text()) | {"fileFormat": "tfrecord"}
    (version / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(data.DataError, match=r"3\.0\.1 .*without TensorFlow.*array_record"):
        data.load("fashion_mnist", tmp_path)


def test_download_without_network_fails_at_once(tmp_path: Path) -> None:
    message = r"no connection to fashion-mnist\.s3.*unreachable.*t10k-labels-idx1-ubyte\.gz"
    with pytest.raises(data.DataError, match=message):
        data.load("fashion_mnist", tmp_path / "new", download=True)
    assert not (tmp_path / "new").exists()


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The files that a download finds; TensorFlow Datasets expects the checksums of these."""
    url = tfds.image_classification.FashionMNIST.URL
    files = {f"{url}{file}.gz": gzip.compress(idx(array)) for file, array in ARRAYS.items()}
    infos = {
        address: checksums.UrlInfo(
            size=Size(len(content)),
            checksum=hashlib.sha256(content).hexdigest(),
            filename=address.removeprefix(url),
        )
        for address, content in files.items()
    }

    def send(_: object, request: requests.PreparedRequest, **__: object) -> requests.Response:
        assert request.url is not None
        response = requests.Response()
        response.url = request.url
        response.request = request
        response.status_code = 200 if request.url in files else 404
        response.raw = io.BytesIO(files.get(request.url, b""))
        return response

    monkeypatch.setattr(tfds.image_classification.FashionMNIST, "url_infos", infos)
    monkeypatch.setattr(socket, "create_connection", lambda *_: io.BytesIO())
    monkeypatch.setattr(HTTPAdapter, "send", send)
    return files


def test_download_fetches_what_is_missing_into_the_folder(
    tmp_path: Path, web: dict[str, bytes]
) -> None:
    folder = tmp_path / "new" / "folder"
    check_is_written_set(data.load("fashion_mnist", folder, download=True))
    assert {file.name for file in folder.iterdir()} == {f"{name}.gz" for name in IDX_FILES}
    (folder / f"{TEST_LABELS}.gz").unlink()
    for address in [address for address in web if TEST_LABELS not in address]:
        del web[address]
    check_is_written_set(data.load("fashion_mnist", folder, download=True))
    web.clear()
    check_is_written_set(data.load("fashion_mnist", folder, download=True))


def test_a_failed_download_keeps_only_complete_files(tmp_path: Path, web: dict[str, bytes]) -> None:
    (address,) = (known for known in web if TEST_IMAGES in known)
    for content, message in ((b"else", "checksum"), (None, "404")):
        if content is None:
            del web[address]
        else:
            web[address] = content
        message = f"{TEST_IMAGES}.gz could not be fetched.*{message}"
        with pytest.raises(data.DataError, match=message):
            data.load("fashion_mnist", tmp_path, download=True)
        names = {file.name for file in tmp_path.iterdir()}
        assert names == {f"{TRAIN_IMAGES}.gz", f"{TRAIN_LABELS}.gz"}
