"""Bad inputs of diagnostics and batch statistics, inside of a per-node function."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import gossipjax as gx
from bad_input.rows import Call

TX = gx.sgp(gx.topology.ring(4))
PARAMS = {"a": jnp.ones((4, 2)), "b": jnp.ones((4, 3))}
D = gx.diagnostics


def on_nodes(function: Callable[[Any], Any], tree: Any = None) -> Callable[[], Any]:
    values = PARAMS if tree is None else tree
    return lambda: jax.vmap(function, axis_name="nodes")(values)


def with_state(function: Callable[[Any, Any], Any], tx: Any = TX) -> Callable[[], Any]:
    return on_nodes(lambda x: function(x, tx.init(x)))


INTEGERS = {"a": jnp.ones((4, 2), int)}
NARROW = gx.osgp(gx.topology.ring(4))


def half(x: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[:1], x)


ROWS: list[Call] = []
for measure in (D.consensus_distance, D.layer_consensus_distance, gx.average_batch_stats):
    name = measure.__name__
    ROWS += [
        Call(f"{name} integers", on_nodes(measure, INTEGERS), "floating-point"),
        Call(f"{name} no axis", lambda measure=measure: measure(PARAMS), "nodes"),
        Call(
            f"{name} axis",
            on_nodes(lambda x, measure=measure: measure(x, "servers")),
            "servers",
        ),
        Call(
            f"{name} text",
            on_nodes(lambda x, measure=measure: measure({"a": "one"})),
            "must be",
        ),
    ]
for measure in (D.total_mass, gx.average_model):
    name = measure.__name__
    ROWS += [
        Call(f"{name} integers", on_nodes(lambda x, m=measure: m(x, ()), INTEGERS), "floating"),
        Call(f"{name} no axis", lambda m=measure: m(PARAMS, TX.init(PARAMS)), "nodes"),
        Call(f"{name} axis", with_state(lambda x, s, m=measure: m(x, s, "servers")), "servers"),
        Call(f"{name} swapped", with_state(lambda x, s, m=measure: m(s, x)), "must be"),
        Call(
            f"{name} another structure",
            with_state(lambda x, s, m=measure: m({"a": x["a"]}, s), NARROW),
            "params must",
        ),
        Call(
            f"{name} another shape",
            with_state(lambda x, s, m=measure: m(half(x), s), NARROW),
            "params must",
        ),
    ]
ROWS += [
    Call("latest swapped", with_state(lambda x, s: gx.latest_model(s, x)), "must be"),
    Call("local swapped", with_state(lambda x, s: gx.local_model(s, x, x)), "must be"),
    Call("local without updates", with_state(lambda x, s: gx.local_model(x, s, None)), "updates"),
    Call(
        "local structure", with_state(lambda x, s: gx.local_model(x, s, {"a": x["a"]})), "updates"
    ),
    Call("local shapes", with_state(lambda x, s: gx.local_model(x, s, half(x))), "updates"),
    Call("mix swapped", with_state(lambda x, s: gx.mix_batch_stats(s, x, 0)), "must be"),
    Call("mix step", with_state(lambda x, s: gx.mix_batch_stats(x, s, None)), "step must be"),
    Call("mix float", with_state(lambda x, s: gx.mix_batch_stats(x, s, 0.5)), "step must be"),
    Call(
        "mix integers",
        with_state(lambda x, s: gx.mix_batch_stats({"n": jnp.ones(2, int)}, s, 0)),
        "floating-point",
    ),
    Call("mix outside", lambda: gx.mix_batch_stats(PARAMS, TX.init(PARAMS), 0), "nodes"),
]
