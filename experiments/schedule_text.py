"""Reads the text of a compiled XLA module: its collectives, and the work between start and done."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = (
    "collective-permute", "all-reduce", "all-gather", "all-to-all", "ragged-all-to-all",
    "reduce-scatter", "collective-broadcast", "send", "recv",
)  # fmt: skip
BITS = {"pred": 8, "bf16": 16}  # the others say it: f32, u16
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*?)\)(.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Message(NamedTuple):
    """A collective, by what one node puts into it."""

    opcode: str
    dtype: str
    bytes: int


class Compiled(NamedTuple):
    """What a compiled program holds.

    Attributes:
      messages: all collectives, wherever they are.
      products: matrix products (convolutions and calls of a library's included) of the step.
      before: those scheduled before the first collective starts.
      between: those scheduled while at least one is under way; 0 of a collective that blocks.
    """

    messages: list[Message]
    products: int
    before: int
    between: int


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: list[str]
    attributes: str

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


def read(text: str) -> Compiled:
    """Reads a scheduled module, as `jax.stages.Compiled.as_text` prints it.

    Raises:
      ValueError: if the text has no entry computation or its order is no schedule.
    """
    computations: dict[str, list[_Instruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        if not line.startswith(" ") and (header := HEADER.match(line)):
            current = computations.setdefault(header[2], [])
            entry = current if header[1] else entry
        elif current is not None and (found := LINE.match(line)):
            name, shape, opcode, operands, attributes = found.groups()
            names = re.findall(r"%([\w.\-]+)", operands)
            current.append(_Instruction(name, shape, opcode, names, attributes))
    if entry is None or "is_scheduled=true" not in text.split("\n", 1)[0]:
        raise ValueError("this is not the text of a compiled and scheduled module.")

    def products(it: _Instruction) -> int:
        if it.opcode in ("dot", "convolution"):
            return 1
        if it.opcode == "custom-call":
            return int(
                re.search(r'custom_call_target="[^"]*(gemm|matmul)', it.attributes) is not None
            )
        return sum(products(inner) for name in it.called for inner in computations.get(name, []))

    before = between = total = 0
    under_way: set[str] = set()
    seen = False
    for it in entry:
        seen = seen or it.collective is not None
        if it.opcode.endswith("-start") and it.collective:
            under_way.add(it.name)
        elif it.opcode.endswith("-done"):
            under_way -= set(it.operands)
        count = products(it)
        total += count
        before += 0 if seen else count
        between += count if under_way else 0
    messages = [m for body in computations.values() for m in _messages(body)]
    return Compiled(messages, total, before, between)


def _messages(body: list[_Instruction]) -> Iterator[Message]:
    shapes = {it.name: it.shape for it in body}
    for it in body:
        if it.collective:
            arrays = [a for name in it.operands for a in ARRAY.findall(shapes.get(name, ""))]
            sizes = [math.prod(map(int, filter(None, dims.split(",")))) for _, dims in arrays]
            bits = [
                BITS.get(kind) or int(kind.lstrip("abcdefghijklmnopqrstuvwxyz"))
                for kind, _ in arrays
            ]
            size = sum(s * b // 8 for s, b in zip(sizes, bits, strict=True))
            yield Message(it.collective, "+".join(sorted({kind for kind, _ in arrays})), size)
