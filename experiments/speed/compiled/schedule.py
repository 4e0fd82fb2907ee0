"""The exchange of compiled train steps, and the work that overlaps it; needs no accelerator.

    python -m experiments.speed compiled schedule --target tpu
    python -m experiments.speed compiled schedule --target gpu

Compiles the train step of an MLP (gradients, SGD with Nesterov momentum, gossip; one program per
round, over a mesh with one node per chip) ahead of time, for chips that need not be present, and
reads the order of instructions that XLA has chosen. `--target tpu` is 8 and 64 TPU v5e chips,
`--target gpu` is 8 hosts with an H100 each.

For each algorithm it reports every collective, and whether they are those of the gossip schedule:
one message per peer and step, of one type and the size of the parameters and the push-sum weight.
`overlapped` are the matrix products that run while a message is under way, from the start of the
first message to the completion of the last: the order of the work, not its duration. For 64 TPU
chips, in the order in which JAX lists them, most permutations block. For GPUs XLA starts a message
as late as it estimates that the remaining work still hides it: the fraction falls with a larger
`--batch-size-per-node`, a narrower wire, or a message in pieces (`2-osgp`).
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import numpy as np
import optax
from jax.sharding import Mesh
from rich.table import Table

import gossipjax as gx
from experiments.options import OutputOptions, PositiveInt
from experiments.results import Record
from experiments.speed import harness
from experiments.speed.compiled import hlo
from experiments.speed.compiled.hlo import PERMUTE, Message
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


def find_round(state: gx.GossipState | None, step: int) -> gx.topology.Round | None:
    """The round by which messages travel at `step`; None for an algorithm that has no schedule."""
    if state is None or state.schedule is None:
        return None
    # Under overlap, what travels now was sent in the round before, and travels in pieces.
    return state.schedule.round_at((step - 1) // state.overlap if state.overlap else step)


def expect_messages(
    state: gx.GossipState | None, wire: WireName, layers: Sequence[int], step: int
) -> list[Message]:
    """The messages that one node sends at `step`, by its gossip state and the mixing matrix.

    `layers` are their numbers of parameters, all alike. Without a state the algorithm averages
    gradients.
    """
    round_ = find_round(state, step)
    if state is None or round_ is None:
        return [Message("all-reduce", "f32", 4 * sum(layers))]
    pieces = np.array_split(layers, max(1, state.overlap))  # one per step of an overlap
    piece = (step - 1) % len(pieces)
    values = int(pieces[piece].sum())
    has_weight = state.weight is not None and (piece == 0 or len(pieces) == 1)
    peers = np.count_nonzero(round_.matrix, axis=0).max() - 1
    if wire == "float32":
        return [Message(PERMUTE, "f32", 4 * (values + has_weight))] * peers
    # The weight travels in full precision, as two words.
    return [Message(PERMUTE, "u16", 2 * (values + 2 * has_weight))] * peers


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


def expect_average(step: int, mlp: MlpSpec, nodes: int, kind: str) -> list[Message]:
    """The messages of Streaming DiLoCo at `step`: of the layer that is used, if there is one.

    On TPUs the average is a ring of permutes.
    """
    if step == 0 or step % 2:
        return []
    values = mlp.size // mlp.layers
    if kind != "tpu":
        return [Message("all-reduce", "f32", 4 * values)]
    return [Message(PERMUTE, "f32", 4 * -(-values // nodes))] * (2 * (nodes - 1))


def read_program(module: hlo.Module, expected: Sequence[Message]) -> Record:
    """What a compiled program exchanges, and the matrix products around it."""
    messages = hlo.list_messages(module)
    return {
        "messages": [message._asdict() for message in messages],
        "expected_messages": [message._asdict() for message in expected],
        "matches_schedule": sorted(messages) == sorted(expected),
        "matmuls": hlo.count_matmuls(module),
        "matmuls_before": hlo.count_matmuls_before(module),
        "matmuls_overlapped": hlo.count_overlapped(module),
    }


def compile_case(
    name: str, wire: WireName, target: Target, options: ScheduleOptions, mesh: Mesh
) -> list[Record]:
    """Compiles the programs of one algorithm; returns their lines of `metrics.jsonl`."""
    mlp = MlpSpec(options.layers, options.width, options.batch_size_per_node)
    method, steps = make_case(name, wire, target.nodes, mlp.layers)
    records = []
    for step in steps if options.every_round else steps[-1:]:
        compiled = lower_step(method.transform, mlp, mesh, step).compile()
        if method.outer is None:
            expected = expect_messages(method.state(), wire, mlp.layer_sizes, step)
        else:
            expected = expect_average(step, mlp, target.nodes, target.kind)
        records.append(
            {
                "target": target.description,
                "algorithm": name.partition("@")[0],
                "topology": method.topology,
                "wire": wire,
                "step": step,
                "parameters": mlp.size,
                **read_program(hlo.parse_module(compiled.as_text()), expected),
            }
        )
    return records


def summarize(programs: Sequence[Record]) -> list[Record]:
    """The object in `runs` of `summary.json`: what programs share, and the worst of the others."""
    worst = min(programs, key=lambda program: program["matmuls_overlapped"])
    wrong = next((program for program in programs if not program["matches_schedule"]), worst)
    shown = ("messages", "expected_messages", "matches_schedule")
    run = {
        **{name: value for name, value in worst.items() if name != "step"},
        "programs": len(programs),
        **{name: wrong[name] for name in shown},
        "fraction_overlapped": worst["matmuls_overlapped"] / max(1, worst["matmuls"]),
    }
    return [run]


def format_messages(messages: Sequence[Record]) -> str:
    """A line per kind of message: count, opcode, type and bytes."""
    counts: dict[str, int] = {}
    for message in messages:
        kind = "{opcode} {dtype} {bytes:,}".format(**message)
        counts[kind] = counts.get(kind, 0) + 1
    return "\n".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


def format_expected(run: Record) -> str:
    """Whether a program exchanges what it must; if not, what that is."""
    if run["matches_schedule"]:
        return "yes"
    return f"NO: {format_messages(run['expected_messages'])}"


def make_table(runs: Sequence[Record]) -> Table:
    """The table of the list `runs` of `summary.json`."""
    columns: dict[str, harness.Cell] = {
        "target": "{target}",
        "algorithm": lambda run: (
            run["algorithm"] + (f", {run['wire']}" if run["wire"] != "float32" else "")
        ),
        "topology": lambda run: run["topology"].replace("_", " "),
        "collectives": lambda run: format_messages(run["messages"]),
        "as expected": format_expected,
        "programs": "{programs}",
        "matmuls": "{matmuls}",
        "overlapped": "{matmuls_overlapped} ({fraction_overlapped:.0%})",
    }
    title = "Collectives of a compiled step, and matrix products between start and done"
    caption = "collectives: of one node: count, kind, type and bytes of each"
    return harness.make_table(title, caption, columns, runs, texts=5)


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
