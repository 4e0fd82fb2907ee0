"""The exchange of compiled train steps over several TPU slices; needs no accelerator.

    python -m experiments.speed compiled slices
    python -m experiments.speed compiled slices --slices 4 --nodes 4 --topology ring

Compiles the train step of an MLP (gradients, SGD with Nesterov momentum, 1-OSGP; one program per
round) for `--slices` slices of TPU chips, whose compiler is in an environment with
`pip install "jax[tpu]==VERSION"`. Chips of a slice have fast links (ICI); slices exchange by their
hosts over a data-center network (DCN). A node is a chip, several chips, or a whole slice, as
`gx.launch.mesh` arranges them; chips of a node hold the same model, and each sends its part of it.

For several slices XLA makes one program for each of them. Of a permutation, the pairs inside a
slice stay a `collective-permute`, whose numbers are those of the slice's chips. Pairs of two slices
become a `send` and a `recv` by hosts, over the data-center network, and name the ids of devices;
other work can lie between the two. For every round it compares the pairs of chips that exchange
over the DCN with those of the gossip schedule, and counts what a chip sends over either network.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from rich.table import Table

import gossipjax as gx
from experiments.options import PositiveInt
from experiments.results import Record
from experiments.speed import harness
from experiments.speed.compiled.hlo import (
    COLLECTIVES,
    PERMUTE,
    Computation,
    Instruction,
    Module,
    count_matmuls,
    count_operands,
    count_overlapped,
    parse_module,
)
from experiments.speed.compiled.targets import (
    MlpSpec,
    Target,
    choose_targets,
    lower_step,
    make_devices,
)
from experiments.training.methods import make_schedule

RANDOM_ROUNDS = 4  # of a random topology: a program each
BETWEEN = ("send", "recv")
GOSSIP = (PERMUTE,)
INSIDE_A_NODE = tuple(set(COLLECTIVES) - {*BETWEEN, *GOSSIP})
TILE_BYTES = 4096  # to which XLA may pad a message
SLICE_ID = 100_000  # the id of chip k of slice s is (s + 1) * SLICE_ID + k
PAIR = re.compile(r"\{(\d+)->(\d+)\}")
GROUP = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}x\{([\d,:]+)\}"')

Pairs = frozenset[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Options(harness.CheckOptions):
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

    def __post_init__(self) -> None:
        super().__post_init__()
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


class Crossing(NamedTuple):
    """A message between slices: ids of senders and receivers, bytes of a chip to a receiver."""

    pairs: Pairs
    bytes: int


def list_pairs(round_: gx.topology.Round, devices: np.ndarray) -> list[tuple[Any, Any]]:
    """The sender and receiver of every message of a round, among the nodes' devices, `[N, ...]`.

    Device k of a node sends to device k of the other.
    """
    edges = round_.senders != round_.receivers
    grid = devices.reshape(round_.size, -1)
    return [
        pair
        for sender, receiver in zip(round_.senders[edges], round_.receivers[edges], strict=True)
        for pair in zip(grid[sender], grid[receiver], strict=True)
    ]


def find_crossing(pairs: Iterable[tuple[Any, Any]]) -> Pairs:
    """The ids of the pairs of devices whose slices differ."""
    return frozenset((a.id, b.id) for a, b in pairs if a.slice_index != b.slice_index)


def read_crossings(module: Module) -> list[Crossing]:
    """The messages between slices of a compiled program.

    Raises:
      ValueError: if one is neither between pairs nor a sum over groups.
    """
    return [
        Crossing(_read_target(it), count_operands(it, body))
        for it, body in module.list_collectives()
        if it.opcode == "send"
    ]


def _read_target(send: Instruction) -> Pairs:
    if pairs := PAIR.findall(send.attributes):
        return frozenset((int(sender), int(receiver)) for sender, receiver in pairs)
    if not (group := GROUP.search(send.attributes)):
        raise ValueError(
            f"a message between slices must name its devices, got {send.attributes[:200]}: XLA "
            "writes them in another form than this program knows."
        )
    slices = _read_numbers(group[1])
    return frozenset(
        (a * SLICE_ID + chip, b * SLICE_ID + chip)
        for chip in _read_numbers(group[2])
        for a in slices
        for b in slices
        if a != b
    )


def _read_numbers(text: str) -> list[int]:
    """The numbers of a list of numbers and ranges.

    >>> _read_numbers("1,4:6")
    [1, 4, 5, 6]
    """
    ranges = [part.partition(":") for part in text.split(",")]
    return [n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)]


def count_sent(module: Module, kinds: Iterable[str]) -> int:
    """Bytes that a chip puts into collectives of these kinds, between slices not counted.

    Of branches, of which each slice takes one, the largest.
    """
    return _count_sent(module.instruction_order, module, frozenset(kinds))


def _count_sent(body: Computation, module: Module, kinds: frozenset[str]) -> int:
    total = 0
    for it in body.values():
        if it.collective in kinds:
            total += count_operands(it, body)
        elif it.opcode == "conditional":
            branches = [module.computations[name] for name in it.called]
            total += max(_count_sent(branch, module, kinds) for branch in branches)
    return total


def read_program(
    module: Module, round_: gx.topology.Round, devices: np.ndarray, message_bytes: int
) -> Record:
    """What a compiled program sends over either network, and beside how many matrix products.

    The nodes' devices are `[N, ...]`; a chip sends `message_bytes` to a peer.
    """
    expected = find_crossing(list_pairs(round_, devices))
    crossings = read_crossings(module)
    crossing = frozenset(pair for message in crossings for pair in message.pairs)
    sizes = {message.bytes for message in crossings}
    slices = {device.id: device.slice_index for device in devices.flat}
    sent: Counter[int] = Counter()  # by chip
    leaving: Counter[int] = Counter()  # by slice
    for message in crossings:
        for chip, _ in message.pairs:
            sent[chip] += message.bytes
            leaving[slices[chip]] += message.bytes
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


def format_share(run: Record, link: str) -> str:
    """The share of the matrix products that run beside the messages of a network."""
    if not run[f"{link}_bytes_per_chip"]:
        return "-"
    return f"{run[f'matmuls_beside_{link}'] / max(1, run['matmuls']):.0%}"


def make_table(runs: Sequence[Record]) -> Table:
    """The table of the list `runs` of `summary.json`."""
    columns: dict[str, harness.Cell] = {
        "nodes": "{nodes}",
        "chips/\nnode": "{chips_per_node}",
        "round": "{round}",
        "cross-\ning": "{crossing_chips}",
        "DCN B/\nchip": "{dcn_bytes_per_chip:,}",
        "DCN B/\nslice": "{dcn_bytes_per_slice:,}",
        "ICI B/\nchip": "{ici_bytes_per_chip:,}",
        "in node": "{inner_bytes_per_chip:,}",
        "as ex-\npected": lambda run: "yes" if run["matches_schedule"] else "NO",
        "DCN\noverl.": partial(format_share, link="dcn"),
        "ICI\noverl.": partial(format_share, link="ici"),
    }
    title = "What a chip sends over the data-center network (DCN) and its slice's links (ICI)"
    caption = "overlapped: matrix products of a step while the message is under way"
    return harness.make_table(title, caption, columns, runs, texts=0)


def require_nodes(nodes: int, options: Options, chips: int) -> None:
    """Raises `ValueError` unless the topology has so many nodes, and slices and chips, too."""
    if nodes % options.slices or chips % nodes:
        raise ValueError(
            f"--nodes must be a multiple of {options.slices} slices that divides {chips} chips, "
            f"got {nodes}: give {options.slices}, for one node per slice."
        )
    make_schedule(options.topology, nodes, RANDOM_ROUNDS)


def make_plan(options: Options) -> harness.Plan:
    """The programs of all numbers of nodes."""
    choose_targets(("tpu",))
    name = f"{options.slices} x {options.chips}"
    devices = make_devices(Target(name, "tpu", 0, options.chips, options.slices))
    sizes = options.nodes or (len(devices), 2 * options.slices, options.slices)
    for nodes in sizes:
        require_nodes(nodes, options, len(devices))
    cases = [(f"{nodes} nodes", partial(compile_nodes, options, nodes, devices)) for nodes in sizes]
    violation = "messages must cross slices where the schedule says so"
    return harness.Plan(f"compiled for {name}", cases, make_table, violation=violation)


def inspect_slices(options: Options) -> None:
    """Exchange of compiled train steps over several TPU slices that need not be present."""
    harness.run_check("slices", options, partial(make_plan, options))
