"""Reads the text of a compiled XLA module: its instructions, collectives and matrix products.

XLA's cost analysis charges a fusion that slices a buffer for the whole buffer. `count_traffic`
charges each executed instruction for what it reads and writes: a slice for its size, an update in
place for the size of the update, and an instruction that only names memory (tuple, bitcast) for
nothing.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = (
    "collective-permute", "all-reduce", "all-gather", "all-to-all", "ragged-all-to-all",
    "reduce-scatter", "collective-broadcast", "send", "recv",
)  # fmt: skip
STARTS = ("-start", "send", "recv")
NAMES_ONLY = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id",
    "after-all", "iota", "broadcast",
)  # fmt: skip
ELEMENTWISE = (
    "bitcast", "copy", "convert", "negate", "add", "subtract", "multiply", "divide", "select",
    "maximum", "minimum", "clamp",
)  # fmt: skip
BITS = {"pred": 8, "bf16": 16}  # the other names contain their width: f32, u16
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
LINE = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*?)\)(.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
MATMUL_CALL = re.compile(r'custom_call_target="[^"]*(gemm|matmul)')  # of a library


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
        """Kind of the collective that this instruction is or starts; None for all others."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def called(self) -> list[str]:
        """Names of the computations that this instruction runs."""
        branches = ",".join(BRANCHES.findall(self.attributes))
        return CALLED.findall(self.attributes) + re.findall(r"[\w.\-]+", branches)

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(size for _, size in parse_arrays(self.shape))


Computation = dict[str, Instruction]


class Module(NamedTuple):
    """The computations of a compiled module by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str

    @property
    def instruction_order(self) -> Computation:
        """The entry computation; its instructions are in the order in which they run."""
        return self.computations[self.entry]

    def list_collectives(self) -> Iterator[tuple[Instruction, Computation]]:
        """Yields each collective and the computation that it is in."""
        for body in self.computations.values():
            yield from ((it, body) for it in body.values() if it.collective)


class Message(NamedTuple):
    """A collective, described by what one node puts into it."""

    opcode: str
    dtype: str
    bytes: int


def parse_arrays(shape: str) -> list[tuple[str, int]]:
    """Type and bytes of each array of a shape.

    >>> parse_arrays("(f32[2,3]{1,0}, bf16[4]{0:T(8)}, u32[])")
    [('f32', 24), ('bf16', 8), ('u32', 4)]
    """

    def count_bits(dtype: str) -> int:
        return BITS.get(dtype) or int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz"))

    return [
        (dtype, math.prod(map(int, filter(None, dims.split(",")))) * count_bits(dtype) // 8)
        for dtype, dims in ARRAY.findall(shape)
        if dtype != "token"
    ]


def parse_module(text: str | None) -> Module:
    """Parses a scheduled module, as `jax.stages.Compiled.as_text` prints it."""
    computations: dict[str, Computation] = {}
    entry = None
    current = None
    for line in (text or "").splitlines():
        if not line.startswith(" ") and (header := HEADER.match(line)):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif current is not None and (match := LINE.match(line)):
            root, name, shape, opcode, operands, attributes = match.groups()
            operand_names = re.findall(r"%([\w.\-]+)", operands)
            current[name] = Instruction(name, shape, opcode, operand_names, attributes, bool(root))
    if text is None or entry is None or "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError(
            "the text must show a compiled and scheduled module, got another one: take "
            "lowered.compile().as_text() of a backend that shows it."
        )
    return Module(computations, entry)


def count_operands(it: Instruction, body: Computation) -> int:
    """Bytes of the operands: of a collective, what a device puts into it."""
    return sum(body[name].bytes for name in it.operands if name in body)


def list_messages(module: Module) -> list[Message]:
    """All collectives, as what one node puts into them."""
    messages = []
    for it, body in module.list_collectives():
        if it.collective and it.collective != "recv":  # into which nothing is put
            shapes = " ".join(body[name].shape for name in it.operands if name in body)
            dtypes = "+".join(sorted({dtype for dtype, _ in parse_arrays(shapes)}))
            messages.append(Message(it.collective, dtypes, count_operands(it, body)))
    return messages


def count_matmuls(module: Module) -> int:
    """Matrix products of the program, convolutions and library calls included."""
    return sum(_count_matmuls(it, module) for it in module.instruction_order.values())


def count_overlapped(module: Module) -> int:
    """Matrix products that run while a collective is under way; 0 for one that blocks."""
    overlapped = 0
    under_way: set[str] = set()
    for it in module.instruction_order.values():
        if it.collective and it.opcode.endswith(STARTS):
            under_way.add(it.name)
        elif it.opcode.endswith("-done"):
            under_way -= set(it.operands)
        overlapped += _count_matmuls(it, module) if under_way else 0
    return overlapped


def _count_matmuls(it: Instruction, module: Module) -> int:
    if it.opcode in ("dot", "convolution"):
        return 1
    if it.opcode == "custom-call":
        return int(MATMUL_CALL.search(it.attributes) is not None)
    bodies = [module.computations.get(name, {}) for name in it.called]
    return sum(_count_matmuls(inner, module) for body in bodies for inner in body.values())


def count_traffic(module: Module) -> dict[str, int]:
    """Bytes that the entry computation reads and writes, by opcode.

    A collective is charged for what is sent and what arrives, an unknown opcode for all operands
    and the result. Loops and branches are skipped.
    """
    traffic = Counter[str]()
    for opcode, size in _count_instructions(module, module.instruction_order):
        traffic[opcode] += size
    return dict(traffic)


def _count_instructions(module: Module, body: Computation) -> Iterator[tuple[str, int]]:
    for it in body.values():
        opcode = it.collective or it.opcode
        if opcode in NAMES_ONLY or it.opcode.endswith("-done") or "AllocateBuffer" in it.attributes:
            continue
        if opcode == "call":
            for name in it.called:
                yield from _count_instructions(module, module.computations[name])
        elif opcode == "fusion":
            yield opcode, _count_fusion(module.computations[it.called[0]])
        elif opcode in COLLECTIVES:
            yield opcode, 2 * count_operands(it, body)
        elif opcode in ("slice", "dynamic-slice"):
            yield opcode, 2 * it.bytes
        elif opcode == "dynamic-update-slice":
            yield opcode, 2 * body[it.operands[1]].bytes
        else:
            yield opcode, it.bytes + count_operands(it, body)


def _count_fusion(body: Computation) -> int:
    """Bytes that a fusion reads and writes."""
    users: dict[str, list[Instruction]] = {}
    for it in body.values():
        for operand in set(it.operands):
            users.setdefault(operand, []).append(it)

    def skip_bitcasts(it: Instruction) -> Instruction:
        return skip_bitcasts(body[it.operands[0]]) if it.opcode == "bitcast" else it

    @functools.cache
    def used_fraction(name: str) -> float:
        """Fraction of a value that the fusion computes or reads: slices of it, or all."""
        fractions = [1.0] if body[name].is_root else []
        for user in users.get(name, []):
            if user.opcode in ("slice", "dynamic-slice"):
                fractions.append(user.bytes / body[name].bytes)
            elif user.opcode in ELEMENTWISE:
                fractions.append(used_fraction(user.name))
            elif user.opcode != "dynamic-update-slice" or user.operands[0] != name:
                fractions.append(1.0)
        return min(1.0, sum(fractions))

    def count_written(it: Instruction) -> int:
        it = skip_bitcasts(it)
        return body[it.operands[1]].bytes if it.opcode == "dynamic-update-slice" else it.bytes

    inputs = [it for it in body.values() if it.opcode == "parameter"]
    read = sum(it.bytes * used_fraction(it.name) for it in inputs)
    root = skip_bitcasts(next(it for it in body.values() if it.is_root))
    outputs = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return round(read) + sum(map(count_written, outputs))
