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


def saved(step: Any = 1, state: Any = None, metadata: Any = None) -> Callable[[], Any]:
    arrays = {"w": np.zeros(3)} if state is None else state
    return within(lambda c: c.save(step, arrays, {} if metadata is None else metadata))


def init_with(tx: Any) -> Any:
    return NODES.init(tx, {"w": jnp.zeros(3)})


def restored_with(old: Any, new: Any) -> Callable[[], Any]:
    """Saves a state of one transform, and restores it for another."""

    def use(checkpoints: Checkpoints) -> Any:
        checkpoints.save(1, init_with(old), {})
        return checkpoints.restore(init_with(new))

    return within(use)


def resumed_by(make_tx: Any) -> Callable[[Checkpoints], Any]:
    """Nothing is saved, so that `make_tx` is not called."""
    return lambda checkpoints: checkpoints.resume(make_state(), NODES, make_tx)


def make_coded(codec: Any) -> Any:
    return optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.ring(2), wire=codec))


def make_outer(every: int) -> Any:
    return gx.outer(optax.sgd(0.1), optax.sgd(0.7), every)


ROWS: list[Call] = []
for name, function, values, message in (
    ("max_to_keep", lambda n: opened(max_to_keep=n), [0], "max_to_keep must"),
    ("folder", Checkpoints, ["", "s3://bucket/run", Path("gs://bucket/run")], "folder must"),
    ("save metadata", lambda m: saved(metadata=m)(), [[1], {"a": np.zeros(2)}], "metadata"),
    ("settings", lambda s: saved(metadata={"settings": s})(), [3], "metadata['settings'] must"),
    ("a setting", lambda x: saved(metadata={"lr": {"a": x}})(), [Path("a")], "metadata['lr']['a']"),
    ("save state", lambda s: saved(state=s)(), [{"w": "text"}], "state"),
    ("make_tx", lambda tx: within(resumed_by(tx))(), [TX, lambda: TX, None], "make_tx must"),
):
    ROWS += calls(name, function, values, message)
INT8 = gx.wire.int8()
for name, old, new, message in (
    ("another codec", make_coded(INT8), make_coded(gx.wire.int4()), "int4(block=256), as this run"),
    ("a codec", make_coded(INT8), make_coded(None), "int8(block=256)"),
    ("every", make_outer(4), make_outer(5), ".plan.every: 5, as this run, got"),
):
    ROWS.append(Call(f"restore {name}", restored_with(old, new), message))
ROWS += [
    Call("after without every", within(lambda c: c.after(make_state())), "every must be given"),
]


def changed(nodes: Any = 2, tx: Any = TX, params: Any = None, opt_state: Any = None) -> Any:
    state = make_state()
    return change_nodes(
        state.params if params is None else params,
        state.opt_state if opt_state is None else opt_state,
        tx,
        nodes,
    )


ROWS += calls("change_nodes nodes", changed, [0, 1.5, 5], "nodes")
ROWS += calls(
    "change_nodes params",
    lambda params: changed(params=params),
    [{"w": np.zeros(3)}, {"w": np.zeros((2, 3), int)}],
    "must",
)
ROWS += calls("average_nodes", lambda n: average_nodes(np.ones(2), n), [0, 1.5], "nodes must be")
