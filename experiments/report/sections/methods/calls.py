"""The sizes of calls in words, read from their options: a text says what is run."""

import itertools

from experiments.report.section import Run

PARAMETERS = 118_282  # of the perceptron on 28x28 images
IMAGES = {
    "fashion_mnist": ("Fashion-MNIST", 60_000),
    "mnist5k": ("5,000 of the digits of MNIST", 4_000),
}
"""A data set on the command line -> its title, and the number of its training images."""
WORDS = {1: "one", 2: "two", 3: "three", 4: "four"}


def read_option(run: Run, name: str) -> tuple[str, ...]:
    """The values of an option of a call; none if it is not there.

    >>> read_option(Run("a", "image", ("--seed", "0", "1", "--epochs", "2")), "--seed")
    ('0', '1')
    """
    if name not in run.arguments:
        return ()
    rest = run.arguments[run.arguments.index(name) + 1 :]
    return tuple(itertools.takewhile(lambda argument: not argument.startswith("--"), rest))


def read_number(run: Run, name: str) -> int:
    """The only value of an option that is an integer."""
    (value,) = read_option(run, name)
    return int(value)


def format_count(count: int, noun: str) -> str:
    """A number and its noun.

    >>> format_count(1, "seed"), format_count(12, "epoch")
    ('one seed', '12 epochs')
    """
    return f"{WORDS.get(count, f'{count}')} {noun}{'' if count == 1 else 's'}"


def describe_seeds(run: Run) -> str:
    """How many seeds a call has."""
    return format_count(len(read_option(run, "--seed")), "seed")


def describe_epochs(run: Run) -> str:
    """How many epochs a call has."""
    return format_count(read_number(run, "--epochs"), "epoch")


def describe_images(run: Run) -> str:
    """Model, images, nodes, length and seeds of a call of `experiments.image` on a perceptron."""
    title, count = IMAGES[read_option(run, "--dataset")[0]]
    nodes = read_number(run, "--nodes")
    batch = read_number(run, "--batch-size-per-node")
    steps = round(count * read_number(run, "--epochs") / (nodes * batch))
    return (
        f"a perceptron of {PARAMETERS:,} parameters on {title} over {nodes} nodes of {batch} "
        f"images, {describe_epochs(run)} ({steps} steps), {describe_seeds(run)}"
    )
