"""Simulated: training in the order of events that `events` lists, as one program.

Every function may be compiled and mapped: rates and inputs of the gradients are traced.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.asynchronous_outer.events import Arrivals, Shares

Model = Any


class Job(NamedTuple):
    """What is trained.

    Attributes:
      model: all workers begin here.
      tx: the optimizer of local steps; each worker keeps its state.
      gradient: `(model, worker, step) -> gradient`; `step` counts the local steps of the worker.
    """

    model: Model
    tx: optax.GradientTransformation
    gradient: Callable[[Model, jax.Array, jax.Array], Model]

    def begin(self, size: int) -> tuple[Model, Any, jax.Array]:
        """Returns models, optimizer states and counts of steps, `[N, ...]`."""
        states = _repeat(self.tx.init(self.model), size)
        return _repeat(self.model, size), states, jnp.zeros(size, int)

    def walk(
        self, model: Model, states: Any, made: jax.Array, worker: Any, steps: Any
    ) -> tuple[Model, Any, jax.Array]:
        """Makes local steps of a worker: returns its model, and the states and counts of all."""

        def step(k: jax.Array, carry: Any) -> Any:
            model, state = carry
            gradient = self.gradient(model, worker, made[worker] + k)
            updates, state = self.tx.update(gradient, state, model)
            return optax.apply_updates(model, updates), state

        model, state = jax.lax.fori_loop(0, steps, step, (model, _pick(states, worker)))
        return model, _put(states, worker, state), made.at[worker].add(steps)


def _repeat(tree: Any, size: int) -> Any:
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (size, *jnp.shape(a))), tree)


def _pick(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda a: a[index], tree)


def _put(tree: Any, index: Any, values: Any) -> Any:
    return jax.tree.map(lambda a, b: a.at[index].set(b), tree, values)


class Server(NamedTuple):
    """What a server keeps, in shapes of the model.

    With `g` the average of a round, `S` the sum of such since the momentum was stepped, and N
    rounds from one step of the momentum to the next (Delayed Nesterov; N = 1 is Nesterov's),

        S <- S + g
        m <- b m + S / N,    x <- x - rate (b m + g / N),    S <- 0         in each N-th round
                             x <- x - rate g / N                            in the others

    References:
      Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, arXiv:2401.09135,
      with its c = 0, which spreads no momentum over the other rounds. The paper's text was not
      available: checked against src/halos/opt.py of utnslab/halos.
    """

    model: Model  # x
    momentum: Model  # m
    pending: Model  # S
    average: Model  # of what has arrived of g
    rounds: jax.Array

    def add(self, share: Any, movement: Model) -> "Server":
        """Counts a part of g."""
        average = jax.tree.map(lambda g, d: g + share * d, self.average, movement)
        return self._replace(average=average)

    def close(self, closes: Any, rate: Any, beta: Any, every: Any) -> "Server":
        """Steps, where the round ends."""
        rounds = self.rounds + closes
        refreshes = closes & (rounds % every == 0)

        def one(x: Any, m: Any, s: Any, g: Any) -> Any:
            s = s + closes * g
            m = jnp.where(refreshes, beta * m + s / every, m)
            x = x - rate * closes * (refreshes * beta * m + g / every)
            return x, m, jnp.where(refreshes, 0, s), jnp.where(closes, 0, g)

        leaves, tree = jax.tree.flatten(self.model)
        others = (jax.tree.leaves(part) for part in self[1:4])
        x, m, s, g = (
            jax.tree.unflatten(tree, part) for part in zip(*map(one, leaves, *others), strict=True)
        )
        return Server(x, m, s, g, rounds)


def train_with_server(
    job: Job, arrivals: Arrivals, momentum_every: int, rate: Any, beta: Any
) -> Model:
    """Returns the models of the server after each arrival, `[E, ...]`."""
    zeros = jax.tree.map(jnp.zeros_like, job.model)
    server = Server(job.model, zeros, zeros, zeros, jnp.zeros((), jnp.int32))

    def arrive(carry: Any, arrival: Arrivals) -> Any:
        server, handed, states, made = carry
        begin = _pick(handed, arrival.worker)
        end, states, made = job.walk(begin, states, made, arrival.worker, arrival.steps)
        movement = jax.tree.map(jnp.subtract, begin, end)
        server = server.add(arrival.share, movement)
        server = server.close(arrival.closes, rate, beta, momentum_every)

        def hand(model: Any, models: Any) -> Any:
            gets = jnp.reshape(arrival.handed, (-1, *(1,) * jnp.ndim(model)))
            return jnp.where(gets, model, models)

        handed = jax.tree.map(hand, server.model, handed)
        return (server, handed, states, made), server.model

    start = (server, *job.begin(arrivals.handed.shape[1]))
    return jax.lax.scan(arrive, start, jax.tree.map(jnp.asarray, arrivals))[1]


def train_without_server(job: Job, shares: Shares, rate: Any, beta: Any) -> tuple[Model, jax.Array]:
    """The outer steps of `gx.asynchronous.outer`: momentum travels with the model.

    A node with `x, w, m`, whose model `x / w` its local steps have moved by p, makes an outer step

        m <- b m - w p;    x <- x + rate (w p - b m);    p <- 0

    and sends half of its `(x, w, m)` to the target, which adds it.

    Returns:
      The models `x / w` and the weights of all nodes after each outer step, `[E, N, ...]`.
    """
    size = shares.living.shape[1]
    models, states, made = job.begin(size)
    zeros = jax.tree.map(jnp.zeros_like, models)
    mass = (models, jnp.ones(size, jax.tree.leaves(models)[0].dtype), zeros)

    def walk(carry: Any, node: Any, steps: Any) -> Any:
        (x, w, m), moved, states, made = carry
        z = jax.tree.map(lambda a: a / w[node], _pick(x, node))
        begin = jax.tree.map(jnp.add, z, _pick(moved, node))
        end, states, made = job.walk(begin, states, made, node, steps)
        moved = _put(moved, node, jax.tree.map(jnp.subtract, end, z))
        return (x, w, m), moved, states, made

    def step(carry: Any, share: Shares) -> Any:
        carry = walk(carry, share.node, share.steps)
        mass, moved, states, made = walk(carry, share.target, share.target_steps)
        x, w, m = _pick(mass, share.node)
        p = jax.tree.map(lambda a: w * a, _pick(moved, share.node))
        moved = jax.tree.map(lambda a: a.at[share.node].set(0), moved)
        m = jax.tree.map(lambda a, b: beta * a - b, m, p)
        x = jax.tree.map(lambda a, b, c: a + rate * (b - beta * c), x, p, m)
        half = jax.tree.map(lambda a: a / 2, (x, w, m))
        mass = _put(mass, share.node, half)
        mass = jax.tree.map(lambda a, b: a.at[share.target].add(b), mass, half)
        models = jax.tree.map(lambda a: a / _beside(mass[1], a), mass[0])
        return (mass, moved, states, made), (models, mass[1])

    start = (mass, zeros, states, made)
    return jax.lax.scan(step, start, jax.tree.map(jnp.asarray, shares))[1]


def average_living(models: Model, weights: jax.Array, living: Any) -> Model:
    """Returns `sum x / sum w` over the living nodes, of models `x / w`, `[E, N, ...]`."""
    parts = jnp.where(living, weights, 0)
    parts = parts / parts.sum(axis=-1, keepdims=True)
    return jax.tree.map(lambda a: jnp.einsum("en,en...->e...", parts, a), models)


def _beside(w: jax.Array, a: jax.Array) -> jax.Array:
    """`[N]` -> `[N, 1, ...]`, to be divided by."""
    return jnp.reshape(w, (-1, *(1,) * (jnp.ndim(a) - 1)))
