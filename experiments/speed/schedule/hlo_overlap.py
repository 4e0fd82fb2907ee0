"""What a compiled program exchanges, and the work that XLA orders between start and done."""

import re
from typing import NamedTuple

from experiments.speed.hlo import Computation, Instruction, Module, parse_arrays, parse_module

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
    total = 0
    before = 0
    overlapped = 0
    under_way: set[str] = set()
    started = False
    for it in module.instruction_order.values():
        started = started or it.collective is not None
        if it.opcode.endswith("-start") and it.collective:
            under_way.add(it.name)
        elif it.opcode.endswith("-done"):
            under_way -= set(it.operands)
        matmuls = _count_matmuls(it, module)
        total += matmuls
        before += 0 if started else matmuls
        overlapped += matmuls if under_way else 0
    messages = [m for body in module.computations.values() for m in _list_messages(body)]
    permutations = [
        _read_edges(it)
        for body in module.computations.values()
        for it in body.values()
        if it.collective == "collective-permute"
    ]
    return Overlap(messages, total, before, overlapped, permutations)


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
        if it.collective:
            operands = [body[name] for name in it.operands if name in body]
            arrays = [array for operand in operands for array in parse_arrays(operand.shape)]
            dtypes = "+".join(sorted({dtype for dtype, _ in arrays}))
            messages.append(Message(it.collective, dtypes, sum(size for _, size in arrays)))
    return messages
