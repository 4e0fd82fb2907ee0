"""Size and compile time of train steps as the number of nodes grows; needs no accelerator.

    python -m experiments.speed compiled scaling

Compiles the train step of an MLP (gradients, SGD with momentum, SGP) for TPUs of several sizes, one
node per chip, with a static step number, which is one round, and with a traced one, whose program
holds all rounds. Their compiler is in an environment with `pip install "jax[tpu]==VERSION"`.

A message of N nodes names N pairs, and most schedules have about log N distinct rounds or peers: a
program should grow by N log N at most. `growth` is how much its largest part has grown beyond that,
from the fewest nodes on. Schedules with N - 1 rounds (complete_cycle) or messages (star)
grow by N^2.
"""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import optax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import gossipjax as gx
from experiments import results
from experiments.options import OptionalPath, PositiveInt, check_fields
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.speed.hlo import parse_module
from experiments.speed.schedule.mlp import MlpSpec, lower_step
from experiments.speed.targets import Target, choose_targets, make_devices
from experiments.training.methods import make_schedule

RANDOM_ROUNDS = 10
SIZES = ("stablehlo_bytes", "hlo_bytes", "instructions", "code_bytes")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the growth of compiled train steps."""

    chips: tuple[str, ...] = ("v5p:4x4x4", "v5p:4x8x8", "v5p:8x16x8")
    """Kind and grid of the chips, as libtpu names them, from few to many."""
    topology: tuple[str, ...] = (
        "one_peer_exponential",
        "base_graph",
        "random_peer_exponential",
        "exponential",
        "ring",
    )
    """Whom nodes send to; random ones have ten rounds."""
    layers: PositiveInt = 4
    """Layers of the MLP."""
    width: PositiveInt = 256
    """Inputs and outputs of a layer."""
    batch_size_per_node: PositiveInt = 16
    """Examples per node and step."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)


def compile_program(name: str, chips: str, is_traced: bool, options: Options) -> Record:
    """Compiles one program; returns its line of `metrics.jsonl`."""
    devices = make_devices(Target(chips, "tpu", 0, chips))
    mesh = gx.launch.mesh(devices=devices)
    mlp = MlpSpec(options.layers, options.width, options.batch_size_per_node)
    schedule = make_schedule(name, mesh.size, RANDOM_ROUNDS)
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), gx.sgp(schedule))
    start = time.perf_counter()
    lowered = lower_step(tx, mlp, mesh, None if is_traced else 0)
    lowered_at = time.perf_counter()
    compiled = lowered.compile()
    compiled_at = time.perf_counter()
    text = compiled.as_text()
    bodies = parse_module(text).computations.values()
    instructions = [it for body in bodies for it in body.values()]
    rounds = len(schedule.rounds) if is_traced else 1
    return {
        "chips": chips,
        "nodes": mesh.size,
        "topology": name,
        "step": "traced" if is_traced else "static",
        "rounds": rounds,
        "collectives_per_round": sum(it.collective is not None for it in instructions) / rounds,
        "trace_seconds": lowered_at - start,
        "compile_seconds": compiled_at - lowered_at,
        "stablehlo_bytes": len(lowered.as_text()),
        "hlo_bytes": len(text),
        "instructions": len(instructions),
        "code_bytes": compiled.memory_analysis().generated_code_size_in_bytes,
    }


def compute_growth(run: Record, smallest: Record) -> float:
    """The largest growth of a size over that of `N log N`.

    >>> sizes = {"hlo_bytes": 9, "instructions": 2, "code_bytes": 3}
    >>> few = {"nodes": 4, "stablehlo_bytes": 10, **sizes}
    >>> compute_growth({"nodes": 16, "stablehlo_bytes": 160, **sizes}, few)
    2.0
    """
    expected = run["nodes"] * math.log(run["nodes"])
    expected /= smallest["nodes"] * math.log(smallest["nodes"])
    return max(run[size] / smallest[size] for size in SIZES) / expected


def make_table(runs: Sequence[Record]) -> Table:
    """The table of the list `runs` of `summary.json`."""
    table = Table(
        title="Compiled train steps of many nodes",
        caption="growth: of the largest of the sizes, over that of N log N",
        box=SIMPLE_HEAD,
        padding=0,
    )
    for header in ("topology", "step"):
        table.add_column(header, overflow="fold", min_width=6)
    headers = ("nodes", "rounds", "collec-\ntives", "trace\ns", "compile\ns", "Stable\nHLO KB")
    for header in (*headers, "HLO\nKB", "instr.", "code\nKB", "growth"):
        table.add_column(header, justify="right")
    for run in runs:
        growth = run["growth"]
        table.add_row(
            run["topology"].replace("_", " "),
            run["step"],
            f"{run['nodes']}",
            f"{run['rounds']}",
            f"{run['collectives_per_round']:.3g}",
            f"{run['trace_seconds']:.2f}",
            f"{run['compile_seconds']:.2f}",
            f"{run['stablehlo_bytes'] / 1e3:,.0f}",
            f"{run['hlo_bytes'] / 1e3:,.0f}",
            f"{run['instructions']:,}",
            f"{run['code_bytes'] / 1e3:,.0f}",
            "-" if growth is None else f"{growth:.2f}",
        )
    return table


def inspect_scaling(options: Options) -> None:
    """Size and compile time of train steps as the number of nodes grows, for absent TPUs."""
    out = None
    with exit_on_error(lambda: out):
        choose_targets(("tpu",))
        for chips in options.chips:
            count = len(make_devices(Target(chips, "tpu", 0, chips)))
            for name in options.topology:
                make_schedule(name, count, RANDOM_ROUNDS)
        out = results.create_run_dir("speed-scaling", options.out, options.overwrite)
        console = Console()
        console.print(f"{', '.join(options.chips)}. Results: {out}", soft_wrap=True)
        runs = compile_all(options, out, console)
        results.write_summary(out, dataclasses.asdict(options), {}, runs)
        console.print(make_table(runs))


def compile_all(options: Options, out: Path, console: Console) -> list[Record]:
    """Compiles all programs; returns the objects in `runs` of `summary.json`."""
    cases = [(name, is_traced) for name in options.topology for is_traced in (False, True)]
    runs: list[Record] = []
    compile_program(options.topology[0], options.chips[0], False, options)  # starts the compiler
    with (out / "metrics.jsonl").open("w") as file, results.make_progress_bar(console) as bar:
        task = bar.add_task("compiling", total=len(cases) * len(options.chips), status="")
        for name, is_traced in cases:
            smallest = None
            for chips in options.chips:
                bar.update(task, status=f"{name}, {chips}")
                run = compile_program(name, chips, is_traced, options)
                run["growth"] = None if smallest is None else compute_growth(run, smallest)
                smallest = smallest or run
                file.write(f"{json.dumps(run)}\n")
                runs.append(run)
                bar.advance(task)
        bar.update(task, status=f"{len(runs)} programs")
    return runs
