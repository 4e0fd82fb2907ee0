"""The bytes that nodes exchange by the text of a compiled program, which a test may trust."""

import re

import numpy as np

from experiments.speed.compiled.hlo import count_operands

# On a ring of n nodes, as a multiple of the operand.
RING = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
}
PAIR = re.compile(r"\{(\d+),(\d+)\}")
GROUPS = re.compile(
    r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\] \{.*?\})"
)


def count_bytes(module, nodes, devices=1):
    """Bytes `[2, N]`, sent and received, of nodes of so many devices, one node after another."""
    return _count(module, module.entry, nodes, devices)


def _count(module, name, nodes, devices):
    total = np.zeros((2, nodes))
    body = module.computations[name]
    for it in body.values():
        if it.collective:
            total += _count_collective(it, count_operands(it, body), nodes, devices)
            continue
        parts = [_count(module, called, nodes, devices) for called in it.called]
        if it.opcode == "conditional":
            parts = [max(parts, key=np.sum)]
        total += sum(parts)
    return total


def _count_collective(it, size, nodes, devices):
    moved = np.zeros((2, nodes))
    if it.collective == "collective-permute":
        pairs = it.attributes.split("source_target_pairs=")[1].split("}}")[0]
        for source, target in PAIR.findall(pairs + "}}"):
            ends = int(source) // devices, int(target) // devices
            if ends[0] != ends[1]:
                moved[0, ends[0]] += size
                moved[1, ends[1]] += size
        return moved
    for group in _read_groups(it.attributes, nodes * devices):
        places, counts = np.unique(np.array(group) // devices, return_counts=True)
        assert (counts == counts[0]).all()
        moved[:, places] += RING[it.collective](len(places)) * size
    return moved


def _read_groups(attributes, count):
    match = GROUPS.search(attributes)
    assert match
    text = match[1]
    if text == "{}":
        return [range(count)]
    if text[0] == "{":
        return [[int(i) for i in group.split(",")] for group in re.findall(r"\{(\d[\d,]*)\}", text)]
    if text.startswith("mesh"):  # since JAX 0.12: mesh['nodes'=4,'fsdp'=2] {'nodes'}
        mesh, over = text.split(" ")
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
        inside = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", over)]
        numbers = np.arange(count).reshape([*sizes.values()])
        size = int(np.prod([numbers.shape[i] for i in inside]))
        return np.moveaxis(numbers, inside, range(-len(inside), 0)).reshape(-1, size).tolist()
    match = re.match(r"\[(.*?)\]<=\[(.*?)\](?:T\((.*?)\))?", text)
    assert match
    shape, order, transposed = match.groups()
    numbers = np.arange(count).reshape([int(i) for i in order.split(",")])
    if transposed:
        numbers = numbers.transpose([int(i) for i in transposed.split(",")])
    return numbers.reshape([int(i) for i in shape.split(",")]).tolist()
