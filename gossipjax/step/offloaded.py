"""Keeps state in the host's memory until a step needs it.

A program keeps all its arguments in the memory of the device, even those that it only passes on.
So the program of a step does not take arrays that the step does not use, as `Plan.fields` says. An
`OnHost`, which is not an array, marks where they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

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


def _can_wait_on_host(part: Any) -> bool:
    """Says whether a part of a chain's state has fields that only some steps use."""
    return isinstance(part, Exchanging) and bool(part.plan.fields(0))


def _is_on_host(part: Any) -> bool:
    return isinstance(part, OnHost)


def _leave_on_host(
    opt_state: Any, step: int, use: Literal["read", "written"], node_axes: int
) -> Any:
    """Replaces each array that `step` does not read, or write, as `use` says, by an `OnHost`.

    A replaced array is neither moved to the device nor an argument or result of the program, so it
    stays in host memory. `node_axes` is 1 for node-stacked arrays and 0 inside of a per-node
    function; an `OnHost` has the shape of one node's array in both cases.
    """

    def replace(x: Any) -> OnHost:
        return OnHost(x.shape[node_axes:], x.dtype)

    def replace_unused(part: Any) -> Any:
        if not _can_wait_on_host(part):
            return part
        fields = {}
        for name, used in part.plan.fields(step).items():
            by_fragment = getattr(part, name)  # a tree for each fragment
            if by_fragment is not None:
                fields[name] = tuple(
                    tree if number in getattr(used, use) else jax.tree.map(replace, tree)
                    for number, tree in enumerate(by_fragment)
                )
        return part._replace(**fields)

    return jax.tree.map(replace_unused, opt_state, is_leaf=_can_wait_on_host)


def take_used_state(update: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an update of one node, so that it takes and returns only arrays that its step uses.

    The step is static. The state that goes in has an `OnHost` for each array that the step does not
    read, and the state that comes out for each array that the step does not write.
    """

    def update_used_state(step: int, params: Any, opt_state: Any, *inputs: Any) -> Any:
        # `update` needs arrays for all of the state. These zeros cost nothing: no result depends on
        # them, so XLA drops them.
        full = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if _is_on_host(x) else x,
            opt_state,
            is_leaf=_is_on_host,
        )
        params, opt_state, aux = update(step, params, full, *inputs)
        return params, _leave_on_host(opt_state, step, "written", node_axes=0), aux

    return update_used_state


class OffloadedUpdate:
    """An update that moves what a step needs to the devices before it, and back to the host after.

    `fused` is the program of `take_used_state`. A call returns while arrays still move.
    """

    def __init__(self, fused: Callable[..., Any], is_donated: bool):
        self._fused = fused
        self._is_donated = is_donated
        self._next_step: int | None = None

    def __call__(self, step: int, number: Any, params: Any, opt_state: Any, *inputs: Any) -> Any:
        """Takes step `step` by the program of its canonical step, `number`."""
        if step != self._next_step:  # another loop begins, whose state may be on the devices
            params, opt_state = self._start_loop(params, opt_state)
        self._next_step = step + 1
        used_state = bring_used_state(opt_state, number)
        params, after, aux = self._fused(number, params, used_state, *inputs)
        # For what the step has not written, the program returns an `OnHost`: keep the old array.
        merged = jax.tree.map(
            lambda new, old: old if _is_on_host(new) else new, after, opt_state, is_leaf=_is_on_host
        )
        return params, _to_host(merged), aux

    def _start_loop(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """Moves state to the host before the first step of a loop; returns parameters and state.

        The old arrays of the state are deleted if the step donates its state.
        """

        def commit(x: Any) -> Any:
            return x if getattr(x, "committed", True) else jax.device_put(x, x.sharding)

        # Arrays that come from the host are bound to a device, and so are all results of a program
        # that takes them. So bind all at the start, or the program of each round compiles twice.
        params, opt_state = jax.tree.map(commit, (params, opt_state))
        try:
            placed = jax.block_until_ready(_to_host(opt_state))
        except jax.errors.JaxRuntimeError as error:
            error.add_note(
                "XLA takes at most 64 GB of pinned memory from the host of a GPU. Allow more by "
                "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB, or offload less."
            )
            raise
        if self._is_donated:  # JAX cannot donate an array from one memory to another: delete it
            still_used = set(map(id, jax.tree.leaves((params, placed))))
            for x in jax.tree.leaves(opt_state):
                if id(x) not in still_used:
                    x.delete()
        return params, placed


def bring_used_state(opt_state: Any, step: int) -> Any:
    """Returns the state as the program of `step` takes it: what it reads is on the devices."""
    return _move(_leave_on_host(opt_state, step, "read", node_axes=1), "device")


def _to_host(opt_state: Any) -> Any:
    """Moves those fields of a state that only some steps use to the memory of the host."""

    def put(part: Any) -> Any:
        if not _can_wait_on_host(part):
            return part
        fields = {name: getattr(part, name) for name in part.plan.fields(0)}
        return part._replace(**_move(fields, HOST_MEMORY))

    return jax.tree.map(put, opt_state, is_leaf=_can_wait_on_host)


def _move(tree: Any, kind: str) -> Any:
    """Moves the arrays of a tree to the memory `kind`, "device" or `HOST_MEMORY`, by one call."""
    leaves, structure = jax.tree.flatten(tree)
    arrays = [x for x in leaves if isinstance(x, jax.Array) and x.sharding.memory_kind != kind]
    shardings = [x.sharding.with_memory_kind(kind) for x in arrays]
    moved = dict(zip(map(id, arrays), jax.device_put(arrays, shardings), strict=True))
    return jax.tree.unflatten(structure, [moved.get(id(x), x) for x in leaves])
