"""What exchanges, run inside `gx.sharded` by each device of a node on its own parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

from gossipjax.algorithms.frame.exchange import exchange_parts, split_messages
from gossipjax.algorithms.frame.messages import (
    pack_messages,
    with_packed_messages,
    with_unpacked_messages,
)
from gossipjax.algorithms.frame.state import GossipState
from gossipjax.collectives import default_step
from gossipjax.sharding import inner_axes, on_shards, specs_here


def exchange_on_parts(
    init: optax.TransformInitFn, update: Callable[..., Any], axis_name: str
) -> optax.GradientTransformationExtraArgs:
    """A transform that exchanges over `axis_name`, on the parts where it is inside `gx.sharded`.

    What stands beside it in a chain stays outside, where XLA partitions whole arrays.
    """
    parts = _Parts(init, update, axis_name)
    return optax.GradientTransformationExtraArgs(parts.init, parts.update)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """`init` and `update` of a transform that exchanges."""

    tx_init: optax.TransformInitFn
    tx_update: Callable[..., Any]
    axis_name: str

    def init(self, params: optax.Params) -> optax.OptState:
        specs = specs_here()
        if specs is None:
            return self.tx_init(params)
        specs.require(params, inner_axes(self.axis_name), may_repeat=True)
        state = jax.eval_shape(self._init, params)
        in_specs = (specs.of(params, params),)
        out_specs = specs.of(state, params)
        return on_shards(self._init, specs, self.axis_name, in_specs, out_specs)(params)

    def _init(self, params: Any) -> Any:
        return with_unpacked_messages(self.tx_init(params), params)

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        specs = specs_here()
        if specs is None:
            return self.tx_update(updates, state, params, **extra_args)
        specs.require(updates, inner_axes(self.axis_name), may_repeat=True)
        pieces = None
        if isinstance(state, GossipState) and state.overlap:
            pieces = split_messages(state)
        names = ("step", "received", "skip_exchange")
        known = {name: extra_args[name] for name in names if name in extra_args}
        arrays = {name: arg for name, arg in known.items() if _holds_arrays(arg)}
        others = {name: arg for name, arg in known.items() if name not in arrays}
        args = (updates, state, params, arrays)
        in_specs = specs.of(args, updates)
        update = partial(self._update, others=others, pieces=pieces)
        return on_shards(update, specs, self.axis_name, in_specs, in_specs[:2])(*args)

    def _update(
        self,
        updates: Any,
        state: Any,
        params: Any,
        arrays: dict[str, Any],
        others: dict[str, Any],
        pieces: list[range] | None,
    ) -> tuple[Any, Any]:
        """The update of parts; messages are packed for it. `pieces` are those of an overlap."""
        arguments = {**arrays, **others}
        if pieces is not None and not arguments.get("skip_exchange"):
            received = arguments.get("received")
            if received is None:
                step = default_step(arguments.get("step"), state.count, self.axis_name)
                received = exchange_parts(state, None, step, state.wire, pieces)
            arguments["received"] = pack_messages(received, state.overlap)
        state = with_packed_messages(state)
        updates, state = self.tx_update(updates, state, params, **arguments)
        return updates, with_unpacked_messages(state, updates if params is None else params)


def _holds_arrays(arg: Any) -> bool:
    leaves = jax.tree.leaves(arg)
    return bool(leaves) and all(isinstance(leaf, jax.Array) for leaf in leaves)
