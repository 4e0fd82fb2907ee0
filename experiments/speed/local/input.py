"""Images per second that the input of a training program delivers, compared with decoding alone.

    python -m experiments.speed local input --dataset cifar10 --data-dir DATA

Takes training batches from a prepared data set as `experiments.image` does, but without a training
step: records are read, decoded and augmented by threads, and joined to batches of all nodes. The
upper bound is the speed of one thread that only decodes images which are in memory, times the
cores. It is measured before, because the threads of the input use every core, and go on between two
turns.
"""

import dataclasses
import io
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from PIL import Image
from rich.table import Table

import gossipjax as gx
from experiments import data
from experiments.data.prefetch import count_cores, require_memory
from experiments.options import OptionalPath, PositiveFloat, PositiveInt
from experiments.results import Record
from experiments.speed import harness

SEED = 0
MAX_DECODED = 200  # different images that are decoded from memory
WARM_UP = 4  # batches: those that are kept ready, so that none was made before the clock started


@dataclasses.dataclass(frozen=True)
class Options(harness.CheckOptions):
    """Options of the measurement of the input."""

    dataset: tuple[Literal["cifar10", "imagenet2012"], ...] = ("cifar10", "imagenet2012")
    """One or several prepared data sets."""
    data_dir: OptionalPath = None
    """Folder of TensorFlow Datasets, as in experiments.image."""
    nodes: PositiveInt = 4
    """Number of nodes that the images are divided over."""
    batch_size_per_node: PositiveInt = 32
    """Images per node and batch."""
    turns: PositiveInt = 9
    """Measurements, of which the median is reported."""
    turn_seconds: PositiveFloat = 2.0
    """Length of a turn; that of decoding alone is a quarter of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.dataset or len(set(self.dataset)) < len(self.dataset):
            raise ValueError(
                "--dataset must be one or several different data sets, got "
                f"{' '.join(self.dataset) or 'none'}."
            )


def measure_rate(run: Callable[[], int], seconds: float) -> float:
    """Calls `run`, which returns a number of images, for a time; returns the images per second."""
    count = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or not count:
        count += run()
    return count / elapsed


def make_decoder(contents: list[bytes]) -> Callable[[], int]:
    """Returns a function that decodes the next of the images, in this thread."""
    following = itertools.cycle(contents)

    def decode() -> int:
        with Image.open(io.BytesIO(next(following))) as image:
            image.load()
        return 1

    return decode


def make_feed(batches: Iterator[Any]) -> Callable[[], int]:
    """Returns a function that takes the next batch, images `[N, B, ...]` and labels `[N, B]`."""
    return lambda: next(batches)[1].size


def open_dataset(name: str, options: Options) -> data.ImageRecords:
    """Opens a data set.

    Raises:
      ValueError: if it is not prepared, has fewer images than nodes, or its batches do not fit into
        memory.
    """
    images = data.ImageRecords(name, options.data_dir)
    examples = next(make_batches(images, dataclasses.replace(options, batch_size_per_node=1)))
    require_memory(examples, options.batch_size_per_node)
    return images


def make_batches(images: data.ImageRecords, options: Options) -> Iterator[Any]:
    """Returns infinite training batches of all nodes."""
    shards = data.split_examples(np.arange(images.num_train), options.nodes, None, SEED)
    return images.batches(shards, options.batch_size_per_node, SEED, range(options.nodes), 0)


def measure_dataset(images: data.ImageRecords, options: Options) -> list[Record]:
    """Measures one data set; returns the one object in `runs`."""
    contents = list(itertools.islice(images.read_encoded(), MAX_DECODED))
    decode = make_decoder(contents)
    seconds = options.turn_seconds
    decoded = [measure_rate(decode, seconds / 4) for _ in range(options.turns)]
    decoded_per_second = float(np.median(decoded))
    feed = make_feed(gx.prefetch(make_batches(images, options)))
    for _ in range(WARM_UP):
        feed()
    rates = [measure_rate(feed, seconds) for _ in range(options.turns)]
    cores = count_cores()
    run = {
        "dataset": images.name,
        "cores": cores,
        **harness.summarize_samples("images_per_second", rates),
        "decoded_per_second": decoded_per_second,
        "ratio": float(np.median(rates)) / (cores * decoded_per_second),
        "encoded_bytes": float(np.mean([len(content) for content in contents])),
        "images": images.num_train,
        "corrupt_images": images.count_corrupt(),
    }
    return [run]


def make_table(runs: Sequence[Record]) -> Table:
    """A row per data set."""
    columns: dict[str, harness.Cell] = {
        "data set": "{dataset}",
        "images/s": "{images_per_second:,.0f}",
        "10-90 %": "{images_per_second_p10:,.0f}-{images_per_second_p90:,.0f}",
        "cores": "{cores}",
        "decoding\nonly": "{decoded_per_second:,.0f}",
        "x bound": "{ratio:.2f}",
        "KB/image": harness.scale("encoded_bytes", 1e3, ".1f"),
    }
    caption = "decoding only: one thread, nothing else; x bound: images/s over that times the cores"
    return harness.make_table("Input without a training step", caption, columns, runs)


def measure_input(options: Options) -> None:
    """Images per second of the input of experiments.image, compared with decoding alone."""

    def make_plan() -> harness.Plan:
        sets = [open_dataset(name, options) for name in options.dataset]
        cases = [(images.name, partial(measure_dataset, images, options)) for images in sets]
        return harness.Plan(f"{count_cores()} cores", cases, make_table)

    harness.run_check("input", options, make_plan)
