"""Trains your own model on your own data, which a function of yours returns as a task.

    python -m experiments.own --task my_study:task

`ArrayTask` makes a task of a few functions and arrays; docs/study.md shows one. For anything else
the function may return a `Task` that you have written.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import gossipjax as gx
from experiments.data.sharding import divide_examples, draw_batches
from experiments.options import PositiveFloat
from experiments.training.main import run_program
from experiments.training.methods import import_function
from experiments.training.options import TrainingOptions
from experiments.training.task import Metric, Task, Variables

TEST_BATCH_SIZE = 2000


@dataclasses.dataclass(frozen=True)
class OwnOptions(TrainingOptions):
    """Trains your own model on your own data over gossiping nodes."""

    task: str = ""
    """MODULE:FUNCTION: a function of these options that returns the task, in a module of the
    current folder."""
    dirichlet_alpha: PositiveFloat | None = None
    """Divide the examples of each class over the nodes by Dirichlet(alpha); the smaller alpha, the
    more uneven. Without an alpha, examples are shuffled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_local_shuffle(self.dirichlet_alpha)


class ArrayTask(Task):
    """A model that is a few functions of one node, and data that fit into memory.

    Args:
      options: what the function of `--task` is given.
      init: `key -> params`, the model at which all nodes start.
      loss: `(params, batch) -> mean loss`, a scalar.
      metrics: `(params, batch) -> {name: values}`, a value per example, `[B]`.
      train: a pytree of arrays `[E, ...]`; a batch has B of their rows.
      test: the same of the test set.
      labels: the class of each training example, `[E]`; only `--dirichlet-alpha` needs it.
    """

    def __init__(
        self,
        options: OwnOptions,
        *,
        init: Callable[[jax.Array], Any],
        loss: Callable[[Any, Any], jax.Array],
        metrics: Callable[[Any, Any], Mapping[str, jax.Array]],
        train: Any,
        test: Any,
        labels: Any = None,
    ):
        if options.dirichlet_alpha is not None and labels is None:
            raise ValueError(
                "--dirichlet-alpha needs the class of each training example, got labels=None: give "
                "ArrayTask its labels, or leave the option out."
            )
        self._init = init
        self._loss = loss
        self._metrics = metrics
        self._options = options
        self._train, self._test = jax.tree.map(np.asarray, (train, test))
        self.num_examples = _count_examples("train", self._train)
        num_test = _count_examples("test", self._test)
        self._labels = np.arange(self.num_examples) if labels is None else np.asarray(labels)
        self.description = (
            f"{options.task}, {self.num_examples:,} training and {num_test:,} test examples"
        )

    def init(self, seed: int) -> Variables:
        return {"params": self._init(jax.random.key(seed))}

    def loss(self, variables: Variables, batch: Any) -> tuple[jax.Array, None]:
        return self._loss(variables["params"], batch), None

    def batches(
        self, nodes: gx.Nodes, batch_size_per_node: int, seed: int, start: int
    ) -> Iterator[Any]:
        given = self._options
        division = divide_examples(
            self._labels, nodes.size, given.dirichlet_alpha, seed, given.shuffle
        )
        rows = draw_batches(division, batch_size_per_node, seed, nodes.local)
        return (_take(self._train, row) for row in itertools.islice(rows, start, None))

    def test_batches(self) -> Iterator[Any]:
        for start in range(0, _count_examples("test", self._test), TEST_BATCH_SIZE):
            yield _take(self._test, slice(start, start + TEST_BATCH_SIZE))

    def metrics(self, variables: Variables, batch: Any) -> dict[str, Metric]:
        found = self._metrics(variables["params"], batch)
        return {name: Metric(values) for name, values in found.items()}


def _take(tree: Any, rows: Any) -> Any:
    return jax.tree.map(lambda array: array[rows], tree)


def _count_examples(name: str, arrays: Any) -> int:
    sizes = {np.shape(array)[:1] for array in jax.tree.leaves(arrays)}
    if len(sizes) != 1 or sizes & {(), (0,)}:
        raise ValueError(
            f"the arrays of {name} must have a row for each of the same examples, got shapes "
            f"{[np.shape(array) for array in jax.tree.leaves(arrays)]}."
        )
    return sizes.pop()[0]


def make_task(options: OwnOptions) -> Task:
    """Returns what the user's function makes."""
    task = import_function(options.task, "--task")(options)
    if not isinstance(task, Task):
        raise ValueError(
            f"--task {options.task} must return a task, got {type(task).__name__}: "
            "experiments.own.ArrayTask makes one."
        )
    return task


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, trains, and reports."""
    run_program("experiments.own", OwnOptions, make_task, arguments)


if __name__ == "__main__":
    main()
