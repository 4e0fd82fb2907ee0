"""The protocol of a task: one class in one file. The rest of this folder serves all tasks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

import gossipjax as gx

Variables = dict[str, Any]
"""A model: `{"params": pytree}`, and `"batch_stats"` if its normalization layers have any."""


DecayMask = Callable[[Any], Any]
"""Pytree of parameters -> the same tree of booleans, True where weight decay applies."""


class Metric(NamedTuple):
    """A metric of a batch, example by example; its value is `sum(totals) / sum(counts)`."""

    totals: jax.Array  # `[B]`
    counts: jax.Array | None = None  # `[B]`, such as the words of each example; None is 1 for each


class Examination(NamedTuple):
    """What a task finds out about a whole model."""

    metrics: dict[str, float]  # by name, as those of `Task.metrics`
    samples: Sequence[str] = ()  # lines for people, such as translations
    details: dict[str, Any] = {}  # noqa: RUF012  # further entries of the run in `summary.json`
    texts: dict[str, Sequence[str]] = {}  # noqa: RUF012  # name -> the lines of OUT/texts/RUN/NAME.txt


class Task(Protocol):
    """A model, its loss and its data: everything that `train` does not know.

    `loss` and `metrics` are written from one node's point of view; `[...]` is the shape of one
    node's array, B the size of its batch.

    Attributes:
      description: the data set and its size, for the first line that a program prints. A run is
        resumed only with the same description and `num_examples`, so they may not depend on the
        nodes that it goes on with.
      num_examples: number of training examples; an epoch is as many, all nodes together.
      decay_mask: which parameters weight decay applies to; None is all.
    """

    description: str
    num_examples: int
    decay_mask: DecayMask | None = None

    def init(self, seed: int) -> Variables:
        """Returns the model at which all nodes start, without an axis for the nodes."""
        ...

    def loss(self, variables: Variables, batch: Any) -> tuple[jax.Array, Any]:
        """Returns the mean loss over a batch, a scalar, and the new `batch_stats`, or None."""
        ...

    def batches(
        self, nodes: gx.Nodes, batch_size_per_node: int, seed: int, start: int
    ) -> Iterator[Any]:
        """Returns infinite batches of this process's nodes: arrays `[len(nodes.local), B, ...]`.

        The examples are divided over all `nodes.size` nodes. The same seed gives the same division
        and the same batches; `start` of them are skipped, for a run that is resumed.
        """
        ...

    def make_shapes(self, nodes: gx.Nodes, batch_size_per_node: int) -> Sequence[Any]:
        """Returns a batch of each shape that `batches` makes; none if all have the same.

        The step is compiled for each of them before training, so they should be few. Override it
        for such as sentences, which are padded to one of several lengths.
        """
        return ()

    def test_batches(self) -> Iterable[Any]:
        """Returns the test set: one or several batches of arrays `[E, ...]`, of any sizes E.

        What takes time to make is a `LazyBatch`: each process then reads the examples of its nodes.
        """
        ...

    def metrics(self, variables: Variables, batch: Any) -> dict[str, Metric]:
        """Returns the metrics of a test batch by name, such as `{"accuracy": Metric(correct)}`.

        Where `test_batches` are a validation set, names start with `valid_`.
        """
        ...

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Returns what is reported, given the means of `metrics` over the test set: the same.

        Override it for a function of them, such as a perplexity, `exp` of the mean loss per word.
        """
        return means

    def examine(self, variables: Variables, is_last: bool) -> Examination | None:
        """Returns what needs one whole model, such as a BLEU score; None for nothing.

        Called on every process, outside of the measured time, whenever the average model is
        evaluated. `variables` have no axis for the nodes; `is_last` is at the end of the training.
        """
        return None

    def save(self, folder: Path) -> None:
        """Saves what the models need beside their parameters into the folder of the results.

        Called once, by process 0, before training. Override it for such as a tokenizer.
        """
        return
