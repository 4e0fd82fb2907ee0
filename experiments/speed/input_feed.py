"""Images per second that the input of a training program delivers, compared with decoding alone.

    python -m experiments.speed local input --dataset cifar10 --data-dir DATA

Takes training batches from a prepared data set as `experiments.image` does, but without a training
step: records are read, decoded and augmented by threads, and joined to batches of all nodes. The
upper bound is the speed of one thread that only decodes images which are in memory, times the
cores. It is measured before, because the threads of the input use every core, and go on between two
turns. README.md in this folder lists the columns and fields.
"""

import dataclasses
import io
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import data, results
from experiments.data.prefetch import count_cores, prefetch, require_memory
from experiments.options import OptionalPath, PositiveFloat, PositiveInt, check_fields
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.speed.timing import summarize_samples

SEED = 0
MAX_DECODED = 200  # different images that are decoded from memory
WARM_UP = 4  # batches: those that are kept ready, so that none was made before the clock started


@dataclasses.dataclass(frozen=True)
class Options:
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
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
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


def measure_dataset(
    images: data.ImageRecords, options: Options, report_turn: Callable[[], None]
) -> Record:
    """Measures one data set; returns the object in `runs`.

    Args:
      images: the data set.
      options: of the program.
      report_turn: is called after each turn.
    """
    contents = list(itertools.islice(images.read_encoded(), MAX_DECODED))
    decode = make_decoder(contents)
    seconds = options.turn_seconds
    decoded = [measure_rate(decode, seconds / 4) for _ in range(options.turns)]
    decoded_per_second = float(np.median(decoded))
    feed = make_feed(prefetch(make_batches(images, options)))
    for _ in range(WARM_UP):
        feed()
    rates = []
    for _ in range(options.turns):
        rates.append(measure_rate(feed, seconds))
        report_turn()
    cores = count_cores()
    return {
        "dataset": images.name,
        "cores": cores,
        **summarize_samples("images_per_second", rates),
        "decoded_per_second": decoded_per_second,
        "ratio": float(np.median(rates)) / (cores * decoded_per_second),
        "encoded_bytes": float(np.mean([len(content) for content in contents])),
        "images": images.num_train,
        "corrupt_images": images.count_corrupt(),
    }


def make_table(runs: list[Record]) -> Table:
    """A row per data set."""
    caption = "decoding only: one thread, nothing else; x bound: images/s over that times the cores"
    table = Table(
        box=SIMPLE_HEAD, title="Input without a training step", caption=caption, padding=0
    )
    table.add_column("data set", no_wrap=True)
    headers = ("images/s", "10-90 %", "cores", "decoding\nonly", "x bound", "KB/image")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run["dataset"],
            f"{run['images_per_second']:,.0f}",
            f"{run['images_per_second_p10']:,.0f}-{run['images_per_second_p90']:,.0f}",
            f"{run['cores']}",
            f"{run['decoded_per_second']:,.0f}",
            f"{run['ratio']:.2f}",
            f"{run['encoded_bytes'] / 1e3:.1f}",
        )
    return table


def measure_input(options: Options) -> None:
    """Images per second of the input of experiments.image, compared with decoding alone."""
    out = None
    with exit_on_error(lambda: out):
        sets = [open_dataset(name, options) for name in options.dataset]
        out = results.create_run_dir("speed-input", options.out, options.overwrite)
        console = Console()
        runs: list[Record] = []
        with results.make_progress_bar(console) as bar:
            task = bar.add_task("input", total=len(sets) * options.turns, status="")
            for images in sets:
                bar.update(task, status=images.name)
                runs.append(measure_dataset(images, options, lambda: bar.advance(task)))
                results.write_summary(out, dataclasses.asdict(options), {}, runs)
        console.print(make_table(runs))
        console.print(f"Results: {out}", soft_wrap=True)
