"""What is kept of a node that waits for nobody, and how it goes on from it.

Each node saves by itself, every `--checkpoint-every` of its own steps and on SIGTERM: its model
`x / w`, its optimizer state, and the number of its steps, which is its position in the data. Its
weight and the messages on their way are not kept. With `--resume` each node starts at its own
model with weight 1, so the average model is the plain mean of the saved ones, which are as far
apart in time as the saves are. A node that has saved nothing asks another for half of its mass.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import gossipjax as gx
from experiments.training.options import TrainingOptions
from experiments.training.task import Variables
from gossipjax.checkpoint import Checkpoints, TrainState

STEPS_PER_LOOK = 8  # for SIGTERM, which may come between two saves


class Start(NamedTuple):
    """Where a node starts.

    Attributes:
      variables: the model.
      opt_state: the optimizer state; None is a new one.
      position: the batches that it had before.
      steps: its steps that the others do not count already.
      is_founder: whether it brings a model, and asks nobody for one.
    """

    variables: Variables
    opt_state: Any
    position: int
    steps: int
    is_founder: bool


def open_checkpoints(folder: Path, place: int, options: TrainingOptions) -> Checkpoints | None:
    """Returns the checkpoints of a node; None if it saves none and has none."""
    own = folder / "checkpoints" / str(place)
    if options.checkpoint_every:
        return Checkpoints(own, options.checkpoint_every, options.max_to_keep)
    return Checkpoints(own, read_only=True) if options.resume and own.exists() else None


def find_start(
    checkpoints: Checkpoints | None,
    variables: Variables,
    opt_state: Any,
    joins: bool,
    resumes: bool,
) -> Start:
    """Returns where a node starts: at what it has saved, or at the model of the seed.

    Args:
      checkpoints: its own.
      variables, opt_state: at step 0.
      joins: whether the others go on already; then it has its optimizer state and its position
        back, and half of another's mass.
      resumes: whether any node has saved something of an earlier job.
    """
    start = Start(variables, None, 0, 0, is_founder=not (joins or resumes))
    if checkpoints is None or not (joins or resumes):
        return start
    restored = checkpoints.restore((stack(variables), stack(opt_state), None))
    if restored is None:
        return start
    saved, saved_opt_state, _ = jax.tree.map(lambda x: x[0], restored.state)
    steps = 0 if joins else restored.step
    return Start(saved, saved_opt_state, restored.step, steps, is_founder=not joins)


def save(checkpoints: Checkpoints, node: gx.asynchronous.Node, step: int, every: int) -> None:
    """Saves a node where that is due; raises `Preempted` after SIGTERM, once it is saved."""
    if step % every == 0 or step % STEPS_PER_LOOK == 0:
        checkpoints.after(TrainState(step, stack(node.params), stack(node.opt_state)))


def stack(tree: Any) -> Any:
    """Gives arrays the axis of nodes, of which there is one here."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
