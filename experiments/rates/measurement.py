"""SGD on the problem, over simulated nodes and many seeds at once, and what is measured of it."""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx
from experiments.rates import problem
from experiments.training.methods import MethodOptions, make_method

BLOCK = 64  # steps of one call of a compiled program


class Sums(NamedTuple):
    """Sums over the steps of a block."""

    squared_gradient: Any  # of `||grad f(mean)||^2`
    squared_distance: Any  # of `1/n sum_i ||z_i - mean||^2`


def advance(
    x: jax.Array,
    opt_state: Any,
    kinds: jax.Array,
    keys: jax.Array,
    start: jax.Array,
    rate: jax.Array,
    method: str,
    nodes: int,
) -> tuple[jax.Array, Any, Sums]:
    """Goes a block of steps from number `start` on, as one node of `nodes`.

    The models `x` of all seeds, `[S, COORDINATES]`, are mixed each for itself, and so are their
    `kinds`. The `keys` of the noise, `[S]`, and the sums, `[S]`, are the same on all nodes.
    """
    tx = make_method(method, MethodOptions(nodes=nodes), optax.sgd(rate)).transform
    centers = jnp.asarray(problem.CENTERS, jnp.float32)[kinds]
    coefficients = jnp.asarray(problem.COEFFICIENTS, jnp.float32)[kinds]

    def draw_noise(key: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(key, start), jax.lax.axis_index("nodes"))
        return problem.NOISE * jax.random.normal(key, (BLOCK, problem.COORDINATES))

    def step(carry: tuple[jax.Array, Any], inputs: tuple[jax.Array, jax.Array]) -> Any:
        x, opt_state = carry
        number, noise = inputs
        mean = jnp.asarray(gx.average_model(x, opt_state))
        squared_gradient = jnp.sum(problem.gradient(mean) ** 2, axis=-1)
        squared_distance = jax.lax.pmean(jnp.sum((x - mean) ** 2, axis=-1), "nodes")
        grads = problem.local_gradient(x, centers, coefficients) + noise
        updates, opt_state = tx.update(grads, opt_state, x, step=number)
        x = jnp.asarray(optax.apply_updates(x, updates))
        return (x, opt_state), Sums(squared_gradient, squared_distance)

    numbers = start + jnp.arange(BLOCK)
    noise = jax.vmap(draw_noise, out_axes=1)(keys)
    (x, opt_state), values = jax.lax.scan(step, (x, opt_state), (numbers, noise))
    return x, opt_state, jax.tree.map(functools.partial(jnp.sum, axis=0), values)


class Means(NamedTuple):
    """Means over the first steps of a run, of what `Sums` has: float64 `[S]`."""

    step: int  # how many steps
    squared_gradient: np.ndarray
    squared_distance: np.ndarray


class Simulation:
    """A method over N simulated nodes; its program is compiled once for all numbers of steps."""

    def __init__(self, method: str, nodes: int, seeds: int) -> None:
        made = make_method(method, MethodOptions(nodes=nodes), optax.sgd(1.0))
        self.algorithm = made.algorithm
        self.topology = made.topology
        self.label = f"{made.algorithm}@{made.topology}"
        self.nodes = gx.Nodes(nodes)
        self._transform = made.transform
        self._seeds = seeds
        self._advance = self.nodes.spmd(
            functools.partial(advance, method=method, nodes=nodes), shared_argnums=(3, 4, 5)
        )

    def run(self, steps: int) -> Iterator[Means]:
        """Goes `steps` steps with the rate `sqrt(N / steps)`, from the same start and noise.

        Yields the means after each block of `BLOCK` steps, of which `steps` must be a multiple.
        """
        start = jnp.full((self._seeds, problem.COORDINATES), problem.START)
        x, opt_state = self.nodes.init(self._transform, start)
        kinds = jnp.asarray(problem.draw_kinds(self.nodes.size, self._seeds))
        keys = jax.vmap(jax.random.key)(jnp.arange(self._seeds))
        rate = jnp.float32(find_rate(self.nodes.size, steps))
        # In float64: as many small numbers would lose digits in a float32 sum.
        totals = np.zeros((2, self._seeds))
        for first in range(0, steps, BLOCK):
            number = jnp.int32(first)
            x, opt_state, sums = self._advance(x, opt_state, kinds, keys, number, rate)
            totals += np.asarray([self.nodes.to_host(part)[0] for part in sums])
            done = first + BLOCK
            yield Means(done, *(totals / done))


def find_rate(nodes: int, steps: int) -> float:
    """Returns the learning rate of SGP-19, theorem 1.

    >>> find_rate(4, 100)
    0.2
    """
    return math.sqrt(nodes / steps)
