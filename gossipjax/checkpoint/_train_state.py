"""How `Checkpoints.resume` fits a saved state to this run."""

from __future__ import annotations

import inspect
import json
import reprlib
import signal
import warnings
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import jax
import numpy as np
import optax

from gossipjax.checkpoint._leaves import arrange_like, unwrap
from gossipjax.checkpoint._resize import ResizeReport, average_nodes, change_nodes
from gossipjax.nodes import Nodes
from gossipjax.processes import put_global
from gossipjax.topology.schedule import require_int
from gossipjax.train_state import TrainState

MakeTx = Callable[[dict[str, Any]], optax.GradientTransformation]


class Preempted(SystemExit):
    """Says that SIGTERM asked the run to end, and its state is saved. The exit status is 143.

    Attributes:
      step: the step of the newest complete checkpoint; None if no checkpoint could be written.
      folder: the folder with the checkpoint.

    >>> stop = Preempted(40, PurePath("runs/a"))
    >>> (stop.step, stop.code)
    (40, 143)
    """

    def __init__(self, step: int | None, folder: PurePath):
        super().__init__(128 + signal.SIGTERM)
        self.step = step
        self.folder = folder

    def __str__(self) -> str:
        saved = "nothing is saved" if self.step is None else f"saved after step {self.step}"
        return f"asked to end: {saved} in {self.folder}; a resumed run continues"


def require_make_tx(make_tx: Any) -> None:
    """Raises `ValueError` now if a resumed run could not call `make_tx` with its metadata."""
    try:
        inspect.signature(make_tx).bind({})
    except TypeError as error:
        raise ValueError(
            "make_tx must be a function of the metadata that returns an optax transform, got "
            f"{reprlib.repr(make_tx)} ({error}). Write `lambda saved: tx`, or better build the "
            'chain for saved["nodes"] nodes.'
        ) from error


def make_template(
    state: TrainState, nodes: Nodes, make_tx: MakeTx, metadata: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """Returns the form in which the run of `metadata` saved `params`, `opt_state` and `rest`.

    They are those of `state`, but `jax.ShapeDtypeStruct`s if that run had another number of nodes
    or another chain. A run with another sharding inside the nodes counts as the same run.
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


def warn_of_changes(saved: Any, settings: dict[str, Any]) -> None:
    """Warns in one line of the settings of this run that differ from the saved ones."""
    if not (saved and isinstance(saved, dict)):
        return
    # JSON makes lists of tuples, as it did with the saved settings.
    was, now = map(_flatten, (saved, json.loads(json.dumps(settings))))
    changes = [
        f"{key} was {was.get(key, 'not there')}, is {now.get(key, 'not there')}"
        for key in {**was, **now}
        if was.get(key) != now.get(key)
    ]
    if changes:
        warnings.warn(f"settings of the resumed run differ: {'; '.join(changes)}.", stacklevel=5)


def _flatten(settings: dict[str, Any]) -> dict[str, str]:
    """Returns name -> text of every setting in nested dicts, with names such as `model.depth`."""
    leaves = jax.tree_util.tree_leaves_with_path(settings, lambda part: not isinstance(part, dict))
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)
    return {name: repr(value) for name, (_, value) in zip(names, leaves, strict=True)}


def _have_same_specs(one: Any, other: Any) -> bool:
    """Says whether two trees have the same structure, shapes and types."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    specs, other_specs = ([(x.shape, x.dtype) for x in jax.tree.leaves(t)] for t in (one, other))
    return specs == other_specs


def fit_state(
    restored: TrainState, state: TrainState, nodes: Nodes, make_tx: MakeTx, *, is_whole: bool
) -> tuple[TrainState, ResizeReport | None]:
    """Returns `restored` on the devices of `nodes`, and a report of the resize, if it is resized.

    `restored` is resized if a run with other nodes or another chain saved it, or it is not whole
    because a node or the part of a process is lost. Then all nodes start from the average model.
    """
    metadata = {**(state.metadata or {}), "nodes": nodes.size}
    report = None
    params, opt_state, rest = restored.arrays
    if is_whole and _have_same_specs(*map(unwrap, (restored.arrays, state.arrays))):
        opt_state = arrange_like(state.opt_state, opt_state)
        if isinstance(jax.tree.leaves(params)[0], jax.Array):  # they were read onto their devices
            return restored._replace(opt_state=opt_state), None
    else:
        params, opt_state, report = change_nodes(params, opt_state, make_tx(metadata), nodes.size)
        if jax.tree.structure(unwrap(opt_state)) == jax.tree.structure(unwrap(state.opt_state)):
            opt_state = arrange_like(state.opt_state, opt_state)
        rest = average_nodes(rest, nodes.size)
    arrays = params, opt_state, rest
    if nodes.inner_axes:
        arrays = jax.tree.map(lambda x, like: put_global(x, like.sharding), arrays, state.arrays)
    else:
        rows = np.array(nodes.local)  # the nodes of this process
        arrays = nodes.put(jax.tree.map(lambda x: x[rows], arrays))
    return TrainState(restored.step, *arrays, metadata=restored.metadata), report
