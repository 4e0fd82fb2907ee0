"""The rows of the network measurement: algorithms, what they send, and their lower bounds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import gossipjax as gx
from experiments.speed.outer_rows import OUTER, OuterTimes
from experiments.training.asynchronous import ASYNCHRONOUS
from experiments.training.methods import (
    ALGORITHMS,
    DENSE,
    FORMS,
    Method,
    MethodOptions,
    WireName,
    make_method,
    parse_name,
)
from gossipjax.wire import decode, encode

# Names, in the files, of the measurements that are not rows.
COMPUTATION = "computation"
ALL_LINKS = "stream, all links"
SINGLE_LINK = "stream, one link"
BUSY_HOSTS = "stream, all links, beside computation"

# Rows of this measurement only, beside those of `experiments.training.methods`.
ALL_REDUCE = "allreduce"
BUCKETS = "allreduce-buckets"
CENTRALIZED = "centralized"
DEFAULT_ALGORITHMS = (
    ALL_REDUCE,
    BUCKETS,
    CENTRALIZED,
    "dpsgd@ring",
    "dpsgd@bipartite_exponential",
    "sgp@one_peer_exponential",
    "sgp@two_peer_exponential",
    "sgp@complete/one_peer_exponential",
    "sgp-cwa",
    "1-osgp",
    "2-osgp",
    "async-sgp",
    "async-adpsgd",
)
OUTER_TIMES = OuterTimes()
STEPS = 12  # of a run; a hybrid topology switches after a third of them
FLOATS: tuple[WireName, ...] = ("float32", "bfloat16")
LEARNING_RATE = 1e-3  # of plain SGD; small, because only time counts here


class Row(NamedTuple):
    """One algorithm with messages of one form.

    Attributes:
      algorithm: the name as it was given.
      wire: the form of its messages.
      nodes: N.
      method: the algorithm on its topology, around plain SGD.
      state: the gossip state of a node; None for an algorithm that averages gradients.
      outer: when an outer optimizer exchanges what; None without one.
    """

    algorithm: str
    wire: WireName
    nodes: int
    method: Method
    state: gx.GossipState | None
    outer: OuterTimes | None = None

    @property
    def name(self) -> str:
        """Name of the row in the files, unique among the rows."""
        return f"{self.algorithm}, {self.wire} wire"

    @property
    def overlaps(self) -> bool:
        """Whether the exchange can run beside the computation of the gradients.

        It can where it needs nothing that its step computes, in buckets, where that of one layer's
        gradients runs beside the computation of the layer before, and with an outer optimizer that
        uses an average some steps after sending it.
        """
        if self.outer is not None:
            return self.outer.delay > 0
        if self.state is None:
            return self.algorithm in (BUCKETS, *ASYNCHRONOUS)
        return self.state.plan.exchanges_early

    @property
    def period(self) -> int:
        """Steps that are timed together; they are made in one go where there are several."""
        return 1 if self.outer is None else self.outer.every

    def canonical_step(self, step: int) -> int:
        """The static step of the program that runs `step`, and of an outer one after its start."""
        if self.outer is not None:
            return self.outer.canonical_step(step)
        return 0 if self.state is None else gx.canonical_step(self.state, step)

    def count_sent_bytes(self, step: int, parameters: int) -> float:
        """Bytes that the node that sends most sends at `step`, for a model of `parameters` float32.

        Only the payload of the messages, without headers. An all-reduce sends 2 (N - 1) / N of the
        buffer; the center of `centralized` sends N - 1 models.
        """
        if self.algorithm == CENTRALIZED:
            return count_message_bytes(parameters, self.wire) * (self.nodes - 1)
        if self.outer is not None:
            if not self.outer.sends(step):
                return 0.0
            all_bytes = count_all_reduce_bytes(parameters, self.nodes, self.wire)
            return all_bytes / self.outer.fragments  # of equal size, nearly
        if self.algorithm in ASYNCHRONOUS:  # at most: a node keeps its share while a link is busy
            return count_message_bytes(parameters + 1, self.wire)
        if self.state is None:
            return count_all_reduce_bytes(parameters, self.nodes, self.wire)
        if self.algorithm.partition("@")[0] == "choco":
            codec = self.state.wire.codec
            assert codec is not None
            assert self.state.schedule is not None
            return codec.count_bytes(parameters) * count_peers(self.state.schedule.round_at(step))
        values = self.state.plan.models * parameters + (self.state.weight is not None)
        if self.state.schedule is None:  # all nodes exchange at once
            return count_all_reduce_bytes(values, self.nodes, self.wire)
        overlap = self.state.overlap
        if not overlap:
            return count_round_bytes(self.state.schedule.round_at(step), values, self.wire)
        # Under overlap a step exchanges one chunk of what was sent in the round before.
        round_ = self.state.schedule.round_at((step - 1) // overlap)
        return count_round_bytes(round_, -(-values // overlap), self.wire)

    def count_link_bytes(self, step: int, parameters: int) -> float:
        """Bytes that the busiest link carries one after another at `step`.

        Links are full duplex, so these are the bytes that a node sends. But the center of
        `centralized` knows the mean only when all gradients are in: it receives N - 1 models, and
        then sends as many.
        """
        sent = self.count_sent_bytes(step, parameters)
        return 2 * sent if self.algorithm == CENTRALIZED else sent


def name_computation(row: Row) -> str:
    """Name, in the files, of the steps without exchange before and after a row made in one go."""
    return f"{COMPUTATION} beside {row.name}"


def count_message_bytes(values: int, wire: WireName) -> float:
    """Bytes of a message of `values` float32, scales and indices included.

    One of the values, the weight, stays in full precision; where others share a scale, it has a
    place among them, too.
    """
    codec = FORMS[wire].codec
    if codec is None:
        return 4.0 * values
    return 4.0 + codec.count_bytes(values - 1 if codec.is_elementwise else values)


def count_all_reduce_bytes(values: int, nodes: int, wire: WireName) -> float:
    """Bytes that a node sends in a ring all-reduce of `values` float32.

    Sparse messages are sent to every other node.

    >>> count_all_reduce_bytes(100, 4, "float32")
    600.0
    """
    if wire == "float32":
        return 4.0 * values * 2 * (nodes - 1) / nodes
    codec = FORMS[wire].codec
    if codec is not None and codec.is_sparse:
        return float((nodes - 1) * codec.count_bytes(values))
    return 2 * (nodes - 1) * count_message_bytes(-(-values // nodes), wire)


def count_round_bytes(round_: gx.topology.Round, values: int, wire: WireName) -> float:
    """Bytes that the node that sends most sends in a round, for a message of `values` float32.

    >>> pair, ring = gx.topology.ring(2).round_at(0), gx.topology.ring(4).round_at(0)
    >>> count_round_bytes(pair, 100, "float32"), count_round_bytes(ring, 100, "float32")
    (400.0, 800.0)
    >>> count_round_bytes(ring, 101, "bfloat16")  # the weight stays in full precision
    408.0
    """
    if round_.is_identity:
        return 0.0
    if round_.is_uniform:
        return count_all_reduce_bytes(values, round_.size, wire)
    return count_message_bytes(values, wire) * count_peers(round_)


def count_peers(round_: gx.topology.Round) -> int:
    """The number of messages of the node that sends most in a round."""
    nodes = np.arange(round_.size)
    peers = [receivers != nodes for receivers, _ in round_.slots]
    return int(np.sum(peers, axis=0).max()) if peers else 0


class Limits(NamedTuple):
    """Lower bounds of an iteration on this machine and link, in seconds.

    Attributes:
      sum: `computation + bytes / goodput`, for one after the other.
      max: `max(computation, bytes / goodput)`, for both at the same time.
    """

    sum: float
    max: float


def compute_limits(computation_seconds: float, link_bytes: float, goodput: float) -> Limits:
    """Both lower bounds of an iteration.

    Args:
      computation_seconds: of an iteration without exchange.
      link_bytes: bytes that the busiest link carries one after another.
      goodput: of a plain TCP stream on that link, bytes per second.

    >>> compute_limits(0.5, 20e6, 25e6)
    Limits(sum=1.3, max=0.8)
    """
    communication_seconds = link_bytes / goodput
    return Limits(
        computation_seconds + communication_seconds, max(computation_seconds, communication_seconds)
    )


def make_row(
    algorithm: str,
    wire: WireName,
    nodes: int,
    steps: int = STEPS,
    outer: OuterTimes = OUTER_TIMES,
) -> Row:
    """The named algorithm over `nodes` nodes, around plain SGD.

    Args:
      algorithm: a name of `ALGORITHMS`, or of a row of this measurement only.
      wire: the form of its messages.
      nodes: N.
      steps: of the run; a hybrid topology switches after a third of them.
      outer: when the rows of outer optimizers exchange what.

    Raises:
      ValueError: for an unknown name, a topology that is impossible for this number of nodes, or a
        `wire` that the algorithm does not have.
    """
    times = outer.of(algorithm) if algorithm in OUTER else None
    if times is not None:
        if wire not in DENSE:
            raise ValueError(f"the wire of {algorithm} must be {' or '.join(DENSE)}, got {wire}.")
        options = MethodOptions(nodes, steps, outer=times.options(wire))
        method = make_method("local", options, optax.sgd(LEARNING_RATE))
    elif algorithm == CENTRALIZED:
        method = make_centralized_method(wire, nodes)
    elif algorithm == BUCKETS and wire not in FLOATS:
        raise ValueError(
            f"messages of {BUCKETS} must be {' or '.join(FLOATS)}, got {wire}: its buckets keep no "
            "state."
        )
    elif algorithm in ASYNCHRONOUS:
        method = make_asynchronous_method(algorithm, wire, nodes)
    else:
        name = ALL_REDUCE if algorithm == BUCKETS else algorithm
        options = MethodOptions(nodes, steps, wire=wire)
        method = make_method(name, options, optax.sgd(LEARNING_RATE))
        if not ALGORITHMS[parse_name(name).row].exchanges:
            raise ValueError(f"{algorithm} exchanges nothing that could be measured.")
    return Row(algorithm, wire, nodes, method, method.state(), times)


def build_rows(
    algorithms: Sequence[str],
    wires: Sequence[WireName],
    nodes: int,
    steps: int = STEPS,
    outer: OuterTimes = OUTER_TIMES,
) -> tuple[list[Row], dict[str, str]]:
    """All rows that are possible for `nodes` nodes; and by name, why the others are not.

    Raises:
      ValueError: for an unknown name, or if no row is possible.
    """
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for algorithm in algorithms:
        if algorithm not in (CENTRALIZED, BUCKETS, *OUTER, *ASYNCHRONOUS):
            parse_name(algorithm)
        for wire in wires:
            try:
                rows.append(make_row(algorithm, wire, nodes, steps, outer))
            except ValueError as error:
                left_out[f"{algorithm}, {wire} wire"] = str(error)
    if not rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ValueError(f"nothing to measure with {nodes} hosts. {reasons}")
    return rows, left_out


def make_centralized_method(wire: WireName, nodes: int) -> Method:
    """The parameter server `average_at_center`, around plain SGD.

    Raises:
      ValueError: if its messages are not of that form.
    """
    if wire not in FLOATS:
        raise ValueError(f"messages of {CENTRALIZED} must be {' or '.join(FLOATS)}, got {wire}.")
    average = average_at_center(FORMS[wire].codec)
    return Method(
        algorithm=CENTRALIZED,
        topology="star",
        schedule=gx.topology.complete(nodes),
        inner=optax.chain(average, optax.sgd(LEARNING_RATE)),
        gossip=optax.with_extra_args_support(optax.identity()),
    )


def make_asynchronous_method(algorithm: str, wire: WireName, nodes: int) -> Method:
    """The name of an algorithm of nodes that wait for nobody; it is no transform of one program.

    Raises:
      ValueError: if its messages are not of that type.
    """
    wires = FLOATS if algorithm == "async-sgp" else FLOATS[:1]
    if wire not in wires:
        raise ValueError(f"messages of {algorithm} must be {' or '.join(wires)}, got {wire}.")
    nothing = optax.with_extra_args_support(optax.identity())
    topology = ASYNCHRONOUS[algorithm].topology
    return Method(algorithm, topology, gx.topology.complete(nodes), nothing, nothing)


def average_at_center(
    codec: gx.wire.Codec | None, axis_name: str = "nodes"
) -> optax.GradientTransformationExtraArgs:
    """A parameter server: node 0 gathers all gradients and sends every node their mean.

    Goes first in a chain. Needs a mesh: the permutations are partial, because only the link of
    node 0 is busy.
    """

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del params, extra_args
        buffer, unravel = ravel_pytree(updates)
        nodes = jax.lax.axis_size(axis_name)
        node = jax.lax.axis_index(axis_name)
        words = encode([buffer], codec)
        total = buffer
        for sender in range(1, nodes):
            received = jax.lax.ppermute(words, axis_name, [(sender, 0)])
            total = total + decode(received, codec, [buffer])[0]
        mean = encode([total / nodes], codec)  # only node 0 has the mean
        result = mean
        for receiver in range(1, nodes):
            received = jax.lax.ppermute(mean, axis_name, [(0, receiver)])
            result = jnp.where(node == receiver, received, result)
        return unravel(decode(result, codec, [buffer])[0]), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
