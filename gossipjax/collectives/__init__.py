"""Pytrees as messages, and their exchange by the rounds of a schedule.

- _buffers: packs a pytree into one flat buffer per type, so that it travels as one message.
- _exchange, _averages: the modules that call lax collectives on parameters, between neighbours and
  over all nodes. (If a device has several nodes, `nodes._composed_axis` replaces them.)
- _low_rank: averages the factors of matrices over all nodes.
- _mixing: applies one round, or one step of a schedule, to a pytree.
- _receive: gives a node the message of each neighbour by itself.

A model reaches `ppermute` by `mix` -> `_mix` -> `_deliver` -> `exchange_slots` -> `permute`.
"""

from gossipjax.collectives._averages import (
    MeanOver,
    agree_on,
    clipped_node_mean,
    exact_average,
    mean_of_encoded,
    node_mean,
    node_spread,
    node_sum,
    sum_over_parts,
)
from gossipjax.collectives._buffers import (
    Layout,
    accumulation_dtype,
    cast_like,
    require_floats,
    upcast,
)
from gossipjax.collectives._exchange import (
    NodeRound,
    StepLike,
    as_varying,
    axis_size,
    copy_for_leaves,
    default_step,
    exchange_along,
    require_step,
    select_for_node,
    split,
    varies,
    vary,
    vary_where_mapped,
)
from gossipjax.collectives._low_rank import init_basis, mean_of_low_rank
from gossipjax.collectives._mixing import (
    at_round,
    change_if,
    cond,
    deliver,
    group_rounds,
    mix,
    require_doubly_stochastic,
    require_schedule,
    round_index,
)
from gossipjax.collectives._receive import Received, mix_encoded, receive, receive_all

__all__ = [
    "Layout",
    "MeanOver",
    "NodeRound",
    "Received",
    "StepLike",
    "accumulation_dtype",
    "agree_on",
    "as_varying",
    "at_round",
    "axis_size",
    "cast_like",
    "change_if",
    "clipped_node_mean",
    "cond",
    "copy_for_leaves",
    "default_step",
    "deliver",
    "exact_average",
    "exchange_along",
    "group_rounds",
    "init_basis",
    "mean_of_encoded",
    "mean_of_low_rank",
    "mix",
    "mix_encoded",
    "node_mean",
    "node_spread",
    "node_sum",
    "receive",
    "receive_all",
    "require_doubly_stochastic",
    "require_floats",
    "require_schedule",
    "require_step",
    "round_index",
    "select_for_node",
    "split",
    "sum_over_parts",
    "upcast",
    "varies",
    "vary",
    "vary_where_mapped",
]
