"""Batches that are read from records: which images, and how augmented."""

import dataclasses
import io
import itertools
import json
import os
from typing import Any

import numpy as np
import pytest
from original_files import CIFAR_PER_FILE, make_cifar_image, write_cifar
from PIL import Image

from experiments import data
from experiments.data.augmentation import augment_cifar, crop_imagenet, draw_box, resize
from experiments.data.local import find_prepared
from experiments.data.originals import ORIGINALS
from experiments.data.preparation import prepare
from experiments.data.sharding import GlobalShuffle

TRAIN = 5 * CIFAR_PER_FILE


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    prepare(ORIGINALS["cifar10"](write_cifar(folder / "from")), folder)
    return folder


def split(nodes):
    return data.split_examples(np.arange(TRAIN), nodes, None, seed=3)


def take(images, shards, count, size=10, seed=0, nodes=None, start=0):
    """Some batches of these nodes, or of all."""
    count_nodes = shards.nodes if isinstance(shards, GlobalShuffle) else len(shards)
    wanted = range(count_nodes) if nodes is None else nodes
    return list(itertools.islice(images.batches(shards, size, seed, wanted, start), count))


def assert_equal_batches(one, other):
    for first, second in zip(one, other, strict=True):
        for a, b in zip(first, second, strict=True):
            assert a.tobytes() == b.tobytes()


def index_of(image):
    """Which image of the stand-in this is a shifted, flipped part of: its mark says so."""
    ((y, x),) = np.argwhere((image[..., 1] == 1) & (image[..., 2] == 2))
    return int(image[y, x, 0])


def test_batches_are_augmented_images_of_the_nodes_shards(cifar):
    """Every image is one of its node's, with its label, and in a pass each one comes once."""
    images = data.ImageRecords("cifar10", cifar)
    assert (images.classes, images.num_train, images.num_test) == (10, TRAIN, CIFAR_PER_FILE)
    shards = split(4)
    first, second, _ = batches = take(images, shards, 3)
    pixels, labels = first
    assert pixels.shape == (4, 10, 32, 32, 3)
    assert (pixels.dtype, labels.dtype) == (np.uint8, np.int32)
    seen = [[index_of(image) for image in row] for row in pixels]
    assert sorted(itertools.chain.from_iterable(seen)) == list(range(TRAIN))
    np.testing.assert_array_equal(labels, np.array(seen) % 10)
    assert_equal_batches(batches, take(images, shards, 3))
    assert not np.array_equal(pixels, take(images, shards, 1, seed=1)[0][0])

    def list_images(batch: Any) -> set[bytes]:
        return {image.tobytes() for image in batch[0].reshape(-1, 32, 32, 3)}

    # The same images in every pass, but not the same parts of them.
    assert len(list_images(first) & list_images(second)) < TRAIN / 4


@pytest.mark.parametrize("shards", [split(4), GlobalShuffle(TRAIN, 4)], ids=["local", "global"])
def test_batches_depend_neither_on_processes_nor_on_the_start(cifar, shards):
    images = data.ImageRecords("cifar10", cifar)
    together = take(images, shards, 8, 7, 5)
    for nodes, start in (([0, 1], 0), ([2, 3], 1), ([1], 3), (range(4), 6)):
        apart = take(images, shards, 8 - start, 7, 5, nodes, start)
        assert_equal_batches(apart, [tuple(x[nodes] for x in batch) for batch in together[start:]])


def test_the_test_set_is_not_augmented(cifar):
    images = data.ImageRecords("cifar10", cifar)
    (batch,) = images.test_batches()
    pixels, labels = batch.read(np.arange(batch.size))
    numbers = pixels[:, 16, 16, 0].astype(int)
    assert sorted(numbers) == list(range(TRAIN, TRAIN + CIFAR_PER_FILE))
    for image, number in zip(pixels, numbers, strict=True):
        np.testing.assert_array_equal(image, make_cifar_image(number))
    np.testing.assert_array_equal(labels, numbers % 10)
    x = np.asarray(images.standardize(pixels))  # pyright: ignore[reportArgumentType]
    assert x.dtype == np.float32
    expected = (pixels / 255 - [0.4914, 0.4822, 0.4465]) / [0.247, 0.2435, 0.2616]
    np.testing.assert_allclose(x, expected, atol=1e-5)


def test_augmentation_reaches_every_part():
    image = Image.fromarray(make_cifar_image(0))
    parts = {augment_cifar(image, np.random.default_rng(i)).tobytes() for i in range(3000)}
    assert len(parts) == 2 * 9 * 9


def test_random_boxes_lie_in_the_image():
    rng = np.random.default_rng(0)
    areas = []
    for _ in range(500):
        left, upper, right, lower = draw_box(500, 375, rng)
        assert 0 <= left < right <= 500
        assert 0 <= upper < lower <= 375
        assert 0.73 <= (right - left) / (lower - upper) <= 1.37
        areas.append((right - left) * (lower - upper) / (500 * 375))
    assert 0.07 < min(areas) < 0.15
    assert max(areas) > 0.85
    # A strip has no part of such a shape and size, so its middle is taken.
    assert draw_box(1000, 10, np.random.default_rng(1)) == (495, 0, 505, 10)


def test_the_crop_for_tests_is_the_middle():
    left = Image.new("RGB", (512, 256))
    left.paste((255, 255, 255), (256, 0, 512, 256))
    pixels = crop_imagenet(left)
    assert pixels.shape == (224, 224, 3)
    assert pixels[:, :111].max() == 0
    assert pixels[:, 113:].min() == 255


def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size():
    """It looks the same, and the part is not enlarged."""
    y, x = np.mgrid[:900, :1203]
    pixels = np.stack([x * 255 // 1203, y * 255 // 900, (x + y) % 256], axis=-1).astype(np.uint8)
    jpeg = io.BytesIO()
    Image.fromarray(pixels).save(jpeg, "JPEG", quality=95)
    for box, size in (
        ((0, 0, 1203, 900), (301, 225)),
        ((100, 200, 550, 650), (602, 450)),
        ((100, 200, 545, 650), (1203, 900)),
    ):
        with Image.open(jpeg) as image, Image.open(jpeg) as whole:
            whole.load()
            small = resize(image, box)
            assert image.size == size
            assert small.shape == (224, 224, 3)
            difference = np.abs(small[..., :2].astype(int) - resize(whole, box)[..., :2])
            assert difference.mean() < 1.5


def test_a_corrupt_image_ends_a_run(cifar):
    images = data.ImageRecords("cifar10", cifar)
    records = [dict(images._train.source[index]) for index in range(TRAIN)]
    records[7]["image"] = records[7]["image"][:60]
    images._train = dataclasses.replace(images._train, source=records)
    with pytest.raises(data.RecordError, match=r"example 7 of train in .* must be one that can be"):
        take(images, split(1), 1, TRAIN)


def test_the_newest_version_is_read_and_must_be_whole(cifar, tmp_path):
    folder = tmp_path / "cifar10" / "3.0.2"
    folder.mkdir(parents=True)
    for path in (cifar / "cifar10" / "3.0.2").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name in ("3.0.10", "incomplete.X_4.0.0"):
        os.symlink(folder, folder.parent / name)
    assert find_prepared("cifar10", tmp_path) == folder.parent / "3.0.10"
    (record,) = folder.glob("*train*array_record*")
    record.unlink()
    with pytest.raises(data.DataError, match=f"must hold all its files, got no .*{record.name}"):
        data.ImageRecords("cifar10", tmp_path)
    info = json.loads((folder / "dataset_info.json").read_text()) | {"fileFormat": "tfrecord"}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(data.DataError, match=r"without TensorFlow.*array_record"):
        data.ImageRecords("cifar10", tmp_path)
