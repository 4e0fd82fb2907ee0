"""Which nodes a permutation joins: XLA on GPUs may run each such component as a clique of its own.

A component is a set of nodes that are joined by messages, directly or through others. A shift of N
nodes by k has gcd(N, k) of them, each of N / gcd(N, k) nodes; exchanges in pairs have N / 2.
"""

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from rich.table import Table

import gossipjax as gx
from experiments.markdown import format_table
from experiments.results import Record
from experiments.speed.harness import Cell, Plan, make_table
from experiments.training.methods import MAX_ROUNDS, TOPOLOGIES

ALL_REDUCE = "all-reduce"
MAX_KINDS = 6  # of permutations in one cell of the table
SCHEDULES: dict[str, Callable[[int, int, int], gx.Schedule]] = {
    **TOPOLOGIES,
    "random_pairs": gx.topology.random_pairs,
}
Edge = tuple[int, int]


def find_components(edges: Iterable[Edge]) -> list[int]:
    """The number of nodes of each component, the largest first; idle nodes are in none.

    >>> find_components([(0, 1), (1, 0), (2, 3), (3, 4)])
    [3, 2]
    """
    parents: dict[int, int] = {}

    def find_root(node: int) -> int:
        parents.setdefault(node, node)
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    for sender, receiver in edges:
        parents[find_root(sender)] = find_root(receiver)
    sizes = collections.Counter(find_root(node) for node in list(parents))
    return sorted(sizes.values(), reverse=True)


def find_round_components(round_: gx.topology.Round) -> list[list[int]]:
    """The components of each permutation of a round; no permutation where it is an all-reduce."""
    if round_.is_uniform:
        return []
    return [
        find_components((int(sender), int(receivers[sender])) for sender in weights.nonzero()[0])
        for receivers, weights in round_.slots
    ]


def describe_components(sizes: Sequence[int]) -> str:
    """Returns "number x nodes" for each size.

    >>> describe_components([4, 2, 2])
    '1x4 + 2x2'
    """
    groups = itertools.groupby(sizes)
    return " + ".join(f"{len(list(group))}x{size}" for size, group in groups)


def make_components_record(topology: str, nodes: int) -> Record:
    """The object in `runs` of a topology: what all rounds of its cycle join."""
    schedule = SCHEDULES[topology](nodes, MAX_ROUNDS, 0)
    rounds = [round_ for round_ in schedule.rounds if not round_.is_identity]
    permutations = [sizes for round_ in rounds for sizes in find_round_components(round_)]
    kinds = list(dict.fromkeys(map(describe_components, permutations)))
    if any(round_.is_uniform for round_ in rounds):
        kinds.append(ALL_REDUCE)
    return {
        "topology": topology,
        "nodes": nodes,
        "rounds": len(schedule.rounds),
        "peers": max(round_.max_peers for round_ in rounds),
        "permutations": len(permutations),
        "kinds": kinds,
        "largest": max((max(sizes) for sizes in permutations), default=0),
        "idle": max((nodes - sum(sizes) for sizes in permutations), default=0),
    }


def describe_kinds(record: Record) -> str:
    """A cell of the table: the kinds of permutations, in the order of their first use."""
    kinds = record["kinds"]
    if len(kinds) > MAX_KINDS:
        return f"{len(kinds)} kinds, of up to {record['largest']}"
    idle = f"; {record['idle']} idle" if record["idle"] else ""
    return ", ".join(kinds) + idle


def list_cells(runs: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: a topology per row, a number of nodes per column."""
    sizes = sorted({run["nodes"] for run in runs})
    cells = {(run["topology"], run["nodes"]): describe_kinds(run) for run in runs}
    rows = [
        [topology, *(cells.get((topology, size), "not possible") for size in sizes)]
        for topology in SCHEDULES
    ]
    return ["topology", *(f"{size} nodes" for size in sizes)], rows


def make_components_table(runs: Sequence[Record]) -> Table:
    """The table of the list `runs` of `summary.json`."""
    headers, rows = list_cells(runs)
    title = "Nodes that the permutations of each topology join: components x nodes"
    caption = "by permutation, each kind once; idle: nodes that one of them leaves out"
    columns: dict[str, Cell] = {header: f"{{{header}}}" for header in headers}
    records = [dict(zip(headers, row, strict=True)) for row in rows]
    return make_table(title, caption, columns, records, texts=len(headers))


def format_markdown(runs: Sequence[Record]) -> str:
    """The same table in Markdown."""
    return f"{format_table(*list_cells(runs))}\n"


def plan_components(sizes: Sequence[int]) -> Plan:
    """Counts the components of all topologies that are possible, from their schedules alone."""

    def count(topology: str, nodes: int) -> list[Record]:
        with contextlib.suppress(ValueError):  # a hypercube of 6 nodes
            return [make_components_record(topology, nodes)]
        return []

    cases = [
        (f"{topology}, {nodes} nodes", partial(count, topology, nodes))
        for topology, nodes in itertools.product(SCHEDULES, sizes)
    ]
    return Plan("nothing is compiled", cases, make_components_table)
