"""The runs of an experiment, and the number of steps and the learning rate of each."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import optax

from experiments.training.algorithms import Method, MethodOptions, make_method
from experiments.training.optimizers import make_lr_schedule, make_optimizer
from experiments.training.options import TrainingOptions


@dataclasses.dataclass(frozen=True)
class Run:
    """One algorithm with one seed.

    Attributes:
      title: the algorithm as it was given, `ALGORITHM` or `ALGORITHM@TOPOLOGY`.
      seed: of the initial model, the division of the data and the batches.
      method: algorithm, topology and optimizer.
    """

    title: str
    seed: int
    method: Method

    @property
    def name(self) -> str:
        """The name of the run in the files."""
        return f"{self.method.algorithm}, {self.method.topology}, seed {self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """Algorithm and seed: arguments of `Plan.make_method`, and metadata of every checkpoint."""
        return {"algorithm": self.title, "seed": self.seed}

    @property
    def folder_name(self) -> str:
        """The name of the folder of its checkpoints: letters, digits, `_`, `.` and `-`."""
        words = "".join(c if c.isalnum() or c in "_." else " " for c in self.name)
        return "-".join(words.split())


@dataclasses.dataclass(frozen=True)
class Plan:
    """Steps, learning rate and methods of the runs, from the options and the size of the data.

    Attributes:
      options: those of the program, with the number of nodes at the start.
      num_examples: size of the training set.
    """

    options: TrainingOptions
    num_examples: int

    @functools.cached_property
    def steps(self) -> int:
        """Steps of each run."""
        examples = self.options.epochs * self.num_examples
        return max(1, round(examples / self.options.global_batch_size))

    @functools.cached_property
    def learning_rate(self) -> optax.Schedule:
        """The learning rate as a function of the step."""
        options = self.options
        return make_lr_schedule(
            options.lr_schedule, options.learning_rate, self.steps, options.global_batch_size
        )

    @functools.cached_property
    def eval_steps(self) -> frozenset[int]:
        """The steps after which the average model is evaluated: the ends of the epochs."""
        epochs_per_step = self.options.global_batch_size / self.num_examples
        ends = {round(epoch / epochs_per_step) for epoch in range(1, self.options.epochs)}
        return frozenset((ends - {0}) | {self.steps})

    def intervals(self, start: int) -> Iterator[range]:
        """Divides the steps from `start` on, at lines of metrics, evaluations and checkpoints."""
        options = self.options
        ends = set(self.eval_steps)
        for every in (options.log_every, options.checkpoint_every):
            if every is not None:
                ends |= set(range(every, self.steps, every))
        return split_at(sorted(end for end in ends if end > start), start)

    def make_method(self, algorithm: str, seed: int, nodes: int) -> Method:
        """Returns the method of a run with this algorithm and seed over this number of nodes."""
        options = self.options
        method_options = MethodOptions(
            nodes=nodes,
            steps=self.steps,
            seed=seed,
            local_steps=options.local_steps,
            wire_dtype=options.wire_dtype,
            staleness=options.staleness,
            switch_at=options.switch_at,
        )
        optimizer = make_optimizer(options.optimizer, self.learning_rate, options.weight_decay)
        return make_method(algorithm, method_options, optimizer, options.topology)

    def make_runs(self, nodes: int) -> list[Run]:
        """Returns a run for each algorithm and seed.

        Raises:
          ValueError: if a method is impossible, or two names mean the same run.
        """
        options = self.options
        runs = [
            Run(algorithm, seed, self.make_method(algorithm, seed, nodes))
            for algorithm, seed in itertools.product(options.algorithm, options.seed)
        ]
        if len({run.name for run in runs}) < len(runs):
            raise ValueError(
                "--algorithm must be different algorithms or topologies, got the same twice: "
                f"{', '.join(options.algorithm)}."
            )
        return runs


def split_at(ends: Sequence[int], start: int) -> Iterator[range]:
    """Returns the range from `start` to the first of the sorted `ends`, and those between them.

    >>> list(split_at([4, 5, 8], start=2))
    [range(2, 4), range(4, 5), range(5, 8)]
    """
    return itertools.starmap(range, itertools.pairwise([start, *ends]))
