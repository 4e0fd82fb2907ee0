"""ImageNet: the folders train and val, with a folder of images for each class in both."""

import functools
import io
from pathlib import Path

import tensorflow_datasets as tfds
from PIL import Image

from experiments.data.local import MissingDataError
from experiments.data.prefetch import count_cores, map_ahead
from experiments.data.preparation.builder import Examples, KeyedExamples, Original
from experiments.data.reader import CorruptImages

SUFFIXES = frozenset({".jpeg", ".jpg", ".png"})
JPEG_QUALITY = 95  # of images that are something else


def open_imagenet2012(folder: Path, max_corrupt: int) -> Original:
    """Reads FOLDER/train/CLASS/IMAGE and FOLDER/val/CLASS/IMAGE; classes in alphabetical order.

    So the labels of the 1,000 official classes, n01440764 and others, are those of TensorFlow
    Datasets. Every image is decoded once. A corrupt one is named and left out; one that is not an
    RGB or grey JPEG, of which ImageNet has 23, is written as one. Files with other endings are
    counted.

    Raises:
        MissingDataError: if there is no image, or `train` and `val` have other classes.
    """
    images: dict[str, list[Path]] = {}
    ignored: list[Path] = []
    for split in ("train", "val"):
        images[split], others = _find_images(folder / split)
        ignored += others
    classes = sorted({path.parent.name for path in images["train"]})
    unknown = {path.parent.name for path in images["val"]} - set(classes)
    if unknown:
        raise MissingDataError(
            f"{folder / 'val'} must have classes of {folder / 'train'}, got {sorted(unknown)[0]}: "
            "move every validation image into the folder of its class."
        )
    corrupt = CorruptImages(max_corrupt)
    return Original(
        name="imagenet2012",
        version="5.1.0",
        features={
            "file_name": tfds.features.Text(),
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(names=classes),
        },
        splits={
            name: Examples(functools.partial(_read, images[split], corrupt), len(images[split]))
            for name, split in (("train", "train"), ("validation", "val"))
        },
        ignored=ignored,
    )


def _find_images(folder: Path) -> tuple[list[Path], list[Path]]:
    """The images of a split, and what else is in the folders of its classes."""
    paths = sorted(folder.glob("*/*"))
    images = [path for path in paths if path.suffix.lower() in SUFFIXES]
    if not images:
        raise MissingDataError(
            "--from must be a folder with train/CLASS/*.JPEG and val/CLASS/*.JPEG, got no image in "
            f"{folder}/*/."
        )
    return images, [path for path in paths if path.suffix.lower() not in SUFFIXES]


def _read(paths: list[Path], corrupt: CorruptImages) -> KeyedExamples:
    contents = map_ahead(_read_jpeg, paths, ahead=4 * count_cores())
    for path, content in zip(paths, contents, strict=True):
        if isinstance(content, Exception):
            corrupt.add(str(path), content)
            continue
        example = {"file_name": path.name, "image": content, "label": path.parent.name}
        yield f"{path.parent.name}/{path.name}", example


def _read_jpeg(path: Path) -> io.BytesIO | Exception:
    """The bytes of an image as a JPEG file, or what is wrong with it."""
    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            if image.format == "JPEG" and image.mode in ("RGB", "L"):
                return io.BytesIO(content)
            jpeg = io.BytesIO()
            image.convert("RGB").save(jpeg, "JPEG", quality=JPEG_QUALITY)
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises errors of many types
        return error
    jpeg.seek(0)
    return jpeg
