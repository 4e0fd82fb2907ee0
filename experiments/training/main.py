"""The `main` of every training program, from the command line to the results."""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import tyro
from rich.console import Console

import gossipjax as gx
from experiments.options import parse_arguments
from experiments.presets.registry import find_preset
from experiments.program import exit_on_error
from experiments.results import Record, create_run_dir, make_progress_bar, read_summary
from experiments.training import placement
from experiments.training.asynchronous import is_asynchronous
from experiments.training.asynchronous_job import run_asynchronously
from experiments.training.options import TrainingOptions
from experiments.training.output import Output, RunLog, load_task
from experiments.training.plan import TrainingPlan
from experiments.training.task import Task
from experiments.training.train import Experiment, train
from experiments.training.trainer import MAX_PROGRAMS
from gossipjax.processes import broadcast_text, is_main_process, processes_agree

ORIGIN = "(Options that are not on the command line are those of --preset {}.)"

Options = TypeVar("Options", bound=TrainingOptions)


def run_program(
    module: str,
    options_type: type[Options],
    make_task: Callable[[Options], Task],
    arguments: Sequence[str] | None = None,
) -> None:
    """Parses the options, joins the job, trains, and reports; ends the program on an error.

    The program is `python -m MODULE`, and `--help` shows the first line of the docstring of
    `options_type`. `make_task` is usually the class of the task.
    """
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    experiment: Experiment | None = None
    # A wrong option ends the program with status 2 as long as there is no folder of results; the
    # launcher does not restart such a job.
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


def parse_options(
    module: str, options_type: type[Options], arguments: Sequence[str] | None = None
) -> Options:
    """Returns the options of `python -m MODULE`; with `--preset`, the preset sets the defaults.

    `options_type` is a dataclass with a field `preset` for the name. `arguments` are the arguments
    of the command line, by default `sys.argv[1:]`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    name = find_name(arguments)
    if name is None:
        return parse_arguments(options_type, module, arguments)
    preset = find_preset(name)
    if module != f"experiments.{preset.program}":
        raise ValueError(
            f"--preset must be a preset of {module}, got {name}, of another program: run "
            f"`{preset.command}`."
        )
    values = {**preset.options, "preset": name}
    # Not checked: a preset may need an option that only the command line has, a folder.
    defaults = object.__new__(options_type)
    for field in dataclasses.fields(options_type):  # pyright: ignore[reportArgumentType]
        object.__setattr__(defaults, field.name, values.get(field.name, field.default))
    # With both --FLAG and --no-FLAG, since a preset may set a flag that is not wanted.
    try:
        return tyro.cli(options_type, prog=f"python -m {module}", args=arguments, default=defaults)
    except SystemExit as error:
        if error.code:  # wrong options, about which tyro has printed a message
            print(ORIGIN.format(name), file=sys.stderr)
        raise


def find_name(arguments: Sequence[str]) -> str | None:
    """Returns the last value of `--preset`, or None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    return parser.parse_known_args(list(arguments))[0].preset


@contextlib.contextmanager
def mention_preset(arguments: Sequence[str] | None) -> Iterator[None]:
    """If options come from a preset, says so in the message of a `ValueError`."""
    name = find_name(sys.argv[1:] if arguments is None else arguments)
    try:
        yield
    except ValueError as error:
        if name is None or "--preset" in str(error):
            raise
        raise ValueError(f"{error} {ORIGIN.format(name)}") from error


def join_job(options: TrainingOptions) -> None:
    """Joins this process to its job, and requests CPU devices for the nodes that it will hold."""
    process = gx.launch.initialize()
    gx.launch.advance(slow=True)  # data are prepared, and models compiled
    # Before JAX looks for its devices: afterwards their number is fixed.
    if options.placement != "vmap" and process.num_processes <= options.nodes * options.fsdp:
        devices = options.nodes * options.fsdp
        placement.request_cpu_devices(-(-devices // process.num_processes))


def prepare(options: Options, make_task: Callable[[Options], Task], program: str) -> Experiment:
    """Checks everything that can be checked before training, and creates the folder.

    `make_task` loads the data, and is called once, after saved options were merged. `program` is
    the first part of a new folder's name.
    """
    size = options.nodes  # a resumed run may have started with another number
    previous = find_previous(options)
    options, task, data = load_task(options, previous or {}, make_task)
    nodes = placement.place_nodes(options.placement, size, options.fsdp)
    # Take the number of nodes at the start, so that a resumed run has the same steps.
    plan = TrainingPlan(
        options, task.num_examples, task.decay_mask, placement.make_sharding(task, nodes)
    )
    runs = plan.make_runs(size)
    for seed in options.seed:  # an impossible division of the data is an error here
        task.batches(nodes, options.examples_per_node, seed, start=0)
    placement.require_parts(task, nodes, options, runs)
    environment = {
        "placement": placement.describe_nodes(nodes),
        **data,
        "job": os.environ.get("GOSSIPJAX_JOB"),
    }
    folder = options.out
    if is_main_process():
        resumes = previous is not None
        folder = create_run_dir(program, options.out, options.overwrite, resumes)
    folder = Path(broadcast_text(str(folder)))
    output = Output(folder, dataclasses.asdict(options), environment, previous or {})
    output.write_summary()  # before the first run: a program that is stopped can be resumed
    if is_main_process():
        task.save(folder)
    return Experiment(plan, task, nodes, runs, output)


def find_previous(options: TrainingOptions) -> Record | None:
    """Returns the `summary.json` that this program resumes, or None if it starts anew.

    The program resumes with `--resume`, and after a restart by the launcher if this job wrote the
    file. The result is empty if the previous program ended before it wrote a summary.
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


def run_all(experiment: Experiment, console: Console) -> None:
    """Trains one run after the other, and then makes the table and the plots from the files."""
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
        if programs > MAX_PROGRAMS:
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
    finally:  # a program that is stopped reports the finished runs all the same
        if output.runs and is_main_process():
            from experiments import plots  # here, because matplotlib takes long to import

            plots.write_report(output.folder, console)
