"""The start of a run: at step 0, from its newest checkpoint, or from that of another run."""

import contextlib
import dataclasses
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import optax

from experiments.program import FatalError
from experiments.results import COUNT, NUMBER, NUMBERS, OBJECT, TEXT, require_fields
from experiments.training.experiment import Experiment
from experiments.training.placement.islands import make_whole
from experiments.training.plan import Run
from experiments.training.reporting.progress import RunProgress
from experiments.training.trainer import Trainer
from gossipjax.checkpoint import Checkpoints, TrainState

IDENTITY = {"algorithm": TEXT, "seed": COUNT, "nodes": COUNT, "fsdp": COUNT}
PROGRESS = {"examples": COUNT, "seconds": NUMBER, "seconds_per_step": NUMBERS, "metrics": OBJECT}


class Start(NamedTuple):
    """The start of a run.

    Attributes:
      state: on the devices.
      progress: counted so far.
      message: a sentence for people; None for a run that starts at step 0.
    """

    state: TrainState
    progress: RunProgress
    message: str | None


def open_checkpoints(
    experiment: Experiment, run: Run
) -> AbstractContextManager[Checkpoints | None]:
    """Opens the checkpoints of a run; None if it saves none and starts at step 0."""
    options = experiment.plan.options
    if not (options.checkpoint_every or options.resume or options.init_from):
        return contextlib.nullcontext()
    folder = experiment.output.folder / "checkpoints" / run.folder_name
    return Checkpoints(folder, options.checkpoint_every, options.max_to_keep)


def start_or_resume(
    experiment: Experiment, run: Run, trainer: Trainer, checkpoints: Checkpoints | None
) -> Start:
    """Returns the newest checkpoint of the run; if it has none, the newest in `--init-from`.

    A run that is resumed with the same nodes continues bit for bit. With another number of nodes,
    or from a run with another method, all nodes start from the average model; so they do where only
    one of the two runs is sharded inside its nodes, and messages were in flight.

    Raises:
      FatalError: if a checkpoint is of another model or optimizer, `--init-from` holds none, or its
        run has taken all steps of this one.
      OSError: if there are checkpoints, but none that can be read.
    """
    plan = experiment.plan
    options = plan.options
    state = trainer.init(run.seed)._replace(metadata=run.identity)
    if checkpoints is None:
        return Start(state, RunProgress(), None)

    def make_tx(saved: dict[str, Any]) -> optax.GradientTransformation:
        saved = {"fsdp": 1} | saved
        require_fields(saved, "the metadata of a checkpoint", IDENTITY)
        saved_plan = plan
        if saved["fsdp"] == 1:
            saved_plan = dataclasses.replace(plan, sharding=None)
        elif plan.sharding is None:
            sharding = make_whole(state.params, saved["fsdp"])
            saved_plan = dataclasses.replace(plan, sharding=sharding)
        method = saved_plan.make_method(saved["algorithm"], saved["seed"], saved["nodes"])
        return method.transform

    try:
        state = checkpoints.resume(state, experiment.nodes, make_tx, options.init_from)
        saved = state.metadata
        if checkpoints.resumed_from is None or saved is None:
            return Start(state, RunProgress(), None)
        is_same_run = checkpoints.resumed_from == checkpoints.folder
        where = f"the metadata of a checkpoint in {checkpoints.resumed_from}"
        require_fields(saved, where, PROGRESS if is_same_run else {"examples": COUNT})
    except ValueError as error:
        raise FatalError(str(error)) from error
    message = f"{run.title} resumes after step {state.step}"
    if checkpoints.resize_report is not None:
        message += f" of {saved['algorithm']}: {checkpoints.resize_report}"
    if is_same_run:
        return Start(state, RunProgress.from_metadata(saved), message)
    if state.step >= plan.steps:
        raise FatalError(
            f"--init-from must be of a step before the end of this run, {plan.steps}, got "
            f"{options.init_from} of step {state.step}: train for more --epochs."
        )
    return Start(state, RunProgress(examples=saved["examples"]), message)
