"""The image data sets that fit into memory."""

import gzip
import re

import numpy as np
import pytest
from original_files import MNIST, idx, write_idx

from experiments import data
from experiments.data.idx import IDX_FILES

TRAIN, TEST = MNIST[:2], MNIST[2:]
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = IDX_FILES


def standardized(images):
    pixels = TRAIN[0].astype(np.float64) / 255
    return ((images.astype(np.float64) / 255 - pixels.mean()) / pixels.std())[..., np.newaxis]


def check_is_written_set(loaded):
    assert (loaded.name, loaded.classes) == ("fashion_mnist", 10)
    np.testing.assert_allclose(loaded.train_images, standardized(TRAIN[0]), atol=1e-5)
    np.testing.assert_allclose(loaded.test_images, standardized(TEST[0]), atol=1e-5)
    np.testing.assert_array_equal(loaded.train_labels, TRAIN[1])
    np.testing.assert_array_equal(loaded.test_labels, TEST[1])
    assert [array.dtype.name for array in loaded[1:5]] == ["float32", "int32"] * 2


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist5k")


def test_mnist5k_is_standardized_and_balanced(digits):
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


def test_a_broken_idx_file_is_named(tmp_path):
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


def test_the_folder_without_data_dir_is_that_of_tensorflow_datasets(tmp_path, monkeypatch):
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    home = re.escape(str(tmp_path / "home" / "tensorflow_datasets"))
    with pytest.raises(data.MissingDataError, match=f"got {home} without train-images"):
        data.load("fashion_mnist")
    monkeypatch.setenv("TFDS_DATA_DIR", str(write_idx(tmp_path / "elsewhere")))
    check_is_written_set(data.load("fashion_mnist"))
    check_is_written_set(data.load("fashion_mnist", write_idx(tmp_path / "gz", gz=True)))
