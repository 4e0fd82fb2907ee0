"""The perceptron on images that several sections train over 16 nodes."""

from typing import NamedTuple

from experiments.report.section import Scale

BATCH = 32  # of a node


class Images(NamedTuple):
    """What is trained: also the numbers of a section's text.

    Attributes:
      data: the title of the data set.
      images: of the training set.
      nodes, epochs, seeds: of a run.
    """

    data: str
    images: int
    nodes: int
    epochs: int
    seeds: int

    @property
    def numbers(self) -> dict[str, object]:
        """The numbers of a text, with the steps of a run."""
        steps = round(self.images * self.epochs / (self.nodes * BATCH))
        return {**self._asdict(), "batch": BATCH, "steps": steps, "parameters": 118_282}


def find_images(scale: Scale, epochs: int, seeds: int) -> Images:
    """Returns the sizes: `epochs` of Fashion-MNIST; without it 12 times as many of the digits.

    The 60,000 images of Fashion-MNIST are 12 epochs of the 5,000 digits.
    """
    if scale.is_quick:
        return Images("5,000 of the digits of MNIST", 4_000, 8, 8, 1)
    if scale.fashion_mnist is None:
        return Images("5,000 of the digits of MNIST", 4_000, 16, 12 * epochs, seeds)
    return Images("Fashion-MNIST", 60_000, 16, epochs, seeds)


def list_arguments(scale: Scale, images: Images) -> tuple[str, ...]:
    """Returns the options of `experiments.image`.

    All nodes are on one device, which computes a perceptron faster than a device per node does.
    """
    data: tuple[str, ...] = ("--dataset", "mnist5k")
    if scale.fashion_mnist is not None and not scale.is_quick:
        data = ("--dataset", "fashion_mnist", "--data-dir", f"{scale.fashion_mnist}")
    size = ("--model", "mlp", "--nodes", f"{images.nodes}", "--batch-size-per-node", f"{BATCH}")
    size = (*size, "--placement", "vmap", "--log-every", "1000", "--epochs", f"{images.epochs}")
    return (*data, *size)


def list_seeds(count: int) -> tuple[str, ...]:
    """Returns the option of some seeds, from 0 on.

    >>> list_seeds(2)
    ('--seed', '0', '1')
    """
    return ("--seed", *map(str, range(count)))
