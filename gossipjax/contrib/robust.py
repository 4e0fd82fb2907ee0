"""Averages that a few liars among the neighbours cannot move far."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.algorithms.gossip import Node, gossip
from gossipjax.collectives import require_doubly_stochastic, sum_over_parts
from gossipjax.sharding import specs_here
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import WireLike

# (own [...], messages [K, ...], weights [K], senders [K]) -> the average, [...]
Rule: TypeAlias = Callable[[Any, Any, jax.Array, jax.Array], Any]

TINY = 1e-6  # of a weight that is 0 but for rounding


def robust_gossip(
    schedule: Schedule, rule: Rule, *, axis_name: str = "nodes", wire: WireLike | None = None
) -> optax.GradientTransformationExtraArgs:
    """D-PSGD with a robust rule in the place of the weighted average. Put it *last* in a chain.

    If `u` is the update from the chain, and `y_j` is what neighbour `j` sends:

        y = x + u;    x <- rule(y, [y_j], [P_ij])

    The rules are `ClippedGossip`, `ClippedSum`, `NearestNeighbors`, `TrimmedMean` and
    `CoordinateMedian`. You can also give a function `rule(own, messages, weights, senders)` of
    trees `[...]` and `[K, ...]` and of arrays `[K]`: what `Node.receive` returns, and
    `node.senders`. A rule protects honest nodes from a few neighbours that lie. It moves the mean
    of the nodes, even if nobody lies. `docs/evidence/limitations.md` says what rules cannot do.

    Args:
      schedule: a doubly stochastic schedule, such as `from_graph(graph, weights="metropolis")`.
      rule: what a node makes of its own value and of the messages. The rules of this module leave
        out a message that is not finite.
      axis_name, wire: as in `gx.sgp`.

    Raises:
      ValueError: if the schedule is not doubly stochastic, or the `liar_weight` of a rule is below
        the weight of every neighbour, or half of all weight.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> rule = gx.contrib.CoordinateMedian()
    >>> tx = gx.contrib.robust_gossip(gx.topology.complete(5), rule)
    >>> def update(x):
    ...     return x + tx.update(jnp.zeros(()), tx.init(x), x, step=0)[0]
    >>> x = jnp.array([1.0, 2.0, 3.0, 4.0, 1e6])
    >>> jax.vmap(update, axis_name="nodes")(x).tolist()
    [3.0, 3.0, 3.0, 3.0, 3.0]
    """
    require_doubly_stochastic(schedule, "robust_gossip")
    # A rule of `gx.faults.Lying` wraps the rule that honest nodes use.
    _require_liar_weight(getattr(rule, "rule", rule), schedule)

    def combine(x: Any, u: Any, node: Node) -> Any:
        y = optax.tree.add(x, u)
        messages, weights = node.receive(y)
        return rule(y, messages, weights, node.senders)

    return gossip(schedule, combine, axis_name=axis_name, wire=wire, models=1)


def _require_liar_weight(rule: Any, schedule: Schedule) -> None:
    """Raises `ValueError` if `rule.liar_weight` is below every neighbour's weight, or >= 1/2."""
    matrices = [round_.matrix for round_ in schedule.rounds if not round_.is_identity]
    off_diagonal = [m[~np.eye(len(m), dtype=bool)] for m in matrices]
    weights = np.array([w for entries in off_diagonal for w in entries if w > 0])
    liar_weight = getattr(rule, "liar_weight", None)
    if liar_weight is not None and weights.size and not weights.min() - TINY <= liar_weight < 0.5:
        raise ValueError(
            f"liar_weight of {type(rule).__name__} must be below 1/2 and at least the weight of a "
            f"neighbour, {weights.min():.6g} and more in this schedule, got {liar_weight!r}: it is "
            "the largest sum of P_ij over the liars j that a node hears."
        )


class _Pull(abc.ABC):
    """A rule `y + sum_j c_j (y_j - y)` for a node's model `y` and K messages `y_j`.

    Subclasses choose the strengths `c` `[K]`, by which messages pull the node. With `c = weights`
    the rule is the plain average: `y` then has what the weights leave of 1.
    """

    def __call__(self, own: Any, messages: Any, weights: jax.Array, senders: jax.Array) -> Any:
        """Returns `own + sum_j c_j (y_j - own)` for the K `messages` `y_j`, `[K, ...]`."""
        del senders
        differences, distances, weights = _compare(own, messages, weights)
        strengths = self._strengths(distances, weights)
        return optax.tree.add(own, _sum_scaled(strengths, differences))

    @abc.abstractmethod
    def _strengths(self, distances: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the strengths of K messages, from their distances `|y_j - y|` and weights."""


@dataclasses.dataclass(frozen=True)
class ClippedGossip(_Pull):
    """Clips how far each neighbour pulls: `y + sum_j P_ij clip(y_j - y, radius)`.

    `clip(d, r) = d min(1, r / |d|)`, with the norm of the whole model. If you give `liar_weight`
    instead of `radius`, a node takes `radius^2 = sum_j P_ij |y_j - y|^2 / liar_weight`. This sum
    leaves out the farthest messages, up to the weight `liar_weight`.

    Args:
      radius: how far a neighbour may pull, in units of the parameters.
      liar_weight: the weight of the neighbours of a node that may lie.

    Raises:
      ValueError: unless one of both is given, above 0.

    References:
      He, Karimireddy, Jaggi, "Byzantine-Robust Decentralized Learning via ClippedGossip", 2022,
      arXiv:2202.01545.

    >>> rule = ClippedGossip(radius=1.0)
    >>> rule(0.0, jnp.array([2.0, -0.5]), jnp.array([0.25, 0.5]), jnp.arange(2)).item()
    0.0
    """

    radius: float | None = None
    liar_weight: float | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.radius, self.liar_weight) if value is not None]
        if len(given) != 1 or not given[0] > 0:
            raise ValueError(
                "ClippedGossip must be given radius or liar_weight, one of them and above 0, got "
                f"{self.radius!r} and {self.liar_weight!r}."
            )

    def _strengths(self, distances: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the weights, smaller for messages that are farther away than the radius."""
        radius: Any = self.radius
        if self.liar_weight is not None:
            near_weights = _keep_nearest(distances, weights, self.liar_weight)
            radius = jnp.sqrt(jnp.sum(near_weights * distances**2) / self.liar_weight)
        return _clip(weights, distances, radius)


@dataclasses.dataclass(frozen=True)
class ClippedSum(_Pull):
    """CS+: `y + sum_j P_ij clip(y_j - y, r)`, with a radius `r` that liars cannot make large.

    `r` is the largest distance of a message from `y` for which all messages that are farther away
    have a weight of `2 liar_weight` or more.

    Args:
      liar_weight: the weight of the neighbours of a node that may lie: with f liars and Metropolis
        weights, up to `f / (degree + 1)`. If it is half of all weight, nodes hear nobody.

    References:
      Gaucher, Dieuleveut, Hendrikx, "Unified Breakdown Analysis for Byzantine Robust Gossip", ICML
      2025, arXiv:2410.10418, CS+-RG with step size 1.

    >>> weights = jnp.full(4, 0.2)
    >>> messages = jnp.array([1.0, 2.0, 9.0, 1e6])
    >>> round(ClippedSum(0.2)(0.0, messages, weights, jnp.arange(4)).item(), 4)
    1.4
    """

    liar_weight: float

    def _strengths(self, distances: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the weights, made smaller beyond a radius that liars cannot make large."""
        # Liars have at most half of the weight beyond the radius: an honest message is farther.
        is_near = _weigh_farther(distances, weights) >= 2 * self.liar_weight - TINY
        radius = jnp.max(jnp.where(is_near, distances, 0))
        return _clip(weights, distances, radius)


@dataclasses.dataclass(frozen=True)
class NearestNeighbors(_Pull):
    """NNA: the weighted mean of a node's own value and the messages that are nearest to it.

    The farthest messages do not count, up to the weight `liar_weight`. If only a part of a
    message's weight is left out, the rest counts.

    Args:
      liar_weight: as in `ClippedSum`.

    References:
      Farhadkhani et al., "Robust Collaborative Learning with Linear Gradient Overhead", ICML 2023,
      arXiv:2209.10931; with weights, it is GTS of Gaucher et al., arXiv:2410.10418.

    >>> messages, weights = jnp.array([3.0, 1e6]), jnp.full(2, 0.25)
    >>> NearestNeighbors(0.25)(0.0, messages, weights, jnp.arange(2)).item()
    1.0
    """

    liar_weight: float

    def _strengths(self, distances: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the weights of the nearest messages, in a mean with the node's own value."""
        near_weights = _keep_nearest(distances, weights, self.liar_weight)
        own_weight = 1 - weights.sum()
        return near_weights / jnp.maximum(own_weight + near_weights.sum(), TINY)


@dataclasses.dataclass(frozen=True)
class TrimmedMean:
    """Takes of each coordinate the plain mean without the `liars` smallest and largest values.

    A node's own value always counts, but not in `gx.outer`. If there are not more messages than
    `2 liars`, a node keeps its own value.

    Args:
      liars: how many neighbours of a node may lie.

    References:
      Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, arXiv:1803.01498; with
      neighbours Fang, Yang, Bajwa, "BRIDGE", 2022, arXiv:1908.08649 (BRIDGE-T).

    >>> messages, weights = jnp.array([-1e6, 2.0, 1e6]), jnp.full(3, 0.25)
    >>> TrimmedMean(1)(0.0, messages, weights, jnp.arange(3)).item()
    1.0
    """

    liars: int

    def __call__(self, own: Any, messages: Any, weights: jax.Array, senders: jax.Array) -> Any:
        """Averages the node's `own` value and K `messages` `[K, ...]`, without the extreme ones."""
        del senders
        has_own_weight = 1 - weights.sum() > TINY  # not in gx.outer: messages have all the weight
        _, _, weights = _compare(own, messages, weights)  # 0 for messages that are not finite
        count = jnp.sum(weights > 0)  # messages
        kept_messages = jnp.maximum(count - 2 * self.liars, 0)
        own_count = (has_own_weight | (kept_messages == 0)).astype(jnp.float32)
        kept_count = kept_messages.astype(jnp.float32) + own_count

        def average(x: Any, received: jax.Array) -> jax.Array:
            """Averages a leaf `x [...]` with the middle ones of the `received` `[K, ...]`."""
            rank = _add_axes(jnp.arange(len(weights)), received)
            is_kept = (rank >= self.liars) & (rank < count - self.liars)
            total = jnp.sum(jnp.where(is_kept, _sort_messages(received, weights), 0), axis=0)
            total += own_count.astype(received.dtype) * x
            return total / kept_count.astype(received.dtype)

        return jax.tree.map(average, own, messages)


@dataclasses.dataclass(frozen=True)
class CoordinateMedian:
    """Takes of each coordinate the median of a node's own value and the messages.

    References:
      Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, arXiv:1803.01498.

    >>> messages, weights = jnp.array([3.0, 1e6]), jnp.full(2, 0.25)
    >>> CoordinateMedian()(0.0, messages, weights, jnp.arange(2)).item()
    3.0
    """

    def __call__(self, own: Any, messages: Any, weights: jax.Array, senders: jax.Array) -> Any:
        """Returns the median by coordinates of the node's `own` value and K `messages`."""
        del senders
        own_weight = jnp.maximum(1 - weights.sum() - TINY, 0)  # 0 in gx.outer: only messages count
        _, _, weights = _compare(own, messages, weights)  # 0 for messages that are not finite
        # A weight only says whether a value counts. If no message does, the node's own value does.
        weights = jnp.append(weights, jnp.where(weights.sum() > 0, own_weight, 1))
        last = jnp.maximum(jnp.sum(weights > 0) - 1, 0)  # the index of the largest value

        def find_median(x: Any, heard: jax.Array) -> jax.Array:
            """Returns the median of a leaf `x [...]` and its K values `heard [K, ...]`."""
            values = jnp.concatenate([heard, jnp.asarray(x, heard.dtype)[None]])
            ordered = _sort_messages(values, weights)
            return (ordered[last // 2] + ordered[(last + 1) // 2]) / 2

        return jax.tree.map(find_median, own, messages)


def _compare(own: Any, messages: Any, weights: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """Returns the differences `y_j - y` of K messages, their norms `[K]`, and weights `[K]`.

    All three are 0 for a message that is missing or not finite.
    """
    distances = _norms(own, messages)
    is_heard = (weights > 0) & jnp.isfinite(distances)
    differences = jax.tree.map(
        lambda x, heard: jnp.where(_add_axes(is_heard, heard), heard - jnp.asarray(x)[None], 0),
        own,
        messages,
    )
    return differences, jnp.where(is_heard, distances, 0), jnp.where(is_heard, weights, 0)


def _norms(own: Any, messages: Any) -> jax.Array:
    """Returns `|y_j - y|` of K messages over all leaves, `[K]`; also of a model that is sharded."""
    squares = jax.tree.map(
        lambda x, heard: jnp.sum(
            jnp.square(heard - jnp.asarray(x)[None]), axis=tuple(range(1, heard.ndim))
        ),
        own,
        messages,
    )
    if (specs := specs_here()) is not None:
        squares = sum_over_parts(squares, specs.of(own, own))
    return jnp.sqrt(sum(leaf.astype(jnp.float32) for leaf in jax.tree.leaves(squares)))


def _sum_scaled(strengths: jax.Array, differences: Any) -> Any:
    """Returns `sum_j c_j d_j`; no matrix product, because some chips round these to 16 bits."""
    return jax.tree.map(
        lambda d: jnp.sum(_add_axes(strengths.astype(d.dtype), d) * d, axis=0), differences
    )


def _add_axes(values: jax.Array, heard: jax.Array) -> jax.Array:
    """Reshapes `[K]` to `[K, 1, ...]`, as many axes as `heard` has."""
    return values.reshape(-1, *[1] * (heard.ndim - 1))


def _clip(weights: jax.Array, distances: jax.Array, radius: Any) -> jax.Array:
    """Returns `weights min(1, radius / distances)`: no message then pulls beyond the radius."""
    return weights * jnp.minimum(1, radius / jnp.where(distances > 0, distances, 1))


def _weigh_farther(distances: jax.Array, weights: jax.Array) -> jax.Array:
    """Sums, for each of K messages, the weights of all that are farther away, `[K]`.

    Of two at the same distance, the later one counts as farther.
    """
    number = jnp.arange(len(weights))
    is_later = (distances[:, None] == distances[None]) & (number[:, None] > number[None])
    is_farther = (distances[:, None] > distances[None]) | is_later  # [i, j]: i than j
    return jnp.sum(jnp.where(is_farther, weights[:, None], 0), axis=0)


def _keep_nearest(distances: jax.Array, weights: jax.Array, liar_weight: float) -> jax.Array:
    """Returns the weights after `liar_weight` was taken from them, from the farthest message on."""
    still_to_take = liar_weight - _weigh_farther(distances, weights)
    return weights - jnp.clip(still_to_take, 0, weights)


def _sort_messages(heard: jax.Array, weights: jax.Array) -> jax.Array:
    """Sorts the K values of each coordinate of `[K, ...]`; messages of weight 0 come last."""
    return jnp.sort(jnp.where(_add_axes(weights > 0, heard), heard, jnp.inf), axis=0)
