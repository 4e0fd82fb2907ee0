"""The links of a schedule. Weights and faults are arrays, so one program serves all of them."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.collectives import StepLike, exchange_along, round_index
from gossipjax.faults._faults import Faults
from gossipjax.topology.permutations import color_edges
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Wire

NEVER = np.int32(2**30)  # the "steps until arrival" of a lost message


class Links:
    """All links that the rounds of a schedule use, as L permutations with one link per node.

    A method computes for the node that runs it. Its arrays have a leading axis `[L]`, one entry for
    each link to a receiver. Queues have a second axis `[D + 1]` for the age of a message in steps;
    the last entry also holds all older messages.
    """

    def __init__(self, schedule: Schedule, faults: Faults, wire: Wire):
        n = schedule.size
        nodes = np.arange(n)
        edges = np.unique(
            np.concatenate([r.receivers.astype(np.int64) * n + r.senders for r in schedule.rounds])
        )
        receivers, senders = np.divmod(edges, n)
        is_edge = receivers != senders
        # A weight of 1 marks a link. Slots are filled up to permutations with weights of 0.
        ones = np.ones(np.count_nonzero(is_edge))
        slots = color_edges(n, receivers[is_edge], senders[is_edge], ones)
        # All rounds use the same permutations of links. Only their weights differ.
        self._receivers = [slot.receivers for slot in slots]  # by sender
        self._is_edge = [slot.weights > 0 for slot in slots]
        receiver_of = np.stack(self._receivers) if slots else np.zeros((0, n), int)  # [L, N]
        matrices = (round_.matrix for round_ in schedule.rounds)
        weights = np.stack([matrix[receiver_of, nodes] for matrix in matrices])
        self.weights = weights * np.array(self._is_edge) if slots else weights  # [R, L, N]
        self._arrives = faults.arrives[:, receiver_of, nodes]  # [T, L, N]
        self._delays = faults.delays[:, receiver_of, nodes].astype(np.int32)  # [T, L, N]
        self._active_receivers = faults.active[:, receiver_of]  # [T, L, N]
        self._deaths_of_receivers = faults.death_steps[receiver_of]  # [L, N]
        self._faults = faults
        self.count = len(receiver_of)  # L
        self.capacity = faults.max_delay + 1  # D + 1
        self.schedule = schedule
        self.wire = wire
        self._read_row = partial(read_row, axis_name=wire.axis_name)

    def shares(self, step: StepLike, count: jax.Array) -> jax.Array:
        """Returns the weight of each link, `[L]`, at `step`; 0 unless both ends are active."""
        receives = self._read_row(self._active_receivers, count)
        receives &= count < self._read_row(self._deaths_of_receivers[None], 0)
        weights = self._read_row(self.weights, round_index(self.schedule, step))
        sends = is_active(self._faults, count, self.wire.axis_name)
        return jnp.where(sends & receives, weights, jnp.zeros_like(weights))

    def due(self, shares: jax.Array, count: jax.Array) -> jax.Array:
        """Returns after how many steps the message of each link arrives, `[L]`; `NEVER` if lost."""
        arrives = (shares > 0) & self._read_row(self._arrives, count)
        return jnp.where(arrives, self._read_row(self._delays, count), NEVER)

    def push(self, queue: jax.Array, new: jax.Array) -> jax.Array:
        """Returns the queue `[L, D + 1, ...]` a step later; its youngest messages are `new`."""
        if self.capacity == 1:
            return queue + new[:, None]
        # Shares older than any delay were lost. Their sum waits for a later message to bring it.
        oldest = queue[:, -2:-1] + queue[:, -1:]
        return jnp.concatenate([new[:, None], queue[:, :-2], oldest], axis=1)

    def push_due(self, queue: jax.Array, new: jax.Array) -> jax.Array:
        """Does what `push` does for the steps until each message arrives, which count down."""
        return jnp.concatenate([new[:, None], queue[:, :-1] - 1], axis=1)

    def no_message(self, like: Any) -> jax.Array:
        """Returns a queue for `push_due` in which no message is on its way, int32 `[L, D + 1]`."""
        return jnp.full_like(like, NEVER, shape=(self.count, self.capacity), dtype=jnp.int32)

    def exchange(self, messages: Any) -> list[Any]:
        """Sends the messages `[L, ...]`; returns for each link what arrives, zeros if nothing."""
        return [
            exchange_along(
                jax.tree.map(itemgetter(link), messages),
                self._receivers[link],
                self._is_edge[link],
                self.wire,
            )
            for link in range(self.count)
        ]


def read_row(table: np.ndarray, row: Any, axis_name: str) -> jax.Array:
    """Reads this node's entries, `[L]` or `[]`, in a row of a table `[T, ..., N]` that repeats."""
    return jnp.asarray(table)[row % len(table), ..., jax.lax.axis_index(axis_name)]


def is_active(faults: Faults, count: jax.Array, axis_name: str) -> jax.Array:
    """Says whether this node is active at its step `count`; bool scalar."""
    death = read_row(faults.death_steps[None], 0, axis_name)
    return read_row(faults.active, count, axis_name) & (count < death)


def add_axes(values: jax.Array, leaf: jax.Array) -> jax.Array:
    """Adds axes to values `[L]` or `[L, D + 1]`, so that they broadcast with messages or queues."""
    return values.reshape(values.shape + (1,) * (leaf.ndim - values.ndim))
