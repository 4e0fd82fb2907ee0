"""Actions that all processes of a job take together: agree, wait, place and fetch arrays.

Every process makes the same calls in the same order. With one process they return at once.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gossipjax import meshes
from gossipjax.launch import peers

__all__ = [
    "all_processes",
    "any_process",
    "barrier",
    "broadcast_text",
    "gather_texts",
    "is_main_process",
    "local_nodes",
    "processes_agree",
    "put",
    "put_replicated",
    "put_sharded",
    "require_shared_folder",
    "to_host",
]

# How long processes wait for one that compiles or evaluates alone. After 30 s a line names it.
MEETING_SECONDS = 1800.0
_max_waiting = contextvars.ContextVar("seconds", default=MEETING_SECONDS)  # see `meet_within`


@contextlib.contextmanager
def meet_within(seconds: float) -> Iterator[None]:
    """Lets processes wait for one another for at most `seconds` within this context.

    Use it for work that all processes do at the same time and that compiles and evaluates nothing,
    such as reading.
    """
    token = _max_waiting.set(seconds)
    try:
        yield
    finally:
        _max_waiting.reset(token)


def is_main_process() -> bool:
    """Says whether this is process 0, which writes files and prints.

    >>> is_main_process()
    True
    """
    return jax.process_index() == 0


def all_processes(flag: bool, timeout: float | None = None) -> bool:
    """Says whether `flag` is true on all processes.

    If the processes met by `gx.launch.initialize`, they agree over the connections of that meeting.
    After 30 s of waiting, a line says which process is missing and in which call. If JAX found the
    job by itself, a collective asks all processes, and waits without a limit.

    Raises:
      TimeoutError: if a process has not come within `timeout` seconds; the message names the
        process. The default is 30 minutes, or the `timeout` of `Checkpoints` while it reads or
        writes.

    >>> all_processes(True), all_processes(False)
    (True, False)
    """
    if jax.process_count() == 1:
        return flag
    if peers.kept is None:
        return "False" not in gather_texts(str(bool(flag)))
    return all(peers.kept.gather("all_processes", bool(flag), timeout or _max_waiting.get()))


def any_process(flag: bool) -> bool:
    """Says whether `flag` is true on at least one process.

    >>> any_process(False)
    False
    """
    return not all_processes(not flag)


def processes_agree(flag: bool) -> bool:
    """Says whether `flag` is the same on all processes.

    >>> processes_agree(True)
    True
    """
    return all_processes(flag) or all_processes(not flag)


def barrier() -> None:
    """Returns when all processes have called it.

    >>> barrier()
    """
    all_processes(True)


def require_shared_folder(folder: Path) -> None:
    """Makes a folder; raises `OSError` unless process 0 can write there and all others see it.

    >>> import tempfile
    >>> require_shared_folder(Path(tempfile.mkdtemp()) / "runs")
    """
    problem = None
    name = ""
    if is_main_process():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A file with a new name, which no other job has and which is no link.
            file, path = tempfile.mkstemp(prefix=".is_writable", dir=folder)
            os.close(file)
            name = Path(path).name
        except OSError as error:
            problem = error.strerror
    probe = folder / broadcast_text(name)
    if problem is None and not probe.is_file():
        problem = f"process {jax.process_index()} does not see what process 0 writes there"
    is_shared = all_processes(problem is None)
    if name:
        probe.unlink(missing_ok=True)
    if not is_shared:
        raise OSError(
            f"the folder must be one that all processes share, got {folder}: "
            f"{problem or 'another process does not see it'}. Give a folder on a shared disk."
        )


def broadcast_text(text: str) -> str:
    """Returns the text of process 0 on all processes.

    >>> broadcast_text("runs/7")
    'runs/7'
    """
    return gather_texts(text)[0]


def gather_texts(text: str) -> list[str]:
    """Returns the texts of all processes on every process, in the order of the processes.

    >>> gather_texts("runs/7")
    ['runs/7']
    """
    if jax.process_count() == 1:
        return [text]
    if peers.kept is not None:
        return peers.kept.gather("gather_texts", text, _max_waiting.get())
    encoded = text.encode()
    sizes = gather_arrays(np.int32(len(encoded)))
    # Pad all texts to a power of two of bytes, so that texts of many lengths need few programs.
    width = 1 << int(sizes.max()).bit_length()
    rows = gather_arrays(np.frombuffer(encoded.ljust(width, b"\0"), np.uint8))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def gather_arrays(tree: Any) -> Any:
    """Returns the arrays of all processes on every process, `[processes, ...]`, by a collective.

    >>> gather_arrays(np.array([3, 4])).tolist()
    [[3, 4]]
    """
    # A mesh with the first device of each process.
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([first[process] for process in sorted(first)]), ("processes",))
    rows = jax.tree.map(lambda array: np.asarray(array)[None], tree)
    return to_host(put(rows, mesh, mesh.size, axis_name="processes"))


def local_nodes(mesh: Mesh | None, size: int, *, axis_name: str = "nodes") -> list[int]:
    """Returns the numbers of the nodes on this process's devices; without a mesh, of all nodes.

    N = `size` is a multiple of the D devices of the axis. Each device gets N / D consecutive nodes.

    >>> local_nodes(None, size=3)
    [0, 1, 2]
    """
    if mesh is None:
        return list(range(size))
    count = mesh.shape[axis_name]
    # Row d: the devices at place d of the axis, several if the mesh has other axes.
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), 0).reshape(count, -1)
    process_id = jax.process_index()
    return [
        node
        for node in range(size)
        if any(device.process_index == process_id for device in devices[node * count // size])
    ]


@meshes.apart_from_set_mesh
def put(rows: Any, mesh: Mesh | None, size: int, *, axis_name: str = "nodes") -> Any:
    """Puts the rows of each process's nodes, `[local_nodes, ...]`, on the devices: `[N, ...]`.

    Raises:
      ValueError: if a leaf is not an array with a row for each node of this process.

    >>> put(np.zeros((3, 2)), None, size=3).shape
    (3, 2)
    """
    require_rows(rows, len(local_nodes(mesh, size, axis_name=axis_name)), "rows")
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(rows)):
        return jax.tree.map(jnp.asarray, rows)  # inside of a program, which places its arrays
    if mesh is None:
        return jax.device_put(rows)
    sharding = NamedSharding(mesh, P(axis_name))
    if jax.process_count() == 1:
        return jax.device_put(rows, sharding)
    return put_sharded(rows, jax.tree.map(lambda _: sharding, rows), size, axis_name=axis_name)


@meshes.apart_from_set_mesh
def put_sharded(rows: Any, shardings: Any, size: int, *, axis_name: str = "nodes") -> Any:
    """Puts rows on the devices like `put`, with a sharding for each array, also inside the nodes.

    Every process that has devices of a node gives the node's whole row. Each device then gets its
    part of the row.

    Args:
      rows: `[local_nodes, ...]`.
      shardings: a tree like `rows` of `NamedSharding`s of one mesh, the first axis over the nodes.
      size: N.
      axis_name: the axis of the nodes.

    Raises:
      ValueError: if a leaf is not an array with a row for each node of this process.

    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("nodes",))
    >>> put_sharded(np.zeros((1, 2)), NamedSharding(mesh, PartitionSpec("nodes")), size=1).shape
    (1, 2)
    """
    used_meshes = {sharding.mesh for sharding in jax.tree.leaves(shardings)}  # one, if any
    nodes = [node for mesh in used_meshes for node in local_nodes(mesh, size, axis_name=axis_name)]
    require_rows(rows, len(nodes), "rows")

    def put_leaf(leaf: Any, sharding: NamedSharding) -> jax.Array:
        leaf = np.asarray(leaf)

        def read_part(index: Any) -> np.ndarray:
            # `index` counts all N nodes, but `leaf` only has the rows of this process.
            local_rows = [nodes.index(node) for node in range(size)[index[0]]]
            return leaf[(slice(local_rows[0], local_rows[-1] + 1), *index[1:])]

        return jax.make_array_from_callback((size, *leaf.shape[1:]), sharding, read_part)

    return jax.tree.map(functools.partial(_apply_to_data, put_leaf), rows, shardings)


def is_key(leaf: Any) -> bool:
    """Says whether a leaf is an array of typed PRNG keys, or a `jax.ShapeDtypeStruct` of one."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _apply_to_data(move: Callable[..., jax.Array], leaf: Any, *args: Any) -> jax.Array:
    """Returns `move(leaf, *args)`. Of a PRNG key it moves the data, because NumPy has no keys."""
    if not is_key(leaf):
        return move(leaf, *args)
    data = move(jax.random.key_data(leaf), *args)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))


def require_rows(tree: Any, count: int, name: str) -> None:
    """Raises `ValueError` unless every leaf is an array of `count` rows."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        shape = getattr(leaf, "shape", None)
        if not shape or shape[0] != count:
            got = f"{leaf!r}" if shape is None else f"shape {list(shape)}"
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} must be an array with a leading axis of "
                f"{count}, a row per node, got {got}: gx.Nodes.replicate stacks one value for all "
                "nodes."
            )


@meshes.apart_from_set_mesh
def put_replicated(tree: Any, mesh: Mesh | None) -> Any:
    """Puts host arrays on every device of the mesh. All processes must give the same arrays.

    >>> put_replicated(np.zeros(2), None).shape
    (2,)
    """
    if mesh is None:
        return jax.device_put(tree)
    return jax.tree.map(lambda x: put_global(x, NamedSharding(mesh, P())), tree)


def put_global(value: Any, sharding: NamedSharding) -> jax.Array:
    """Puts an array or number that every process has whole on the devices, with this sharding.

    `jax.device_put` would gather the value over all processes to check that all have the same.
    """
    if jax.process_count() == 1:
        return jax.device_put(value, sharding)

    def put_array(value: Any) -> jax.Array:
        array = np.asarray(value, jnp.result_type(value))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return _apply_to_data(put_array, value)


def uncommit(x: jax.Array) -> jax.Array:
    """Copies a replicated array to one that is not committed: JAX moves it where it is used."""
    if not x.committed:
        return x

    def copy(x: jax.Array) -> jax.Array:  # unlike jnp.array, it compiles nothing
        return jax.device_put(np.asarray(x.addressable_data(0)), may_alias=False)

    return _apply_to_data(copy, x)


def to_host(tree: Any) -> Any:
    """Returns node-stacked arrays as whole NumPy arrays on every process.

    >>> to_host(put(np.zeros((3, 2)), None, size=3)).shape
    (3, 2)
    """
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    leaves, structure = jax.tree.flatten(meshes.on_auto_axes(tree))
    if not leaves:
        return tree
    mesh = leaves[0].sharding.mesh
    # A model that is sharded inside a node may not fit on a device: replicate leaf by leaf.
    groups = [leaves] if mesh.shape.get("nodes") == mesh.size else [[leaf] for leaf in leaves]
    with meshes.unset_mesh():
        copies = [
            np.asarray(copy.addressable_data(0))
            for group in groups
            for copy in _replicate(mesh)(group)
        ]
    return jax.tree.unflatten(structure, copies)


@functools.cache
def _replicate(mesh: Mesh) -> Any:
    """Makes a program that copies arrays to all devices; it is cached to compile only once."""
    return jax.jit(lambda leaves: leaves, out_shardings=NamedSharding(mesh, P()))
