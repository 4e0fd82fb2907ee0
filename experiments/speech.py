"""Trains an acoustic model over gossiping nodes: RAND-PSGD's speech task, on public data.

    python -m experiments.speech --data-dir FOLDER

FOLDER contains speech_languages.npz, or DATASET.npz with `--dataset`, in the format of
`experiments.data.speech`. Bidirectional LSTM layers read windows of 21 frames (log-mel with deltas
and double deltas), as in the paper, and predict the class of the utterance at each frame. The paper
keeps the total batch at 8192 windows for any number of learners:

    python -m experiments.speech --data-dir FOLDER --nodes 16 --batch-size-per-node 512
    python -m experiments.speech --data-dir FOLDER --nodes 32 --batch-size-per-node 256
    python -m experiments.speech --data-dir FOLDER --nodes 64 --batch-size-per-node 128
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx
from experiments.data import DataError, draw_batches, split_examples
from experiments.data.prefetch import LazyBatch
from experiments.data.sharding import GlobalShuffle
from experiments.data.speech import DATASET, Windows, load_utterances
from experiments.models.acoustic import ACOUSTIC_SIZES, NUM_FRAMES, AcousticLSTM, AcousticSize
from experiments.options import DTYPES, OptionalPath, PositiveFloat, PositiveInt
from experiments.training.main import run_program
from experiments.training.options import TrainingOptions
from experiments.training.task import Metric, Task, Variables


@dataclasses.dataclass(frozen=True)
class SpeechOptions(TrainingOptions):
    """Trains an acoustic model over gossiping nodes."""

    batch_size_per_node: PositiveInt = 32
    """Windows per node and step."""
    dataset: str = DATASET
    """Name of the data set, which is DATASET.npz in --data-dir."""
    data_dir: OptionalPath = None
    """Folder that contains the data set."""
    dirichlet_alpha: PositiveFloat | None = None
    """Divide the utterances of each class over the nodes by Dirichlet(alpha); the smaller alpha,
    the more uneven. Without an alpha, utterances are shuffled."""
    frames_per_window: PositiveInt = NUM_FRAMES
    """Number of frames of a window. The windows of an utterance do not overlap."""
    model: Literal["mini", "paper"] = "mini"
    """mini has 2 LSTM layers of 2 x 64 cells and a projection to 64. paper has 6 layers of 2 x 512
    cells and a projection to 256."""
    layers: PositiveInt | None = None
    """Number of bidirectional LSTM layers, by default as in --model."""
    cells: PositiveInt | None = None
    """Number of cells of a layer in each direction, by default as in --model."""
    projection: PositiveInt | None = None
    """Width of the linear layer before the softmax, by default as in --model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_local_shuffle(self.dirichlet_alpha)

    @property
    def size(self) -> AcousticSize:
        """The size of the model, from `model` and the sizes that are given."""
        named = ACOUSTIC_SIZES[self.model]
        return AcousticSize(
            self.layers or named.layers,
            self.cells or named.cells,
            self.projection or named.projection,
        )


class SpeechClassification(Task):
    """A classifier of windows of speech, trained by the cross-entropy of each frame.

    All windows of an utterance are on one node, except with `--shuffle global`. The predicted class
    of a window has the largest mean log-probability over its frames; for an utterance the mean is
    over all its windows.
    """

    def __init__(self, options: SpeechOptions):
        self.options = options
        length = options.frames_per_window
        self.train = Windows(load_utterances(options.dataset, options.data_dir, "train"), length)
        self.test = Windows(load_utterances(options.dataset, options.data_dir, "test"), length)
        for windows in (self.train, self.test):
            if not len(windows):
                longest = windows.utterances.lengths.max()
                raise DataError(
                    f"--frames-per-window must be at most {longest}, the frames of the longest "
                    f"utterance, got {length}: lower it."
                )
        self.num_examples = len(self.train)
        dtype, param_dtype = DTYPES[options.precision]
        classes = self.train.utterances.classes
        self.model: Any = AcousticLSTM(
            len(classes), options.size, dtype, param_dtype, options.remat
        )
        self.description = (
            f"{options.dataset}, {len(self.train):,} training and {len(self.test):,} test windows "
            f"of {length} frames with {self.train.num_features} features, {len(classes)} classes; "
            f"{self.train.num_too_short:,} training and {self.test.num_too_short:,} test "
            "utterances are shorter than a window and left out"
        )

    def init(self, seed: int) -> Variables:
        return self.model.init(jax.random.key(seed), self.train.read(np.arange(1)))

    def loss(self, variables: Variables, batch: Any) -> tuple[jax.Array, Any]:
        frames, labels = batch
        logits = self.model.apply(variables, frames)
        labels = jnp.broadcast_to(labels[:, None], logits.shape[:2])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), None

    def split_windows(self, nodes: int, seed: int) -> list[np.ndarray]:
        """Divides the utterances over the nodes; returns the windows of each node."""
        windows = self.train
        usable = np.flatnonzero(windows.counts)
        labels = windows.utterances.labels[usable]
        shards = split_examples(labels, nodes, self.options.dirichlet_alpha, seed)
        return [windows.list_windows(usable[shard]) for shard in shards]

    def batches(
        self, nodes: gx.Nodes, batch_size_per_node: int, seed: int, start: int
    ) -> Iterator[Any]:
        if self.options.shuffle == "global":
            division = GlobalShuffle(len(self.train), nodes.size)
        else:
            division = self.split_windows(nodes.size, seed)
        rows = draw_batches(division, batch_size_per_node, seed, nodes.local)
        windows = self.train
        labels = windows.labels
        return ((windows.read(row), labels[row]) for row in itertools.islice(rows, start, None))

    def test_batches(self) -> Iterator[LazyBatch]:
        """Yields windows `[E, W, T, features]`, and each utterance's window count and label."""
        usable = np.flatnonzero(self.test.counts)
        longest = self.test.counts.max()
        size = max(self.options.nodes, self.options.global_batch_size // longest)
        for start in range(0, len(usable), size):
            utterances = usable[start : start + size]
            yield LazyBatch(len(utterances), functools.partial(self.read_test, utterances))

    def read_test(self, utterances: np.ndarray, chosen: np.ndarray) -> Any:
        """Returns some of these test utterances in the form of `test_batches`."""
        windows = self.test
        utterances = utterances[chosen]
        counts = windows.counts[utterances]
        rows = windows.first_windows[utterances][..., None] + np.arange(windows.counts.max())
        is_window = np.arange(windows.counts.max()) < counts[..., None]
        labels = windows.utterances.labels[utterances]
        return windows.read(np.where(is_window, rows, 0)), counts.astype(np.int32), labels

    def metrics(self, variables: Variables, batch: Any) -> dict[str, Metric]:
        windows, counts, labels = batch
        logits = self.model.apply(variables, windows.reshape(-1, *windows.shape[2:]))
        scores = jax.nn.log_softmax(logits).mean(axis=1).reshape(*windows.shape[:2], -1)
        is_window = jnp.arange(windows.shape[1])[None] < counts[:, None]
        are_correct = (scores.argmax(axis=-1) == labels[:, None]) & is_window
        utterance_scores = jnp.where(is_window[..., None], scores, 0.0).sum(axis=1)
        return {
            "window_accuracy": Metric(are_correct.sum(axis=1), counts),
            "utterance_accuracy": Metric(utterance_scores.argmax(axis=-1) == labels),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, trains, and reports."""
    run_program("experiments.speech", SpeechOptions, SpeechClassification, arguments)


if __name__ == "__main__":
    main()
