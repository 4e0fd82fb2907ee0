"""The protocol of a task. A task is one class in one file; this folder serves all tasks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

import gossipjax as gx

Variables = dict[str, Any]
"""A model `{"params": pytree}`, with `"batch_stats"` if its normalization layers have any."""


DecayMask = Callable[[Any], Any]
"""Maps a pytree of parameters to the same tree of booleans: True if weight decay applies."""


class Metric(NamedTuple):
    """A metric of a batch by example. The value of the metric is `sum(totals) / sum(counts)`."""

    totals: jax.Array  # `[B]`
    counts: jax.Array | None = None  # `[B]`, such as the words of each example; None is 1 for each


class Examination(NamedTuple):
    """What a task finds out about a whole model."""

    metrics: dict[str, float]  # by name, as those of `Task.metrics`
    samples: Sequence[str] = ()  # lines for people, such as translations
    details: dict[str, Any] = {}  # noqa: RUF012  # further entries of the run in `summary.json`
    texts: dict[str, Sequence[str]] = {}  # noqa: RUF012  # name -> the lines of OUT/texts/RUN/NAME.txt


@runtime_checkable
class Task(Protocol):
    """A model, its loss and its data, which is everything that `train` does not know.

    `loss` and `metrics` see one node: `[...]` is the shape of one node's array, and B is the size
    of its batch.

    Attributes:
      description: the data set and its size, for the first line that a program prints. A run can be
        resumed only with the same description and `num_examples`, so both must not depend on the
        number of nodes.
      num_examples: the number of training examples, which all nodes together use in an epoch.
      decay_mask: to which parameters weight decay applies; None means all.
    """

    description: str
    num_examples: int
    decay_mask: DecayMask | None = None

    def init(self, seed: int) -> Variables:
        """Returns the model at which all nodes start, without an axis for the nodes."""
        ...

    def loss(self, variables: Variables, batch: Any) -> tuple[jax.Array, Any]:
        """Returns the mean loss over a batch (a scalar), and the new `batch_stats` or None."""
        ...

    def batches(
        self, nodes: gx.Nodes, batch_size_per_node: int, seed: int, start: int
    ) -> Iterator[Any]:
        """Yields batches of this process's nodes without end: arrays `[len(nodes.local), B, ...]`.

        The examples are divided over all `nodes.size` nodes. The same seed gives the same division
        and the same batches. A resumed run skips the first `start` batches.
        """
        ...

    def make_shapes(self, nodes: gx.Nodes, batch_size_per_node: int) -> Sequence[Any]:
        """Returns a batch of each shape that `batches` makes, or nothing if there is one shape.

        The step is compiled for each shape before training, so there should be few. Override this
        if, for example, sentences are padded to one of several lengths.
        """
        return ()

    def test_batches(self) -> Iterable[Any]:
        """Returns the test set in one or several batches of arrays `[E, ...]`, of any sizes E.

        If a batch takes time to make, return a `LazyBatch`: each process then reads only the
        examples of its nodes.
        """
        ...

    def metrics(self, variables: Variables, batch: Any) -> dict[str, Metric]:
        """Returns the metrics of a test batch by name, for example `{"accuracy": Metric(correct)}`.

        If `test_batches` returns a validation set, names start with `valid_`.
        """
        ...

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Returns the metrics to report, given the means of `metrics` over the test set.

        By default it returns the means. Override it for example for a perplexity, `exp` of the mean
        loss.
        """
        return means

    def examine(self, variables: Variables, is_last: bool) -> Examination | None:
        """Returns results that need one whole model, for example a BLEU score, or None.

        Every process calls it, outside of the measured time, whenever the average model is
        evaluated. `variables` have no axis for the nodes. `is_last` is true at the end of training.
        """
        return None

    def save(self, folder: Path) -> None:
        """Saves into `folder` what models need besides parameters, for example a tokenizer.

        Process 0 calls it once, before training.
        """
        return
