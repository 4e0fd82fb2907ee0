"""Tables that say what goes wrong at each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from gossipjax.topology.schedule import MAX_STEP, require_int


@dataclasses.dataclass(frozen=True, eq=False)
class Faults:
    """Says what goes wrong at each step of N nodes.

    The number of the step alone decides what fails, so a resumed run sees the same faults as an
    uninterrupted run. A table has a row per step, and begins again after its last row. Deaths are
    for ever. `independent_drops` and other functions of `gx.faults` draw tables.

    - A message may be lost. Who keeps its share then is up to `apply`, `sgp` or `dpsgd`.
    - A node that is not active neither computes nor sends nor receives. The other nodes know
      which nodes are not active, and send them nothing. `inactive` stops the computation of a node
      that is not active; `apply`, `sgp` and `dpsgd` stop its messages.
    - A dead node is never active again. The dead node keeps its model and its weight.

    Attributes:
      size: N, the number of nodes.
      arrives: bool `[T, N, N]`; `arrives[k, i, j]` says whether the message that `j` sends to `i`
        at step `k` arrives. By default all arrive.
      active: bool `[T, N]`, whether each node is active at each step. By default all nodes
        are active.
      deaths: a dict from a node to the step at which it dies.
      delays: how many steps late a message arrives: one number, or int `[T, N, N]` in the order
        of `arrives`.
      noise: standard deviation of the normal noise on every value of a message. Push-sum weights
        get no noise.
      seed: the seed of the noise.

    Raises:
      ValueError: if a table has another shape or type, or `deaths` names a node that does not
        exist.

    >>> import gossipjax as gx
    >>> faults = gx.faults.Faults(3, active=gx.faults.cyclic_activity(3, 2, 1), deaths={0: 7})
    >>> faults.active_at(6).tolist(), faults.active_at(7).tolist()
    ([True, True, False], [False, False, True])
    """

    size: int
    _: dataclasses.KW_ONLY
    arrives: Any = None
    active: Any = None
    deaths: Mapping[int, int] = dataclasses.field(default_factory=dict)
    delays: Any = 0
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        n = self.size
        fields: dict[str, Any] = {
            "arrives": _read_table(self.arrives, True, "arrives", (n, n)),
            "active": _read_table(self.active, True, "active", (n,)),
            "delays": _read_table(self.delays, 0, "delays", (n, n)),
            "deaths": {
                require_int(node, "each node of the deaths of Faults", 0, n - 1): int(step)
                for node, step in self.deaths.items()
            },
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def max_delay(self) -> int:
        """The largest delay of a message, in steps."""
        return int(np.max(self.delays))

    def arrives_at(self, step: int) -> np.ndarray:
        """Says whether a message that `j` sends to `i` at this step arrives; bool `[N, N]`."""
        return self.arrives[step % len(self.arrives)]

    def active_at(self, step: int) -> np.ndarray:
        """Says whether each node is active and not dead at this step; bool `[N]`."""
        return self.scheduled_at(step) & (step < self.death_steps)

    def scheduled_at(self, step: int) -> np.ndarray:
        """Says whether each node would be active at this step if no node died; bool `[N]`."""
        return self.active[step % len(self.active)]

    @property
    def death_steps(self) -> np.ndarray:
        """The step at which each node dies, int32 `[N]`; 2^31 - 1 for a node that never dies."""
        return np.array([self.deaths.get(node, MAX_STEP) for node in range(self.size)], np.int32)


def _read_table(table: Any, default: bool | int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a field of `Faults` as a read-only table `[T, *shape]`, or raises `ValueError`.

    A table of None, which stands for `default`, and one of a single integer get one row, for all
    steps. A single bool is refused.
    """
    kind = np.dtype(type(default)).kind  # "b" for bool, "i" for int
    array = np.array(default if table is None else table)
    is_scalar = array.dtype.kind == kind and array.ndim == 0
    if is_scalar and (kind == "i" or table is None):
        array = np.full((1, *shape), array)
    if array.dtype.kind != kind or array.shape[1:] != shape or array.ndim < 2 or not array.size:
        letters = ", ".join(["T", *["N"] * len(shape)])
        raise ValueError(
            f"{name} of Faults must be {'bool' if kind == 'b' else 'int'} [{letters}] with N = "
            f"{shape[0]}, got {array.dtype} {list(array.shape)}: the builders in gx.faults draw "
            "such tables."
        )
    array.setflags(write=False)
    return array


def require_faults(faults: Faults, size: int, name: str) -> None:
    """Raises `ValueError` unless the faults are for this number of nodes."""
    if faults.size != size:
        raise ValueError(
            f"the faults of {name} must have as many nodes as the schedule, {size}, got "
            f"{faults.size}."
        )
