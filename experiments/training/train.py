"""The training loop of one run, and how it starts or resumes."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import optax

import gossipjax as gx
from experiments.options import option_name
from experiments.program import FatalError
from experiments.results import Record
from experiments.training.evaluation import Evaluator
from experiments.training.methods import Method
from experiments.training.output import Output, RunLog, RunProgress
from experiments.training.placement import make_put, make_whole
from experiments.training.plan import TrainingPlan, TrainingRun
from experiments.training.sharpness import measure_sharpness
from experiments.training.task import Task
from experiments.training.trainer import Trainer
from gossipjax.checkpoint import Checkpoints, TrainState
from gossipjax.processes import any_process

SECONDS_PER_HOUR = 3600

IDENTITY = ("algorithm", "seed", "nodes", "fsdp")
PROGRESS = ("examples", "seconds", "seconds_per_step", "metrics")


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that a command line asks for, after all checks."""

    plan: TrainingPlan
    task: Task
    nodes: gx.Nodes  # nodes of this program; the options contain their number at the start
    runs: list[TrainingRun]  # finished runs included
    output: Output


class Clock:
    """Sums up the seconds in `with clock:` blocks."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._seconds += time.perf_counter() - self._started

    def lap(self) -> float:
        """Returns the seconds since the last call, and restarts at 0."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


class InputClock(Clock):
    """Sums up the seconds for which the devices wait for input."""

    def __init__(self, get_newest: Callable[[], jax.Array | None]):
        super().__init__()
        self._get_newest = get_newest

    def __enter__(self) -> Self:
        # Input that is made while the devices still compute costs nothing.
        jax.block_until_ready(self._get_newest())
        return super().__enter__()


class Start(NamedTuple):
    """The state and the progress with which a run starts."""

    state: TrainState  # on the devices
    progress: RunProgress  # progress so far
    message: str | None  # for people; None for a run that starts at step 0


def make_metadata(experiment: Experiment, run: TrainingRun) -> Record:
    """Returns what each checkpoint of a run says of it, without its progress."""
    settings = experiment.plan.options.settings
    settings |= {"algorithm": run.title, "seed": run.seed}  # the options may be of several runs
    return run.identity | {"settings": settings}


def open_checkpoints(
    experiment: Experiment, run: TrainingRun
) -> AbstractContextManager[Checkpoints | None]:
    """Opens the checkpoints of a run; None if the run neither saves nor resumes."""
    options = experiment.plan.options
    if not (options.checkpoint_every or options.resume or options.init_from):
        return contextlib.nullcontext()
    folder = experiment.output.folder / "checkpoints" / run.folder_name
    return Checkpoints(folder, every=options.checkpoint_every, max_to_keep=options.max_to_keep)


def start_or_resume(
    experiment: Experiment, run: TrainingRun, trainer: Trainer, checkpoints: Checkpoints | None
) -> Start:
    """Starts from the newest checkpoint of the run, or else the newest in `--init-from`.

    A run that is resumed with the same nodes continues bit for bit.
    """
    plan = experiment.plan
    options = plan.options
    state = trainer.init(run.seed)._replace(metadata=make_metadata(experiment, run))
    if checkpoints is None:
        return Start(state, RunProgress(), None)

    def make_tx(saved: dict[str, Any]) -> optax.GradientTransformation:
        saved = {"fsdp": 1} | saved
        require_fields(saved, IDENTITY)
        saved_plan = plan
        if saved["fsdp"] == 1:
            saved_plan = dataclasses.replace(plan, sharding=None)
        elif plan.sharding is None:
            sharding = make_whole(state.params, saved["fsdp"])
            saved_plan = dataclasses.replace(plan, sharding=sharding)
        method = saved_plan.make_method(saved["algorithm"], saved["seed"], saved["nodes"])
        return method.transform

    try:
        # With another number of nodes, or from a run with another method, all nodes start from the
        # average model; so they do where only one of the two runs is sharded inside its nodes, and
        # messages were in flight.
        state = checkpoints.resume(state, experiment.nodes, make_tx, options.init_from)
        saved = state.metadata
        if checkpoints.resumed_from is None or saved is None:
            return Start(state, RunProgress(), None)
        is_same_run = checkpoints.resumed_from == checkpoints.folder
        require_fields(saved, PROGRESS if is_same_run else ("examples",))
    except ValueError as error:
        raise FatalError(str(error)) from error
    message = f"{run.title} resumes after step {state.step}"
    if checkpoints.resize_report is not None:
        message += f" of {saved['algorithm']}: {checkpoints.resize_report}"
    if is_same_run:
        return Start(state, RunProgress.from_metadata(saved), message)
    if state.step >= plan.last_step:
        raise FatalError(
            f"--init-from must be of a step before the end of this run, {plan.last_step}, got "
            f"{options.init_from} of step {state.step}: train for more --epochs or --max-steps."
        )
    return Start(state, RunProgress(examples=saved["examples"]), message)


def require_fields(metadata: Record, names: Sequence[str]) -> None:
    """Raises `ValueError` if a checkpoint's metadata are not from a training program."""
    if missing := sorted(set(names) - metadata.keys()):
        raise ValueError(
            f"the metadata of a checkpoint must have {', '.join(missing)}, got one without: give "
            "checkpoints of these programs."
        )


def is_out_of_time(plan: TrainingPlan, progress: RunProgress) -> bool:
    """Whether the hours of a run are over on any process. All processes must call it."""
    hours = plan.options.max_hours
    return hours is not None and any_process(progress.seconds >= hours * SECONDS_PER_HOUR)


def find_end(plan: TrainingPlan, step: int) -> str:
    """Returns the option that ended a run after this step."""
    if step >= plan.steps:
        return "epochs"
    return "max_steps" if step >= plan.last_step else "max_hours"


def train(experiment: Experiment, run: TrainingRun, log: RunLog) -> Record:
    """Trains one run to its end; returns its entry in `summary.json`.

    The run ends at its last step, or earlier at the end of its budget.
    """
    plan = experiment.plan
    options = plan.options
    nodes = experiment.nodes
    global_batch_size = nodes.size * options.examples_per_node
    trainer = Trainer(experiment.task, run.method, nodes, options.batch_stats, options.accumulate)
    gx.launch.advance(slow=True)
    evaluator = Evaluator(experiment.task, nodes)
    evaluation = None
    clock = Clock()
    input_clock = InputClock(lambda: trainer.newest_loss)
    with open_checkpoints(experiment, run) as checkpoints:
        state, progress, message = start_or_resume(experiment, run, trainer, checkpoints)
        log.start(state.step, message)
        rows = experiment.task.batches(nodes, options.examples_per_node, run.seed, state.step)
        put = make_put(nodes)
        batches = gx.prefetch(map(put, rows), waiting=input_clock)
        # The programs are compiled with the first batch, which is then trained on as well.
        batch = next(batches)
        shapes = experiment.task.make_shapes(nodes, options.examples_per_node)
        trainer.compile(state, map(put, shapes) if shapes else [batch])
        batches = itertools.chain([batch], batches)
        seconds_before = progress.seconds
        input_clock.lap()

        eval_steps = plan.eval_steps(start=state.step)
        next_eval_step = next(eval_steps, None)
        is_over = is_out_of_time(plan, progress)
        for steps in () if is_over else plan.intervals(start=state.step):
            # The last step of an interval comes by itself: the distance before mixing is that of
            # its gradient, whose batch is needed once more, outside of the measured time.
            with clock:
                state, losses = trainer.run_steps(state, itertools.islice(batches, len(steps) - 1))
                batch = next(batches)
            before_mixing = trainer.measure_distance_before_mixing(state, batch)
            with clock:
                state, last_losses = trainer.run_steps(state, [batch])
            loss = trainer.fetch_losses(losses + last_losses, steps.start).mean()

            progress.advance(len(steps), global_batch_size, clock.lap())
            progress.metrics = {
                "loss": float(loss),
                "consensus_distance_before_mixing": before_mixing,
                "consensus_distance": trainer.measure_distance(state),
                "examples_per_second": global_batch_size / progress.seconds_per_step[-1],
                "learning_rate": plan.learning_rate_at(steps[-1]),
            }
            log.add_training(state.step, progress)
            # The same on all processes: none goes on alone, and waits for the others for ever.
            is_over = state.step == plan.last_step or is_out_of_time(plan, progress)
            if state.step == next_eval_step or is_over:
                next_eval_step = next(eval_steps, None)
                evaluation = evaluator.evaluate_whole(trainer.average_variables(state), is_over)
                shown: Record = {**evaluation[0]}
                if options.evaluate_nodes:
                    shown |= evaluator.evaluate_nodes(trainer.node_variables(state))
                log.add_evaluation(state.step, progress, shown, evaluation[1])
            if checkpoints is not None and options.checkpoint_every is not None:
                state = state._replace(metadata=make_metadata(experiment, run) | vars(progress))
                checkpoints.after(state, last=is_over)
            gx.launch.advance()
            if is_over:
                break

    seconds = progress.seconds - seconds_before
    input_wait = input_clock.lap() / seconds if seconds else 0.0
    gx.launch.advance(slow=True)
    if evaluation is None:  # resumed after its last step
        evaluation = evaluator.evaluate_whole(trainer.average_variables(state), is_last=True)
    metrics, examined = evaluation
    ended_by = find_end(plan, state.step)
    if ended_by != "epochs":
        option = option_name(ended_by)
        why = f"{run.title} ends after step {state.step} of {plan.steps}, by {option}"
        log.bar.console.print(why, soft_wrap=True)
    log.write_texts(examined.texts)
    params = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), state.params)
    seconds_per_step = float(np.median(progress.seconds_per_step))
    sharpness = {}
    if options.sharpness:  # on the same examples for all methods
        first = next(experiment.task.batches(nodes, options.examples_per_node, run.seed, 0))
        average = nodes.one(trainer.average_variables(state), require_equal=False)
        value = measure_sharpness(experiment.task, average, nodes.to_host(put(first)))
        sharpness["sharpness"] = float(value)
    return {
        "run": run.name,
        "algorithm": run.method.algorithm,
        "topology": run.method.topology,
        "nodes": nodes.size,
        "steps": state.step,
        "ended_by": ended_by,
        "seed": run.seed,
        "seconds_per_step": seconds_per_step,
        "examples_per_second": global_batch_size / seconds_per_step,
        "input_wait": input_wait,
        "gradients_per_node": state.step * options.accumulate,
        "spectral_gap": run.method.spectral_gap,
        "sent_bytes_per_step": count_sent_bytes(run.method, params, nodes, state.step),
        **metrics,
        **examined.metrics,
        **evaluator.evaluate_nodes(trainer.node_variables(state)),
        **examined.details,
        "consensus_distance": progress.metrics["consensus_distance"],
        "consensus_distance_before_mixing": progress.metrics["consensus_distance_before_mixing"],
        "consensus_distance_by_layer": trainer.measure_distance_by_layer(state),
        "final_loss": progress.metrics["loss"],
        **sharpness,
    }


def count_sent_bytes(method: Method, params: Any, nodes: gx.Nodes, steps: int) -> float:
    """Returns the bytes that the busiest node sends in a step, as a mean over the steps.

    `params` are the parameters of one node, `[...]`, or their shapes.

    >>> import optax
    >>> from experiments.training.methods import MethodOptions, make_method
    >>> sgp = make_method("sgp", MethodOptions(nodes=4, local_steps=5), optax.sgd(0.1))
    >>> count_sent_bytes(sgp, {"w": np.zeros(999, np.float32)}, gx.Nodes(4), steps=10)
    800.0
    """
    sent = gx.bytes_per_step(method.transform, params, nodes, steps=range(steps)).sent
    return float(sent.max(axis=1).mean()) if steps else 0.0
