"""A job of asynchronous nodes. One process is one node, and all share a folder."""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import TaskID

import gossipjax as gx
from experiments.options import option_name
from experiments.results import create_run_dir, make_progress_bar, read_summary, replace_text
from experiments.training.asynchronous import ASYNCHRONOUS, NodeJob, NodeRun, OneNode, train_node
from experiments.training.forms import DENSE
from experiments.training.options import TrainingOptions
from experiments.training.output import Output, load_task
from experiments.training.plan import TrainingPlan
from experiments.training.task import Task

START_SECONDS = 120.0  # how far apart processes may start
JOB_FILE = "job.json"


def run_asynchronously(
    program: str, options: TrainingOptions, make_task: Callable[[Any], Task]
) -> None:
    """Trains the runs of a command line, one after the other, as one node of a job.

    At the end of a run, the living node with the lowest place adds the run to `summary.json`.
    """
    info = require_node(options)
    previous = read_summary(options.out) if options.resume else {}
    if (nodes := previous.get("options", {}).get("nodes", info.num_nodes)) != info.num_nodes:
        raise ValueError(
            f"--processes of the launcher must be {nodes}, the nodes of the run in {options.out}, "
            f"got {info.num_nodes}: start as many to resume it."
        )
    options, task, data = load_task(options, previous, make_task)
    if "async-outer" in options.algorithm and "batch_stats" in jax.eval_shape(task.init, 0):
        raise ValueError(
            "--algorithm async-outer must have a model without running statistics, which its "
            "momentum would carry too far, got one with batch normalization."
        )
    plan = TrainingPlan(options, task.num_examples, task.decay_mask)
    for seed in options.seed:
        task.batches(
            OneNode(info.num_nodes, place=info.place), options.batch_size_per_node, seed, start=0
        )
    folder = share_folder(program, options, info)
    placement = f"{info.num_nodes} asynchronous processes"
    environment = {"placement": placement, **data, "job": info.job}
    job = NodeJob(info, task, plan, folder, environment)
    if info.place == 0 and not info.is_restart:
        open_output(job).write_summary()
        task.save(folder)
    finished = open_output(job).finished
    runs = [
        run
        for name, seed in itertools.product(options.algorithm, options.seed)
        if (run := NodeRun(name, seed)).name not in finished
    ]
    console = Console(quiet=info.place != 0)
    console.print(
        f"{task.description}; {info.num_nodes} asynchronous nodes, {plan.steps:,} steps "
        f"each on average. Results: {folder}",
        soft_wrap=True,
    )
    with make_progress_bar(console) as bar:
        for run, joins in list_runs(folder, runs, info):
            row = bar.add_task(f"{run.title} ({run.seed})", total=plan.steps, status="compiling")

            def show(step: float, text: str, row: TaskID = row) -> None:
                bar.update(row, completed=step, status=text)

            try:
                record = train_node(job, run, joins, show)
            except TimeoutError:
                if joins and run.name in open_output(job).finished:
                    continue  # the run ended before this node was back
                raise
            if record is not None:
                open_output(job).add_run(record)
    if open_output(job).runs and info.place == 0:
        from experiments import plots  # here, because matplotlib takes long to import

        plots.write_report(folder, console)


def require_node(options: TrainingOptions) -> gx.launch.NodeInfo:
    """Returns the place of this process; raises `ValueError` outside an asynchronous job."""
    info = gx.launch.find_node()
    if info is None or info.num_nodes == 1:
        raise ValueError(
            f"--algorithm {' '.join(options.algorithm)} must run as one process per node, got one "
            f"process: python -m gossipjax.launch --asynchronous --processes {options.nodes} -- "
            "COMMAND --out FOLDER"
        )
    if info.num_nodes != options.nodes:
        raise ValueError(
            f"--nodes must be the number of processes, {info.num_nodes}, got {options.nodes}."
        )
    first = options.algorithm[0]
    refused = ["init_from", "topology", "delays_of", "max_steps", "max_hours", "evaluate_nodes"]
    refused += ["sharpness", *["evaluate_every"] * (options.evaluate_every != 1)]
    if "async-outer" in options.algorithm:
        ASYNCHRONOUS["async-outer"].build(0, options.outer)  # raises for unsupported options
    else:
        refused.append("outer_every")
    for name in refused:
        if getattr(options, name):
            raise ValueError(
                f"{option_name(name)} must not be given with {first}: its nodes are asynchronous."
            )
    # Option -> values that an asynchronous algorithm supports.
    sends_copies = any(name.startswith("async-adpsgd") for name in options.algorithm)
    allowed = {
        **dict.fromkeys(("accumulate", "local_steps", "fsdp"), (1,)),
        **dict.fromkeys(("batch_stats", "momentum"), ("local",)),
        "wire": ("float32",) if sends_copies else DENSE,
    }
    for name, values in allowed.items():
        value = getattr(options, name)
        if value not in values:
            raise ValueError(
                f"{option_name(name)} must be {' or '.join(map(str, values))} with {first}, whose "
                f"messages are of whole models, got {value}: leave it out."
            )
    if options.out is None:
        raise ValueError("--out must be given, a folder that all nodes share, got none.")
    return info


def share_folder(program: str, options: TrainingOptions, info: gx.launch.NodeInfo) -> Path:
    """Creates the folder in the node at place 0; other nodes wait until the folder exists."""
    assert options.out is not None
    path = options.out / JOB_FILE
    if info.place == 0 and not is_of_job(path, info.job):
        create_run_dir(program, options.out, options.overwrite, options.resume)
        replace_text(path, json.dumps({"job": info.job}))
    deadline = time.monotonic() + START_SECONDS
    while not is_of_job(path, info.job):
        if time.monotonic() > deadline:
            raise OSError(
                f"--out must be a folder that all nodes share, got {options.out}, which node 0 "
                f"has not created for {START_SECONDS:g} s: give one on a shared disk."
            )
        time.sleep(0.05)
    return options.out


def is_of_job(path: Path, job: str) -> bool:
    """Whether the file says that the folder belongs to this job."""
    try:
        return bool(json.loads(path.read_text())["job"] == job)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def open_output(job: NodeJob) -> Output:
    """Opens the results that are in the folder so far."""
    options = dataclasses.asdict(job.plan.options)
    return Output(job.folder, options, job.environment, read_summary(job.folder))


def list_runs(
    folder: Path, runs: list[NodeRun], info: gx.launch.NodeInfo
) -> Iterator[tuple[NodeRun, bool]]:
    """Yields the runs to do, and whether other nodes train each run already.

    A process that was started again goes on with the newest run that any node began.
    """
    begun = [number for number, run in enumerate(runs) if (run.folder(folder) / "begun").exists()]
    first = begun[-1] if info.is_restart and begun else 0
    for number, run in enumerate(runs[first:], first):
        joins = info.is_restart and number == first and bool(begun)
        run.folder(folder).mkdir(parents=True, exist_ok=True)
        (run.folder(folder) / "begun").touch()
        yield run, joins
