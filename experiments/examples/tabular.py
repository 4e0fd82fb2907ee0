"""A task in one file: tells three kinds of wine apart by 13 measurements of each.

    python -m experiments.examples.tabular --nodes 4

The class says what is trained; options, algorithms, checkpoints, launch and output come with it.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mlxtend.data import wine_data

from experiments.data import draw_batches, split_examples
from experiments.options.checks import OpenFraction, PositiveInt
from experiments.training.main import run_program
from experiments.training.options import TrainingOptions
from experiments.training.task import Metric, Task


@dataclasses.dataclass(frozen=True)
class Options(TrainingOptions):
    """Trains a classifier of 178 wines over gossiping nodes."""

    batch_size_per_node: PositiveInt = 8
    """Wines per node and step."""
    test_fraction: OpenFraction = 0.25
    """The part of the wines that is kept for the test."""


class Wines(Task):
    """Softmax regression on standardized measurements."""

    def __init__(self, options: Options):
        measurements, kinds = wine_data()
        kinds = kinds.astype(np.int32)
        x = (measurements - measurements.mean(0)) / measurements.std(0)
        wines = np.random.default_rng(0).permutation(len(x))
        test, train = np.split(wines, [int(options.test_fraction * len(x))])
        x = x.astype(np.float32)
        self.train = x[train], kinds[train]
        self.test = x[test], kinds[test]
        self.num_examples = len(train)
        self.description = f"{len(train)} wines, {len(test)} for the test"

    def init(self, seed):
        return {
            "params": {"w": jax.random.normal(jax.random.key(seed), (13, 3)), "b": jnp.zeros(3)}
        }

    def loss(self, variables, batch):
        x, kinds = batch
        logits = self.predict(variables, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, kinds).mean(), None

    def predict(self, variables, x):
        return x @ variables["params"]["w"] + variables["params"]["b"][None]

    def batches(self, nodes, batch_size_per_node, seed, start):
        x, kinds = self.train
        shards = split_examples(kinds, nodes.size, None, seed)
        rows = draw_batches(shards, batch_size_per_node, seed, nodes.local)
        return ((x[row], kinds[row]) for row in itertools.islice(rows, start, None))

    def test_batches(self):
        return [self.test]

    def metrics(self, variables, batch):
        x, kinds = batch
        return {"accuracy": Metric(self.predict(variables, x).argmax(-1) == kinds)}


def main(arguments=None):
    """Trains, and reports."""
    run_program("experiments.examples.tabular", Options, Wines, arguments)


if __name__ == "__main__":
    main()
