"""Keeps the state of an outer optimizer in the host's memory until a step needs it.

A program keeps all its arguments in the memory of the device, even those that it only passes on.
So the program of a step does not take arrays that the step does not use. An `OnHost`, which is not
an array, marks their places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gossipjax.algorithms.outer.average import OuterState
from gossipjax.meshes import HOST_MEMORY

# Fields of `OuterState` -> the fragments for which a step reads them, and writes them. A skipped
# step writes what is sent unchanged, so it reads it, too.
BOTH = ("sent", "used")
READ = {"anchor": BOTH, "outer": ("used",), "sent": BOTH, "error": ("used",)}
WRITTEN = {"anchor": ("used",), "outer": ("used",), "sent": ("sent",), "error": ("used",)}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OnHost:
    """Marks the place of an array on the host, with the shape and type of one node's array."""

    shape: tuple[int, ...]
    dtype: Any


def _is_outer(part: Any) -> bool:
    return isinstance(part, OuterState)


def _is_on_host(part: Any) -> bool:
    return isinstance(part, OnHost)


def _leave_out(opt_state: Any, step: int, fields: Any, node_axes: int) -> Any:
    """Leaves out the arrays of `fields` that no fragment of `step` uses."""

    def leave(x: Any) -> OnHost:
        return OnHost(x.shape[node_axes:], x.dtype)

    def leave_fields(part: Any) -> Any:
        if not _is_outer(part):
            return part
        now = {"sent": part.plan.sent_at(step), "used": part.plan.used_at(step)}
        rest = {}
        for name, roles in fields.items():
            by_fragment = getattr(part, name)
            if by_fragment is not None:
                needed = {now[role] for role in roles}
                rest[name] = tuple(
                    tree if f in needed else jax.tree.map(leave, tree)
                    for f, tree in enumerate(by_fragment)
                )
        return part._replace(**rest)

    return jax.tree.map(leave_fields, opt_state, is_leaf=_is_outer)


def with_less(update: Callable[..., Any]) -> Callable[..., Any]:
    """An update of one node that takes and returns only the state that its static step needs."""

    def run(step: int, params: Any, opt_state: Any, *inputs: Any) -> Any:
        # XLA drops these zeros: nothing that depends on them is returned.
        full = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if _is_on_host(x) else x,
            opt_state,
            is_leaf=_is_on_host,
        )
        params, opt_state, aux = update(step, params, full, *inputs)
        return params, _leave_out(opt_state, step, WRITTEN, node_axes=0), aux

    return run


def start(params: Any, opt_state: Any, is_donated: bool) -> tuple[Any, Any]:
    """Parameters and state at the start of a loop; parts that wait move to the host."""

    def commit(x: Any) -> Any:
        return x if getattr(x, "committed", True) else jax.device_put(x, x.sharding)

    # What comes from the host is bound to a device, as then all results are. Programs would be
    # compiled again for these.
    params, opt_state = jax.tree.map(commit, (params, opt_state))
    placed = _to_host(opt_state)
    if is_donated:  # which JAX does not do from one memory to another
        jax.block_until_ready(placed)
        kept = set(map(id, jax.tree.leaves((params, placed))))
        for x in jax.tree.leaves(opt_state):
            if id(x) not in kept:
                x.delete()
    return params, placed


def bring(opt_state: Any, step: int) -> Any:
    """The state that the program of `step` takes. Returns while arrays move to the devices."""
    return _move(_leave_out(opt_state, step, READ, node_axes=1), "device")


def put_back(new: Any, old: Any) -> Any:
    """The state after a step, from its program's input and output. Returns while arrays move."""
    merged = jax.tree.map(lambda x, o: o if _is_on_host(x) else x, new, old, is_leaf=_is_on_host)
    return _to_host(merged)


def _to_host(opt_state: Any) -> Any:
    def put(part: Any) -> Any:
        fields = {name: getattr(part, name) for name in READ} if _is_outer(part) else {}
        return part._replace(**_move(fields, HOST_MEMORY)) if fields else part

    return jax.tree.map(put, opt_state, is_leaf=_is_outer)


def _move(tree: Any, kind: str) -> Any:
    """Moves all arrays of the tree to a kind of memory at once."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [x for x in leaves if isinstance(x, jax.Array) and x.sharding.memory_kind != kind]
    shardings = [x.sharding.with_memory_kind(kind) for x in arrays]
    moved = dict(zip(map(id, arrays), jax.device_put(arrays, shardings), strict=True))
    return jax.tree.unflatten(structure, [moved.get(id(x), x) for x in leaves])
