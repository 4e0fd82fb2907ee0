"""Which messages of a compiled program leave a TPU slice.

For several slices XLA makes one program for each of them. Of a permutation, the pairs inside a
slice stay a `collective-permute`, whose numbers are those of the slice's chips. Pairs of two slices
become a `send` and a `recv` by hosts, over the data-center network, and name the ids of devices.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

import gossipjax as gx
from experiments.speed.hlo import Computation, Instruction, Module

SLICE_ID = 100_000  # the id of chip k of slice s is (s + 1) * SLICE_ID + k
PAIR = re.compile(r"\{(\d+)->(\d+)\}")
GROUP = re.compile(r'_xla_megascale_target="\{([\d,:]+)\}x\{([\d,:]+)\}"')

Pairs = frozenset[tuple[int, int]]


class Crossing(NamedTuple):
    """A message between slices.

    Attributes:
      pairs: the ids of each sender and its receiver.
      bytes: that one chip sends to one receiver.
    """

    pairs: Pairs
    bytes: int


def list_pairs(round_: gx.topology.Round, devices: np.ndarray) -> list[tuple[Any, Any]]:
    """The sender and receiver of every message of a round.

    Device k of a node sends to device k of the other.

    Args:
      round_: of N nodes.
      devices: those of the nodes, `[N, ...]`.
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
        Crossing(_read_target(it), sum(body[name].bytes for name in it.operands if name in body))
        for body in module.computations.values()
        for it in body.values()
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
            total += sum(body[name].bytes for name in it.operands if name in body)
        elif it.opcode == "conditional":
            branches = [module.computations[name] for name in it.called]
            total += max(_count_sent(branch, module, kinds) for branch in branches)
    return total
