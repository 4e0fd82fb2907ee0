"""How `Checkpoints.resume` fits a saved state to this run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import signal
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from gossipjax.checkpoint._leaves import arrange_like, unwrap
from gossipjax.checkpoint._resize import (
    ResizeReport,
    average_nodes,
    change_nodes,
    paths_of_floats,
)
from gossipjax.nodes import Nodes
from gossipjax.processes import is_key, put_global, to_host
from gossipjax.topology.schedule import Schedule, require_int
from gossipjax.train_state import TrainState

MAX_SETTINGS = 1000  # settings of a chain in a manifest
MAX_CHANGES = 4  # changes that one line names
# Parts that are left out of the names of settings, because they say nothing.
WRAPPERS = ("tx", "tx_init", "tx_update", "update_fns", "init_fns", "combine", "init", "plan")
LIBRARIES = ("gossipjax", "jax", "optax")

MakeTx = Callable[[dict[str, Any]], optax.GradientTransformation]


class Preempted(SystemExit):
    """SIGTERM asked the run to end, and its state is saved. The exit status is 143.

    Attributes:
      step: the step of the newest complete checkpoint; None if no checkpoint could be written.
      folder: the folder with the checkpoint.

    >>> stop = Preempted(40, Path("runs/a"))
    >>> (stop.step, stop.code)
    (40, 143)
    """

    def __init__(self, step: int | None, folder: Path):
        super().__init__(128 + signal.SIGTERM)
        self.step = step
        self.folder = folder

    def __str__(self) -> str:
        if self.step is None:
            return f"asked to end: nothing is saved in {self.folder}"
        return (
            f"asked to end: saved after step {self.step} in {self.folder}; a resumed run continues"
        )


def make_template(
    state: TrainState, nodes: Nodes, make_tx: MakeTx, metadata: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """Returns the form of the saved arrays: `state`, unless another run saved them.

    If the number of nodes or the chain was another, the arrays are `jax.ShapeDtypeStruct`s. A run
    with another sharding inside the nodes counts as the same run.
    """
    size = require_int(metadata.get("nodes", nodes.size), 'metadata["nodes"], as saved,', 1)
    metadata = {**metadata, "nodes": size}

    def resize(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)

    params, rest = jax.tree.map(resize, (state.params, state.rest))
    init = Nodes(size, axis_name=nodes.axis_name).spmd(make_tx(metadata).init)
    opt_state = jax.eval_shape(init, params)
    # Arrays of the same run are read onto their devices, arrays of another run as a whole.
    if size == nodes.size and _have_same_specs(*map(unwrap, (opt_state, state.opt_state))):
        return state.params, arrange_like(opt_state, state.opt_state), state.rest
    return params, opt_state, rest


def describe_chain(make_tx: MakeTx, metadata: dict[str, Any]) -> dict[str, str]:
    """Returns the settings of a chain by name, or none if `make_tx` fails with this metadata."""
    found: dict[str, str] = {}
    # Only a report needs this, so an error ends no run. `resume` itself calls `make_tx` later.
    with contextlib.suppress(Exception):
        _find_settings(make_tx(metadata), "", found, {})
    return found


def _find_settings(part: Any, name: str, found: dict[str, str], seen: dict[int, Any]) -> None:
    """Collects the numbers, texts and schedules that the functions of a chain refer to.

    Optax keeps its arguments in closures, so a setting is named after its variable.
    """
    if isinstance(part, bool | int | float | str):
        found[name] = str(part)
    if isinstance(part, np.generic | np.ndarray | jax.Array) and np.size(part) == 1:
        found[name] = str(part.item())
    if id(part) in seen or len(found) >= MAX_SETTINGS:
        return
    seen[id(part)] = part
    part = getattr(part, "__wrapped__", part)  # the function inside `jit`
    items: Iterable[tuple[str, Any]] = []
    if isinstance(part, Schedule):
        digest = zlib.crc32(repr(part.segments).encode())
        for round_ in part.rounds:
            for array in (round_.receivers, round_.senders, round_.weights):
                digest = zlib.crc32(array.tobytes(), digest)
        found[name] = f"{part} #{digest:08x}"
    elif isinstance(part, optax.GradientTransformation):
        items = [("tx", part.update), ("tx", part.init)]
    elif isinstance(part, tuple | list):
        items = ((str(i), value) for i, value in enumerate(part))
    elif isinstance(part, dict):
        items = ((str(key), value) for key, value in part.items())
    elif isinstance(part, functools.partial):
        items = [("tx", part.func), ("tx", part.args), ("tx", part.keywords)]
    elif inspect.ismethod(part):
        items = [("tx", part.__self__)]
    elif inspect.isfunction(part):
        variables = inspect.getclosurevars(part)
        items = list(variables.nonlocals.items())
        # For a user's function, also take the numbers in it and in its module.
        if str(part.__module__).partition(".")[0] not in LIBRARIES:
            numbers = [x for x in part.__code__.co_consts if isinstance(x, int | float)]
            others = {k: x for k, x in variables.globals.items() if isinstance(x, int | float)}
            items += [("numbers", str(numbers)), *others.items()]
    elif dataclasses.is_dataclass(part):
        items = ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))
    for key, value in items:
        _find_settings(value, name if key in WRAPPERS else f"{name}.{key}", found, seen)


def compare_chains(saved: dict[str, str], current: dict[str, str]) -> str:
    """Says in a line which settings differ; empty if none do, or one chain is not known."""
    names = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    if not saved or not current or not names:
        return ""
    texts = [
        f"{name[1:]} was {saved.get(name, 'not there')}, is {current.get(name, 'not there')}"
        for name in names[:MAX_CHANGES]
    ]
    more = len(names) - MAX_CHANGES
    return "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


def _have_same_specs(one: Any, other: Any) -> bool:
    leaves, structure = jax.tree.flatten(one)
    other_leaves, other_structure = jax.tree.flatten(other)
    return structure == other_structure and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(leaves, other_leaves, strict=True)
    )


def take_kept_nodes(state: TrainState, lost: set[int]) -> tuple[list[int], TrainState]:
    """Returns the nodes of which no process has lost a part, and their rows, on every process."""
    first = jax.tree.leaves(state.params)[0]
    rows = range(first.shape[0])
    devices = first.sharding.devices_indices_map(first.shape)
    gone = {
        row
        for device, index in devices.items()
        if device.process_index in lost
        for row in rows[index[0]]
    }
    kept = sorted({*rows} - gone)
    if not kept:
        raise OSError(
            f"at least one node must be whole, got parts of all {len(rows)} that were on process "
            f"{', '.join(map(str, sorted(lost)))}, which has no checkpoint in its folder: mount "
            "its disk, or begin in empty folders."
        )

    def take(leaf: Any) -> Any:
        if is_key(leaf):
            return jax.random.wrap_key_data(
                take(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf)
            )
        return to_host(leaf)[np.array(kept, int)]

    arrays = jax.tree.map(take, state.arrays)
    return kept, TrainState(state.step, *arrays, metadata=state.metadata)


def fit_state(
    restored: TrainState, state: TrainState, nodes: Nodes, make_tx: MakeTx
) -> tuple[TrainState, ResizeReport | None]:
    """Returns `restored` on the devices of `nodes`, resized if another run saved it."""
    metadata = {**(state.metadata or {}), "nodes": nodes.size}
    if _have_same_specs(*map(unwrap, (restored.arrays, state.arrays))):
        return restored._replace(opt_state=arrange_like(state.opt_state, restored.opt_state)), None
    params, opt_state, report = change_nodes(
        restored.params, restored.opt_state, make_tx(metadata), nodes.size
    )
    if jax.tree.structure(unwrap(opt_state)) == jax.tree.structure(unwrap(state.opt_state)):
        opt_state = arrange_like(state.opt_state, opt_state)
    others = jax.tree_util.tree_leaves_with_path(restored.rest)
    averaged = (*report.averaged, *paths_of_floats(others, "rest"))
    report = report._replace(averaged=averaged)
    rest = average_nodes(restored.rest, nodes.size)
    arrays = params, opt_state, rest
    if nodes.inner_axes:
        arrays = jax.tree.map(lambda x, like: put_global(x, like.sharding), arrays, state.arrays)
    else:
        rows = np.array(nodes.local)
        arrays = nodes.put(jax.tree.map(lambda x: x[rows], arrays))
    return TrainState(restored.step, *arrays, metadata=restored.metadata), report
