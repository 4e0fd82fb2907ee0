"""The exchange of compiled train steps over several TPU slices; needs no accelerator.

    python -m experiments.speed compiled slices
    python -m experiments.speed compiled slices --slices 4 --nodes 4 --topology ring

Compiles the train step of an MLP (gradients, SGD with Nesterov momentum, 1-OSGP; one program per
round) for `--slices` slices of TPU chips, whose compiler is in an environment with
`pip install "jax[tpu]==VERSION"`. Chips of a slice have fast links (ICI); slices exchange by their
hosts over a data-center network (DCN). A node is a chip, several chips, or a whole slice, as
`gx.launch.mesh` arranges them; chips of a node hold the same model, and each sends its part of it.

For every round it compares the pairs of chips that exchange over the DCN with those of the gossip
schedule, and counts what a chip sends over either network. XLA sends over the DCN by `send` and
`recv`, which other work can lie between; `overlapped` are the matrix products that do. It leaves a
permutation inside a slice as it is for one slice.

The exit status is 1 if a message crosses that the schedule has not, or one of another size.
README.md in this folder's parent lists the columns and fields.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import gossipjax as gx
from experiments import results
from experiments.options import OptionalPath, PositiveInt, check_fields
from experiments.program import ProgramError, exit_on_error
from experiments.results import Record
from experiments.speed.hlo import COLLECTIVES, Module, parse_module
from experiments.speed.schedule.hlo_overlap import count_matmuls, count_overlapped
from experiments.speed.schedule.links import (
    count_sent,
    find_crossing,
    list_pairs,
    read_crossings,
)
from experiments.speed.schedule.mlp import MlpSpec, lower_step
from experiments.speed.targets import Target, choose_targets, make_devices
from experiments.training.methods import make_schedule

RANDOM_ROUNDS = 4  # of a random topology: a program each
BETWEEN = ("send", "recv")
GOSSIP = ("collective-permute",)
INSIDE_A_NODE = tuple(set(COLLECTIVES) - {*BETWEEN, *GOSSIP})
TILE_BYTES = 4096  # to which XLA may pad a message


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the train steps over several slices."""

    slices: PositiveInt = 2
    """TPU slices."""
    chips: str = "v5e:16x16"
    """Kind and grid of the chips of a slice, as libtpu names them."""
    nodes: tuple[PositiveInt, ...] = ()
    """Numbers of nodes; a node per chip, two per slice and one per slice if not given."""
    topology: str = "one_peer_exponential"
    """Whom nodes send to; random ones have four rounds."""
    layers: PositiveInt = 20
    """Layers of the MLP."""
    width: PositiveInt = 512
    """Inputs and outputs of a layer."""
    batch_size_per_chip: PositiveInt = 128
    """Examples per chip and step."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.slices < 2:
            raise ValueError(
                f"--slices must be at least 2, got {self.slices}: the program schedule compiles "
                "for one."
            )


def make_gossip(schedule: gx.Schedule, mesh: Mesh) -> optax.GradientTransformationExtraArgs:
    """SGD and 1-OSGP; first the mean of the gradients where a node has several chips."""
    sgd = optax.sgd(0.1, momentum=0.9, nesterov=True)
    if "local" not in mesh.axis_names:
        return optax.chain(sgd, gx.osgp(schedule))
    return optax.chain(gx.allreduce("local"), sgd, gx.osgp(schedule, local_axis_name="local"))


def read_program(
    module: Module, round_: gx.topology.Round, devices: np.ndarray, message_bytes: int
) -> Record:
    """What a compiled program sends over either network, and beside how many matrix products.

    Args:
      module: the compiled train step.
      round_: that it exchanges.
      devices: those of the nodes, `[N, ...]`.
      message_bytes: that a chip sends to a peer.
    """
    expected = find_crossing(list_pairs(round_, devices))
    crossings = read_crossings(module)
    crossing = frozenset(pair for message in crossings for pair in message.pairs)
    sizes = {message.bytes for message in crossings}
    sent: dict[int, int] = {}  # by chip
    for message in crossings:
        for sender, _ in message.pairs:
            sent[sender] = sent.get(sender, 0) + message.bytes
    slices = {device.id: device.slice_index for device in devices.flat}
    leaving: dict[int, int] = {}  # by slice
    for chip, size in sent.items():
        leaving[slices[chip]] = leaving.get(slices[chip], 0) + size
    return {
        "messages": len(round_.weights) - round_.size,
        "crossing_chips": len(sent),
        "dcn_bytes_per_chip": max(sent.values(), default=0),
        "dcn_bytes_per_slice": max(leaving.values(), default=0),
        "ici_bytes_per_chip": count_sent(module, GOSSIP),
        "inner_bytes_per_chip": count_sent(module, INSIDE_A_NODE),
        "matches_schedule": crossing == expected
        and all(message_bytes <= size < message_bytes + TILE_BYTES for size in sizes),
        "matmuls": count_matmuls(module),
        "matmuls_beside_dcn": count_overlapped(module, BETWEEN),
        "matmuls_beside_ici": count_overlapped(module, GOSSIP),
    }


def compile_nodes(options: Options, nodes: int, devices: Sequence[Any]) -> list[Record]:
    """Compiles the programs of all rounds for one number of nodes."""
    chips = len(devices) // nodes
    mesh = gx.launch.mesh(nodes, chips if chips > 1 else None, devices=devices)
    mlp = MlpSpec(options.layers, options.width, options.batch_size_per_chip * chips)
    schedule = make_schedule(options.topology, nodes, RANDOM_ROUNDS)
    tx = make_gossip(schedule, mesh)
    records = []
    for step in gx.canonical_steps(jax.eval_shape(tx.init, mlp.params)):
        module = parse_module(lower_step(tx, mlp, mesh, step).compile().as_text())
        sent_before = (step - 1) % schedule.period  # under overlap 1 it travels now
        message_bytes = 4 * -(-(mlp.size + 1) // chips)  # with the push-sum weight
        program = read_program(module, schedule.round_at(sent_before), mesh.devices, message_bytes)
        records.append(
            {
                "slices": options.slices,
                "chips": options.chips,
                "nodes": nodes,
                "chips_per_node": chips,
                "topology": options.topology,
                "round": sent_before,
                "model_bytes": 4 * mlp.size,
                **program,
            }
        )
    return sorted(records, key=lambda record: record["round"])


def make_table(runs: Sequence[Record]) -> Table:
    """The table of the list `runs` of `summary.json`."""
    table = Table(
        title="What a chip sends over the data-center network (DCN) and its slice's links (ICI)",
        caption="overlapped: matrix products of a step while the message is under way",
        box=SIMPLE_HEAD,
        padding=0,
    )
    headers = ("nodes", "chips/\nnode", "round", "cross-\ning", "DCN B/\nchip", "DCN B/\nslice")
    others = ("ICI B/\nchip", "in node", "as ex-\npected", "DCN\noverl.", "ICI\noverl.")
    for header in (*headers, *others):
        table.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        shares = (
            f"{run[f'matmuls_beside_{link}'] / max(1, run['matmuls']):.0%}"
            if run[f"{link}_bytes_per_chip"]
            else "-"
            for link in ("dcn", "ici")
        )
        table.add_row(
            f"{run['nodes']}",
            f"{run['chips_per_node']}",
            f"{run['round']}",
            f"{run['crossing_chips']}",
            f"{run['dcn_bytes_per_chip']:,}",
            f"{run['dcn_bytes_per_slice']:,}",
            f"{run['ici_bytes_per_chip']:,}",
            f"{run['inner_bytes_per_chip']:,}",
            "yes" if run["matches_schedule"] else "NO",
            *shares,
        )
    return table


def inspect_slices(options: Options) -> None:
    """Exchange of compiled train steps over several TPU slices that need not be present."""
    out = None
    with exit_on_error(lambda: out):
        choose_targets(("tpu",))
        name = f"{options.slices} x {options.chips}"
        devices = make_devices(Target(name, "tpu", 0, options.chips, options.slices))
        cases = options.nodes or (len(devices), 2 * options.slices, options.slices)
        for nodes in cases:
            require_nodes(nodes, options, len(devices))
        out = results.create_run_dir("speed-slices", options.out, options.overwrite)
        console = Console()
        console.print(f"{name}. Results: {out}", soft_wrap=True)
        runs = compile_all(options, cases, devices, out, console)
        results.write_summary(out, dataclasses.asdict(options), {}, runs)
        console.print(make_table(runs))
        if not all(run["matches_schedule"] for run in runs):
            raise ProgramError(
                "messages must cross slices where the schedule says so, got others: see the table."
            )


def require_nodes(nodes: int, options: Options, chips: int) -> None:
    """Raises `ValueError` unless the topology has so many nodes, and slices and chips, too."""
    if nodes % options.slices or chips % nodes:
        raise ValueError(
            f"--nodes must be a multiple of {options.slices} slices that divides {chips} chips, "
            f"got {nodes}: give {options.slices}, for one node per slice."
        )
    make_schedule(options.topology, nodes, RANDOM_ROUNDS)


def compile_all(
    options: Options, cases: Sequence[int], devices: Sequence[Any], out: Path, console: Console
) -> list[Record]:
    """Compiles for all numbers of nodes; returns the objects in `runs` of `summary.json`."""
    runs: list[Record] = []
    with (out / "metrics.jsonl").open("w") as file, results.make_progress_bar(console) as bar:
        task = bar.add_task("compiling", total=len(cases), status="")
        for nodes in cases:
            bar.update(task, status=f"{nodes} nodes")
            programs = compile_nodes(options, nodes, devices)
            file.writelines(f"{json.dumps(program)}\n" for program in programs)
            file.flush()
            runs += programs
            bar.advance(task)
        bar.update(task, status=f"{len(runs)} programs")
    return runs
