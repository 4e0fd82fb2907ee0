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
from bad_input.rows import Call, each
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


def train(gradients: Any, **changes: Any) -> Any:
    params, opt_state = NODES.init(TX, MODEL)
    arguments = {"params": params, "opt_state": opt_state} | changes
    return gx.TrainStep(gradients, TX, nodes=NODES)(0, *arguments.values())


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
ON_TWO = gx.Nodes(4, mesh=launch.mesh(2))
WITH_LOCAL = gx.Nodes(mesh=launch.mesh(4, local=2))
STEP = gx.TrainStep(double, TX, nodes=NODES)
CALLS: list[Call] = [
    *each(gx.Nodes, "nodes must be", 0, 2.0),
    *each(lambda n: gx.Nodes(n, mesh=launch.mesh(4)), "nodes must be the size", 2, 5),
    (lambda: gx.Nodes(4, mesh=launch.mesh(2, local=2)), "must have no axis"),
    (lambda: ON_TWO.spmd(identity, check_vma=True), "check_vma must be False"),
    (lambda: gx.spmd(identity, nodes=4)({"w": jnp.ones((3, 2))}), "argument 0['w'] must be"),
    (lambda: gx.spmd(identity, nodes=4)(jnp.ones(())), "shared_argnums or static_argnums"),
    (
        lambda: WITH_LOCAL.spmd(identity, local_argnums=0)(jnp.ones((4, 3))),
        "second axis that 2 local devices divide",
    ),
    (lambda: gx.TrainStep(double, optax.sgd, nodes=4), "tx must"),
    (lambda: STEP(*START, jnp.zeros((4, 3))), "got a dict: call train_step(step, params"),
    (
        lambda: gx.TrainStep(double, SGP, nodes=ON_MESH, overlap_in_thread=True),
        "overlap_in_thread must be None or False",
    ),
    *each(train, "a pair", lambda p: p, lambda p: None, lambda p: (p, p, p)),
    (lambda: train(lambda p: (jnp.zeros(()), p)), "other order"),
    (lambda: train(lambda p: (p | {"w": p["w"][:1]}, 0.0)), "got shape [1, 4]"),
    (lambda: train(double, params=MODEL), "must be node-stacked"),
    (lambda: train(double, opt_state=TX.init(MODEL)), "node-stacked"),
    *each(NODES.one, "must be", jnp.arange(4.0), jnp.ones(3), 1.0),
    *each(lambda params: NODES.init(TX, params), "['w'] must be", {"w": "zero"}, {"w": 3}),
    (lambda: NODES.replicate({"w": "x"}), "must be an array or a number"),
    *each(NODES.put, "leading axis of 4", jnp.ones((3, 2)), 1.0),
    (lambda: launch.mesh(2, fsdp=1000), "must be the number of devices"),
    (lambda: launch.initialize("127.0.0.1:1", 2, 0), "must get the same numbers at each call"),
    (lambda: launch.mesh(1000), "must be the number of devices"),
    (lambda: launch.mesh(2, devices=2), "jax.make_mesh((N, 2)"),
    (lambda: gx.sharded(SGP, {"w": "fsdp", "b": None}), "PartitionSpec"),
    (lambda: gx.sharded("sgp", SPECS), "tx of sharded must"),
    (lambda: gx.sharded(SGP, lambda params: "fsdp").init(MODEL), "PartitionSpec"),
    (lambda: gx.sharded(SGP).init(MODEL), "specs must be given if"),
    *each(update_unsharded, "sharded", SGP, gx.osgp(RING), gx.allreduce(), OUTER),
    (lambda: init({"w": P("fsdp")}), "none for params['b']"),
    *each(
        lambda axis: init({"w": P(axis), "b": None}),
        "must name axes inside a node, ['fsdp'], got",
        "tensor",
        "nodes",
    ),
    (lambda: init({"w": P("fsdp"), "b": P("fsdp")}), "shape [3], evenly"),
    (lambda: init({"w": None, "b": None}), "would each send it"),
    (lambda: init(SPECS, gx.sgp(RING, axis_name="data")), "axis_name of sharded must be"),
    *each(
        lambda wire: init(SPECS, gx.sgp(RING, wire=wire)),
        "rounded apart",
        gx.wire.int8(),
        gx.wire.float16(),
    ),
    (lambda: init(SPECS, gx.allreduce(wire=gx.wire.low_rank(1))), "inside gx.sharded"),
    *each(
        update_parts,
        "one gossip or gx.allreduce alone",
        optax.chain(optax.clip_by_global_norm(1.0), SGP),
        OUTER,
        optax.masked(SGP, {"w": True, "b": False}),
        gx.apply_if_finite(TX),
    ),
]
