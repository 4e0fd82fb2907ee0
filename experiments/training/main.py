"""The `main` of every training program: from a command line to results."""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console

import gossipjax as gx
from experiments import plots
from experiments.presets.registry import mention_preset, parse_options
from experiments.program import exit_on_error
from experiments.results import make_progress_bar
from experiments.training import placement
from experiments.training.asynchronous import is_asynchronous
from experiments.training.asynchronous_job import run_asynchronously
from experiments.training.experiment import Experiment, prepare
from experiments.training.options import TrainingOptions
from experiments.training.output import RunLog
from experiments.training.task import Task
from experiments.training.topologies import TOPOLOGIES, make_schedule
from experiments.training.train import train
from gossipjax.processes import is_main_process

Options = TypeVar("Options", bound=TrainingOptions)


def run_program(
    module: str,
    options_type: type[Options],
    make_task: Callable[[Options], Task],
    arguments: Sequence[str] | None = None,
) -> None:
    """Parses the options, joins the job, trains, and reports; ends the program if that fails.

    The program is `python -m MODULE`, described by the first line of the docstring of
    `options_type`. `make_task` is most often the class of the task.
    """
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    experiment: Experiment | None = None
    with exit_on_error(lambda: experiment and experiment.output.folder):
        with mention_preset(arguments):
            options = parse_options(module, options_type, arguments)
            program = module.rpartition(".")[2]
            if is_asynchronous(options.algorithm):
                run_asynchronously(program, options, make_task)
                return
            join_job(options)
            experiment = prepare(options, make_task, program)
        run_all(experiment, Console(quiet=not is_main_process()))


def join_job(options: TrainingOptions) -> None:
    """Joins this process to its job, and requests CPU devices for the nodes that it will hold."""
    process = gx.launch.initialize()
    gx.launch.advance(slow=True)  # data are prepared, and models compiled
    if options.placement != "vmap" and process.num_processes <= options.nodes * options.fsdp:
        devices = options.nodes * options.fsdp
        placement.request_cpu_devices(-(-devices // process.num_processes))


def run_all(experiment: Experiment, console: Console) -> None:
    """Trains one run after the other, and makes the table and the plots from the files.

    If it is stopped, the finished runs are reported all the same.
    """
    plan = experiment.plan
    output = experiment.output
    description = placement.describe_nodes(experiment.nodes)
    console.print(
        f"{experiment.task.description}; {experiment.nodes.size} nodes, {plan.last_step:,} steps; "
        f"{description}. Results: {output.folder}",
        soft_wrap=True,
    )
    for title, method in {run.title: run.method for run in experiment.runs}.items():
        programs = len(method.canonical_steps())
        if programs > gx.MAX_PROGRAMS:
            console.print(f"{title}: {programs} distinct rounds, so a traced step")
    try:
        with make_progress_bar(console) as bar:
            for run in experiment.runs:
                if run.name in output.finished:
                    continue
                title = f"{run.title} ({run.seed})"
                row = bar.add_task(title, total=plan.last_step, status="compiling")
                with output.open_reporter(plan.options.report_to, run) as reporter:
                    log = RunLog(run, output, bar, row, plan.num_examples, reporter)
                    output.add_run(train(experiment, run, log))
    finally:
        if output.runs and is_main_process():
            plot_topologies(experiment)
            plots.write_report(output.folder, console)


def plot_topologies(experiment: Experiment) -> None:
    """Draws the topologies of the runs, except where all nodes exchange with all."""
    nodes = experiment.nodes.size
    topologies = {run.method.topology for run in experiment.runs} - {"complete"}
    names = {name for topology in topologies for name in topology.split("/")}
    for name in sorted(names & TOPOLOGIES.keys()):
        schedule = make_schedule(name, nodes, seed=experiment.plan.options.seed[0])
        path = experiment.output.folder / f"topology_{name}.png"
        plots.plot_topology(schedule.matrices(), f"{name}, {nodes} nodes", path)
