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
from bad_input.rows import Call, each
from gossipjax.checkpoint import Checkpoints, TrainState, average_nodes, change_nodes

NODES = gx.Nodes(2)
TX = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.ring(2)))


def make_state() -> TrainState:
    params, opt_state = NODES.init(TX, {"w": jnp.zeros(3)})
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


def saved(step: Any = 1, state: Any = None, metadata: Any = None) -> Any:
    arrays = {"w": np.zeros(3)} if state is None else state
    return within(lambda c: c.save(step, arrays, {} if metadata is None else metadata))()


def restored_with(old: Any, new: Any) -> Any:
    """Saves a state of one transform, and restores it for another."""

    def use(checkpoints: Checkpoints) -> Any:
        checkpoints.save(1, NODES.init(old, {"w": jnp.zeros(3)}), {})
        return checkpoints.restore(NODES.init(new, {"w": jnp.zeros(3)}))

    return within(use)()


def resumed_by(make_tx: Any) -> Any:
    """Nothing is saved, so that `make_tx` is not called."""
    return within(lambda checkpoints: checkpoints.resume(make_state(), NODES, make_tx))()


def make_coded(codec: Any) -> Any:
    return optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.ring(2), wire=codec))


def make_outer(every: int) -> Any:
    return gx.outer(optax.sgd(0.1), optax.sgd(0.7), every)


def changed(nodes: Any = 2, params: Any = None) -> Any:
    state = make_state()
    return change_nodes(state.params if params is None else params, state.opt_state, TX, nodes)


INT8 = make_coded(gx.wire.int8())
CALLS: list[Call] = [
    (within(lambda checkpoints: checkpoints, max_to_keep=0), "max_to_keep must"),
    *each(Checkpoints, "folder must", "", "s3://bucket/run", Path("gs://bucket/run")),
    *each(lambda m: saved(metadata=m), "metadata", [1], {"a": np.zeros(2)}),
    (lambda: saved(metadata={"settings": 3}), "metadata['settings'] must"),
    (lambda: saved(metadata={"lr": {"a": Path("a")}}), "metadata['lr']['a']"),
    (lambda: saved(state={"w": "text"}), "state"),
    *each(resumed_by, "make_tx must", TX, lambda: TX, None),
    (
        lambda: restored_with(INT8, make_coded(gx.wire.int4())),
        "int4(block=256), as this run",
    ),
    (lambda: restored_with(INT8, make_coded(None)), "int8(block=256)"),
    (lambda: restored_with(make_outer(4), make_outer(5)), ".plan.every: 5, as this run, got"),
    (within(lambda c: c.after(make_state())), "every must be given"),
    *each(changed, "nodes", 0, 1.5, 5),
    *each(
        lambda params: changed(params=params),
        "must",
        {"w": np.zeros(3)},
        {"w": np.zeros((2, 3), int)},
    ),
    *each(lambda n: average_nodes(np.ones(2), n), "nodes must be", 0, 1.5),
]
