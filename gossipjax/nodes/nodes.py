"""Runs a per-node function on node-stacked arrays: on a mesh, or simulated on one device.

`Nodes` says once where N nodes run; `spmd` compiles a function that is written from one node's
point of view. Node-stacked arrays are `[N, ...]`; the function sees `[...]`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gossipjax import meshes, processes
from gossipjax.nodes._blocks import run_in_blocks
from gossipjax.nodes.arguments import (
    Argnums,
    ArgumentKinds,
    argument_numbers,
    is_function,
    is_int,
    require_no_arguments,
    require_numbers,
    require_size_of_mesh,
    require_transform,
)
from gossipjax.nodes.program import Program, is_mesh_of, run_sharded, run_simulated
from gossipjax.nodes.stacked import (
    first_row,
    fold_in_nodes,
    make_rows,
    repeat_rows,
    require_equal_rows,
    require_one_model,
    shard_rows,
    spec_of_row,
    split_rows,
)
from gossipjax.renamed import renamed
from gossipjax.sharding import shard_specs

MAX_KEPT_PROGRAMS = 256  # of `Nodes.run`


@renamed(mesh="nodes=gx.Nodes(mesh=mesh)")
def spmd(
    fn: Callable[..., Any],
    nodes: int | Nodes | None = None,
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
    Inside `fn` you can use collectives over `axis_name` and all transforms of this library.

    Args:
      fn: `fn(*args) -> pytree`, of positional arguments.
      nodes: where the nodes run, a `Nodes`, such as `gx.Nodes(mesh=mesh)`. A number N is
        `gx.Nodes(N)`: `vmap` simulates N nodes on one device. By default each device is a node.
      axis_name, local_axis_name: as in `gx.Nodes`, if `nodes` is not a `Nodes`.
      static_argnums: arguments that are fixed when traced, as in `jax.jit`; not node-stacked.
      donate_argnums: arguments whose memory the results may take, as in `jax.jit`.
      shared_argnums: arguments without a node axis that are the same for every node.
      local_argnums: arguments such as batches, `[N, B, ...]`, whose second axis is split over the
        devices of a node: `fn` sees `[B / L, ...]`. Other arguments are replicated over these
        devices.
      check_vma: the option of `shard_map`, for one node per device. If True, JAX refuses a result
        that was not averaged over the local axis, and you must take gradients at
        `jax.lax.pcast(params, "local", to="varying")`. If False, you silently get the result of the
        node's first device.

    Returns:
      A `Program`, compiled once per set of shapes and static values. Make the program outside of
      loops, or use `Nodes.run`, which keeps programs.

    Raises:
      ValueError: if `nodes` is neither a number nor a `Nodes`; when traced, if an argument is not
        node-stacked, or `fn` has a collective that does not work over several nodes per device.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> gx.spmd(lambda x: x - jax.lax.pmean(x, "nodes"), nodes=2)(jnp.array([1.0, 3.0])).tolist()
    [-1.0, 1.0]
    """
    nodes = as_nodes(nodes, axis_name, local_axis_name)
    donated = argument_numbers(donate_argnums)
    kinds = ArgumentKinds.make(static_argnums, shared_argnums, local_argnums)
    if nodes.mesh is None:
        make_run = run_simulated
    elif nodes.per_device == 1:
        make_run = run_sharded
    else:
        make_run = run_in_blocks
    run = make_run(fn, kinds, nodes, check_vma)
    run.__name__ = getattr(fn, "__name__", run.__name__)  # what profiles show
    options: dict[str, Any] = {}
    if nodes.mesh is not None and nodes.per_device > 1:
        # A loop passes results back, so they must be sharded as arguments are.
        options["out_shardings"] = NamedSharding(nodes.mesh, P(nodes.axis_name))
    jitted = jax.jit(run, static_argnums=tuple(kinds.static), donate_argnums=donated, **options)
    return Program(jitted, kinds, nodes)


@dataclasses.dataclass(frozen=True)
class Shared:
    """An argument of `Nodes.run` without a node axis; `Nodes.shared` makes it."""

    tree: Any


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Says where N nodes run: each on a device (or row of devices), or several on each device.

    `Nodes(8)` simulates 8 nodes on one device by `vmap`. `Nodes(mesh=mesh)` takes the nodes of a
    mesh: `shard_map` runs each on a device. `Nodes(8, mesh=mesh)` on a mesh of D = 2 devices puts
    k = 4 nodes on each device: node `i` is row `i % k` of device `i // k` (random numbers of "rbg"
    keys then differ, as under any `vmap`). `Nodes()` makes each device a node. Equal `Nodes` share
    compiled programs.

    Attributes:
      size: N, the number of nodes.
      mesh: the D devices, with Auto axes; None if the nodes are simulated. You can give axes of any
        kind. If you call `jax.set_mesh` with a mesh of these devices and axes, arrays go to your
        mesh. Over further axes XLA partitions the computation of a node as its arrays are sharded;
        see `gx.sharded`.
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of the devices of one node, if the mesh has it.

    Raises:
      ValueError: if `size` is not an integer >= 1 or not a multiple of the devices of the mesh, or
        the mesh has no axis of that name.

    >>> import jax.numpy as jnp, optax, gossipjax as gx
    >>> nodes = gx.Nodes(4)
    >>> tx = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.ring(4)))
    >>> params, opt_state = nodes.init(tx, {"w": jnp.zeros(3)})
    >>> params["w"].shape
    (4, 3)
    >>> model = gx.average_model(params, opt_state, nodes=nodes)
    >>> model["w"].shape
    (3,)
    """

    size: int = None  # pyright: ignore[reportAssignmentType]  # see __post_init__
    _: dataclasses.KW_ONLY
    mesh: Mesh | None = None
    axis_name: str = "nodes"
    local_axis_name: str = "local"

    def __post_init__(self) -> None:
        """Fills in what is not given, checks the size, and makes the axes of the mesh Auto."""
        size = self.size
        mesh = self.mesh
        if mesh is None and size is None:
            mesh = Mesh(jax.devices(), (self.axis_name,))
        if mesh is not None:
            size = require_size_of_mesh(size, mesh, self.axis_name)
            # shard_map over Explicit axes, the default of jax.make_mesh, refuses unsharded arrays.
            mesh = meshes.auto_mesh(mesh)
        if not is_int(size) or size < 1:
            raise ValueError(f"nodes must be an integer >= 1, got {size!r}.")
        object.__setattr__(self, "size", int(size))
        object.__setattr__(self, "mesh", mesh)

    def __repr__(self) -> str:
        return f"Nodes({self.size}{f', mesh={dict(self.mesh.shape)}' if self.mesh else ''})"

    @property
    def is_simulated(self) -> bool:
        """Says whether all nodes run on one device."""
        return self.mesh is None

    @property
    def local_devices(self) -> int | None:
        """L, the number of devices of one node; None if the mesh has no such axis."""
        return None if self.mesh is None else self.mesh.shape.get(self.local_axis_name)

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """The axes inside a node over which XLA partitions its computation and its arrays."""
        names = () if self.mesh is None else self.mesh.axis_names
        return tuple(n for n in names if n not in (self.axis_name, self.local_axis_name))

    @property
    def per_device(self) -> int:
        """k, the number of nodes on each device: N if they are simulated."""
        return self.size if self.mesh is None else self.size // self.mesh.shape[self.axis_name]

    @property
    def local(self) -> list[int]:
        """The numbers of the nodes that this process holds."""
        return processes.local_nodes(self.mesh, self.size, axis_name=self.axis_name)

    def spmd(
        self,
        fn: Callable[..., Any],
        *,
        static_argnums: Argnums = (),
        donate_argnums: Argnums = (),
        shared_argnums: Argnums = (),
        local_argnums: Argnums = (),
        check_vma: bool = False,
    ) -> Program:
        """Calls `gx.spmd` with these nodes."""
        return spmd(
            fn,
            self,
            static_argnums=static_argnums,
            donate_argnums=donate_argnums,
            shared_argnums=shared_argnums,
            local_argnums=local_argnums,
            check_vma=check_vma,
        )

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Runs a per-node function once, and keeps its program for the next call.

        Arguments are node-stacked; `nodes.shared(x)` marks an argument without a node axis.
        """
        shared = tuple(i for i, arg in enumerate(args) if isinstance(arg, Shared))
        program = _kept_program(self, fn, shared)
        return program(*(arg.tree if isinstance(arg, Shared) else arg for arg in args))

    def shared(self, tree: Any) -> Shared:
        """Marks an argument of `run` that is the same for every node and has no node axis."""
        return Shared(tree)

    @meshes.apart_from_set_mesh
    def replicate(self, tree: Any, specs: Any = None, *, fold_in: bool = False) -> Any:
        """Gives every node a copy: `[...]` -> `[N, ...]`, on the devices.

        Args:
          tree: arrays and numbers, such as a `TrainState` of flax or the `nnx.State` of `nnx.Rngs`,
            or a function that returns them. The function runs on the devices. If the result
            contains a state of `gx.sharded`, each device makes only its own part of arrays that
            this state shards inside a node.
          specs: as in `put`.
          fold_in: whether node `i` gets `jax.random.fold_in(key, i)` of each key, so that every
            node draws its own dropout; by default all nodes have the same keys.

        Raises:
          ValueError: if a leaf is neither an array nor a number, if all leaves are already stacked,
            `[N, ...]` with equal rows, or if `fold_in` finds no key, or a `jax.random.PRNGKey`.

        >>> import jax, gossipjax as gx
        >>> keys = gx.Nodes(2).replicate({"dropout": jax.random.key(0)}, fold_in=True)["dropout"]
        >>> bool(keys[1] == jax.random.fold_in(jax.random.key(0), 1))
        True
        """
        shapes = self._shapes(tree, "tree")
        make = tree
        args = ()
        if not is_function(tree):
            require_one_model(tree, self.size)
            tree = meshes.on_auto_axes(tree)
            if not self._is_on_devices(tree):
                rows = repeat_rows(tree, len(self.local))
                return self.put(fold_in_nodes(rows, self.local) if fold_in else rows, specs)
            args = (tree,)  # as an argument, since no process may have the whole arrays

            def make(tree: Any) -> Any:
                return tree

        specs_of_state = shard_specs(shapes) if self.inner_axes and specs is None else None
        if specs_of_state is not None and self.mesh is not None:
            sizes = {name: self.mesh.shape[name] for name in self.inner_axes}
            specs = specs_of_state.of(shapes, sizes=sizes)
        return make_rows(make, shapes, specs, self, *args, fold_in=fold_in)

    def _is_on_devices(self, tree: Any) -> bool:
        """Says whether all leaves are arrays on the mesh of the nodes, maybe in parts."""
        shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
        return bool(shardings) and all(
            isinstance(sharding, NamedSharding) and sharding.mesh == self.mesh
            for sharding in shardings
        )

    def _shapes(self, tree: Any, name: str) -> Any:
        """Returns `tree` itself, or, if it is a function, the shapes of what the function makes.

        It raises `ValueError` if leaves are no numbers; `name` is what the error calls the tree.
        """
        if is_function(tree):
            require_no_arguments(tree, name)
            tree = jax.eval_shape(tree)
        else:
            require_numbers(tree, name)
        return tree

    @meshes.apart_from_set_mesh
    def split(self, batch: Any, specs: Any = None, *, axis: int = 0) -> Any:
        """Splits a batch over the nodes, on the devices: `[B, ...]` -> `[N, B / N, ...]`.

        Node `i` gets the `i`-th run of `B / N` examples. The axis of examples is the first, unless
        you give another `axis`: with `axis=1` time-major batches `[T, B]` become `[N, T, B / N]`.
        If there are several processes, each process gives the examples of its own nodes,
        `nodes.local`, and all processes give equally many per node.
        `gx.prefetch(map(nodes.split, batches))` prepares the next batches while a step runs.

        Args:
          batch: arrays of as many examples each, as loaders return them: of NumPy, JAX, torch, ...
          specs: as in `put`, for a node's part `[B / N, ...]`.
          axis: the axis of the examples.

        Raises:
          ValueError: if a leaf has no such axis, the number of nodes does not divide it, leaves
            have different numbers of examples, or a leaf contains no numbers.

        >>> import numpy as np, gossipjax as gx
        >>> gx.Nodes(2).split({"x": np.arange(4), "y": np.zeros((4, 3))})["x"].tolist()
        [[0, 1], [2, 3]]
        """
        return self.put(split_rows(batch, len(self.local), axis), specs)

    @meshes.apart_from_set_mesh
    def init(self, tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
        """Makes the start of a loop from `[...]`: parameters and `tx.init` of them, `[N, ...]`.

        `params` may be a function that returns the parameters. The function runs on the devices. If
        `tx` shards the model inside a node (`gx.sharded`), each device makes only its own part.

        Raises:
          ValueError: if `replicate` would raise it.
        """
        require_transform(tx)
        params = meshes.on_auto_axes(params)
        shapes = self._shapes(params, "params")
        specs = shard_specs(jax.eval_shape(tx.init, shapes)) if self.inner_axes else None
        if specs is not None and self.mesh is not None:
            specs.require(shapes, {name: self.mesh.shape[name] for name in self.inner_axes})
        stacked = self.replicate(params, None if specs is None else specs.of(shapes))
        return stacked, self.run(tx.init, stacked)

    def put(self, rows: Any, specs: Any = None) -> Any:
        """Puts the rows of this process's nodes, `[len(nodes.local), ...]`, on the devices.

        Args:
          rows: arrays with one row for each node that has devices in this process.
          specs: for a mesh with axes inside the nodes, how a row `[...]` is sharded over these
            axes: one `PartitionSpec` for all arrays, or a tree of specs like `rows`.
        """
        if specs is None or self.mesh is None:
            return processes.put(rows, self.mesh, self.size, axis_name=self.axis_name)
        processes.require_rows(rows, len(self.local), "rows")
        shardings = shard_rows(rows, specs, self.mesh, self.axis_name)
        return processes.put_sharded(rows, shardings, self.size, axis_name=self.axis_name)

    def put_shared(self, tree: Any) -> Any:
        """Puts host arrays, which must be equal on all processes, on every device of the nodes."""
        return processes.put_replicated(tree, self.mesh)

    def to_host(self, stacked: Any) -> Any:
        """Returns `[N, ...]` as whole NumPy arrays on every process."""
        return processes.to_host(stacked)

    def one(self, stacked: Any, *, require_equal: bool = True) -> Any:
        """Returns the row that all nodes have, on every process: `[N, ...]` -> `[...]`.

        You can use `one` to get one ordinary model from an average. The result is bound to no
        device, so you can use it with arrays on any devices, such as a batch for evaluation that is
        sharded over all of them. On a mesh with axes inside the nodes the model stays sharded over
        these axes. With `require_equal=False` you get the row of the first node, without a check.

        Raises:
          ValueError: if the rows of a leaf differ: if real numbers, or the real or imaginary parts
            of complex numbers, differ by more than 1 % of the leaf's largest finite value, or if
            integers or keys differ at all. NaN equals NaN with any bits, and 0.0 equals -0.0.
        """
        if not jax.tree.leaves(stacked):
            return stacked
        processes.require_rows(stacked, self.size, "stacked")
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(stacked)):
            return jax.tree.map(lambda x: x[0], stacked)
        row = self._first_row(stacked, require_equal)
        mesh = meshes.current_mesh()
        if self.inner_axes or (mesh is not None and is_mesh_of(self, mesh)):
            return row
        return jax.tree.map(processes.uncommit, row)

    @meshes.apart_from_set_mesh
    def _first_row(self, stacked: Any, require_equal: bool) -> Any:
        """Returns the row of the first node, on all devices of the nodes.

        With `require_equal` it raises `ValueError` if the rows of other nodes differ.
        """
        stacked = meshes.on_auto_axes(stacked)
        specs = None
        if self.inner_axes:  # the row stays sharded inside the nodes
            specs = tuple(map(spec_of_row, jax.tree.leaves(stacked)))
        row, spreads = first_row(self.mesh, specs, require_equal)(stacked)
        if require_equal:
            require_equal_rows(stacked, np.asarray(spreads.addressable_data(0)))
        return row


@functools.lru_cache(MAX_KEPT_PROGRAMS)
def _kept_program(nodes: Nodes, fn: Callable[..., Any], shared: tuple[int, ...]) -> Program:
    """Makes the program of `Nodes.run`, or returns it if it was made for an earlier call."""
    return nodes.spmd(fn, shared_argnums=shared)


def as_nodes(
    nodes: int | Nodes | None, axis_name: str = "nodes", local_axis_name: str = "local"
) -> Nodes:
    """Returns `nodes` itself if it is a `Nodes`, or makes one; None makes each device a node."""
    if isinstance(nodes, Nodes):
        return nodes
    if isinstance(nodes, Mesh):
        raise ValueError("nodes must be a number or a gx.Nodes, got a mesh: gx.Nodes(mesh=mesh).")
    return Nodes(nodes, axis_name=axis_name, local_axis_name=local_axis_name)  # pyright: ignore[reportArgumentType]


def donate_on_accelerators(*argnums: int) -> tuple[int, ...]:
    """Returns `argnums`, or `()` on CPU, where XLA copies most donated buffers anyway.

    An update by SGP and momentum passes over memory 18 times. Copies of donated buffers are four of
    these passes, and take a sixth of the time.

    >>> import jax
    >>> donate_on_accelerators(1, 2) == (() if jax.default_backend() == "cpu" else (1, 2))
    True
    """
    return () if jax.default_backend() == "cpu" else argnums
