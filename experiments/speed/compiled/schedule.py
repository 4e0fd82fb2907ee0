"""The exchange of compiled train steps, and the work that overlaps it; needs no accelerator.

    python -m experiments.speed schedule --target tpu
    python -m experiments.speed schedule --target gpu

docs/evidence/speed.md says what it does, and lists columns and fields. `overlapped` is the order of
the work, not its duration. For 64 TPU chips, in the order in which JAX lists them, most
permutations block. For GPUs XLA starts a message as late as it estimates that the remaining work
still hides it: the fraction falls with a larger `--batch-size-per-node`, a narrower wire, or a
message in pieces (`2-osgp`).
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import optax
from jax.sharding import Mesh
from rich.table import Table

import gossipjax as gx
from experiments import tables
from experiments.options import OutputOptions, PositiveInt
from experiments.results import Record
from experiments.speed import harness
from experiments.speed.compiled import hlo
from experiments.speed.compiled.targets import (
    MlpSpec,
    Target,
    TargetKind,
    choose_targets,
    lower_step,
    make_devices,
)
from experiments.training.forms import WireName
from experiments.training.methods import Method, MethodOptions, make_method
from experiments.training.outer import OuterOptions

STREAMING_DILOCO = "streaming-diloco"

CASES: tuple[tuple[str, WireName], ...] = (
    ("allreduce", "float32"),
    ("dpsgd@ring", "float32"),
    ("dpsgd@bipartite_exponential", "float32"),
    ("dpsgd@chain", "float32"),
    ("sgp", "float32"),
    ("sgp@two_peer_exponential", "float32"),
    ("sgp", "bfloat16"),
    ("sgp-cwa", "float32"),
    ("sgp-cwa", "bfloat16"),
    ("1-osgp", "float32"),
    ("2-osgp", "float32"),
    ("1-osgp", "bfloat16"),
    (STREAMING_DILOCO, "float32"),
)


@dataclasses.dataclass(frozen=True)
class ScheduleOptions(OutputOptions):
    """Options of the compiled train steps."""

    target: tuple[TargetKind, ...] = ()
    """Chips to compile for; all whose compiler is installed if not given."""
    layers: PositiveInt = 20
    """Layers of the MLP."""
    width: PositiveInt = 512
    """Inputs and outputs of a layer."""
    batch_size_per_node: PositiveInt = 128
    """Examples per node and step."""
    every_round: bool = False
    """Compile the program of every distinct round; without it, one per algorithm."""


def make_case(name: str, wire: WireName, nodes: int, layers: int) -> tuple[Method, list[int]]:
    """The algorithm of a case, and the steps that need different programs.

    Streaming DiLoCo's fragments are the layers; each is used one step after it was sent.
    """
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    if name != STREAMING_DILOCO:
        method = make_method(name, MethodOptions(nodes, wire=wire), optimizer)
        state = method.state()
        return method, [0] if state is None else list(gx.canonical_steps(state))
    outer = OuterOptions(
        2 * layers, 0.7, 0.9, outer_nesterov=True, outer_fragments=layers, outer_delay=1
    )
    method = make_method("local", MethodOptions(nodes, outer=outer), optimizer)
    return method, list(method.canonical_steps())


def compile_program(method: Method, mlp: MlpSpec, mesh: Mesh, step: int) -> Record:
    """What the compiled program of a step exchanges, and the matrix products around it."""
    module = hlo.parse_module(lower_step(method.transform, mlp, mesh, step).compile().as_text())
    messages = hlo.list_messages(module)
    nodes = mesh.size
    share = 2 * (nodes - 1) / nodes  # of an all-reduce, that a node sends on a ring
    sent = sum(it.bytes * (share if it.opcode == "all-reduce" else 1) for it in messages)
    expected = float(
        gx.bytes_per_step(method.transform, mlp.params, nodes, steps=[step]).sent.max()
    )
    # On TPUs an outer average is a ring of permutes, of equal parts that are filled up with zeros.
    padding = 0 if method.outer is None else 8 * nodes
    return {
        "messages": [message._asdict() for message in messages],
        "sent_bytes": sent,
        "expected_bytes": expected,
        "matches_schedule": 0 <= sent - expected <= padding,
        "matmuls": hlo.count_matmuls(module),
        "matmuls_overlapped": hlo.count_overlapped(module),
    }


def compile_case(
    name: str, wire: WireName, target: Target, options: ScheduleOptions, mesh: Mesh
) -> list[Record]:
    """Compiles the programs of one algorithm; returns their lines of `metrics.jsonl`."""
    mlp = MlpSpec(options.layers, options.width, options.batch_size_per_node)
    method, steps = make_case(name, wire, target.nodes, mlp.layers)
    return [
        {
            "target": target.description,
            "algorithm": name.partition("@")[0],
            "topology": method.topology,
            "wire": wire,
            "step": step,
            "parameters": mlp.size,
            **compile_program(method, mlp, mesh, step),
        }
        for step in (steps if options.every_round else steps[-1:])
    ]


def summarize(programs: Sequence[Record]) -> list[Record]:
    """The object in `runs` of `summary.json`: what programs share, and the worst of the others."""
    worst = min(programs, key=lambda program: program["matmuls_overlapped"])
    wrong = next((program for program in programs if not program["matches_schedule"]), worst)
    run = {name: value for name, value in worst.items() if name != "step"}
    for name in ("messages", "sent_bytes", "expected_bytes", "matches_schedule"):
        run[name] = wrong[name]
    run["programs"] = len(programs)
    run["fraction_overlapped"] = worst["matmuls_overlapped"] / max(1, worst["matmuls"])
    return [run]


def format_messages(messages: Sequence[Record]) -> str:
    """A line per kind of message: count, opcode, type and bytes."""
    counts = Counter("{opcode} {dtype} {bytes:,}".format(**message) for message in messages)
    return "\n".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


def make_table(runs: Sequence[Record]) -> Table:
    """The table of the list `runs` of `summary.json`."""
    columns: dict[str, tables.Cell] = {
        "target": "{target}",
        "algorithm": lambda run: (
            run["algorithm"] + (f", {run['wire']}" if run["wire"] != "float32" else "")
        ),
        "topology": lambda run: run["topology"].replace("_", " "),
        "collectives": lambda run: format_messages(run["messages"]),
        "as expected": lambda run: (
            "yes"
            if run["matches_schedule"]
            else "NO: {sent_bytes:,.0f} of {expected_bytes:,.0f} bytes".format(**run)
        ),
        "programs": "{programs}",
        "matmuls": "{matmuls}",
        "overlapped": "{matmuls_overlapped} ({fraction_overlapped:.0%})",
    }
    title = "Collectives of a compiled step, and matrix products between start and done"
    caption = "collectives: of one node: count, kind, type and bytes of each"
    return tables.make_table(title, caption, columns, runs, texts=5)


def make_measurement(options: ScheduleOptions) -> harness.Measurement:
    """The cases of all targets."""
    targets = choose_targets(options.target)

    def compile_for(target: Target, name: str, wire: WireName) -> list[Record]:
        mesh = Mesh(np.array(make_devices(target)), ("nodes",))
        return compile_case(name, wire, target, options, mesh)

    cases = [
        (f"{name}, {wire} wire, {target.description}", partial(compile_for, target, name, wire))
        for target in targets
        for name, wire in CASES
    ]
    description = f"compiled for {', '.join(target.description for target in targets)}"
    violation = "a program must exchange what its schedule says"
    return harness.Measurement(description, cases, make_table, summarize, violation)


def inspect_schedules(options: ScheduleOptions) -> None:
    """Exchange of compiled train steps, and the work that overlaps it, on absent TPUs and GPUs."""
    harness.run_check("schedule", options, partial(make_measurement, options))
