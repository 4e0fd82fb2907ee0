"""What a compiled program exchanges, and the work between start and done."""

import re
from typing import NamedTuple

from experiments.hlo import Computation, Instruction, arrays, parse


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


def read(text: str) -> Compiled:
    """Reads a scheduled module, as `jax.stages.Compiled.as_text` prints it.

    Raises:
      ValueError: if the text has no entry computation or its order is no schedule.
    """
    module = parse(text)

    def products(it: Instruction) -> int:
        if it.opcode in ("dot", "convolution"):
            return 1
        if it.opcode == "custom-call":
            return int(
                re.search(r'custom_call_target="[^"]*(gemm|matmul)', it.attributes) is not None
            )
        bodies = [module.computations.get(name, {}) for name in it.called]
        return sum(products(inner) for body in bodies for inner in body.values())

    before = between = total = 0
    under_way: set[str] = set()
    seen = False
    for it in module.schedule.values():
        seen = seen or it.collective is not None
        if it.opcode.endswith("-start") and it.collective:
            under_way.add(it.name)
        elif it.opcode.endswith("-done"):
            under_way -= set(it.operands)
        count = products(it)
        total += count
        before += 0 if seen else count
        between += count if under_way else 0
    messages = [m for body in module.computations.values() for m in _messages(body)]
    return Compiled(messages, total, before, between)


def _messages(body: Computation) -> list[Message]:
    messages = []
    for it in body.values():
        if it.collective:
            sent = [a for name in it.operands if name in body for a in arrays(body[name].shape)]
            kinds = "+".join(sorted({kind for kind, _ in sent}))
            messages.append(Message(it.collective, kinds, sum(bytes for _, bytes in sent)))
    return messages
