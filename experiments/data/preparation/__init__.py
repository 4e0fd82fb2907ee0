"""Writing data sets, from their original files, in the form of TensorFlow Datasets."""

from experiments.data.preparation.builder import Original, prepare
from experiments.data.preparation.cifar import open_cifar10
from experiments.data.preparation.imagenet import open_imagenet2012
from experiments.data.preparation.mnist import open_fashion_mnist, open_mnist

__all__ = ["ORIGINALS", "Original", "prepare"]

ORIGINALS = {
    "cifar10": open_cifar10,
    "fashion_mnist": open_fashion_mnist,
    "imagenet2012": open_imagenet2012,
    "mnist": open_mnist,
}
"""Name -> function of (folder or file, maximum of corrupt images) that returns the `Original`."""
