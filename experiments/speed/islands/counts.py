"""What a compiled step sends between nodes and inside them, and the memory that it needs."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.results import Record
from experiments.speed.hlo import Computation, Instruction, parse_module

PERMUTE = "collective-permute"
LISTS = re.compile(r"(?:source_target_pairs|replica_groups)=\{((?:\{[\d,]*\},?)+)\}")
GRID = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH = re.compile(r"replica_groups=mesh\[((?:'[^']+'=\d+,?)+)\] \{((?:'[^']+',?)+)\}")


class Traffic(NamedTuple):
    """The collectives of one compiled step.

    Attributes:
      messages: the number of those between nodes.
      sent: bytes that the busiest device puts into them.
      inside: the number of those inside nodes, by opcode.
      inside_bytes: bytes that a device puts into those, by opcode.
    """

    messages: int
    sent: int
    inside: Counter[str]
    inside_bytes: Counter[str]


def read_traffic(text: str, devices_per_node: int) -> Traffic:
    """Reads a scheduled module, as `jax.stages.Compiled.as_text` prints it.

    Devices are numbered node by node.
    """
    module = parse_module(text)
    messages = 0
    sent: Counter[int] = Counter()
    inside: Counter[str] = Counter()
    inside_bytes: Counter[str] = Counter()
    for body in module.computations.values():
        for it in body.values():
            if it.collective is None:
                continue
            size = count_bytes(it, body)
            senders = find_senders(it, devices_per_node)
            if senders:
                messages += 1
                sent.update(dict.fromkeys(senders, size))
            else:
                inside[it.collective] += 1
                inside_bytes[it.collective] += size
    return Traffic(messages, max(sent.values(), default=0), inside, inside_bytes)


def find_senders(it: Instruction, devices_per_node: int) -> set[int]:
    """The devices that put something into a collective which another node takes out."""
    senders = set()
    for group in read_groups(it.attributes):
        first = group[:1] if it.collective == PERMUTE else group
        if len({device // devices_per_node for device in group}) > 1:
            senders.update(first)
    return senders


def read_groups(attributes: str) -> list[list[int]]:
    """The devices of each group of a collective; of a permute, each sender and its receiver.

    >>> read_groups("source_target_pairs={{0,2},{2,0}}, channel_id=1")
    [[0, 2], [2, 0]]
    >>> read_groups("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}")
    [[0, 2], [1, 3]]
    >>> read_groups("replica_groups=mesh['nodes'=2,'local'=2] {'nodes'}, dimensions={0}")
    [[0, 2], [1, 3]]

    Raises:
      ValueError: if they are written in none of these forms.
    """
    if found := LISTS.search(attributes):
        return [parse_numbers(group) for group in re.findall(r"\{([\d,]*)\}", found[1])]
    if found := MESH.search(attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        axes = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", found[2])]
        devices = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        groups = np.moveaxis(devices, axes, range(len(axes)))
        return groups.reshape(math.prod(groups.shape[: len(axes)]), -1).T.tolist()
    if not (found := GRID.search(attributes)):
        raise ValueError(
            f"a collective must name its devices, got {attributes[:200]}: XLA writes them in "
            "another form than this program knows."
        )
    shape, sizes, order = (parse_numbers(part or "") for part in found.groups())
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose(order or None).reshape(shape).tolist()


def parse_numbers(text: str) -> list[int]:
    """The numbers of a list that has commas between them."""
    return [int(number) for number in text.split(",") if number]


def count_bytes(it: Instruction, body: Computation) -> int:
    """Bytes that a device puts into a collective."""
    return sum(body[name].bytes for name in it.operands if name in body)


def summarize_traffic(rounds: Sequence[Traffic]) -> Record:
    """The fields of a form: of the rounds, the most of each."""
    opcodes = sorted({opcode for traffic in rounds for opcode in traffic.inside})
    return {
        "messages": max(traffic.messages for traffic in rounds),
        "sent_bytes": max(traffic.sent for traffic in rounds),
        "inside": {
            opcode: {
                "count": max(traffic.inside[opcode] for traffic in rounds),
                "bytes": max(traffic.inside_bytes[opcode] for traffic in rounds),
            }
            for opcode in opcodes
        },
    }


def count_memory(rounds: Sequence[jax.stages.Compiled]) -> Record:
    """Bytes of a device at the most, by XLA's plan: arguments, results and temporary values.

    Results in the memory of arguments count once.

    Raises:
      ValueError: if the backend does not say it.
    """
    plans = [plan for compiled in rounds if (plan := compiled.memory_analysis()) is not None]
    if not plans:
        raise ValueError("the backend must say how much memory a program needs, got nothing.")
    return {
        "argument_bytes": max(plan.argument_size_in_bytes for plan in plans),
        "temporary_bytes": max(plan.temp_size_in_bytes for plan in plans),
        "memory_bytes": max(
            plan.argument_size_in_bytes
            + plan.output_size_in_bytes
            + plan.temp_size_in_bytes
            - plan.alias_size_in_bytes
            for plan in plans
        ),
    }


def count_extra(inside: Record, plain: Record) -> int:
    """Bytes of collectives inside nodes beyond those of the same form without an exchange."""
    return total_bytes(inside) - total_bytes(plain)


def total_bytes(inside: Record) -> int:
    """Bytes that a device puts into collectives inside its node."""
    return sum(kind["bytes"] for kind in inside.values())
