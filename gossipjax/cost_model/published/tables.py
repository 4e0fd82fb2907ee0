"""Rows of published figures beside the model's."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from gossipjax.cost_model.exchange import Kind
from gossipjax.cost_model.methods import allreduce, sgp
from gossipjax.cost_model.network import Network
from gossipjax.cost_model.networks import SGP_ETHERNET, SGP_INFINIBAND, remove_host_copies
from gossipjax.cost_model.prediction import predict_step
from gossipjax.cost_model.published import _figures as figures
from gossipjax.cost_model.published._resnet import (
    RESNET50,
    fit_slowmo_compute,
    make_slowmo_method,
    predict_hours,
    predict_seconds,
)
from gossipjax.cost_model.published._utilization import (
    BANDWIDTH_GRID,
    REPLICAS,
    find_cell,
    find_nearest_cell,
)
from gossipjax.topology import one_peer_exponential

WHAT_IF_NODES = 32


@dataclasses.dataclass(frozen=True)
class Row:
    """A published figure and the model's.

    Attributes:
      table: where it was published.
      name: of the method.
      nodes: N.
      predicted: by the model.
      published: by the paper.
      unit: of both.
      is_fitted: whether the network is fitted on this method at this number of nodes.
    """

    table: str
    name: str
    nodes: int
    predicted: float
    published: float
    unit: str
    is_fitted: bool = False

    @property
    def error(self) -> float:
        """`predicted / published - 1`.

        >>> Row("Table 1", "SGP", 8, 3.0, 2.0, "h").error
        0.5
        """
        return self.predicted / self.published - 1


def compare_sgp18_table2() -> tuple[Row, ...]:
    """Seconds of a step over Ethernet, on which the network is fitted.

    >>> rows = compare_sgp18_table2()
    >>> len(rows), max(abs(row.error) for row in rows) < 0.12
    (16, True)
    """
    return tuple(
        Row(
            "SGP-18 Table 2",
            name,
            nodes,
            predict_seconds(name, nodes, SGP_ETHERNET),
            seconds,
            "s",
            is_fitted=True,
        )
        for name, row in figures.SGP18_SECONDS.items()
        for nodes, seconds in zip(figures.SGP18_NODES, row, strict=True)
    )


def compare_sgp19_table1() -> tuple[Row, ...]:
    """Hours of 90 epochs over Ethernet: iterations of SGP-18 Table 2, all of which are fitted."""
    return _compare_hours(1)


def compare_sgp19_table2() -> tuple[Row, ...]:
    """Hours of 90 epochs over InfiniBand, nominal: nothing is fitted."""
    return _compare_hours(2)


def compare_sgp19_table3() -> tuple[Row, ...]:
    """Hours of hybrids, and of two peers, over Ethernet."""
    return _compare_hours(3)


def compare_sgp19_table4() -> tuple[Row, ...]:
    """Hours with overlap, over Ethernet."""
    return _compare_hours(4)


def compare_sgp19_table5() -> tuple[Row, ...]:
    """Hours of 90 epochs of AllReduce and 270 of others, over Ethernet."""
    return _compare_hours(5)


def compare_slowmo_table2() -> tuple[Row, ...]:
    """Seconds of a step on the network of SGP-18, without copies, with a ring all-reduce.

    The computation, which SlowMo does not give, is fitted: one number for five figures.
    """
    network = remove_host_copies(SGP_ETHERNET)
    workload = dataclasses.replace(RESNET50, compute_seconds=fit_slowmo_compute())
    nodes = figures.SLOWMO_NODES
    rows = []
    for name, seconds in figures.SLOWMO_SECONDS.items():
        predicted = predict_step(make_slowmo_method(name), workload, network, nodes).seconds
        rows.append(Row("SlowMo Table 2", name, nodes, predicted, seconds, "s"))
    return tuple(rows)


@functools.cache
def compare_streaming_diloco_table4() -> tuple[Row, ...]:
    """Bandwidths for shares of the time that is computation; compare them by `count_cells`.

    Two replicas, 16 bits per parameter. Nothing is fitted.
    """
    return tuple(
        Row(
            "Streaming DiLoCo Table 4",
            f"{requirement.model}, {requirement.method}, {utilization:.0%}",
            REPLICAS,
            float(BANDWIDTH_GRID[max(0, find_cell(requirement, utilization))]),
            gbits,
            "Gbit/s",
        )
        for requirement in figures.STREAMING_DILOCO
        for utilization, gbits in zip(figures.UTILIZATIONS, requirement.gbits, strict=True)
    )


def count_cells(row: Row) -> int:
    """How many cells of `BANDWIDTH_GRID` the prediction is above the published figure.

    >>> count_cells(Row("", "", 2, 1.68, 1.4, "Gbit/s"))
    1
    """
    return find_nearest_cell(row.predicted) - find_nearest_cell(row.published)


def compare_what_if() -> tuple[Row, ...]:
    """AllReduce's seconds over SGP's at 32 nodes, as published and if it were run otherwise.

    The published factor, in all rows, is that of a tree with copies through the host.
    """
    nodes = WHAT_IF_NODES
    schedule = one_peer_exponential(nodes)
    published = figures.SGP18_SECONDS["AllReduce"][-1] / figures.SGP18_SECONDS["SGP"][-1]
    direct = remove_host_copies(SGP_ETHERNET)
    cases: tuple[tuple[str, Kind, Network], ...] = (
        ("tree, host copies", "tree", SGP_ETHERNET),
        ("ring, host copies", "ring", SGP_ETHERNET),
        ("ring, no copies", "ring", direct),
    )
    rows = []
    for name, kind, network in cases:
        all_reduce = predict_step(allreduce(kind), RESNET50, network, nodes).seconds
        gossip = predict_step(sgp(schedule), RESNET50, network, nodes).seconds
        rows.append(Row("What if", name, nodes, all_reduce / gossip, published, "AllReduce / SGP"))
    return tuple(rows)


def _compare_hours(table: int) -> tuple[Row, ...]:
    network = SGP_INFINIBAND if table == 2 else SGP_ETHERNET
    return tuple(
        Row(
            f"SGP-19 Table {table}",
            ", then ".join(name for name, _ in hours.parts),
            hours.nodes,
            predict_hours(hours, network),
            hours.hours,
            "h",
            is_fitted=table != 2 and all(name in figures.SGP18_SECONDS for name, _ in hours.parts),
        )
        for hours in figures.SGP19_HOURS
        if hours.table == table
    )


COMPARISONS: tuple[Callable[[], Sequence[Row]], ...] = (
    compare_sgp18_table2,
    compare_sgp19_table1,
    compare_sgp19_table2,
    compare_sgp19_table3,
    compare_sgp19_table4,
    compare_sgp19_table5,
    compare_slowmo_table2,
    compare_streaming_diloco_table4,
    compare_what_if,
)
