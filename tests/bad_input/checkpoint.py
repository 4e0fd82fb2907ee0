"""Bad inputs of checkpoints."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx
from bad_input.rows import Call, calls
from gossipjax.checkpoint import Checkpoints, TrainState, average_nodes, change_nodes

NODES = gx.Nodes(2)
TX = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.ring(2)))


def make_state(size: int = 2) -> TrainState:
    params, opt_state = gx.Nodes(size).init(TX, {"w": jnp.zeros(3)})
    return TrainState(0, params, opt_state)


def within(use: Callable[[Checkpoints], Any], **options: Any) -> Callable[[], Any]:
    """Uses a new folder of checkpoints."""

    def run() -> Any:
        with (
            tempfile.TemporaryDirectory() as folder,
            Checkpoints(Path(folder), **options) as checkpoints,
        ):
            return use(checkpoints)

    return run


def opened(**options: Any) -> Any:
    return within(lambda checkpoints: checkpoints, **options)()


def restored(like: Any, step: Any = None) -> Callable[[], Any]:
    def use(checkpoints: Checkpoints) -> Any:
        checkpoints.save(1, {"w": np.zeros(3, np.float32)}, {})
        return checkpoints.restore(like, step)

    return within(use)


def saved(step: Any = 1, state: Any = None, metadata: Any = None) -> Callable[[], Any]:
    arrays = {"w": np.zeros(3)} if state is None else state
    return within(lambda c: c.save(step, arrays, {} if metadata is None else metadata))


def restored_with(old: Any, new: Any) -> Callable[[], Any]:
    """Saves a state of one transform, and restores it for another."""

    def use(checkpoints: Checkpoints) -> Any:
        checkpoints.save(1, NODES.init(old, {"w": jnp.zeros(3)}), {})
        return checkpoints.restore(NODES.init(new, {"w": jnp.zeros(3)}))

    return within(use)


def make_coded(codec: Any) -> Any:
    return optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.ring(2), wire=codec))


def make_outer(**changes: Any) -> Any:
    settings = {"every": 4, "average": "exact", "delay": 2, "mix": 0.5} | changes
    return gx.outer(optax.sgd(0.1), optax.sgd(0.7), **settings)


ROWS: list[Call] = []
ROWS += calls("every", lambda n: opened(every=n), [0, 1.5, "3"], "every, in steps, must be")
ROWS += calls("max_to_keep", lambda n: opened(max_to_keep=n), [0, 1.5], "max_to_keep must")
ROWS += calls("timeout", lambda n: opened(timeout=n), [0, "60", float("nan")], "timeout must")
ROWS += calls("folder", lambda folder: Checkpoints(folder), [None, ""], "folder must")
ROWS += calls("save step", lambda step: saved(step)(), [None, -1, 1.5], "step must be")
ROWS += calls(
    "save metadata",
    lambda metadata: saved(metadata=metadata)(),
    [[1], {"a": np.zeros(2)}],
    "metadata",
)
ROWS += calls("save state", lambda s: saved(state=s)(), [{"w": "text"}], "state")
CODECS = {
    "another codec": (gx.wire.int8(), gx.wire.int4(), "int4(block=256), as this run, got"),
    "another block": (gx.wire.int8(64), gx.wire.int8(), "int8(block=64). It is of another codec"),
    "a codec": (gx.wire.int8(), None, "int8(block=256). It is of another codec"),
    "no codec": (None, gx.wire.int8(), "got nothing more. It is of another codec"),
}
ROWS += [
    Call(f"restore {name}", restored_with(make_coded(old), make_coded(new)), message)
    for name, (old, new, message) in CODECS.items()
]
ROWS.append(
    Call(
        "restore another codec of allreduce",
        restored_with(*(gx.allreduce(wire=codec) for codec in (gx.wire.int8(), gx.wire.int4()))),
        "It is of another codec",
    )
)
ROWS += [
    Call(
        f"restore outer of another {name}",
        restored_with(make_outer(), make_outer(**{name: value})),
        f".plan.{name}: {value}, as this run, got",
    )
    for name, value in {"every": 5, "delay": 3, "mix": 0.25}.items()
]
ROWS.append(
    Call(
        "restore outer of another average",
        restored_with(make_outer(), make_outer(average=gx.topology.ring(2))),
        "It is of another setting of gx.outer",
    )
)
ROWS += [
    Call("restore another shape", restored({"w": np.zeros(4, np.float32)}), "must have"),
    Call("restore another type", restored({"w": np.zeros(3, np.int32)}), "must have"),
    Call("restore another structure", restored({"v": np.zeros(3, np.float32)}), "must have"),
    Call("restore a missing step", restored({"w": np.zeros(3, np.float32)}, 7), "step"),
    Call("after without every", within(lambda c: c.after(make_state())), "every must be given"),
    Call(
        "resume without a chain",
        within(lambda c: c.resume(make_state(), NODES, None), every=1),  # pyright: ignore
        "make_tx must",
    ),
    Call(
        "resume from nowhere",
        within(lambda c: c.resume(make_state(), NODES, lambda _: TX, "/nowhere"), every=1),
        "init_from must be",
    ),
]


def changed(nodes: Any = 2, tx: Any = TX, params: Any = None, opt_state: Any = None) -> Any:
    state = make_state()
    return change_nodes(
        state.params if params is None else params,
        state.opt_state if opt_state is None else opt_state,
        tx,
        nodes,
    )


ROWS += calls("change_nodes nodes", changed, [0, 1.5, "3"], "nodes must be")
ROWS += calls("change_nodes tx", lambda tx: changed(tx=tx), ["sgp"], "tx must")
ROWS += [
    Call("change_nodes of a model", lambda: changed(params={"w": np.zeros(3)}), "must"),
    Call("change_nodes of integers", lambda: changed(params={"w": np.zeros((2, 3), int)}), "must"),
    Call(
        "change_nodes of another optimizer",
        lambda: changed(tx=optax.chain(optax.adam(0.1), gx.sgp(gx.topology.ring(2)))),
        "must have",
    ),
    Call(
        "change_nodes without a state",
        lambda: change_nodes(make_state().params, None, TX, 2),
        "opt_state must",
    ),
    Call("change_nodes to another size", lambda: changed(5), "nodes"),
]
ROWS += calls("average_nodes", lambda n: average_nodes(np.ones(2), n), [0, 1.5], "nodes must be")
ROWS += [Call("average_nodes of a number", lambda: average_nodes(1.0, 2), "must")]
