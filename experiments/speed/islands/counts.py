"""What a compiled step sends between nodes and inside them, and the memory that it needs."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax

from experiments.results import Record
from experiments.speed.hlo import Computation, Instruction, parse_module

PERMUTE = "collective-permute"
PAIR = re.compile(r"\{(\d+),(\d+)\}")


class Traffic(NamedTuple):
    """The collectives of one compiled step.

    Attributes:
      permutes: those between nodes.
      sent: bytes that the busiest device sends in them.
      inside: the number of the other collectives, by opcode.
      inside_bytes: bytes that a device puts into those, by opcode.
    """

    permutes: int
    sent: int
    inside: Counter[str]
    inside_bytes: Counter[str]


def read_traffic(text: str, devices_per_node: int) -> Traffic:
    """Reads a scheduled module, as `jax.stages.Compiled.as_text` prints it.

    Devices are numbered node by node. A permute that stays inside nodes is one of the others.
    """
    module = parse_module(text)
    permutes = 0
    sent: Counter[int] = Counter()
    inside: Counter[str] = Counter()
    inside_bytes: Counter[str] = Counter()
    for body in module.computations.values():
        for it in body.values():
            if it.collective is None:
                continue
            size = count_bytes(it, body)
            pairs = read_pairs(it)
            crossing = [s for s, r in pairs if s // devices_per_node != r // devices_per_node]
            if crossing:
                permutes += 1
                sent.update(dict.fromkeys(crossing, size))
            else:
                inside[it.collective] += 1
                inside_bytes[it.collective] += size
    return Traffic(permutes, max(sent.values(), default=0), inside, inside_bytes)


def read_pairs(it: Instruction) -> list[tuple[int, int]]:
    """The sender and receiver of each message of a permute; none for other collectives."""
    if it.collective != PERMUTE:
        return []
    pairs = it.attributes.partition("source_target_pairs={")[2].partition("}}")[0] + "}"
    return [(int(sender), int(receiver)) for sender, receiver in PAIR.findall(pairs)]


def count_bytes(it: Instruction, body: Computation) -> int:
    """Bytes that a device puts into a collective."""
    return sum(body[name].bytes for name in it.operands if name in body)


def summarize_traffic(rounds: Sequence[Traffic]) -> Record:
    """The fields of a form: of the rounds, the most of each."""
    opcodes = sorted({opcode for traffic in rounds for opcode in traffic.inside})
    return {
        "permutes": max(traffic.permutes for traffic in rounds),
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
    """
    plans = [compiled.memory_analysis() for compiled in rounds]
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
