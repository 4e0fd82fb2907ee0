"""Compiled programs of all nodes, by `vmap` or `shard_map`, and the form of their arguments."""

from __future__ import annotations

import collections
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gossipjax import meshes, processes
from gossipjax.nodes._convolutions import vmap_nodes
from gossipjax.nodes.arguments import (
    ArgumentKinds,
    require_all_stacked,
    require_numbers,
    require_stacked,
)
from gossipjax.nodes.equations import all_equations, is_collective_over
from gossipjax.sharding import axes_of, constrain, shard_specs

if TYPE_CHECKING:
    from gossipjax.nodes import Nodes


def is_put(x: Any, sharding: NamedSharding) -> bool:
    """Says whether an array need not be moved: it has this sharding, or is traced."""
    return isinstance(x, Tracer) or getattr(x, "sharding", None) == sharding


def keep_inside(x: Any, sharding: NamedSharding, nodes: Nodes) -> NamedSharding:
    """Extends the sharding of a node-stacked array, so that a row stays sharded inside its node.

    The sharding is returned as it is if the array is not sharded over inner axes of these nodes.
    """
    actual = getattr(x, "sharding", None)
    if nodes.mesh is None or not nodes.inner_axes or not isinstance(actual, NamedSharding):
        return sharding
    inside = actual.spec[len(sharding.spec) :]
    is_on_mesh = is_mesh_of(nodes, actual.mesh)
    if not is_on_mesh or not set(axes_of(P(*inside))) <= set(nodes.inner_axes):
        return sharding
    return NamedSharding(sharding.mesh, P(*sharding.spec, *inside))


def is_mesh_of(nodes: Nodes, mesh: Any) -> bool:
    """Says whether a mesh is that of the nodes, also with Explicit axes instead of Auto ones."""
    return isinstance(mesh, Mesh) and meshes.auto_mesh(mesh) == nodes.mesh


def put_leaf(x: Any, sharding: NamedSharding) -> jax.Array:
    """Moves an array, of this process or spread over all, to the devices of `sharding`."""
    is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
    if is_global or processes.is_key(x):
        return jax.device_put(x, sharding)
    return processes.put_global(x, sharding)


# A program warns when it was compiled for more: a train step compiles at most as many rounds.
MAX_STATIC_VALUES = 32

# An array of the last result that must be there before the next program starts, on some devices.
_last: collections.deque[jax.Array] = collections.deque(maxlen=1)


class Program:
    """A jitted function on node-stacked arrays, as `spmd` returns it.

    A program first moves its arrays to the mesh, if they are not there yet. The first step of a
    loop therefore runs the same compiled program as the later steps.

    >>> import gossipjax as gx
    >>> import jax.numpy as jnp
    >>> double = gx.spmd(lambda x: 2 * x, nodes=4)
    >>> double(jnp.arange(4.0)).tolist()
    [0.0, 2.0, 4.0, 6.0]
    """

    def __init__(self, jitted: Any, kinds: ArgumentKinds, nodes: Nodes):
        self.max_static_values: float = MAX_STATIC_VALUES
        self._static_values: set[Any] = set()
        self._jitted = jitted
        self._kinds = kinds
        self._nodes = nodes
        self._compiled: dict[Any, Any] = {}  # by static values and shapes; see `prepare`
        # By number of the argument: shardings of arrays that need not be moved.
        self._good_shardings: dict[int, set[Any]] = collections.defaultdict(set)
        # The first array of each tree of the last result.
        self._last_results: list[weakref.ref[Any]] = []

    @meshes.apart_from_set_mesh
    def __call__(self, *args: Any) -> Any:
        """Moves the arguments to the devices, if needed, and runs the program for all nodes."""
        if self._kinds.static and self.max_static_values < math.inf:
            self._count_static_values(args)
        if meshes.has_explicit_axes(jax.sharding.get_abstract_mesh()):
            return self._call_in_jit(args)
        if self._is_one_at_a_time:  # wait for the program before
            for array in tuple(_last):
                if not array.is_deleted():  # if it was donated, a later program has waited for it
                    array.block_until_ready()
        result = self._jitted(*self.put(*args))
        if self._is_one_at_a_time:  # one array tells that all are there; a loss, often, is small
            arrays = jax.tree.leaves(result)[-1:]
            _last.extend(array for array in arrays if not isinstance(array, Tracer))
        if type(result) is tuple:
            firsts = [jax.tree.leaves(part)[:1] for part in result]
            self._last_results = [weakref.ref(leaf) for (leaf,) in filter(None, firsts)]
        return result

    def _count_static_values(self, args: Sequence[Any]) -> None:
        """Warns once if a program is compiled for many static values, such as each step number."""
        values = tuple(arg for i, arg in enumerate(args) if i in self._kinds.static)
        self._static_values.add(values)
        if len(self._static_values) > self.max_static_values:
            self.max_static_values = math.inf
            warnings.warn(
                "this program is compiled anew for each value of its static arguments, the "
                f"{len(self._static_values)}th of which is {values}: give a step as "
                "gx.canonical_step(opt_state, step), one value per round, or traced, by "
                "shared_argnums.",
                stacklevel=4,
            )

    @functools.cached_property
    def _is_one_at_a_time(self) -> bool:
        """Says whether a program must wait until the program before has ended.

        This holds if a process has several CPU devices, because they share its threads: a
        collective could wait for a thread on which a later program waits, and neither would end.
        """
        mesh = self._nodes.mesh
        devices = () if mesh is None else mesh.local_devices
        return len(devices) > 1 and devices[0].platform == "cpu"

    def _call_in_jit(self, args: Sequence[Any]) -> Any:
        """Runs the program inside of a jitted function, under a set mesh of Explicit axes."""
        if self._nodes.inner_axes:
            raise ValueError(
                "a program of nodes with axes inside must be called outside of jax.jit under a set "
                f"mesh of Explicit axes, got the axes {self._nodes.inner_axes} inside of it: XLA "
                "shards what they hold. Call it outside, or set nodes.mesh, whose axes are Auto."
            )
        spec = P() if self._nodes.is_simulated else P(self._nodes.axis_name)
        kinds = self._kinds

        def call(dynamic: dict[int, Any]) -> Any:
            return self._jitted(*kinds.merge(args, dynamic))

        return jax.sharding.auto_axes(call, out_sharding=spec)(kinds.dynamic(args))

    def lower(self, *args: Any) -> Any:
        """Lowers the program, as `jax.jit` does, for node-stacked arrays or `ShapeDtypeStruct`s."""
        with meshes.unset_mesh():
            return self._jitted.lower(*meshes.on_auto_axes(args))

    def has_collective(self, axis_name: str, *args: Any) -> bool:
        """Says whether the program exchanges over an axis; traces the program if needed."""
        with meshes.unset_mesh():
            jaxpr = self._jitted.trace(*meshes.on_auto_axes(args)).jaxpr
        return any(
            is_collective_over(axis_name, eqn) and eqn.primitive.name != "axis_index"
            for eqn in all_equations(jaxpr.eqns)
        )

    def prepare(self, *args: Any) -> Callable[[], Any]:
        """Compiles the program here, if needed; returns a call that runs it, on any thread.

        The call returns when the result is on the devices.
        """
        mesh = meshes.current_mesh()
        with meshes.unset_mesh():
            placed = self.put(*args)
            dynamic = [arg for i, arg in enumerate(placed) if i not in self._kinds.static]
            static = tuple(arg for i, arg in enumerate(placed) if i in self._kinds.static)
            leaves, structure = jax.tree.flatten(dynamic)
            key = static, structure, tuple((x.shape, x.dtype, x.sharding) for x in leaves)
            if key not in self._compiled:
                self._compiled[key] = self._jitted.lower(*placed).compile()
        compiled = self._compiled[key]
        return lambda: meshes.on_mesh(jax.block_until_ready(compiled(*dynamic)), mesh)

    def put(self, *args: Any) -> Sequence[Any]:
        """Returns the arguments as arrays on the devices, in the parts that the program takes."""
        return [
            arg if i in self._kinds.static or self._need_not_move(i, arg) else self._put(i, arg)
            for i, arg in enumerate(args)
        ]

    def _need_not_move(self, number: int, arg: Any) -> bool:
        """Says whether all arrays of an argument are known to be where the program takes them.

        They are if a call has returned them, or if they are sharded like arrays of an earlier call.
        """
        leaves = jax.tree.leaves(arg)
        # A loop passes results back. To look at the sharding of each takes as long as the call, so
        # the first array of the tree stands for all.
        if leaves and any(result() is leaves[0] for result in self._last_results):
            return True
        shardings = {getattr(leaf, "sharding", None) for leaf in leaves}
        return self._good_shardings_of(number).issuperset(shardings)

    def _good_shardings_of(self, number: int) -> set[Any]:
        # On one device all arguments need the same.
        return self._good_shardings[-1 if self._nodes.mesh is None else number]

    def _put(self, number: int, arg: Any) -> Any:
        """Moves an argument to the devices, and remembers how its arrays are sharded then."""
        require_numbers(arg, f"argument {number}")
        placed = self._put_tree(number, arg)
        leaves = jax.tree.leaves(placed)
        if not any(isinstance(leaf, Tracer) for leaf in leaves):
            self._good_shardings_of(number).update(leaf.sharding for leaf in leaves)
        return placed

    def _put_tree(self, number: int, arg: Any) -> Any:
        """Moves those arrays of an argument that are not yet where the program takes them."""
        if self._nodes.mesh is None:
            arg = meshes.on_auto_axes(arg)
            return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.device_put(x), arg)
        spec = _spec_of_argument(number, self._kinds, self._nodes)
        sharding = NamedSharding(self._nodes.mesh, spec)
        shardings = jax.tree.map(lambda x: keep_inside(x, sharding, self._nodes), arg)
        if all(map(is_put, jax.tree.leaves(arg), jax.tree.leaves(shardings))):
            return arg
        require_stacked(number, arg, self._kinds, self._nodes)
        return jax.tree.map(lambda x, s: x if is_put(x, s) else put_leaf(x, s), arg, shardings)


def run_simulated(
    fn: Callable[..., Any], kinds: ArgumentKinds, nodes: Nodes, check_vma: bool
) -> Callable[..., Any]:
    """Returns `fn` of one node for N nodes on one device, by `vmap`."""
    del check_vma  # an option of `shard_map`

    def run(*args: Any) -> Any:
        """Checks the arguments, and runs `fn` for all nodes by `vmap`."""
        dynamic = require_all_stacked(kinds, args, nodes)
        in_axes = {i: None if i in kinds.shared else 0 for i in dynamic}

        def run_node(values: dict[int, Any]) -> Any:
            return jax.tree.map(jnp.asarray, fn(*kinds.merge(args, values)))

        return vmap_nodes(run_node, (in_axes,), nodes.axis_name, nodes.size)(dynamic)

    return run


def run_sharded(
    fn: Callable[..., Any], kinds: ArgumentKinds, nodes: Nodes, check_vma: bool
) -> Callable[..., Any]:
    """Returns `fn` of one node for the nodes of a mesh, by `shard_map`, with a node per device.

    A node can also have several devices, a row of the mesh.
    """
    mesh = nodes.mesh
    assert mesh is not None
    if check_vma and nodes.inner_axes:
        raise ValueError(
            f"check_vma must be False on a mesh with axes inside the nodes, {nodes.inner_axes}, "
            "got True: XLA partitions a node over these axes, and types cannot say how. Use a mesh "
            "without them."
        )

    def run(*args: Any) -> Any:
        """Checks the arguments, and runs `fn` for the node of each device by `shard_map`."""
        dynamic = require_all_stacked(kinds, args, nodes)

        def run_device(shards: dict[int, Any]) -> Any:
            """Runs `fn` for this device's row, `[1, ...]`, of each argument that is not shared."""
            values = {
                i: shard if i in kinds.shared else jax.tree.map(lambda x: x[0], shard)
                for i, shard in shards.items()
            }
            out = fn(*kinds.merge(args, values))
            # The results stay sharded inside the node as `gx.sharded` says in the state.
            out = constrain(out, shard_specs((out, values)), nodes.axis_name)
            return jax.tree.map(lambda x: jnp.asarray(x)[None], out)

        mapped = jax.shard_map(
            run_device,
            mesh=mesh,
            in_specs=({i: _spec_of_argument(i, kinds, nodes) for i in dynamic},),
            out_specs=P(nodes.axis_name),
            axis_names=set(mesh.axis_names) - set(nodes.inner_axes),
            check_vma=check_vma,
        )
        return mapped(dynamic)

    return run


def _spec_of_argument(number: int, kinds: ArgumentKinds, nodes: Nodes) -> P:
    """Says how an argument is sharded over the nodes, and over the devices of each node."""
    if number in kinds.shared:
        return P()
    if number in kinds.local and nodes.local_devices is not None:
        return P(nodes.axis_name, nodes.local_axis_name)
    return P(nodes.axis_name)
