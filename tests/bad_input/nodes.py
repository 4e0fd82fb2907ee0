"""Bad inputs of Nodes, spmd, TrainStep, processes and launch."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx
from bad_input.rows import Call, calls
from gossipjax import launch, processes

NODES = gx.Nodes(4)
TX = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.ring(4)))
MODEL = {"w": jnp.zeros(2)}


def identity(*args: Any) -> Any:
    return args


class Unhashable:
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __call__(self, x: Any) -> Any:
        return x


def train(gradients: Any, step: Any = 0, tx: Any = TX, **changes: Any) -> Any:
    train_step = gx.TrainStep(gradients, tx, nodes=NODES)
    params, opt_state = NODES.init(tx, MODEL)
    arguments = {"params": params, "opt_state": opt_state} | changes
    return train_step(step, *arguments.values())


def double(params: Any) -> Any:
    return params, jnp.zeros(())


NO_INTEGERS = [0, 2.0, "4"]
NO_ARGNUMS = [None, 1.5, "x", -1]
NO_MESH = [4, [jax.devices()[0]]]
NO_NAMES = [None, ("nodes",)]

ROWS: list[Call] = []
ROWS += calls("Nodes size", gx.Nodes, [*NO_INTEGERS, 2**40], "nodes must be")
ROWS += calls("Nodes mesh", lambda mesh: gx.Nodes(mesh=mesh), NO_MESH, "mesh must be")
ROWS += calls(
    "Nodes axis_name", lambda name: gx.Nodes(4, None, name), NO_NAMES, "axis_name must be"
)
ROWS += calls(
    "Nodes local_axis_name", lambda n: gx.Nodes(4, None, "nodes", n), NO_NAMES, "local_axis_name"
)
ROWS += calls("spmd fn", lambda fn: gx.spmd(fn, nodes=4), [None, "f"], "fn must be a function")
ROWS += calls("spmd mesh", lambda mesh: gx.spmd(identity, mesh), NO_MESH, "mesh must be")
ROWS += calls("spmd nodes", lambda n: gx.spmd(identity, nodes=n), NO_INTEGERS, "nodes must be")
for option in ("static_argnums", "donate_argnums", "shared_argnums", "local_argnums"):
    ROWS += calls(
        f"spmd {option}",
        lambda value, option=option: gx.spmd(identity, nodes=4, **{option: value}),
        NO_ARGNUMS,
        "argument numbers must be",
    )
ROWS += calls("TrainStep gradients", lambda f: gx.TrainStep(f, TX, nodes=4), [None, 3], "function")
ROWS += calls(
    "TrainStep tx",
    lambda tx: gx.TrainStep(double, tx, nodes=4),
    ["sgd", optax.sgd],
    "tx must",
)
ROWS += calls(
    "TrainStep thread",
    lambda flag: gx.TrainStep(double, TX, nodes=4, overlap_in_thread=flag),
    ["yes"],
    "overlap_in_thread",
)
ROWS += calls(
    "TrainStep local_argnums",
    lambda n: gx.TrainStep(double, TX, nodes=4, local_argnums=n),
    [None, 1.5],
    "argument numbers",
)
MOMENTUM = optax.sgd(0.1, momentum=0.9)
RING = gx.topology.ring(NODES.size)
ROWS += calls(
    "TrainStep momentum before its own",
    lambda gossip: train(double, tx=optax.chain(MOMENTUM, gossip)),
    [gx.quasi_global(RING, 0.1), gx.mixed_momentum(RING, 0.1), gx.quasi_global_adam(RING, 0.1)],
    "gossip that is the optimizer must get gradients",
)
ROWS += calls("TrainStep step", lambda s: train(double, s), [None, 1.5, -1], "step")
ROWS += [
    Call("gradients without aux", lambda: train(lambda p: p), "must return a pair"),
    Call("gradients of nothing", lambda: train(lambda p: None), "must return a pair"),
    Call("gradients of three", lambda: train(lambda p: (p, p, p)), "must return a pair"),
    Call("value_and_grad", lambda: train(lambda p: (jnp.zeros(()), p)), "other order"),
    Call("gradients of another shape", lambda: train(lambda p: ({"w": p["w"][:1]}, 0.0)), "shapes"),
    Call("train without a node axis", lambda: train(double, params=MODEL), "must be node-stacked"),
    Call(
        "train on a state of one", lambda: train(double, opt_state=TX.init(MODEL)), "node-stacked"
    ),
    Call(
        "run without a node axis", lambda: NODES.run(gx.average_batch_stats, MODEL), "node-stacked"
    ),
    Call("run of no function", lambda: NODES.run(None, MODEL), "fn must be a function"),
    Call("one of other rows", lambda: NODES.one(jnp.arange(4.0)), "rows of all nodes must be"),
    Call("one of too few", lambda: NODES.one(jnp.ones(3)), "leading axis of 4"),
    Call("one of a number", lambda: NODES.one(1.0), "leading axis of 4"),
    Call("init without a transform", lambda: NODES.init(None, MODEL), "tx must be"),
    Call("init of text", lambda: NODES.init(TX, {"w": "zero"}), "must be an array or a number"),
    Call("init of integers", lambda: NODES.init(TX, {"w": 3}), "floating-point"),
    Call("replicate text", lambda: NODES.replicate({"w": "x"}), r"must be an array or a number"),
    Call("replicate a function", lambda: NODES.replicate(identity), "must be an array or a number"),
    Call("put of too few rows", lambda: NODES.put(jnp.ones((3, 2))), "leading axis of 4"),
    Call("put of a number", lambda: NODES.put(1.0), "leading axis of 4"),
    Call("nodes and mesh", lambda: gx.Nodes(5, launch.mesh(4)), "nodes must be the size"),
    Call("fewer nodes than devices", lambda: gx.Nodes(2, launch.mesh(4)), "give a multiple of 4"),
    Call("nodes of several devices", lambda: gx.Nodes(4, launch.mesh(2, 2)), "must have no axis"),
    Call(
        "types of several nodes",
        lambda: gx.spmd(identity, launch.mesh(2), 4, check_vma=True),
        "check_vma must be False",
    ),
    Call("names of axes", lambda: gx.Nodes(4, None, "x", "x"), "must differ"),
    Call("unhashable function", lambda: gx.spmd(Unhashable(), nodes=4), "can be hashed"),
]


ROWS += calls("all_processes", processes.all_processes, [None, "yes"], "must be a bool")
ROWS += calls("broadcast_text", processes.broadcast_text, [None, "x" * 2000], "text must")
ROWS += calls(
    "require_shared_folder", processes.require_shared_folder, [None, "runs"], "folder must"
)
ROWS += [
    Call(
        "a folder in a file",
        lambda: processes.require_shared_folder(Path("/dev/null/runs")),
        "folder must be one",
        OSError,
    ),
    Call(
        "local_nodes axis", lambda: processes.local_nodes(launch.mesh(4), 4, "x"), "mesh must have"
    ),
    Call("local_nodes size", lambda: processes.local_nodes(launch.mesh(4), 5), "mesh must have"),
    Call(
        "put on a mesh", lambda: processes.put(jnp.ones(3), launch.mesh(4), 4), "leading axis of 4"
    ),
]
ROWS += calls("mesh axis", lambda size: launch.mesh(2, fsdp=size), NO_INTEGERS, "must be")
ROWS += [
    Call("mesh of no node", lambda: launch.mesh(fsdp=1000), "must divide the number of devices"),
]
ROWS += calls("mesh nodes", launch.mesh, [*NO_INTEGERS, 1000], "must be")
ROWS += calls("mesh local", lambda n: launch.mesh(1, n), [0, 1.5, "2", 1000], "must be")
ROWS += calls("mesh divisor", lambda n: launch.mesh(None, n), [3, 5], "must divide")
ROWS += calls("surviving_nodes", launch.surviving_nodes, [*NO_INTEGERS, None], "nodes must be")
ROWS += calls(
    "initialize address",
    lambda a: launch.initialize(a, 2, 0),
    ["host", "host:0", "host:99999", ":1", "::1:80"],
    "coordinator_address must be HOST:PORT",
)
ROWS += calls(
    "initialize num_processes",
    lambda n: launch.initialize("host:1", n, 0),
    [-1, 1.5],
    "num_processes",
)
ROWS += calls(
    "initialize process_id",
    lambda n: launch.initialize("host:1", 2, n),
    [-1, 2, "x"],
    "process_id",
)
ROWS += calls(
    "initialize timeout",
    lambda t: launch.initialize(num_processes=1, initialization_timeout=t),
    [0, "60", float("nan"), 1e9],
    "initialization_timeout",
)
ROWS += [
    Call("incomplete", lambda: launch.initialize(num_processes=2), "must be given together"),
    Call("incomplete id", lambda: launch.initialize(process_id=0), "must be given together"),
]
ROWS += calls(
    "mesh devices",
    lambda d: launch.mesh(devices=d),
    [[], [1], jax.devices() * 2],
    "devices must be",
)
ROWS += calls("advance", launch.advance, [-1, 1.5, "3"], "step must be")
ROWS += calls("exit_process", launch.exit_process, [None, 256], "status must be")
