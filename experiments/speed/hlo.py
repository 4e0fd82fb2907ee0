"""Reads the text of a compiled XLA module: its instructions, and the bytes that they move.

XLA's own cost analysis charges a fusion that slices a buffer for the whole of it. Here every
instruction that runs is charged for what it reads and writes: slices at their size, updates in
place at that of the update, and what only names memory (tuples, bitcasts) nothing.
"""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = (
    "collective-permute", "all-reduce", "all-gather", "all-to-all", "ragged-all-to-all",
    "reduce-scatter", "collective-broadcast", "send", "recv",
)  # fmt: skip
NAMES_ONLY = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id",
    "after-all", "iota", "broadcast",
)  # fmt: skip
ELEMENTWISE = (
    "bitcast", "copy", "convert", "negate", "add", "subtract", "multiply", "divide", "select",
    "maximum", "minimum", "clamp",
)  # fmt: skip
BITS = {"pred": 8, "bf16": 16}  # the others say it: f32, u16
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*?)\)(.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: list[str]
    attributes: str
    is_root: bool

    @property
    def collective(self) -> str | None:
        """Its kind, if it is a collective or the start of one."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def called(self) -> list[str]:
        """The computations that it runs."""
        branches = ",".join(BRANCHES.findall(self.attributes))
        return CALLED.findall(self.attributes) + re.findall(r"[\w.\-]+", branches)

    @property
    def size(self) -> int:
        """The bytes of its result."""
        return size(self.shape)


Computation = dict[str, Instruction]


class Module(NamedTuple):
    """The computations of a compiled module by name, and the name of the entry."""

    computations: dict[str, Computation]
    entry: str

    @property
    def schedule(self) -> Computation:
        """The entry computation, in the order in which it runs."""
        return self.computations[self.entry]


def arrays(shape: str) -> list[tuple[str, int]]:
    """Type and bytes of each array of a shape.

    >>> arrays("(f32[2,3]{1,0}, bf16[4]{0:T(8)}, u32[])")
    [('f32', 24), ('bf16', 8), ('u32', 4)]
    """

    def bits(kind: str) -> int:
        return BITS.get(kind) or int(kind.lstrip("abcdefghijklmnopqrstuvwxyz"))

    return [
        (kind, math.prod(map(int, filter(None, dims.split(",")))) * bits(kind) // 8)
        for kind, dims in ARRAY.findall(shape)
        if kind != "token"
    ]


def size(shape: str) -> int:
    """The bytes of all arrays of a shape."""
    return sum(bytes for _, bytes in arrays(shape))


def parse(text: str) -> Module:
    """Reads a scheduled module, as `jax.stages.Compiled.as_text` prints it.

    Raises:
      ValueError: if the text has no entry computation or its order is no schedule.
    """
    computations: dict[str, Computation] = {}
    entry, current = None, None
    for line in text.splitlines():
        if not line.startswith(" ") and (header := HEADER.match(line)):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif current is not None and (found := LINE.match(line)):
            root, name, shape, opcode, operands, attributes = found.groups()
            names = re.findall(r"%([\w.\-]+)", operands)
            current[name] = Instruction(name, shape, opcode, names, attributes, bool(root))
    if entry is None or "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError("this is not the text of a compiled and scheduled module.")
    return Module(computations, entry)


def traffic(module: Module) -> dict[str, int]:
    """Bytes that the entry computation reads and writes, by opcode.

    Calls are charged for what they run, a collective for reading what is sent and writing what
    arrives, an operation unknown here for all of its operands and its result. Loops and branches
    are not looked into.
    """
    charged: dict[str, int] = {}
    for opcode, bytes in _charges(module, module.schedule):
        charged[opcode] = charged.get(opcode, 0) + bytes
    return charged


def _charges(module: Module, body: Computation) -> Iterator[tuple[str, int]]:
    for it in body.values():
        opcode = it.collective or it.opcode
        if opcode in NAMES_ONLY or it.opcode.endswith("-done") or "AllocateBuffer" in it.attributes:
            continue
        operands = [body[name] for name in it.operands if name in body]
        if opcode == "call":
            for name in it.called:
                yield from _charges(module, module.computations[name])
        elif opcode == "fusion":
            yield opcode, _of_fusion(module.computations[it.called[0]])
        elif opcode in COLLECTIVES:
            yield opcode, 2 * sum(operand.size for operand in operands)
        elif opcode in ("slice", "dynamic-slice"):
            yield opcode, 2 * it.size
        elif opcode == "dynamic-update-slice":
            yield opcode, 2 * operands[1].size
        else:
            yield opcode, it.size + sum(operand.size for operand in operands)


def _of_fusion(body: Computation) -> int:
    users: dict[str, list[Instruction]] = {}
    for it in body.values():
        for operand in set(it.operands):
            users.setdefault(operand, []).append(it)

    def source(it: Instruction) -> Instruction:
        return source(body[it.operands[0]]) if it.opcode == "bitcast" else it

    @functools.cache
    def needed(name: str) -> float:
        """The share of a value that the fusion computes or reads: slices of it, or all."""
        shares = [1.0] if body[name].is_root else []
        for user in users.get(name, []):
            if user.opcode in ("slice", "dynamic-slice"):
                shares.append(user.size / body[name].size)
            elif user.opcode in ELEMENTWISE:
                shares.append(needed(user.name))
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
                shares.append(1.0)
        return min(1.0, sum(shares))

    def written(it: Instruction) -> int:
        it = source(it)
        return body[it.operands[1]].size if it.opcode == "dynamic-update-slice" else it.size

    total = sum(it.size * needed(it.name) for it in body.values() if it.opcode == "parameter")
    root = source(next(it for it in body.values() if it.is_root))
    parts = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return round(total) + sum(map(written, parts))
