"""What a node hears from each neighbour by itself, before anybody has added it up."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.collectives._buffers import upcast
from gossipjax.collectives._exchange import (
    NodeRound,
    NodeSlot,
    StepLike,
    axis_size,
    exchange_packed,
    gather_rows,
    gather_words,
    permute,
    vary,
)
from gossipjax.collectives._mixing import at_round
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Wire, decode_array, encode_array


def mix_encoded(tree: Any, round_: NodeRound, wire: Wire, key: jax.Array | None) -> tuple[Any, Any]:
    """Sends `q = C(x)` to the neighbours; returns `q` and `sum_j P_ij q_j`, which includes `j = i`.

    Nodes send one message per type and slot, with any codec and any number of leaves. Without a
    codec they send `x`, float32 at least.
    """

    def exchange(part: jax.Array, wire: Wire, key: jax.Array | None) -> list[jax.Array]:
        words = encode_array(part, wire.codec, key)
        sent = decode_array(words, wire.codec, part)
        mixed = [round_.select(round_.self_weights, part.dtype) * sent]
        for slot in round_.slots:
            received = _receive_slot(words, slot, round_, wire, part)
            mixed.append(round_.select(slot.received_weights, part.dtype) * received)
        return [sent, reduce(jnp.add, mixed)]

    sent, mixed = exchange_packed(exchange, tree, wire, key, results=2)
    return sent, mixed


def _receive_slot(
    words: jax.Array, slot: NodeSlot, round_: NodeRound, wire: Wire, like: jax.Array
) -> jax.Array:
    """The message of the sender of a slot, decoded; zeros where nobody sends to this node."""
    if round_.is_single:
        is_message = slot.weights[0] > 0
        (message,) = permute([words], slot.receivers[0], wire.axis_name, is_message)
    else:
        sender = round_.select(slot.senders, np.int32)
        (message,) = gather_rows([words], sender, wire.axis_name)
    received = decode_array(message, wire.codec, like)
    is_edge = slot.received_weights > 0
    if is_edge.all():
        return received
    # A filler, whose NaN would spread along edges of no graph.
    return jnp.where(round_.select(is_edge, bool), received, jnp.zeros_like(received))


class Received(NamedTuple):
    """What a node hears in a round, by slot; where nobody sends to it, zeros of weight 0.

    Attributes:
      messages: a tree like what was sent, `[K, ...]`, float32 at least.
      weights: float32 `[K]`, `P_ij` of each sender.
      senders: int32 `[K]`, their numbers.
    """

    messages: Any
    weights: jax.Array
    senders: jax.Array


def receive(
    tree: Any, schedule: Schedule, step: StepLike, wire: Wire, key: jax.Array | None
) -> Received:
    """Sends `tree` along the edges of a round, and returns every message by itself.

    `K` is the largest number of slots of a round. Each edge carries one message per type.
    """
    slots = max(1, *(len(round_.slots) for round_ in schedule.rounds))
    apply = partial(_receive, wire=wire, key=key, slots=slots)
    return at_round(apply, schedule, step, wire.axis_name, upcast(tree))


def _receive(
    round_: NodeRound, tree: Any, wire: Wire, key: jax.Array | None, slots: int
) -> Received:
    filler = NodeSlot(*np.broadcast_arrays(np.arange(round_.size), np.zeros((1, round_.size))))
    given = [*round_.slots, *[filler] * (slots - len(round_.slots))]

    def hear(part: jax.Array, wire: Wire, key: jax.Array | None) -> list[jax.Array]:
        words = encode_array(part, wire.codec, key)
        heard = [_receive_slot(words, slot, round_, wire, part) for slot in round_.slots]
        return heard + [jnp.zeros_like(part)] * (slots - len(heard))

    trees = exchange_packed(hear, tree, wire, key, slots)
    received = Received(
        jax.tree.map(lambda *heard: jnp.stack(heard), *trees),
        jnp.stack([round_.select(slot.received_weights, np.float32) for slot in given]),
        jnp.stack([round_.select(slot.senders, np.int32) for slot in given]),
    )
    return vary(received, wire.axis_name)


def receive_all(tree: Any, wire: Wire, key: jax.Array | None) -> tuple[Any, Any]:
    """Returns what all nodes sent, `[N, ...]` on every node, and what this node's message left out.

    Each node has N copies of the tree in memory.
    """

    def hear(part: jax.Array, wire: Wire, key: jax.Array | None) -> list[jax.Array]:
        words = encode_array(part, wire.codec, key)
        decode = partial(decode_array, codec=wire.codec, like=part)
        left_out = part - decode(words)
        return [left_out, *map(decode, gather_words(words, wire.axis_name))]

    results = 1 + axis_size(wire.axis_name)
    left_out, *heard = exchange_packed(hear, tree, wire, key, results)
    return jax.tree.map(lambda *parts: jnp.stack(parts), *heard), left_out
