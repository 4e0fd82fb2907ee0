"""Messages in flight: as they travel, and like the parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.algorithms.frame.masks import gossiped
from gossipjax.algorithms.frame.state import GossipState, InFlight, PushSum
from gossipjax.collectives import Layout, pad_to_rows, upcast


def mass_in_flight(params: optax.Params, state: GossipState | None) -> PushSum:
    """The weight and numerators (like `params`, float32 at least) of this node's messages.

    Zeros where nothing is in flight; the weight is None for an algorithm without weights.
    """
    zeros = jax.tree.map(jnp.zeros_like, upcast(params))
    if state is None or state.in_flight is None:
        return PushSum(None, zeros)
    if isinstance(state.in_flight, PushSum):
        return state.in_flight
    layout = message_layout(zeros, state)
    rows = state.overlap
    expected = [-(-size // rows) * rows for size in layout.sizes]
    if expected != [buffer.size for buffer in state.in_flight.buffers]:
        raise ValueError(
            "params must be the parameters that the transform gossips, got others than those of "
            "the messages in flight: where it is masked, pass that part of the parameters."
        )
    return PushSum(*layout.unpack(state.in_flight.buffers))


def pack_messages(mass: PushSum | InFlight, overlap: int) -> InFlight:
    """The weight and numerators of messages as they travel: in `overlap` rows per type."""
    if isinstance(mass, InFlight):
        return mass
    # A buffer also for the placeholder that optax.tree_map_params gives to init, without leaves.
    buffers = Layout(mass).pack(mass) or [jnp.zeros(0, jnp.float32)]
    return InFlight(tuple(pad_to_rows(buffer, overlap) for buffer in buffers))


def with_packed_messages(opt_state: Any) -> Any:
    """The state of a chain with all messages in flight as they travel."""

    def pack(part: Any) -> Any:
        if not _is_gossip(part) or not isinstance(part.in_flight, PushSum):
            return part
        return part._replace(in_flight=pack_messages(part.in_flight, part.overlap))

    return jax.tree.map(pack, opt_state, is_leaf=_is_gossip)


def with_unpacked_messages(opt_state: Any, params: Any) -> Any:
    """The state of a chain with all messages in flight as a `PushSum` like the parameters."""

    def unpack(part: Any) -> Any:
        if not _is_gossip(part) or not isinstance(part.in_flight, InFlight):
            return part
        return part._replace(in_flight=mass_in_flight(gossiped(params, part), part))

    return jax.tree.map(unpack, opt_state, is_leaf=_is_gossip)


def _is_gossip(part: Any) -> bool:
    return isinstance(part, GossipState)


def message_layout(x: Any, state: GossipState) -> Layout:
    """The layout of a message of numerators like `x`: the weight, if there is one, comes first."""
    return Layout(PushSum(state.weight, x))
