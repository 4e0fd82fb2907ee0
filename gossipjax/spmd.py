"""A per-node function becomes a jitted function on node-stacked arrays: on a mesh or one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Argnums = int | Sequence[int]


def _numbers(argnums: Argnums) -> set[int]:
    numbers = {argnums} if isinstance(argnums, int) else set(argnums)
    if any(number < 0 for number in numbers):
        raise ValueError(f"arguments are counted from 0; given {sorted(numbers)}.")
    return numbers


class Program:
    """What `spmd` returns: called with node-stacked arrays; `lower` is that of `jax.jit`.

    Arrays that are not on the mesh yet are put there first, so that the first step of a loop runs
    the same compiled program as the later ones.
    """

    def __init__(self, jitted: Any, place: Callable[[int, Any], Any]):
        self._jitted = jitted
        self._place = place

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*(self._place(i, arg) for i, arg in enumerate(args)))

    def lower(self, *args: Any) -> Any:
        """As `jax.jit(...).lower`: arrays or `jax.ShapeDtypeStruct`s, node-stacked."""
        return self._jitted.lower(*args)


def _is_placed(x: Any, sharding: NamedSharding) -> bool:
    return isinstance(x, Tracer) or getattr(x, "sharding", None) == sharding


def spmd(
    fn: Callable[..., Any],
    mesh: Mesh | None = None,
    nodes: int | None = None,
    *,
    axis_name: str = "nodes",
    local_axis_name: str = "local",
    static_argnums: Argnums = (),
    donate_argnums: Argnums = (),
    shared_argnums: Argnums = (),
    local_argnums: Argnums = (),
    check_vma: bool = False,
) -> Program:
    """Runs `fn`, written from one node's point of view, for all N nodes at once, jitted.

    Every array that goes in or comes out is node-stacked: `[N, ...]`, while `fn` sees `[...]`.
    Inside `fn` collectives over `axis_name` work, and so do all transforms of this library.

    Args:
      fn: `fn(*args) -> pytree`, of positional arguments.
      mesh: run by `shard_map` over its axis `axis_name`, one node per device (or per row of
        devices, if it has the axis `local_axis_name` too). N is that axis' size. The kind of its
        axes does not matter; do not `jax.set_mesh` one of Explicit axes around the call.
      nodes: without a mesh: N nodes simulated on one device by `vmap`. With neither, the mesh is
        all devices.
      static_argnums: arguments that are fixed when traced, as in `jax.jit`; not node-stacked.
      donate_argnums: arguments whose memory the results may take, as in `jax.jit`.
      shared_argnums: arguments given once, the same for every node, with no node axis.
      local_argnums: arguments such as batches, `[N, B, ...]`, whose second axis is split over a
        node's local devices: `fn` sees `[B / L, ...]`. The others are replicated over them.
      check_vma: of `shard_map`. Without it, a result that was not averaged over the local axis is
        silently that of a node's first device; with it, it is refused. Gradients must then be taken
        at `jax.lax.pcast(params, "local", to="varying")`.

    Returns:
      A jitted function, compiled once per set of shapes and static values: make it once, outside
      of loops.

    Raises:
      ValueError: if the mesh has no such axis or `nodes` contradicts it; `nodes` below 1; when
        traced, if an argument's leaf has no leading axis of size N, or its second one does not
        divide over the local devices.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> gx.spmd(lambda x: x - jax.lax.pmean(x, "nodes"), nodes=2)(jnp.array([1.0, 3.0])).tolist()
    [-1.0, 1.0]
    """
    if mesh is None and nodes is None:
        mesh = Mesh(jax.devices(), (axis_name,))
    if mesh is not None:
        if axis_name not in mesh.axis_names:
            raise ValueError(
                f"the mesh has the axes {mesh.axis_names}, none named {axis_name!r}: name one so, "
                "or pass axis_name."
            )
        if nodes not in (None, mesh.shape[axis_name]):
            raise ValueError(
                f"nodes={nodes}, but the mesh has {mesh.shape[axis_name]} on {axis_name!r}; give "
                "one of the two."
            )
        nodes = mesh.shape[axis_name]
        # shard_map over Explicit axes, the default of jax.make_mesh, refuses unsharded arrays.
        mesh = Mesh(mesh.devices, mesh.axis_names)
    if isinstance(nodes, bool) or not isinstance(nodes, int | np.integer) or nodes < 1:
        raise ValueError(f"nodes is a whole number of at least 1; given {nodes!r}.")
    local = mesh.shape.get(local_axis_name) if mesh is not None else None
    static, shared, split = map(_numbers, (static_argnums, shared_argnums, local_argnums))
    if static & shared:
        raise ValueError(f"arguments {sorted(static & shared)} are both static and shared.")

    def call(dynamic: dict[int, Any], args: Sequence[Any]) -> Any:
        out = fn(*(dynamic.get(i, arg) for i, arg in enumerate(args)))
        return jax.tree.map(jnp.asarray, out)

    def require_stacked(i: int, arg: Any) -> None:
        if i not in shared:
            _require_stacked(arg, i, nodes, local if i in split else None)

    def check(args: Sequence[Any]) -> dict[int, Any]:
        dynamic = {i: arg for i, arg in enumerate(args) if i not in static}
        for i, arg in dynamic.items():
            require_stacked(i, arg)
        return dynamic

    def run_on_one_device(*args: Any) -> Any:
        dynamic = check(args)
        axes = {i: None if i in shared else 0 for i in dynamic}
        mapped = jax.vmap(lambda d: call(d, args), (axes,), axis_name=axis_name, axis_size=nodes)
        return mapped(dynamic)

    def spec(i: int) -> P:
        if i in shared:
            return P()
        return P(axis_name, local_axis_name) if i in split and local else P(axis_name)

    def run_on_mesh(*args: Any) -> Any:
        def per_device(dynamic: dict[int, Any]) -> Any:
            stripped = {
                i: v if i in shared else jax.tree.map(lambda x: x[0], v) for i, v in dynamic.items()
            }
            return jax.tree.map(lambda x: x[None], call(stripped, args))

        dynamic = check(args)
        mapped = jax.shard_map(
            per_device,
            mesh=mesh,
            in_specs=({i: spec(i) for i in dynamic},),
            out_specs=P(axis_name),
            check_vma=check_vma,
        )
        return mapped(dynamic)

    def place(i: int, arg: Any) -> Any:
        if mesh is None or i in static:
            return arg
        sharding = NamedSharding(mesh, spec(i))
        if all(_is_placed(x, sharding) for x in jax.tree.leaves(arg)):
            return arg
        require_stacked(i, arg)
        return jax.device_put(arg, sharding)

    run = run_on_one_device if mesh is None else run_on_mesh
    run.__name__ = getattr(fn, "__name__", run.__name__)  # what profiles show
    jitted = jax.jit(run, static_argnums=tuple(static), donate_argnums=donate_argnums)
    return Program(jitted, place)


def donated_argnums(*argnums: int) -> tuple[int, ...]:
    """These arguments; none on a CPU, where XLA would copy most of what an update is given so.

    For an update by SGP and momentum those are 4 of 18 passes over memory, and a sixth of its time.
    """
    return () if jax.default_backend() == "cpu" else argnums


def _require_stacked(arg: Any, number: int, nodes: int, local: int | None) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
        shape = jnp.shape(leaf)
        where = f"argument {number}{jax.tree_util.keystr(path)} has shape {list(shape)}"
        if not shape or shape[0] != nodes:
            raise ValueError(
                f"{where}; node-stacked arrays have a leading axis of {nodes} nodes. Stack it, "
                "build it per node (gx.spmd(tx.init, ...)(params)), or list the argument in "
                "shared_argnums or static_argnums."
            )
        if local is not None and (len(shape) < 2 or shape[1] % local):
            raise ValueError(
                f"{where}; its second axis is split over {local} local devices, which do not "
                "divide it."
            )
