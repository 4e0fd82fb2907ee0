"""A model sharded inside its nodes, beside one that each device of a node has whole.

    python -m experiments.speed compiled islands
    python -m experiments.speed compiled islands --target tpu

Trains the language model by Adam and SGP in four forms, on the same tokens from the same start:

- one device: a node is one device, which has the model and all of the node's tokens;
- replicated: a node is `--fsdp` devices, each of which has the whole model (the axis `local`). They
  share the tokens, and the message of the node;
- FSDP: a node is as many devices, over which the parameters, the gradients and the moments of Adam
  are sharded (`gx.fsdp_specs`, `gx.sharded`). Each exchanges its part;
- FSDP, local: the same without SGP, to see what else the exchange asks for.

For each of them it reports what a device sends to other nodes in a round, as the compiled program
has it, beside the model divided by `--fsdp`; the collectives inside a node, and how many bytes of
them plain training has not; the memory of a device by XLA's plan; seconds per step; and the loss
after `--steps` steps. All devices of `--target here` are virtual ones on a CPU, which share its
cores: seconds compare the forms only. `--target tpu` and `gpu` compile for 8 chips that need not be
present, see `schedule`; nothing is timed then. README.md in the parent folder lists the fields.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import results
from experiments.options import OptionalPath, PositiveInt, check_fields
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.speed.islands.counts import (
    count_extra,
    count_memory,
    read_traffic,
    summarize_traffic,
)
from experiments.speed.islands.forms import (
    FORMS,
    FSDP,
    FSDP_LOCAL,
    ONE_DEVICE,
    RANDOM_ROUNDS,
    Form,
    ModelSpec,
    compile_step,
    make_form,
    make_mesh,
    start,
)
from experiments.speed.targets import choose_targets, make_devices
from experiments.speed.timing import summarize_samples
from experiments.training import placement
from experiments.training.methods import make_schedule

MIN_DEVICES = 2  # of a node
MEGA = 1e6


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement of models sharded inside nodes."""

    nodes: PositiveInt = 4
    """Number of nodes."""
    fsdp: PositiveInt = 2
    """Devices of a node."""
    model: Literal["nano", "mini", "gpt2-small"] = "nano"
    """Parameters without the embedding of the tokens: 0.8, 11, 85 million."""
    vocabulary_size: PositiveInt = 4096
    """Tokens of the vocabulary."""
    sequence_length: PositiveInt = 128
    """Tokens of a sequence."""
    batch_size_per_node: PositiveInt = 8
    """Sequences per node and step."""
    topology: str = "one_peer_exponential"
    """Whom nodes send to; random ones have four rounds."""
    steps: PositiveInt = 20
    """Steps of each form, timed in turns."""
    target: Literal["here", "tpu", "gpu"] = "here"
    """tpu, gpu: compile for 8 chips that need not be present; nothing is timed."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.fsdp < MIN_DEVICES:
            raise ValueError(
                f"--fsdp must be an integer >= {MIN_DEVICES}, the devices that share a model, got "
                f"{self.fsdp}."
            )
        if self.batch_size_per_node % self.fsdp:
            raise ValueError(
                f"--batch-size-per-node must be a multiple of --fsdp, {self.fsdp}, whose devices "
                f"share it, got {self.batch_size_per_node}."
            )

    @property
    def model_spec(self) -> ModelSpec:
        """The language model."""
        return ModelSpec(
            self.model, self.vocabulary_size, self.sequence_length, self.batch_size_per_node
        )


class Program(NamedTuple):
    """A form that is compiled, and its state.

    Attributes:
      form: on the devices that are compiled for.
      state: parameters, optimizer state and tokens, here; only their shapes where nothing runs.
      rounds: the compiled step of each round.
    """

    form: Form
    state: tuple[Any, Any, Any]
    rounds: list[jax.stages.Compiled]


def compile_form(name: str, options: Options, devices: Sequence[Any]) -> Program:
    """Starts a form here, and compiles its steps for `devices`."""
    model = options.model_spec
    here, there = (
        make_form(name, model, options.topology, make_mesh(name, options.nodes, options.fsdp, some))
        for some in (jax.devices(), devices)
    )
    state = start(here, model)
    if options.target != "here":
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
    return Program(there, state, [compile_step(there, model, state, k) for k in there.rounds])


def count(program: Program) -> Record:
    """What the steps of a form send, and the memory that they need."""
    form = program.form
    params = jax.tree.leaves(program.state[0])
    model_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in params) // form.nodes.size
    texts = [compiled.as_text() for compiled in program.rounds]
    if any(text is None for text in texts):
        raise ValueError("the backend must show the compiled program, got none: use a CPU.")
    traffic = [read_traffic(text, form.devices) for text in texts if text is not None]
    return {
        "form": form.name,
        "nodes": form.nodes.size,
        "devices_per_node": form.devices,
        "model_bytes": model_bytes,
        "model_bytes_per_device": model_bytes / form.devices,
        **summarize_traffic(traffic),
        **count_memory(program.rounds),
    }


def run_in_turns(
    programs: Sequence[Program], steps: int, report_progress: Callable[[int], None]
) -> list[Record]:
    """Trains all forms for some steps, which take turns; their seconds and their last losses."""
    states = [program.state[:2] for program in programs]
    seconds: list[list[float]] = [[] for _ in programs]
    losses = [0.0] * len(programs)
    for step in range(steps):
        report_progress(step)
        for i, program in enumerate(programs):
            compiled = program.rounds[step % len(program.rounds)]
            started = time.perf_counter()
            *state, loss = jax.block_until_ready(compiled(*states[i], program.state[2]))
            seconds[i].append(time.perf_counter() - started)
            states[i] = tuple(state)
            losses[i] = float(np.mean(program.form.nodes.to_host(loss)))
    return [
        {**summarize_samples("seconds", samples), "loss": loss}
        for samples, loss in zip(seconds, losses, strict=True)
    ]


def compare(records: Sequence[Record]) -> list[Record]:
    """Adds what a form has beyond plain training, and how far its loss is from that of one device.

    The form without an exchange trains other models, so that its loss is not compared.
    """
    by_form = {record["form"]: record for record in records}
    compared = []
    for record in records:
        more: Record = {}
        if record["form"] == FSDP:
            more["extra_bytes"] = count_extra(record["inside"], by_form[FSDP_LOCAL]["inside"])
        if "loss" in record and record["form"] != FSDP_LOCAL:
            more["loss_difference"] = record["loss"] - by_form[ONE_DEVICE]["loss"]
        compared.append(record | more)
    return compared


def make_table(runs: Sequence[Record], title: str) -> Table:
    """The table of the list `runs` of `summary.json`."""
    table = Table(
        title=title,
        caption="sent: MB of a device and round to other nodes; inside: collectives inside a node, "
        "and their MB beyond those without an exchange; memory: MB of a device, by XLA's plan",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("form", no_wrap=True)
    headers = [
        "nodes\nx L",
        "sent",
        "model\n/ L",
        "mes-\nsages",
        "inside",
        "beyond",
        "memory",
        "ms",
    ]
    for header in [*headers, "loss", "differ-\nence"]:
        table.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        extra = run.get("extra_bytes")
        difference = run.get("loss_difference")
        table.add_row(
            run["form"],
            f"{run['nodes']} x {run['devices_per_node']}",
            f"{run['sent_bytes'] / MEGA:.3f}",
            f"{run['model_bytes_per_device'] / MEGA:.3f}",
            f"{run['messages']}",
            f"{sum(kind['count'] for kind in run['inside'].values())}",
            "-" if extra is None else f"{extra / MEGA:.3f}",
            f"{run['memory_bytes'] / MEGA:.1f}",
            f"{1e3 * run['seconds']:.0f}" if "seconds" in run else "-",
            f"{run['loss']:.5f}" if "loss" in run else "-",
            "-" if difference is None else f"{difference:.1e}",
        )
    return table


def choose_devices(options: Options) -> tuple[list[Any], str]:
    """Returns the devices to compile for, and words for them; JAX has N * L CPU devices then."""
    needed = options.nodes * options.fsdp
    placement.request_cpu_devices(needed)
    if options.target == "here":
        return jax.devices(), f"{needed} {jax.devices()[0].platform.upper()} devices"
    target = choose_targets((options.target,))[0]
    if target.nodes != needed:
        raise ValueError(
            f"--nodes * --fsdp must be {target.nodes} with --target {options.target}, got "
            f"{options.nodes} * {options.fsdp}."
        )
    return make_devices(target), f"compiled for {target.description}, nothing runs"


def measure_islands(options: Options) -> None:
    """Memory, messages, time and loss of a model sharded inside its nodes, and of a whole one."""
    out = None
    with exit_on_error(lambda: out):
        devices, description = choose_devices(options)
        make_schedule(options.topology, options.nodes, RANDOM_ROUNDS)
        for name in FORMS:  # devices that are missing are an error here
            make_mesh(name, options.nodes, options.fsdp, devices)
        out = results.create_run_dir("speed-islands", options.out, options.overwrite)
        console = Console()
        with results.make_progress_bar(console) as bar:
            task = bar.add_task("islands", total=len(FORMS) + options.steps, status="")
            programs = []
            for name in FORMS:
                bar.update(task, status=f"compiling: {name}")
                programs.append(compile_form(name, options, devices))
                bar.advance(task)
            records = [count(program) for program in programs]
            if options.target == "here":
                done = len(FORMS)
                timed = run_in_turns(
                    programs,
                    options.steps,
                    lambda step: bar.update(task, completed=done + step, status=f"step {step + 1}"),
                )
                records = [a | b for a, b in zip(records, timed, strict=True)]
            runs = compare(records)
            bar.update(task, completed=len(FORMS) + options.steps, status=description)
        results.write_summary(out, dataclasses.asdict(options), {"placement": description}, runs)
        model_bytes = runs[0]["model_bytes"]
        console.print(
            make_table(runs, f"A language model of {model_bytes / 4 / MEGA:.1f} million parameters")
        )
        console.print(f"{description}. Results: {out}", soft_wrap=True)
