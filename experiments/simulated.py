"""Trains simulated nodes on a small task in one program, for studies of many short runs.

All nodes draw their own batches from the same examples, with replacement.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.language import LanguageModeling, LanguageOptions
from experiments.options import (
    OptionalPath,
    OutputOptions,
    PositiveInt,
    Seed,
    require_different,
)
from experiments.perceptron import Images, compute_loss, init_perceptron, load_images

MOMENTUM = 0.9
WATCHED = 5_000  # images by which a loss is judged
WATCHED_SEQUENCES = 256

Batch = Any
"""Arrays `[B, ...]`."""
Transform = Callable[[Any, Any], optax.GradientTransformationExtraArgs]
"""Makes the chain of a method from the rate, and the part of the run, below 1, that is over."""


class Task(NamedTuple):
    """What nodes learn."""

    init: Callable[[jax.Array], Any]  # the parameters for a key
    compute_loss: Callable[[Any, Batch], jax.Array]  # of parameters and a batch, in nats
    examples: Batch  # of which nodes draw batches
    watched: Batch  # by which the loss is judged
    make_optimizer: Callable[[Any], optax.GradientTransformation]  # of a rate


@dataclasses.dataclass(frozen=True)
class SimulatedOptions(OutputOptions):
    """The options of a study of simulated nodes; `GRID` names those that make its cells."""

    GRID: ClassVar[tuple[str, ...]] = ()
    batch_size_per_node: PositiveInt = 32
    """Images, or sequences of 32 tokens, per node and step."""
    fashion_mnist: OptionalPath = None
    """Folder with the four files of Fashion-MNIST. Without the folder, nodes train on 4,000 MNIST
    digits.
    """
    seed: tuple[Seed, ...] = (0, 1, 2)
    """One or several seeds for models and batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_different(self, *self.GRID, "seed")


def make_image_task(images: Images, hidden: int) -> Task:
    """Returns a perceptron that classifies images, by SGD with Nesterov momentum."""
    return Task(
        lambda key: init_perceptron(key, images.pixels, hidden),
        compute_loss,
        images.train,
        jax.tree.map(lambda x: x[:WATCHED], images.train),
        lambda rate: optax.sgd(rate, momentum=MOMENTUM, nesterov=True),
    )


def make_language_task() -> Task:
    """Returns the smallest Transformer, which predicts Python's manual, by Adam."""
    small = LanguageOptions(model="pico", vocabulary_size=512, sequence_length=32)
    language = LanguageModeling(small)
    tokens = jnp.asarray(language.train_tokens)
    return Task(
        lambda key: language.model.init(key, tokens[:1]),
        lambda params, batch: language.loss(params, batch)[0],
        tokens,
        tokens[:WATCHED_SEQUENCES],
        lambda rate: optax.adam(rate, b2=small.adam_b2),
    )


def make_task(name: str, hidden: int, fashion_mnist: Path | None, pool: int = 1) -> Task:
    """Returns the task `image` or `language`; only the first needs the other arguments."""
    if name == "language":
        return make_language_task()
    return make_image_task(load_images(fashion_mnist, pool), hidden)


class Trainer(NamedTuple):
    """Trains all nodes at once; its methods may be under `jit` and `vmap`.

    A carry is the parameters `[N, ...]` of all nodes, and their states.
    """

    transform: Transform
    nodes: int
    task: Task
    batch_size: int  # of a node

    def start(self, seed: jax.Array) -> Any:
        """Returns the carry at the start: all nodes have one model."""
        model = self.task.init(jax.random.split(jax.random.key(seed))[1])
        params = jax.tree.map(lambda x: jnp.broadcast_to(x, (self.nodes, *x.shape)), model)
        return params, jax.vmap(self.transform(0.1, 0.0).init, axis_name="nodes")(params)

    def advance(self, carry: Any, rate: Any, seed: Any, first: Any, last: Any, steps: Any) -> Any:
        """Makes the steps `first` to `last - 1` of a run of `steps`."""
        key = jax.random.split(jax.random.key(seed))[0]

        def advance_one(k: jax.Array, carry: Any) -> Any:
            keys = jax.random.split(jax.random.fold_in(key, k), self.nodes)
            params, state = carry
            step = functools.partial(self._step, self.transform(rate, k / steps), k)
            return jax.vmap(step, axis_name="nodes")(params, state, keys)

        return jax.lax.fori_loop(first, last, advance_one, carry)

    def _step(self, tx: Any, k: jax.Array, params: Any, state: Any, key: jax.Array) -> Any:
        batch = draw_batch(self.task.examples, self.batch_size, key)
        grads = jax.grad(self.task.compute_loss)(params, batch)
        updates, state = tx.update(grads, state, params, step=k)
        return optax.apply_updates(params, updates), state


def draw_batch(examples: Batch, size: int, key: jax.Array) -> Batch:
    """Returns examples that are drawn with replacement."""
    index = jax.random.randint(key, (size,), 0, len(jax.tree.leaves(examples)[0]))
    return jax.tree.map(lambda x: x[index], examples)


def average_nodes(params: Any) -> Any:
    """Returns the average of models `[N, ...]`."""
    return jax.tree.map(lambda x: x.mean(0), params)


def hold_then_fall(part: Any, constant: float = 0.75) -> Any:
    """Returns the factor of a rate: 1 for the first part of a run, then it falls to 0.

    >>> float(hold_then_fall(0.5)), float(hold_then_fall(0.875))
    (1.0, 0.5)
    """
    return jnp.minimum(1.0, (1 - part) / (1 - constant))
