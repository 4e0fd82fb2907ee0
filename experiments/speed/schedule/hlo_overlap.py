"""What a compiled program exchanges, and the work that XLA orders between start and done."""

import re
from collections.abc import Container
from typing import NamedTuple

from experiments.speed.hlo import (
    COLLECTIVES,
    Computation,
    Instruction,
    Module,
    parse_arrays,
    parse_module,
)

STARTS = ("-start", "send", "recv")
MATMUL_CALL = re.compile(r'custom_call_target="[^"]*(gemm|matmul)')  # of a library
EDGES = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


class Message(NamedTuple):
    """A collective, described by what one node puts into it."""

    opcode: str
    dtype: str
    bytes: int


class Overlap(NamedTuple):
    """The exchange of a compiled program, and the matrix products around it.

    Attributes:
      messages: all collectives, in whichever computation they are.
      matmuls: matrix products of the step, convolutions and library calls included.
      matmuls_before: those that run before the first collective starts.
      matmuls_overlapped: those that run while at least one collective is under way; 0 for a
        collective that blocks.
      permutations: the pairs of sender and receiver of each permute.
    """

    messages: list[Message]
    matmuls: int
    matmuls_before: int
    matmuls_overlapped: int
    permutations: list[list[tuple[int, int]]]


def read_overlap(text: str) -> Overlap:
    """Reads a scheduled module, as `jax.stages.Compiled.as_text` prints it.

    Raises:
      ValueError: if the text has no entry computation, XLA has not ordered its instructions, or a
        permute does not say which nodes it joins.
    """
    module = parse_module(text)
    before = 0
    for it in module.instruction_order.values():
        if it.collective:
            break
        before += _count_matmuls(it, module)
    messages = [m for body in module.computations.values() for m in _list_messages(body)]
    permutations = [
        _read_edges(it)
        for body in module.computations.values()
        for it in body.values()
        if it.collective == "collective-permute"
    ]
    overlapped = count_overlapped(module, COLLECTIVES)
    return Overlap(messages, count_matmuls(module), before, overlapped, permutations)


def count_matmuls(module: Module) -> int:
    """Matrix products of the program, convolutions and library calls included."""
    return sum(_count_matmuls(it, module) for it in module.instruction_order.values())


def count_overlapped(module: Module, kinds: Container[str | None]) -> int:
    """Matrix products that run while a collective of one of these kinds is under way."""
    overlapped = 0
    under_way: set[str] = set()
    for it in module.instruction_order.values():
        if it.collective in kinds and it.opcode.endswith(STARTS):
            under_way.add(it.name)
        elif it.opcode.endswith("-done"):
            under_way -= set(it.operands)
        overlapped += _count_matmuls(it, module) if under_way else 0
    return overlapped


def _read_edges(it: Instruction) -> list[tuple[int, int]]:
    match = EDGES.search(it.attributes)
    if match is None:
        raise ValueError(f"a permute must list its pairs of nodes, got {it.attributes!r}.")
    numbers = [int(number) for number in re.findall(r"\d+", match[1])]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _count_matmuls(it: Instruction, module: Module) -> int:
    if it.opcode in ("dot", "convolution"):
        return 1
    if it.opcode == "custom-call":
        return int(MATMUL_CALL.search(it.attributes) is not None)
    bodies = [module.computations.get(name, {}) for name in it.called]
    return sum(_count_matmuls(inner, module) for body in bodies for inner in body.values())


def _list_messages(body: Computation) -> list[Message]:
    messages = []
    for it in body.values():
        if it.collective and it.collective != "recv":  # into which nothing is put
            operands = [body[name] for name in it.operands if name in body]
            arrays = [array for operand in operands for array in parse_arrays(operand.shape)]
            dtypes = "+".join(sorted({dtype for dtype, _ in arrays}))
            messages.append(Message(it.collective, dtypes, sum(size for _, size in arrays)))
    return messages
