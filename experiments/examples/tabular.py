"""A task in one file: the kind of a wine, of three, from 13 measurements.

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

from experiments.data import divide_examples, draw_batches
from experiments.options import OpenFraction, PositiveInt
from experiments.training.main import run_program
from experiments.training.options import TrainingOptions
from experiments.training.task import Metric, Task


@dataclasses.dataclass(frozen=True)
class Options(TrainingOptions):
    """Trains a classifier of 178 wines over gossiping nodes."""

    batch_size_per_node: PositiveInt = 8
    """Wines per node and step."""
    test_fraction: OpenFraction = 0.25
    """The fraction of the wines that are for the test."""


class Wines(Task):
    """Softmax regression on standardized measurements."""

    def __init__(self, options: Options):
        measurements, kinds = wine_data()
        x = ((measurements - measurements.mean(0)) / measurements.std(0)).astype(np.float32)
        order = np.random.default_rng(0).permutation(len(x))
        test, train = np.split(order, [int(options.test_fraction * len(x))])
        self.train = x[train], kinds[train]
        self.test = x[test], kinds[test]
        self.num_examples = len(train)
        self.options = options
        self.description = f"{len(train)} wines, {len(test)} for the test"

    def init(self, seed):
        w = jax.random.normal(jax.random.key(seed), (13, 3))
        return {"params": {"w": w, "b": jnp.zeros((1, 3))}}

    def loss(self, variables, batch):
        x, kinds = batch
        losses = optax.softmax_cross_entropy_with_integer_labels(self.predict(variables, x), kinds)
        return losses.mean(), None

    def predict(self, variables, x):
        return x @ variables["params"]["w"] + variables["params"]["b"]

    def batches(self, nodes, batch_size_per_node, seed, start):
        x, kinds = self.train
        division = divide_examples(kinds, nodes.size, None, seed, self.options.shuffle)
        rows = draw_batches(division, batch_size_per_node, seed, nodes.local)
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
