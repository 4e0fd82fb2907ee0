"""One round: a validated mixing matrix, kept as its nonzero entries. NumPy only."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gossipjax.topology.permutations import Slot, color_edges, freeze

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

TOLERANCE = 1e-6  # how far a sum may be from 1, so that float32 matrices pass


def require_int(value: Any, what: str, minimum: int, maximum: int | None = None) -> int:
    """Returns `value` as an int; raises `ValueError` unless it is an integer in the range."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise ValueError(f"{what} must be an integer >= {minimum}, got {value!r}.")
    if maximum is not None and value > maximum:
        raise ValueError(f"{what} must be at most {maximum}, got {value!r}.")
    return int(value)


class Round:
    """One exchange between all nodes, given by its mixing matrix `P` `[N, N]`.

    A round keeps only the E nonzero entries of `P`, sorted by row and then by column. A column may
    miss the sum 1 by 1e-6; it is then divided by its sum. Rounds with the same matrix are equal and
    have equal hashes.

    Attributes:
      size: N, the number of nodes.
      receivers: int32 `[E]`, the rows of the nonzero entries.
      senders: int32 `[E]`, the columns of the nonzero entries.
      weights: float64 `[E]`, the nonzero entries, `P[receivers[e], senders[e]] = weights[e]`.
      self_weights: float64 `[N]`, the diagonal of `P`.

    Args:
      matrix: `P`, `[N, N]`, which is copied.
      name: what error messages call the round.

    Raises:
      ValueError: if `matrix` is not square, has a negative or non-finite entry, a column that does
        not sum to 1, or a zero on its diagonal.

    References:
      Assran et al., "Stochastic Gradient Push", ICML 2019, arXiv:1811.10792, assumption 4 (of the
      diagonal).

    >>> Round([[0.5, 0.5], [0.5, 0.5]], "pair")
    Round(2 nodes, 1 peer each)
    """

    def __init__(self, matrix: ArrayLike, name: str = "round 0"):
        dense = np.array(matrix, dtype=np.float64)
        if dense.ndim != 2 or dense.shape[0] != dense.shape[1] or not dense.size:
            raise ValueError(
                f"the mixing matrix of {name} must have shape [N, N], got {list(dense.shape)}."
            )
        receivers, senders = np.nonzero(dense)
        self._check_and_set(len(dense), receivers, senders, dense[receivers, senders], name)

    @classmethod
    def from_entries(
        cls, size: int, receivers: ArrayLike, senders: ArrayLike, weights: ArrayLike
    ) -> Round:
        """Makes a round from the nonzero entries of `P`, in any order, without a dense matrix.

        `receivers` and `senders` `[E]` are the rows and columns of the entries. `weights` `[E]` are
        the values, or one number for all. The diagonal must be among the entries.

        Raises:
          ValueError: in the same cases as `Round`.

        >>> Round.from_entries(2, [0, 1, 1], [0, 0, 1], [0.5, 0.5, 1]).matrix.tolist()
        [[0.5, 0.0], [0.5, 1.0]]
        """
        rows, columns = (np.asarray(nodes, np.int32) for nodes in (receivers, senders))
        values = np.broadcast_to(np.asarray(weights, np.float64), rows.shape)
        round_ = object.__new__(cls)
        round_._check_and_set(size, rows, columns, values, "a round")
        return round_

    def _check_and_set(
        self, size: int, receivers: np.ndarray, senders: np.ndarray, weights: np.ndarray, name: str
    ) -> None:
        """Checks the entries of `P`, and stores those that are not 0, sorted by row and column."""
        nonzero = np.flatnonzero(weights)
        order = nonzero[np.lexsort((senders[nonzero], receivers[nonzero]))]
        receivers = receivers[order]
        senders = senders[order]
        weights = weights[order]
        valid = np.isfinite(weights) & (weights >= 0)
        if not valid.all():
            e = int(np.argmin(valid))
            raise ValueError(
                f"the weights of {name} must be finite and not negative, "
                f"got P[{receivers[e]}, {senders[e]}] = {weights[e]}."
            )
        sums = np.bincount(senders, weights, size)
        if (abs(sums - 1) > TOLERANCE).any():
            j = int(np.argmax(abs(sums - 1)))
            hint = ""
            row_sums = np.bincount(receivers, weights, size)
            if (abs(row_sums - 1) <= TOLERANCE).all():
                hint = (
                    " The rows sum to 1: pass the transpose. P[i, j] is the weight that receiver i "
                    "gives to sender j."
                )
            elif (weights == weights[0]).all():
                hint = (
                    " It looks like an adjacency matrix: gx.topology.from_graph(graph) of networkx "
                    "finds weights for its edges."
                )
            raise ValueError(
                f"the columns of {name} must sum to 1, or mass is lost, got {sums[j]:.9g} for "
                f"column {j}.{hint}"
            )
        # Columns whose sum is 1 except for float64 rounding stay as they are.
        weights = weights / np.where(abs(sums - 1) > 1e-12, sums, 1)[senders]
        if np.count_nonzero(receivers == senders) < size:
            node = np.setdiff1d(np.arange(size), senders[receivers == senders])[0]
            raise ValueError(
                f"the diagonal of {name} must be positive, so that every node keeps part of its "
                f"model, got P[{node}, {node}] = 0. Give each node a weight for itself."
            )
        self._set_entries(size, receivers, senders, weights)

    def _set_entries(
        self, size: int, receivers: np.ndarray, senders: np.ndarray, weights: np.ndarray
    ) -> None:
        """Stores entries that are valid and sorted already, as read-only arrays."""
        self.size = size
        self.receivers = freeze(receivers.astype(np.int32))
        self.senders = freeze(senders.astype(np.int32))
        self.weights = freeze(np.array(weights, dtype=np.float64))
        self.self_weights = freeze(self.weights[self.receivers == self.senders])

    def __repr__(self) -> str:
        peers = self.max_peers
        sent = f"{peers} peer{'s' * (peers > 1)}" if peers else "no messages"
        has_equal_degrees = len(self.weights) == self.size * (1 + peers)
        sent = f"{sent}{' each' * (peers > 0)}" if has_equal_degrees else f"up to {sent}"
        return f"Round({self.size} node{'s' * (self.size > 1)}, {sent})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickles no caches; the arrays of the copy are read-only again.
        return Round.from_entries, (self.size, self.receivers, self.senders, self.weights)

    @functools.cached_property
    def _digest(self) -> bytes:
        """A hash of all entries. Rounds are equal if their digests are; no arrays are compared."""
        digest = hashlib.blake2b(self.size.to_bytes(8, "little"), digest_size=32)
        for array in (self.receivers, self.senders, self.weights):
            digest.update(array.data)
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Round) and self._digest == other._digest)

    def __hash__(self) -> int:
        return hash(self._digest)

    @property
    def matrix(self) -> np.ndarray:
        """`P`, float64 `[N, N]`, read-only. Each access makes a new array."""
        matrix = np.zeros((self.size, self.size))
        matrix[self.receivers, self.senders] = self.weights
        return freeze(matrix)

    @functools.cached_property
    def is_identity(self) -> bool:
        """Says whether no node sends anything."""
        return len(self.weights) == self.size

    @functools.cached_property
    def is_uniform(self) -> bool:
        """Says whether every entry is 1/N, so that every node gets the exact average."""
        return len(self.weights) == self.size**2 and bool(
            np.allclose(self.weights, 1 / self.size, rtol=TOLERANCE, atol=0)
        )

    @functools.cached_property
    def is_doubly_stochastic(self) -> bool:
        """Says whether rows and columns both sum to 1, so that push-sum weights stay 1."""
        sums = np.bincount(self.receivers, self.weights, self.size)
        return bool((abs(sums - 1) <= TOLERANCE).all())

    @property
    def max_peers(self) -> int:
        """K, the largest number of nodes that a node sends to, or receives from."""
        sent = np.bincount(self.senders, minlength=self.size).max()
        received = np.bincount(self.receivers, minlength=self.size).max()
        return int(max(sent, received)) - 1

    @functools.cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The messages of the round as K full permutations; K is `max_peers`."""
        is_message = self.receivers != self.senders
        edges = (entries[is_message] for entries in (self.receivers, self.senders, self.weights))
        return color_edges(self.size, *edges)


def make_regular_round(senders: np.ndarray) -> Round:
    """Makes a round in which every node averages K nodes, itself included; checks nothing.

    Row `i` of `senders` `[N, K]` lists the nodes that node `i` averages, in order.
    """
    size, degree = senders.shape  # N and K
    receivers = np.repeat(np.arange(size, dtype=np.int32), degree)
    round_ = object.__new__(Round)
    round_._set_entries(size, receivers, senders.ravel(), np.full(senders.size, 1 / degree))
    return round_


def find_unreached(rounds: Sequence[Round], dead: Sequence[int] = ()) -> str | None:
    """Says which node can never reach which other ("node 0 can never send to node 3"), or None.

    Dead nodes need not be reached. The first living node is enough to examine: if it reaches all
    others and all others reach it, every node can reach every other.
    """
    senders = np.concatenate([round_.senders for round_ in rounds])
    receivers = np.concatenate([round_.receivers for round_ in rounds])
    is_dead = np.zeros(rounds[0].size, dtype=bool)
    is_dead[list(dead)] = True
    first = int(np.argmin(is_dead))
    for direction, sources, targets in (
        ("send to", senders, receivers),
        ("receive from", receivers, senders),
    ):
        reached = is_dead.copy()
        reached[first] = True
        count = 0
        while count < np.count_nonzero(reached):  # the last pass has reached further nodes
            count = np.count_nonzero(reached)
            reached[targets[reached[sources]]] = True
        if count < len(reached):
            return f"node {first} can never {direction} node {int(np.argmin(reached))}"
    return None
