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
import math
import time
from collections.abc import Sequence
from functools import partial

import optax
from rich.table import Table

import gossipjax as gx
from experiments.options import PositiveInt
from experiments.results import Record
from experiments.speed import harness
from experiments.speed.compiled.hlo import parse_module
from experiments.speed.compiled.targets import (
    MlpSpec,
    Target,
    choose_targets,
    lower_step,
    make_devices,
)
from experiments.training.methods import make_schedule

RANDOM_ROUNDS = 10
SIZES = ("stablehlo_bytes", "hlo_bytes", "instructions", "code_bytes")


@dataclasses.dataclass(frozen=True)
class Options(harness.CheckOptions):
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
    columns: dict[str, harness.Cell] = {
        "topology": lambda run: run["topology"].replace("_", " "),
        "step": "{step}",
        "nodes": "{nodes}",
        "rounds": "{rounds}",
        "collec-\ntives": "{collectives_per_round:.3g}",
        "trace\ns": "{trace_seconds:.2f}",
        "compile\ns": "{compile_seconds:.2f}",
        "Stable\nHLO KB": harness.scale("stablehlo_bytes", 1e3, ",.0f"),
        "HLO\nKB": harness.scale("hlo_bytes", 1e3, ",.0f"),
        "instr.": "{instructions:,}",
        "code\nKB": harness.scale("code_bytes", 1e3, ",.0f"),
        "growth": harness.scale("growth", 1, ".2f"),
    }
    caption = "growth: of the largest of the sizes, over that of N log N"
    return harness.make_table("Compiled train steps of many nodes", caption, columns, runs, texts=2)


def compile_sizes(name: str, is_traced: bool, options: Options) -> list[Record]:
    """Compiles the programs of all numbers of nodes, from few to many."""
    runs: list[Record] = []
    for chips in options.chips:
        run = compile_program(name, chips, is_traced, options)
        run["growth"] = compute_growth(run, runs[0]) if runs else None
        runs.append(run)
    return runs


def make_plan(options: Options) -> harness.Plan:
    """Both kinds of steps of all topologies."""
    choose_targets(("tpu",))
    for chips in options.chips:
        count = len(make_devices(Target(chips, "tpu", 0, chips)))
        for name in options.topology:
            make_schedule(name, count, RANDOM_ROUNDS)

    def start_compiler() -> list[Record]:
        compile_program(options.topology[0], options.chips[0], False, options)
        return []

    cases = [
        (f"{name}, {'traced' if is_traced else 'static'}",
         partial(compile_sizes, name, is_traced, options))
        for name in options.topology
        for is_traced in (False, True)
    ]  # fmt: skip
    description = f"compiled for {', '.join(options.chips)}"
    return harness.Plan(description, [("starting", start_compiler), *cases], make_table)


def inspect_scaling(options: Options) -> None:
    """Size and compile time of train steps as the number of nodes grows, for absent TPUs."""
    harness.run_check("scaling", options, partial(make_plan, options))
