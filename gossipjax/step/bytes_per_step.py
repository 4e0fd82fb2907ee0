"""The bytes that each node sends in a step, read in the traced program of an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from gossipjax import meshes
from gossipjax.exchanges.chain import find_parts, step_plan
from gossipjax.exchanges.plan import Plan
from gossipjax.exchanges.transform import require_transform
from gossipjax.nodes import Nodes, as_nodes
from gossipjax.nodes.equations import AXIS_PARAMS, is_collective_over, programs_in
from gossipjax.topology.schedule import require_int

# What each of n nodes sends, and receives, by a collective on a ring, as a multiple of the bytes
# that it gives to the collective.
RING: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **dict.fromkeys(("psum", "pmax", "pmin"), lambda n: 2 * (n - 1) / n),
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "all_to_all": lambda n: (n - 1) / n,
}


class Traffic(NamedTuple):
    """The bytes that N nodes exchange in T steps.

    Attributes:
      sent: float64 `[T, N]`, the bytes that each node sends in each step.
      received: float64 `[T, N]`, the bytes that each node receives in each step.

    >>> import jax.numpy as jnp, gossipjax as gx
    >>> star = gx.sgp(gx.topology.star(3))
    >>> gx.bytes_per_step(star, jnp.zeros(9), nodes=3).received.tolist()  # nine values and a weight
    [[80.0, 40.0, 40.0]]
    """

    sent: np.ndarray
    received: np.ndarray


def bytes_per_step(
    tx: optax.GradientTransformation,
    params: Any,
    nodes: int | Nodes,
    *,
    steps: Iterable[int] | None = None,
    **extra_args: Any,
) -> Traffic:
    """Returns the bytes that each node sends and receives in each step.

    The function runs no step. It traces one update for each kind of step, as if each node had a
    device of its own, in the form that `gx.TrainStep` compiles. It counts the collectives in it,
    with the scales and indices of codecs and the push-sum weights. A node without a peer in a round
    sends nothing. If rounds differ only in who sends to whom, as random rounds do, one round is
    traced. Exact averages are counted on a ring: of B bytes an all-reduce sends `2 (N - 1) / N B`,
    a gather `(N - 1) B`, an all-to-all `(N - 1) / N B`.

    If a node has several devices, the bytes that they exchange with other nodes are added up; the
    bytes between devices of the same node are not counted. `gx.apply_if_finite` is counted as if it
    skipped nothing. What a training step exchanges outside of `tx` is not counted.

    Args:
      tx: the whole chain.
      params: the parameters of one node, `[...]`: arrays or `jax.ShapeDtypeStruct`s.
      nodes: N, or a `Nodes` if its mesh has more axes, such as "local" or "fsdp".
      steps: the numbers of T steps, from 0; by default all steps up to the end of the first cycle.
      extra_args: further arguments of `tx.update` for one node, such as `node_weight=`.

    Raises:
      ValueError: if tracing cannot tell whether or how often nodes exchange, as in
        `gx.contrib.desloc`, if a collective has no formula here, or if `tx` raises it.

    >>> import jax.numpy as jnp, optax, gossipjax as gx
    >>> schedule = gx.topology.one_peer_exponential(4).every(2)
    >>> tx = optax.chain(optax.sgd(0.1), gx.sgp(schedule, wire=jnp.bfloat16))
    >>> gx.bytes_per_step(tx, {"w": jnp.zeros((10, 10))}, nodes=4).sent[:, 0].tolist()
    [204.0, 0.0, 204.0, 0.0]
    """
    tx = require_transform(tx, "tx of bytes_per_step")
    nodes = as_nodes(nodes)
    sizes = dict(nodes.mesh.shape) if nodes.mesh is not None else {}  # by axis of the mesh
    sizes[nodes.axis_name] = nodes.size  # each node gets a device, even if some share one now
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    manual = set(sizes) - set(nodes.inner_axes)

    def on_mesh(fn: Callable[..., Any]) -> Callable[..., Any]:
        """Maps a per-node function over the mesh, which has no devices: it can only be traced."""
        options: dict[str, Any] = {"axis_names": manual, "check_vma": False}
        return jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), **options)

    def count(step: int) -> np.ndarray:
        """Returns the bytes `[2, N]` that nodes send and receive in the update of one step."""

        def update(updates: Any, state: Any, params: Any) -> Any:
            return tx.update(updates, state, params, step=step, **extra_args)

        jaxpr = jax.make_jaxpr(on_mesh(update))(shapes, state, shapes)
        return _count(jaxpr, nodes, {}, may_skip)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    with meshes.unset_mesh():
        state = jax.eval_shape(on_mesh(tx.init), shapes)
        plan = step_plan(state)
        may_skip = bool(find_parts(state, optax.ApplyIfFiniteState))
        wanted = range(sum(plan.cycle)) if steps is None else steps
        programs = [plan.canonical_step(require_int(k, "a step", 0)) for k in wanted]
        counted: dict[int, np.ndarray] = {}
        messages: dict[Any, float] = {}  # kind of a step -> bytes along each edge of its round
        for step in dict.fromkeys(programs):
            kind, edges = _describe_round(plan, step)
            if kind in messages:  # nothing need be traced
                counted[step] = messages[kind] * edges
                continue
            counted[step] = count(step)
            message = counted[step].max() / max(1, edges.max())
            if kind is not None and (counted[step] == message * edges).all():
                messages[kind] = message
    rows = np.array([counted[k] for k in programs]).reshape(-1, 2, nodes.size)
    return Traffic(rows[:, 0], rows[:, 1])


def _describe_round(plan: Plan, step: int) -> tuple[Any, np.ndarray]:
    """Returns the kind of a step, and how many messages each node sends and receives, `[2, N]`.

    Messages have the same size in all steps of one kind, so only one of these steps is traced. If
    the kind is None, other steps tell nothing about this one, and the counts are not used.
    """
    exchanges = plan.exchanges()
    travelling = [(e, found) for e in exchanges if (found := e.find_piece(step)) is not None]
    schedules = {e.schedule for e in exchanges}
    if len(schedules) != 1 or len(travelling) > 1:
        return None, np.zeros((2, 1))
    if not travelling:
        return "idle", np.zeros((2, 1))
    ((exchange, (number, piece)),) = travelling
    round_ = exchange.round_of(number)
    if round_ is None:  # all nodes at once
        return None, np.zeros((2, 1))
    edges = np.zeros((2, round_.size))
    in_pairs = []  # of each slot; some backends exchange in pairs by sums
    for receivers, weights in round_.slots:
        edges += [weights > 0, (weights > 0)[np.argsort(receivers)]]
        in_pairs.append((receivers[receivers] == np.arange(round_.size)).all())
    # Bytes that do not depend on the edges would be divided among them. So the number of edges of a
    # node is a part of the kind.
    degrees = *edges.min(axis=1), *edges.max(axis=1)
    return (exchange.phase, piece, round_.is_uniform, *in_pairs, *degrees), edges


def _count(jaxpr: Any, nodes: Nodes, manual: Mapping[str, int], may_skip: bool) -> np.ndarray:
    """Counts the bytes `[2, N]` that each node, with all its devices, sends and receives.

    `jaxpr` is the program. `manual` has the sizes of the axes over which each device runs it.
    """
    total = np.zeros((2, nodes.size))
    for eqn in jaxpr.eqns:
        axes = manual
        if eqn.primitive.name == "shard_map":
            added = eqn.params["newly_manual_axes"]
            axes = {**manual, **{name: eqn.params["mesh"].shape[name] for name in added}}
        parts = [_count(inner, nodes, axes, may_skip) for inner in programs_in(eqn)]
        if eqn.primitive.name == "cond":
            total += _choose(parts, eqn.params.get("branches_platforms"), may_skip)
        elif eqn.primitive.name == "scan":
            total += eqn.params["length"] * sum(parts)
        elif eqn.primitive.name == "while" and np.any(parts):
            raise ValueError(
                "an exchange must be in a loop whose length is known when traced, got one in a "
                "while loop: use jax.lax.scan, or a fori_loop between numbers."
            )
        else:
            total += sum(parts)
        if eqn.invars and is_collective_over(nodes.axis_name, eqn):
            total += _count_collective(eqn, nodes, manual)
    return total


def _choose(branches: list[np.ndarray], platforms: Any, may_skip: bool) -> np.ndarray:
    """Returns the bytes of the branch of a `cond` that is counted.

    With `platforms`, it is the branch that this backend compiles. If values decide at run time,
    all branches must exchange alike, except that with `may_skip` one may skip the exchange.
    """
    if platforms is not None:
        backend = jax.default_backend()
        fits = [not names or backend in names for names in platforms]
        return branches[fits.index(True)]
    if np.ptp(branches, axis=0).any() and not may_skip:
        raise ValueError(
            "whether nodes exchange must be known when traced, got a condition that values decide, "
            "as in optax.MultiSteps or gx.contrib.desloc: use gx.accumulate_gradients, or count "
            "each average by itself, as gx.dpsgd(schedule.every(period))."
        )
    return max(branches, key=np.sum)


def _count_collective(eqn: Any, nodes: Nodes, manual: Mapping[str, int]) -> np.ndarray:
    """Returns the bytes `[2, N]` of one collective, added over all devices of a node."""
    found = [eqn.params[name] for name in AXIS_PARAMS if name in eqn.params]
    over = {axis for axes in found for axis in (axes if isinstance(axes, tuple) else (axes,))}
    # The devices of a node along other axes take part in collectives of their own.
    devices = math.prod(size for axis, size in manual.items() if axis not in over)
    given = devices * sum(var.aval.size * var.aval.dtype.itemsize for var in eqn.invars)  # bytes
    kind = eqn.primitive.name
    if kind == "ppermute":
        edges = np.array([edge for edge in eqn.params["perm"] if edge[0] != edge[1]], int)
        ends = edges.reshape(-1, 2).T
        return given * np.array([np.bincount(end, minlength=nodes.size) for end in ends])
    if kind not in RING:
        raise ValueError(
            f"collectives over {nodes.axis_name!r} must be {', '.join(RING)} or ppermute to be "
            f"counted, got {kind}."
        )
    groups = eqn.params.get("axis_index_groups") or [range(nodes.size)]
    sizes = np.ones(nodes.size)
    for group in groups:
        sizes[list(group)] = len(group)
    return given * np.tile(RING[kind](sizes), (2, 1))
