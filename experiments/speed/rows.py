"""The rows of the network measurement: the algorithms, what they send, the limit of a link."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import gossipjax as gx
from experiments import methods
from gossipjax.buffers import decode, encode
from gossipjax.schedule import Round

Width = Literal["float32", "bfloat16"]

Record = dict[str, Any]

COMPUTATION, RING, ALONE = "computation", "stream, all links", "stream, one link"  # beside rows
CENTRALIZED = "centralized"
ALGORITHMS = (
    "allreduce",
    CENTRALIZED,
    "dpsgd@ring",
    "dpsgd@bipartite_exponential",
    "sgp@one_peer_exponential",
    "sgp@two_peer_exponential",
    "1-osgp",
    "2-osgp",
)
RATE = 1e-3  # of plain SGD: small, as all that counts here is time


class Row(NamedTuple):
    """One algorithm with messages of one width."""

    algorithm: str  # as it was asked for
    wire: Width
    method: methods.Method

    @property
    def name(self) -> str:
        """What it is called in the files: unique among the rows."""
        return f"{self.algorithm}, {self.wire} wire"

    @property
    def overlaps(self) -> bool:
        """Whether the exchange runs beside the gradients, as a program of its own."""
        return self.method.algorithm.endswith("-osgp") and self.method.lookback > 0

    def canonical_step(self, step: int) -> int:
        """The static step of a program."""
        return self.method.schedule.canonical_step(step, self.method.lookback)

    def sent_bytes(self, step: int, parameters: int) -> float:
        """What the node that sends most sends at `step`, for a model of so many float32 values.

        The payload of the messages alone: no headers. An all-reduce sends 2 (N - 1) / N of the
        buffer; the center of `centralized` sends N - 1 models.
        """
        size = self.method.schedule.size
        if self.algorithm == CENTRALIZED:
            return message_bytes(parameters, self.wire) * (size - 1)
        if self.method.algorithm == "allreduce" and self.wire != "float32":
            return 2 * (size - 1) * message_bytes(-(-parameters // size), self.wire)
        if self.method.algorithm == "allreduce":
            return 4.0 * parameters * 2 * (size - 1) / size
        pieces = max(1, self.method.lookback) if self.overlaps else 1
        # Under overlap a step exchanges a piece of what was sent in the round before.
        at = (step - 1) // pieces * pieces if self.overlaps else step
        values = parameters + self._carries_weight
        return round_bytes(self.method.schedule.round_at(at), -(-values // pieces), self.wire)

    def link_bytes(self, step: int, parameters: int) -> float:
        """What the busiest link carries one thing after another at `step`.

        Links are full duplex, so that is what a node sends; but the center of `centralized` knows
        the mean only when all gradients are in: it receives N - 1 models, and then sends as many.
        """
        sent = self.sent_bytes(step, parameters)
        return 2 * sent if self.algorithm == CENTRALIZED else sent

    @property
    def _carries_weight(self) -> bool:
        name = self.method.algorithm
        return name == "sgp" or (name.endswith("osgp") and not name.startswith("biased"))


def round_bytes(mixing: Round, values: int, wire: Width) -> float:
    """What the node that sends most sends in one round, for a message of so many float32 values.

    >>> pair, ring = gx.topology.ring(2).round_at(0), gx.topology.ring(4).round_at(0)
    >>> round_bytes(pair, 100, "float32"), round_bytes(ring, 100, "float32")
    (400.0, 800.0)
    >>> round_bytes(pair, 101, "bfloat16")  # the weight stays wide
    204.0
    """
    if mixing.is_identity:
        return 0.0
    if mixing.is_uniform and wire == "float32":  # a ring all-reduce
        return 4.0 * values * 2 * (mixing.size - 1) / mixing.size
    order = np.arange(mixing.size)
    peers = np.sum([receivers != order for receivers, _ in mixing.slots], axis=0)
    return message_bytes(values, wire) * float(peers.max())


def message_bytes(values: int, wire: Width) -> float:
    """What a message of so many float32 values takes; the weight of a narrow one stays wide."""
    return 4.0 * values if wire == "float32" else 4.0 + 2.0 * (values - 1)


def limit_seconds(
    computation: float, link_bytes: float, goodput: float, overlaps: bool = False
) -> float:
    """The least that an iteration can take on this machine and link, in seconds.

    `computation + bytes / goodput`, or the larger of the two where they overlap.

    Args:
      computation: seconds of an iteration without any exchange.
      link_bytes: that the busiest link carries, one thing after another.
      goodput: of a plain TCP stream on that link, bytes per second.
      overlaps: whether the exchange runs beside the computation.

    >>> limit_seconds(0.5, 20e6, 25e6), limit_seconds(0.5, 20e6, 25e6, overlaps=True)
    (1.3, 0.8)
    """
    wire = link_bytes / goodput
    return max(computation, wire) if overlaps else computation + wire


def row(algorithm: str, wire: Width, nodes: int) -> Row:
    """The named algorithm over so many nodes, around plain SGD.

    Raises:
      ValueError: for an unknown name, a topology that is impossible for so many nodes, or a narrow
        wire where there is none.
    """
    narrow = None if wire == "float32" else jnp.dtype(wire)
    if algorithm == CENTRALIZED:
        first = optax.chain(centralized(narrow), optax.sgd(RATE))
        nothing = optax.with_extra_args_support(optax.identity())
        everyone = gx.topology.complete(nodes)
        how = methods.Method(CENTRALIZED, "star", everyone, 0, first, nothing)
        return Row(algorithm, wire, how)
    setting = methods.Setting(nodes, wire_dtype=narrow)
    return Row(algorithm, wire, methods.method(algorithm, setting, optax.sgd(RATE)))


def rows(
    algorithms: Sequence[str], wires: Sequence[Width], nodes: int
) -> tuple[list[Row], dict[str, str]]:
    """All rows that are possible for so many nodes, and why the others are not, by name.

    Raises:
      ValueError: for a name that is unknown, or if nothing is left.
    """
    possible: list[Row] = []
    left_out: dict[str, str] = {}
    for algorithm in algorithms:
        if algorithm != CENTRALIZED:
            methods.split_name(algorithm)
        for wire in wires:
            try:
                possible.append(row(algorithm, wire, nodes))
            except ValueError as error:
                left_out[f"{algorithm}, {wire} wire"] = str(error)
    if not possible:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise ValueError(f"nothing to measure with {nodes} hosts. {reasons}")
    return possible, left_out


def summarize(
    rows: Sequence[Row], hosts: int, rate: str | None, found: Sequence[Record]
) -> tuple[Record, list[Record]]:
    """The configuration, and an object per row, of what every host has measured."""
    first = found[0]
    slowest = {name: _slowest(found, name) for name in first["seconds"]}
    low, computation, high = np.quantile(slowest[COMPUTATION], [0.1, 0.5, 0.9]).tolist()
    goodput = {name: first["stream_bytes"] / np.median(slowest[name]) for name in (RING, ALONE)}
    fastest = float(max(goodput.values()))  # the stricter limit
    where = {"hosts": hosts, "bandwidth": rate}
    configuration = where | {
        "parameters": first["parameters"],
        "examples_per_host": first["examples"],
        "computation_seconds": computation,
        "computation_seconds_10": low,
        "computation_seconds_90": high,
        "stream_bytes": first["stream_bytes"],
        "goodput_all_links": goodput[RING],
        "goodput_one_link": goodput[ALONE],
        "peak_memory_bytes": max(record["peak_memory_bytes"] for record in found),
    }
    runs = []
    for row in rows:
        seconds = slowest[row.name]
        steps = range(len(seconds))
        low, median, high = np.quantile(seconds, [0.1, 0.5, 0.9]).tolist()
        link = float(np.mean([row.link_bytes(k, first["parameters"]) for k in steps]))
        limit = limit_seconds(computation, link, fastest, row.overlaps)
        rounds = np.array([row.canonical_step(k) for k in steps])
        counted = [record["sent_bytes"][row.name] for record in found]
        runs.append(
            {
                "algorithm": row.algorithm,
                "topology": row.method.topology,
                "wire": row.wire,
                **where,
                "iterations": len(seconds),
                "seconds": median,
                "seconds_10": low,
                "seconds_90": high,
                "seconds_by_round": {
                    f"{k}": float(np.median(seconds[rounds == k])) for k in np.unique(rounds)
                },
                "computation_seconds": computation,
                "sent_bytes": float(
                    np.mean([row.sent_bytes(k, first["parameters"]) for k in steps])
                ),
                "counted_bytes": None if rate is None else float(np.mean(counted, axis=1).max()),
                "link_bytes": link,
                "goodput": fastest,
                "overlaps": row.overlaps,
                "limit_seconds": limit,
                "ratio_to_limit": median / limit,
            }
        )
    return configuration, runs


def _slowest(found: Sequence[Record], name: str) -> np.ndarray:
    """The seconds of the slowest host, `[iterations]`."""
    return np.max([record["seconds"][name] for record in found], axis=0)


def lines(hosts: int, rate: str | None, found: Sequence[Record]) -> list[Record]:
    """The lines of `metrics.jsonl`: `seconds` and `sent_bytes` of every host, a list each."""
    return [
        {
            "hosts": hosts,
            "bandwidth": rate,
            "row": name,
            "iteration": k,
            **{
                field: [record[field][name][k] for record in found]
                for field in ("seconds", "sent_bytes")
            },
        }
        for name, seconds in found[0]["seconds"].items()
        for k in range(len(seconds))
    ]


def centralized(
    wire_dtype: np.dtype | None, axis_name: str = "nodes"
) -> optax.GradientTransformationExtraArgs:
    """A parameter server: node 0 gathers all gradients and sends every node their mean.

    Goes first in a chain. Needs a mesh: the permutations are partial, as only node 0's link is
    busy.
    """

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del params, extra_args
        buffer, unravel = ravel_pytree(updates)
        nodes, index = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
        words, total = encode([buffer], wire_dtype), buffer
        for sender in range(1, nodes):
            came = jax.lax.ppermute(words, axis_name, [(sender, 0)])
            total = total + decode(came, wire_dtype, [buffer])[0]
        mean = encode([total / nodes], wire_dtype)  # on node 0, and nothing of use elsewhere
        result = mean
        for receiver in range(1, nodes):
            came = jax.lax.ppermute(mean, axis_name, [(0, receiver)])
            result = jnp.where(index == receiver, came, result)
        return unravel(decode(result, wire_dtype, [buffer])[0]), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
