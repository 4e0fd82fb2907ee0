"""Bad inputs of Nodes, spmd, TrainStep, models sharded inside a node, processes and launch."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gossipjax as gx
from bad_input.rows import Call, calls
from gossipjax import launch

NODES = gx.Nodes(4)
RING = gx.topology.ring(4)
SGP = gx.sgp(RING)
TX = optax.chain(optax.sgd(0.1), SGP)
MODEL = {"w": jnp.zeros((2, 4)), "b": jnp.zeros(3)}
MESH = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("nodes", "fsdp"))
ON_MESH = gx.Nodes(mesh=MESH)
SPECS = {"w": P("fsdp"), "b": None}


def identity(*args: Any) -> Any:
    return args


def train(gradients: Any, step: Any = 0, tx: Any = TX, **changes: Any) -> Any:
    train_step = gx.TrainStep(gradients, tx, nodes=NODES)
    params, opt_state = NODES.init(tx, MODEL)
    arguments = {"params": params, "opt_state": opt_state} | changes
    return train_step(step, *arguments.values())


def double(params: Any) -> Any:
    return params, jnp.zeros(())


def init(specs: Any, tx: Any = SGP) -> Any:
    return ON_MESH.init(gx.sharded(tx, specs), MODEL)


def update_parts(tx: Any) -> Any:
    """One update in a `shard_map` over all axes, where transforms get parts."""
    sharded = gx.sharded(tx, SPECS)
    specs = {"w": P("fsdp"), "b": P()}

    def update(params: Any) -> Any:
        return sharded.update(params, sharded.init(params), params, step=0)[0]

    return jax.shard_map(update, mesh=MESH, in_specs=(specs,), out_specs=specs)(MODEL)


def update_unsharded(tx: Any) -> Any:
    params, state = ON_MESH.init(tx, MODEL)
    return ON_MESH.run(lambda p, state: tx.update(p, state, p, step=0), params, state)


START = NODES.init(TX, MODEL)
OUTER = gx.outer(optax.sgd(0.1), optax.sgd(0.7), 4)
BY_HAND = "coordinator_address must be HOST:PORT"
ROWS: list[Call] = []
for name, function, values, message in (
    ("Nodes size", gx.Nodes, [0, 2.0], "nodes must be"),
    (
        "Nodes and mesh",
        lambda n: gx.Nodes(n, mesh=launch.mesh(4)),
        [2, 5],
        "nodes must be the size",
    ),
    (
        "Nodes of rows",
        lambda n: gx.Nodes(n, mesh=launch.mesh(2, local=2)),
        [4],
        "must have no axis",
    ),
    (
        "spmd check_vma",
        lambda flag: gx.Nodes(4, mesh=launch.mesh(2)).spmd(identity, check_vma=flag),
        [True],
        "check_vma must be False",
    ),
    ("spmd rows", gx.spmd(identity, nodes=4), [{"w": jnp.ones((3, 2))}], "argument 0['w'] must be"),
    ("spmd number", gx.spmd(identity, nodes=4), [jnp.ones(())], "shared_argnums or static_argnums"),
    (
        "spmd parts",
        gx.Nodes(mesh=launch.mesh(4, local=2)).spmd(identity, local_argnums=0),
        [jnp.ones((4, 3))],
        "second axis that 2 local devices divide",
    ),
    ("TrainStep tx", lambda tx: gx.TrainStep(double, tx, nodes=4), [optax.sgd], "tx must"),
    (
        "train_step without a step",
        lambda x: gx.TrainStep(double, TX, nodes=NODES)(*START, x),
        [jnp.zeros((4, 3))],
        "got a dict: call train_step(step, params",
    ),
    (
        "TrainStep thread",
        lambda nodes: gx.TrainStep(double, SGP, nodes=nodes, overlap_in_thread=True),
        [ON_MESH],
        "overlap_in_thread must be None or False",
    ),
    ("gradients", train, [lambda p: p, lambda p: None, lambda p: (p, p, p)], "a pair"),
    ("gradients and value", train, [lambda p: (jnp.zeros(()), p)], "other order"),
    ("gradients of parts", train, [lambda p: (p | {"w": p["w"][:1]}, 0.0)], "got shape [1, 4]"),
    ("train on", lambda params: train(double, params=params), [MODEL], "must be node-stacked"),
    ("state", lambda s: train(double, opt_state=s), [TX.init(MODEL)], "node-stacked"),
    ("one", NODES.one, [jnp.arange(4.0), jnp.ones(3), 1.0], "must be"),
    ("init of", lambda params: NODES.init(TX, params), [{"w": "zero"}, {"w": 3}], "['w'] must be"),
    ("replicate", NODES.replicate, [{"w": "x"}], "must be an array or a number"),
    ("put", NODES.put, [jnp.ones((3, 2)), 1.0], "leading axis of 4"),
    ("mesh axis", lambda size: launch.mesh(2, fsdp=size), [0, 2.0, 1000], "must be"),
    ("mesh nodes", launch.mesh, [0, 2.0, 1000], "must be"),
    ("mesh local", lambda n: launch.mesh(1, local=n), [0, 1.5, 1000], "must be"),
    ("address", lambda a: launch.initialize(a, 2, 0), ["host", "host:0", ":1", "::1:80"], BY_HAND),
    ("num_processes", lambda n: launch.initialize("host:1", n, 0), [-1, 1.5], "num_processes"),
    ("sharded specs", lambda s: gx.sharded(SGP, s), [{"w": "fsdp", "b": None}], "PartitionSpec"),
    ("sharded tx", lambda tx: gx.sharded(tx, SPECS), ["sgp"], "tx of sharded must"),
    ("without sharded", update_unsharded, [SGP, gx.osgp(RING), gx.allreduce(), OUTER], "sharded"),
    ("no spec", init, [{"w": P("fsdp")}], "none for params['b']"),
    (
        "no axis of a node",
        init,
        [{"w": P("tensor"), "b": None}, {"w": P("nodes"), "b": None}],
        "must name axes inside a node, ['fsdp'], got",
    ),
    ("uneven parts", init, [{"w": P("fsdp"), "b": P("fsdp")}], "shape [3], evenly"),
    ("whole models", init, [{"w": None, "b": None}], "would each send it"),
    (
        "copies that are rounded apart",
        lambda wire: init(SPECS, gx.sgp(RING, wire=wire)),
        [gx.wire.int8(), gx.wire.float16()],
        "rounded apart",
    ),
    (
        "an optimizer of parts",
        update_parts,
        [
            optax.chain(optax.clip_by_global_norm(1.0), SGP),
            OUTER,
            optax.masked(SGP, {"w": True, "b": False}),
            gx.apply_if_finite(TX),
        ],
        "one gossip or gx.allreduce alone",
    ),
):
    ROWS += calls(name, function, values, message)
ROWS += [
    Call("no specs", lambda: gx.sharded(SGP).init(MODEL), "specs must be given where"),
]
