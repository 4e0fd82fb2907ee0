"""What all algorithms share: the state, its wrapper, and the way to it in a chain.

- parameters: those of less than 32 bits, and the part of them that a masked transform sees.
- state: `GossipState`, and the plan of the exchange in it.
- chain: the states inside that of a chain, and its static steps.
- exchange: one round, messages in flight, and the exchange that can run before a step.
- transform: the wrapper of all gossip transforms, and the checks of arguments.

An algorithm takes all of it as `frame.NAME`.
"""
# ruff: noqa: F401

from gossipjax.algorithms.frame import chain, exchange, parameters, state, transform
from gossipjax.algorithms.frame.chain import (
    Average,
    OuterPlan,
    OuterState,
    exchange_plan,
    find_parts,
    gossip_state,
    outer_state,
    replace_gossip_state,
)
from gossipjax.algorithms.frame.exchange import (
    mass_in_flight,
    merge,
    mix_once,
    pick,
    split_leaves,
)
from gossipjax.algorithms.frame.parameters import (
    as_update,
    gossiped,
    make_mask,
    merge_gossiped,
    predict,
    residuals,
    widen,
    zeros_like_model,
)
from gossipjax.algorithms.frame.state import (
    ExchangePlan,
    Extra,
    GossipState,
    OnResize,
    Order,
    PushSum,
    add,
    common_model,
    debias,
    init_state,
    models,
    numerators,
    push_sum_weight,
    scale,
    subtract,
)
from gossipjax.algorithms.frame.transform import (
    Combined,
    exchange_on_parts,
    gossip_transform,
    make_route,
    require_axis_names,
    require_choice,
    require_like,
    require_number,
    require_params,
    require_plan,
    require_scalar,
    require_state,
    require_transform,
    update_if,
)

__all__ = ["chain", "exchange", "parameters", "state", "transform"]
