"""From options to an experiment: everything that can fail before training."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import gossipjax as gx
from experiments.data.prefetch import require_memory
from experiments.options import option_name
from experiments.results import Record, create_run_dir, read_summary
from experiments.training.options import TrainingOptions
from experiments.training.output import Output
from experiments.training.placement import describe_nodes, make_sharding, place_nodes, require_parts
from experiments.training.plan import TrainingPlan, TrainingRun
from experiments.training.task import Task
from gossipjax.processes import broadcast_text, is_main_process, processes_agree

Options = TypeVar("Options", bound=TrainingOptions)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """All that a command line asks for, after every check."""

    plan: TrainingPlan
    task: Task
    nodes: gx.Nodes  # where they run now; the options have their number at the start
    runs: list[TrainingRun]  # the finished ones included
    output: Output


def prepare(options: Options, make_task: Callable[[Options], Task], program: str) -> Experiment:
    """Checks everything that can be checked before training, in order, and creates the folder.

    `make_task` loads the data; it is called once, with the options after merging saved ones.
    `program` is the first part of a new folder's name.

    Raises:
      ValueError, OSError: for options that exclude each other, missing data, a folder that holds
        another run, or other data than those of the run that is resumed.
    """
    size = options.nodes
    previous = find_previous(options)
    if previous is not None:
        options = merge_saved_options(options, previous.get("options", {}))
    task = make_task(options)
    data = {"dataset": task.description, "num_examples": int(task.num_examples)}
    if previous:
        require_same_data(previous["environment"], data, options.out)
    nodes = place_nodes(options.placement, size, options.fsdp)
    plan = TrainingPlan(options, task.num_examples, task.decay_mask, make_sharding(task, nodes))
    runs = plan.make_runs(size)
    for seed in options.seed:  # an impossible division of the data is an error here
        task.batches(nodes, options.examples_per_node, seed, start=0)
    fewest = task.min_batch_size
    examples = next(task.batches(nodes, fewest, options.seed[0], start=0))
    require_memory(examples, options.examples_per_node, options.BATCH_OPTION, fewest)
    require_parts(task, nodes, options, runs)
    environment = {
        "placement": describe_nodes(nodes),
        **data,
        "job": os.environ.get("GOSSIPJAX_JOB"),
    }
    folder = create_shared_run_dir(program, options, resume=previous is not None)
    output = Output(folder, dataclasses.asdict(options), environment, previous or {})
    output.write_summary()
    if is_main_process():
        task.save(folder)
    return Experiment(plan, task, nodes, runs, output)


def find_previous(options: TrainingOptions) -> Record | None:
    """Returns the `summary.json` that this program resumes; None if it starts anew.

    It is resumed with `--resume`, and after a restart by the launcher if this job wrote it. It is
    empty if the previous program ended before it wrote any.

    Raises:
      ValueError: if the file cannot be read, or the experiment cannot go on from it.
      OSError: if processes see different folders.
    """
    is_restart = bool(options.checkpoint_every and int(os.environ.get("GOSSIPJAX_RESTART", 0)))
    if not options.resume and not is_restart:
        return None
    previous = read_summary(options.out)
    if not processes_agree(bool(previous)):
        raise OSError(
            f"--out must be a folder that all processes share, got {options.out}: give one on a "
            "shared disk."
        )
    job = os.environ.get("GOSSIPJAX_JOB")
    is_of_another_job = previous and previous["environment"].get("job") != job
    return None if is_of_another_job and not options.resume else previous


def merge_saved_options(options: Options, saved: dict[str, Any]) -> Options:
    """Returns the options of a run that is resumed: the number of nodes is that of its start.

    Raises:
      ValueError: if an option differs that must stay the same.
    """
    current = json.loads(json.dumps(dataclasses.asdict(options), default=str))
    for name, value in current.items():
        is_changeable = name in options.CHANGEABLE_ON_RESUME
        if not is_changeable and saved.get(name, value) != value:
            raise ValueError(
                f"{option_name(name)} must be {saved[name]}, as in the run in {options.out}, got "
                f"{value}: keep it to resume that run, or choose another --out."
            )
    return dataclasses.replace(options, nodes=saved.get("nodes", options.nodes))


def require_same_data(saved: Record, data: Record, out: Path | None) -> None:
    """Raises `ValueError` unless a run that is resumed is given the data that it was trained on.

    `saved` is the environment in its `summary.json`, `data` the task's description of its data and
    their size, by the same names.
    """
    for name, value in data.items():
        before = saved.get(name, value)
        if before != value:
            raise ValueError(
                f"{name} must be that of the run in {out}, {before!r}, got {value!r}: give the "
                "data of that run to resume it, or choose another --out."
            )


def create_shared_run_dir(program: str, options: TrainingOptions, resume: bool) -> Path:
    """Has process 0 create the folder for the results, and returns it on all processes."""
    folder = options.out
    if is_main_process():
        folder = create_run_dir(program, options.out, options.overwrite, resume)
    return Path(broadcast_text(str(folder)))
