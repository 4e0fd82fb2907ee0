"""Gives a node the message of each neighbour by itself, and not only their sum."""

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
        """Sends `q` of a part; returns `q`, and the sum of it and the received `q_j`, weighted."""
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
    """Sends words to the peer of one slot; returns the decoded message that this node received.

    `like` is an array like the message. The result is zeros if nobody sends to this node.
    """
    if round_.is_single:
        is_message = slot.weights[0] > 0
        (message,) = permute([words], slot.receivers[0], wire.axis_name, is_message)
    else:  # nodes are simulated, so the sender may be traced
        sender = round_.select(slot.senders, np.int32)
        (message,) = gather_rows([words], sender, wire.axis_name)
    received = decode_array(message, wire.codec, like)
    is_edge = slot.received_weights > 0
    if is_edge.all():
        return received
    # What a filler brings is dropped: a NaN would spread between nodes that are no neighbours.
    return jnp.where(round_.select(is_edge, bool), received, jnp.zeros_like(received))


class Received(NamedTuple):
    """The messages that a node gets in a round, one for each slot; zeros if nobody sends in a slot.

    Attributes:
      messages: a tree like what was sent, `[K, ...]`, float32 at least.
      weights: float32 `[K]`, `P_ij` of each sender `j`; 0 if nobody sends.
      senders: int32 `[K]`, the number of each sender.
    """

    messages: Any
    weights: jax.Array
    senders: jax.Array


def receive(
    tree: Any, schedule: Schedule, step: StepLike, wire: Wire, key: jax.Array | None
) -> Received:
    """Sends `tree` along the edges of the round of `step`; returns each message by itself.

    `K` is the largest number of slots of a round. Each edge carries one message per type.
    """
    slots = max(1, *(len(round_.slots) for round_ in schedule.rounds))
    apply = partial(_receive, wire=wire, key=key, slots=slots)
    return at_round(apply, schedule, step, wire.axis_name, upcast(tree))


def _receive(
    round_: NodeRound, tree: Any, wire: Wire, key: jax.Array | None, slots: int
) -> Received:
    """Runs `receive` for one round, filled up to `slots` slots: all rounds then have one shape."""
    # In a filler each node sends to itself, with weight 0.
    filler = NodeSlot(*np.broadcast_arrays(np.arange(round_.size), np.zeros((1, round_.size))))
    filled = [*round_.slots, *[filler] * (slots - len(round_.slots))]

    def receive_part(part: jax.Array, wire: Wire, key: jax.Array | None) -> list[jax.Array]:
        words = encode_array(part, wire.codec, key)
        messages = [_receive_slot(words, slot, round_, wire, part) for slot in round_.slots]
        return messages + [jnp.zeros_like(part)] * (slots - len(messages))

    trees = exchange_packed(receive_part, tree, wire, key, results=slots)
    received = Received(
        jax.tree.map(lambda *messages: jnp.stack(messages), *trees),
        jnp.stack([round_.select(slot.received_weights, np.float32) for slot in filled]),
        jnp.stack([round_.select(slot.senders, np.int32) for slot in filled]),
    )
    return vary(received, wire.axis_name)


def receive_all(tree: Any, wire: Wire, key: jax.Array | None) -> tuple[Any, Any]:
    """Sends `tree` to all nodes; returns what all sent, `[N, ...]`, and what this message left out.

    A message leaves out what its codec rounds off or drops. Each node has N trees in memory.
    """

    def gather_part(part: jax.Array, wire: Wire, key: jax.Array | None) -> list[jax.Array]:
        words = encode_array(part, wire.codec, key)
        decode = partial(decode_array, codec=wire.codec, like=part)
        left_out = part - decode(words)
        return [left_out, *map(decode, gather_words(words, wire.axis_name))]

    results = 1 + axis_size(wire.axis_name)
    left_out, *trees = exchange_packed(gather_part, tree, wire, key, results)
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees), left_out
