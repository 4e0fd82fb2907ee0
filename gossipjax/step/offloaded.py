"""Keeps state in the host's memory until a step needs it.

A program keeps all its arguments in the memory of the device, even those that it only passes on.
So the program of a step does not take arrays that the step does not use, as `Plan.fields` says. An
`OnHost`, which is not an array, marks where they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gossipjax.exchanges.state import Exchanging
from gossipjax.meshes import HOST_MEMORY


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OnHost:
    """Marks an array that is on the host, with the shape and type of one node's array."""

    shape: tuple[int, ...]
    dtype: Any


def _waits(part: Any) -> bool:
    return isinstance(part, Exchanging) and bool(part.plan.fields(0))


def _is_on_host(part: Any) -> bool:
    return isinstance(part, OnHost)


def _leave_out(opt_state: Any, step: int, use: str, node_axes: int) -> Any:
    """Leaves out the arrays that `step` does not use; `use` is "read" or "written"."""

    def leave(x: Any) -> OnHost:
        return OnHost(x.shape[node_axes:], x.dtype)

    def leave_fields(part: Any) -> Any:
        if not _waits(part):
            return part
        rest = {}
        for name, used in part.plan.fields(step).items():
            by_fragment = getattr(part, name)
            if by_fragment is not None:
                rest[name] = tuple(
                    tree if f in getattr(used, use) else jax.tree.map(leave, tree)
                    for f, tree in enumerate(by_fragment)
                )
        return part._replace(**rest)

    return jax.tree.map(leave_fields, opt_state, is_leaf=_waits)


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
        return params, _leave_out(opt_state, step, "written", node_axes=0), aux

    return run


class OffloadedUpdate:
    """An update that brings what a step needs to the devices, and puts it back behind it.

    `fused` is the program of `with_less`. Functions return while arrays move.
    """

    def __init__(self, fused: Callable[..., Any], is_donated: bool):
        self._fused = fused
        self._is_donated = is_donated
        self._next_step: int | None = None

    def __call__(self, step: int, number: Any, params: Any, opt_state: Any, *inputs: Any) -> Any:
        """One step; `number` is its number as the program takes it."""
        if step != self._next_step:
            params, opt_state = self._start(params, opt_state)
        self._next_step = step + 1
        brought = bring(opt_state, number)
        params, new, aux = self._fused(number, params, brought, *inputs)
        merged = jax.tree.map(
            lambda x, old: old if _is_on_host(x) else x, new, opt_state, is_leaf=_is_on_host
        )
        return params, _to_host(merged), aux

    def _start(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """Parameters and state at the start of a loop; arrays that wait move to the host."""

        def commit(x: Any) -> Any:
            return x if getattr(x, "committed", True) else jax.device_put(x, x.sharding)

        # What comes from the host is bound to a device, as then all results are. Programs would be
        # compiled again for these.
        params, opt_state = jax.tree.map(commit, (params, opt_state))
        try:
            placed = jax.block_until_ready(_to_host(opt_state))
        except jax.errors.JaxRuntimeError as error:
            error.add_note(
                "XLA takes at most 64 GB of pinned memory from the host of a GPU. Allow more by "
                "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, or offload less."
            )
            raise
        if self._is_donated:  # which JAX does not do from one memory to another
            kept = set(map(id, jax.tree.leaves((params, placed))))
            for x in jax.tree.leaves(opt_state):
                if id(x) not in kept:
                    x.delete()
        return params, placed


def bring(opt_state: Any, step: int) -> Any:
    """The state that the program of `step` takes, on the devices."""
    return _move(_leave_out(opt_state, step, "read", node_axes=1), "device")


def _to_host(opt_state: Any) -> Any:
    def put(part: Any) -> Any:
        fields = {name: getattr(part, name) for name in part.plan.fields(0)} if _waits(part) else {}
        return part._replace(**_move(fields, HOST_MEMORY)) if fields else part

    return jax.tree.map(put, opt_state, is_leaf=_waits)


def _move(tree: Any, kind: str) -> Any:
    """Moves all arrays of the tree to a kind of memory at once."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [x for x in leaves if isinstance(x, jax.Array) and x.sharding.memory_kind != kind]
    shardings = [x.sharding.with_memory_kind(kind) for x in arrays]
    moved = dict(zip(map(id, arrays), jax.device_put(arrays, shardings), strict=True))
    return jax.tree.unflatten(structure, [moved.get(id(x), x) for x in leaves])
