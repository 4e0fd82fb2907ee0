"""The sizes, standardization and standard augmentation of CIFAR-10 and ImageNet."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image

CIFAR_SIZE = 32
CIFAR_PADDING = 4
IMAGENET_SIZE = 224
IMAGENET_RESIZED = 256
MIN_AREA = 0.08
MAX_ASPECT = 4 / 3
CROP_ATTEMPTS = 10

Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels."""


class Recipe(NamedTuple):
    """What is done to the images of a data set."""

    test_split: str
    size: int  # height and width of the results
    mean: tuple[float, float, float]  # of each channel, of values from 0 to 1
    std: tuple[float, float, float]
    test_batch_size: int
    augment: Callable[..., np.ndarray]  # (image, rng) -> uint8 `[size, size, 3]`, for training
    crop: Callable[[Image.Image], np.ndarray]  # image -> the same, for tests


def crop_cifar(image: Image.Image) -> np.ndarray:
    """Returns the whole image; raises `ValueError` if it is not 32x32."""
    if image.size != (CIFAR_SIZE, CIFAR_SIZE):
        raise ValueError(f"an image must be 32x32, got {image.width}x{image.height}.")
    return np.asarray(image.convert("RGB"))


def augment_cifar(image: Image.Image, rng: np.random.Generator) -> np.ndarray:
    """Pads 4 black pixels on each side, cuts 32x32 out at random, flips half of the images.

    He et al., CVPR 2016, arXiv:1512.03385, section 4.2.
    """
    edge = 2 * CIFAR_PADDING
    padded = np.zeros((CIFAR_SIZE + edge, CIFAR_SIZE + edge, 3), np.uint8)
    padded[CIFAR_PADDING:-CIFAR_PADDING, CIFAR_PADDING:-CIFAR_PADDING] = crop_cifar(image)
    y, x, flip = rng.integers(0, (edge + 1, edge + 1, 2))
    pixels = padded[y : y + CIFAR_SIZE, x : x + CIFAR_SIZE]
    return pixels[:, ::-1] if flip else pixels


def augment_imagenet(image: Image.Image, rng: np.random.Generator) -> np.ndarray:
    """Cuts a random rectangle out, resizes it to 224x224, flips half of the images.

    Goyal et al., 2017, arXiv:1706.02677, section 5.1.
    """
    pixels = resize(image, draw_box(image.width, image.height, rng))
    return pixels[:, ::-1] if rng.integers(2) else pixels


def draw_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """Draws a rectangle of 8 % to 100 % of the area, with sides 3:4 to 4:3.

    After 10 attempts that do not fit into the image, it is the largest square in the middle.
    Szegedy et al., CVPR 2015, arXiv:1409.4842, section 6.
    """
    for _ in range(CROP_ATTEMPTS):
        area = width * height * rng.uniform(MIN_AREA, 1)
        aspect = MAX_ASPECT ** rng.uniform(-1, 1)
        w = round(math.sqrt(area * aspect))
        h = round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            x = int(rng.integers(width - w + 1))
            y = int(rng.integers(height - h + 1))
            return x, y, x + w, y + h
    return find_middle(width, height, 1)


def crop_imagenet(image: Image.Image) -> np.ndarray:
    """Resizes the shorter side to 256 and cuts 224x224 out of the middle, in one step."""
    return resize(image, find_middle(*image.size, IMAGENET_SIZE / IMAGENET_RESIZED))


def find_middle(width: int, height: int, fraction: float) -> Box:
    """Returns the square in the middle whose side is a fraction of the shorter side.

    >>> find_middle(400, 200, 0.5)
    (150.0, 50.0, 250.0, 150.0)
    """
    half = min(width, height) * fraction / 2
    return width / 2 - half, height / 2 - half, width / 2 + half, height / 2 + half


def resize(image: Image.Image, box: Box) -> np.ndarray:
    """Returns a part of an image as uint8 `[224, 224, 3]`, by bilinear interpolation.

    A JPEG is decoded at a half, a quarter or an eighth of its size where the part is still at least
    224x224, which takes less time.
    """
    width, height = image.size
    left, upper, right, lower = box
    smallest = (
        math.ceil(width * IMAGENET_SIZE / (right - left)),
        math.ceil(height * IMAGENET_SIZE / (lower - upper)),
    )
    image.draft("RGB", smallest)  # nothing, for other formats and for what is decoded
    x = image.width / width
    y = image.height / height
    if image.mode != "RGB":
        image = image.convert("RGB")
    size = (IMAGENET_SIZE, IMAGENET_SIZE)
    box = (left * x, upper * y, right * x, lower * y)
    return np.asarray(image.resize(size, Image.Resampling.BILINEAR, box=box))


RECIPES = {
    "cifar10": Recipe(
        test_split="test",
        size=CIFAR_SIZE,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        test_batch_size=1000,
        augment=augment_cifar,
        crop=crop_cifar,
    ),
    "imagenet2012": Recipe(
        test_split="validation",
        size=IMAGENET_SIZE,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        test_batch_size=200,
        augment=augment_imagenet,
        crop=crop_imagenet,
    ),
}
"""The data sets that are read from records. Mean and standard deviation are of the training
images."""
