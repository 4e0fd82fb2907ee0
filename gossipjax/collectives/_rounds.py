"""What a node does in a round: one round, or one of several that a traced step chooses.

On a mesh a permutation is part of the compiled program, so a traced step needs a program per round,
a `lax.switch`. Where nodes are simulated, `vmap` makes a permutation a gather of rows, and its
indices may be data: one program serves all rounds. XLA fuses that gather with what stands around
it, which it never does across the branches of a switch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gossipjax.topology.schedule import Round, Schedule


class NodeSlot(NamedTuple):
    """A permutation of the nodes, in each of `R` rounds.

    Attributes:
      receivers: `[R, N]`, by sender.
      weights: float64 `[R, N]`, `P` at the edge to the receiver; 0 at a filler.
    """

    receivers: np.ndarray
    weights: np.ndarray

    @property
    def senders(self) -> np.ndarray:
        """`[R, N]`, by receiver."""
        return np.argsort(self.receivers, axis=1)


class NodeRound:
    """A round of a schedule as a node sees it while its program is traced.

    Args:
      rounds: `R` rounds that are alike: none exchanges, all take the exact mean, or neither.
      index: which of them it is: 0 for a single one, else a traced integer, for simulated nodes.
      axis_name: of the nodes.
    """

    def __init__(self, rounds: tuple[Round, ...], index: int | jax.Array, axis_name: str):
        self._rounds = rounds
        self._index = index
        self._axis_name = axis_name
        self.size = rounds[0].size
        self.is_identity = rounds[0].is_identity
        self.is_uniform = rounds[0].is_uniform
        self.is_single = len(rounds) == 1

    @property
    def self_weights(self) -> np.ndarray:
        """The diagonals, `[R, N]`."""
        return _stack_slots(self._rounds)[0]

    @property
    def slots(self) -> tuple[NodeSlot, ...]:
        """The slots of all rounds; a round of fewer has fillers, from each node to itself."""
        return _stack_slots(self._rounds)[1]

    def select(self, values: np.ndarray, dtype: DTypeLike, slot: Any = None) -> Any:
        """The entry of `values` `[R, N]` of this round and node; a constant where all are equal.

        With the number of a slot, which may be traced, of values `[K, R, N]`.
        """
        if (values == values.flat[0]).all():
            return np.asarray(values.flat[0], dtype)
        place = [self._index, jax.lax.axis_index(self._axis_name)]
        place = [jnp.asarray(i, jnp.int32) for i in ([] if slot is None else [slot]) + place]
        # Not `table[...]`, which takes ten times as long to trace.
        entry = jax.lax.dynamic_slice(jnp.asarray(values, dtype), place, [1] * values.ndim)
        return entry.reshape(())

    def select_round(self, values: np.ndarray) -> Any:
        """The entry of `values` `[R]`, booleans, of this round."""
        if (values == values[0]).all():
            return values[0]
        return jnp.asarray(values)[self._index]


@functools.lru_cache(maxsize=256)
def _stack_slots(rounds: tuple[Round, ...]) -> tuple[np.ndarray, tuple[NodeSlot, ...]]:
    nodes = np.arange(rounds[0].size)
    filler = (nodes, np.zeros(len(nodes)))
    slots = []
    for number in range(max(len(round_.slots) for round_ in rounds)):
        given = [round_.slots[number : number + 1] or (filler,) for round_ in rounds]
        receivers, weights = zip(*(slot for (slot,) in given), strict=True)
        slots.append(NodeSlot(np.stack(receivers), np.stack(weights)))
    return np.stack([round_.self_weights for round_ in rounds]), tuple(slots)


def is_simulated(axis_name: str) -> bool:
    """Whether the axis is one of `vmap`, over which nothing travels and permutations are full.

    It asks when the traced function is mapped: no error could be caught here, in a branch of a
    switch or in a nested jit.
    """
    return axis_name not in jax.sharding.get_abstract_mesh().manual_axes


def group_rounds(schedule: Schedule) -> list[list[int]]:
    """The numbers of the rounds, in groups of which one program serves all, simulated."""
    groups: dict[Any, list[int]] = {}
    for number, round_ in enumerate(schedule.rounds):
        groups.setdefault((round_.is_identity, round_.is_uniform), []).append(number)
    return list(groups.values())


def choose_round(
    apply: Callable[[NodeRound, Any], Any],
    schedule: Schedule,
    index: int | jax.Array,
    axis_name: str,
    x: Any,
) -> Any:
    """`apply(round, x)` with round number `index`, which is traced, of the distinct rounds."""
    rounds = schedule.rounds
    groups = [[number] for number in range(len(rounds))]
    if is_simulated(axis_name):
        groups = group_rounds(schedule)
    group_of, place_in = np.zeros((2, len(rounds)), np.int32)
    for group, numbers in enumerate(groups):
        group_of[numbers] = group
        place_in[numbers] = np.arange(len(numbers))
    branches = []
    for numbers in groups:
        place = jnp.asarray(place_in)[index] if len(numbers) > 1 else 0
        round_ = NodeRound(tuple(rounds[number] for number in numbers), place, axis_name)
        branches.append(functools.partial(apply, round_))
    if len(branches) == 1:
        return branches[0](x)
    return jax.lax.switch(jnp.asarray(group_of)[index], branches, x)
