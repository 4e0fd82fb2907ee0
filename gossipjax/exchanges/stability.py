"""Simulates a transform where no gradient moves the nodes, to see whether they come to agree."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.topology.schedule import Schedule
from gossipjax.topology.spectra import follow_differences
from gossipjax.wire import Wire


def follow_nodes(
    tx: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    wire: Wire,
    start: np.ndarray,
    rounds: int,
    pull: np.ndarray,
) -> list[np.ndarray]:
    """Simulates S runs of a transform side by side, to see how far from 0 the models go.

    The update of a run is `-pull z` at parameters `z`. The simulation runs in a thread of its own,
    which the caller's tracing, mesh and promotion of types do not reach.

    Args:
      tx: the transform, which mixes over the axes of `wire`.
      schedule: the schedule of `tx`, which says at which steps the rounds repeat.
      start: `[N, S, ...]`, models of mean 0 over the nodes.
      rounds: how many rounds to follow in each segment of the schedule.
      pull: `[S]`, how much of the way to 0 a local step goes.

    Returns:
      For each segment `[R, S]`, the logarithm of the distance over its start, as
      `follow_differences` does.
    """

    def follow() -> list[np.ndarray]:
        """Runs all rounds; returns the logarithms of the distances over those of the start."""
        with jax.numpy_dtype_promotion("standard"):
            values = jnp.asarray(start, jnp.float32), init(jnp.asarray(start, jnp.float32))
            logs = follow_differences(schedule, move, values, rounds, _measure)
        return [segment - np.log(_measure((start, None))) for segment in logs]

    def take_step(z: Any, pull: Any, state: Any, step: Any) -> tuple[Any, Any]:
        change, state = tx.update(-pull * z, state, z, step=step)
        return z + change, state

    def move(_: Any, values: Any, step: int) -> Any:
        """Makes one step of all nodes and runs; `tx` mixes, so the first argument is not used."""
        return program(values[0], np.float32(pull), values[1], np.int32(step))

    init = jax.jit(jax.vmap(jax.vmap(tx.init), axis_name=wire.axis_name))
    # The inner `vmap` maps the S runs, and the outer one the N nodes.
    on_nodes = jax.vmap(jax.vmap(take_step, (0, 0, 0, None)), (0, None, 0, None), 0, wire.axis_name)
    if wire.local_axis_name is not None:  # every node has one device
        axis: Any = {"axis_name": wire.local_axis_name, "axis_size": 1}
        on_nodes = jax.vmap(on_nodes, (None,) * 4, None, **axis)
    program = jax.jit(on_nodes)
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(follow).result()


def _measure(values: Any) -> np.ndarray:
    """Returns each run's distance from 0, `[S]`, of models `[N, S, ...]`, the first of `values`."""
    by_run = np.moveaxis(np.asarray(values[0]), 1, 0)
    return np.linalg.norm(by_run.reshape(len(by_run), -1), axis=1)
