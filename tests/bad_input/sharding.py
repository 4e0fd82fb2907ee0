"""Bad inputs of models that are sharded inside a node."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gossipjax as gx
from bad_input.rows import Call, calls

RING = gx.topology.ring(4)
MESH = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("nodes", "fsdp"))
NODES = gx.Nodes(mesh=MESH)
MODEL = {"w": jnp.zeros((2, 4)), "b": jnp.zeros(3)}
SPECS = {"w": P("fsdp"), "b": None}
SGP = gx.sgp(RING)


def init(specs: Any, tx: Any = SGP, model: Any = MODEL) -> Any:
    return NODES.init(gx.sharded(tx, specs), model)


def update(tx: Any, params: Any = MODEL, change: Callable[[Any], Any] = lambda state: state) -> Any:
    """One update of `tx`, with a state that was made for `SPECS`."""
    stacked, state = NODES.init(gx.sharded(SGP, SPECS), params)
    return NODES.run(lambda params, state: tx.update(params, change(state), params), stacked, state)


def update_parts(tx: Any) -> Any:
    """One update in a `shard_map` over all axes, where transforms get parts."""
    sharded = gx.sharded(tx, SPECS)
    specs = {"w": P("fsdp"), "b": P()}

    def update(params: Any) -> Any:
        return sharded.update(params, sharded.init(params), params, step=0)[0]

    return jax.shard_map(update, mesh=MESH, in_specs=(specs,), out_specs=specs)(MODEL)


def update_unsharded(tx: Any) -> Any:
    stacked, state = NODES.init(tx, MODEL)
    return NODES.run(lambda params, state: tx.update(params, state, params, step=0), stacked, state)


NO_SPECS = [{"w": "fsdp", "b": None}, {"w": ("fsdp",), "b": None}]
ROWS: list[Call] = []
ROWS += calls(
    "sharded specs", lambda specs: gx.sharded(SGP, specs), NO_SPECS, "must be a jax.sharding.Part"
)
ROWS += calls("sharded tx", lambda tx: gx.sharded(tx, SPECS), ["sgp"], "tx of sharded must")
ROWS += calls(
    "sharded axis_name",
    lambda name: gx.sharded(SGP, SPECS, name),
    [None],
    "axis_name of sharded",
)
ROWS += calls(
    "put specs",
    lambda specs: NODES.put({"x": jnp.zeros((4, 3))}, specs),
    ["fsdp", {}, P("nodes"), P("tensor"), P("fsdp"), P(None, None, "fsdp")],
    "specs",
)
ROWS += calls("fsdp_specs mesh", lambda m: gx.fsdp_specs(MODEL, m), [None, "x"], "mesh must be")
UNSHARDED = {
    "sgp": SGP,
    "osgp": gx.osgp(RING),
    "allreduce": gx.allreduce(),
    "outer": gx.outer(optax.sgd(0.1), optax.sgd(0.7), 4),
}
ROWS += [
    Call(f"{name} without sharded", lambda tx=tx: update_unsharded(tx), "must stand in gx.sharded")
    for name, tx in UNSHARDED.items()
]
ROWS += [
    Call(
        "the nodes' axis in a spec",
        lambda: gx.sharded(SGP, {"w": P("nodes"), "b": None}),
        "must name axes inside a node, got P('nodes',)",
    ),
    Call("a parameter without a spec", lambda: init({"w": P("fsdp")}), "got none for params['b']"),
    Call(
        "a spec without a parameter",
        lambda: init({**SPECS, "c": None}),
        "got one for ['c'], which they do not have",
    ),
    Call(
        "an axis that a node does not have",
        lambda: init({"w": P("tensor"), "b": None}),
        "must name axes inside a node, ['fsdp'], got P('tensor',)",
    ),
    Call(
        "a spec of too many axes",
        lambda: init({"w": P("fsdp"), "b": P(None, "fsdp")}),
        "must have at most an entry per axis",
    ),
    Call(
        "an array that the devices do not divide",
        lambda: init({"w": P("fsdp"), "b": P("fsdp")}),
        "must split its parameter, of shape [3], evenly",
    ),
    Call(
        "a model that every device of a node has whole",
        lambda: init({"w": None, "b": None}),
        "2 devices of a node would each send it",
    ),
    Call(
        "copies of a parameter that a codec rounds apart",
        lambda: init(SPECS, gx.sgp(RING, wire=gx.wire.int8())),
        "its copies would be rounded apart",
    ),
    Call(
        "copies of a parameter that a common scale rounds apart",
        lambda: init(SPECS, gx.sgp(RING, wire=gx.wire.float16())),
        "its copies would be rounded apart",
    ),
    Call(
        "the state of another transform",
        lambda: update(gx.sharded(SGP, SPECS), change=lambda state: state.inner),
        "the state of sharded must be of type ShardedState",
    ),
    Call(
        "the state of other specs",
        lambda: update(gx.sharded(SGP, {"w": P(None, "fsdp"), "b": None})),
        "must have been made with its specs",
    ),
    Call(
        "specs of other parameters in a diagnostic",
        lambda: NODES.run(
            lambda x: gx.diagnostics.consensus_distance(x, specs={"w": P("fsdp")}),
            NODES.replicate(MODEL),
        ),
        "got none for params['b']",
    ),
    Call(
        "an axis of other nodes",
        lambda: init(SPECS, gx.sgp(RING, axis_name="replicas")),
        "axis_name of sharded must be that of tx, 'replicas'",
    ),
    *[
        Call(
            f"an optimizer of parts: {name}",
            lambda tx=tx: update_parts(tx),
            "must stand around one gossip or gx.allreduce alone in a shard_map",
        )
        for name, tx in {
            "chain": optax.chain(optax.clip_by_global_norm(1.0), SGP),
            "outer": UNSHARDED["outer"],
            "masked": optax.masked(SGP, {"w": True, "b": False}),
            "skipped": gx.apply_if_finite(optax.chain(optax.sgd(0.1), SGP)),
        }.items()
    ],
    Call(
        "the state without its specs",
        lambda: NODES.run(
            lambda params: gx.exchange(gx.osgp(RING).init(params), 1), NODES.replicate(MODEL)
        ),
        "opt_state must be the state of the whole chain",
    ),
    Call(
        "types of what varies",
        lambda: NODES.spmd(lambda x: x, check_vma=True)(NODES.replicate(MODEL)),
        "check_vma must be False",
    ),
    Call(
        "a mesh without the axis",
        lambda: gx.fsdp_specs(MODEL, MESH, "tensor"),
        "with the axis 'tensor', got ('nodes', 'fsdp')",
    ),
    Call(
        "a thread where a node has several devices",
        lambda: gx.TrainStep(lambda p: (p, None), SGP, nodes=NODES, overlap_in_thread=True),
        "overlap_in_thread must be None or False",
    ),
]
