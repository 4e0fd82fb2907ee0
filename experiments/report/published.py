"""Published figures of time beside those of the cost model: modelled, not measured.

    python -m experiments.report --section cost-model

One network, `networks.SGP_ETHERNET`, is fitted, on the 16 figures of SGP-18 Table 2; the others
follow. docs/guides/cost_model.md says what is assumed of each.

- SGP-18: Assran et al., 2018, submission to ICLR 2019, Table 2; hours of sections 5.2 and 5.3.
- SGP-19: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
  arXiv:1811.10792, Tables 1 to 5. ResNet-50 on ImageNet, 256 images per node and step.
- SlowMo: Wang et al., ICLR 2020, arXiv:1910.00643, Table 2. The same task, 32 nodes.
- Streaming DiLoCo: Douillard et al., 2025, arXiv:2501.18512, Table 4: simulated by its authors.
- diloco-measured: github.com/Adnan082/diloco-measured, commit 07b7885: DiLoCo on 4 servers with an
  L40S each, over TCP with links shaped by tc.

That the all-reduce of the SGP papers follows a tree is our inference: no source says it. Their
seconds are `0.298 + 2 log2(n) 0.100` within 1.2 %, and no ring has such a growth.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import least_squares

import gossipjax as gx
from experiments.presets import sgp19
from experiments.report.section import (
    TEXTS,
    Findings,
    Results,
    Scale,
    Table,
    exact,
    read_claims,
    read_section,
    read_table,
    tabulate,
)
from gossipjax.cost_model import Method, Network, Workload, from_transform, networks, predict_step
from gossipjax.topology import bipartite_exponential, k_peer_exponential, one_peer_exponential

PUBLISHED = TEXTS["cost-model"]["published"]

IMAGES_PER_NODE = 256
STEPS_PER_EPOCH = 1.28e6 / IMAGES_PER_NODE  # of one node: ImageNet
RESNET50 = Workload(
    parameters=25.6e6,  # "about 100 MB"
    compute_seconds=1 / 4.384,  # mini-batches per second of one server (SGP-18)
    examples=IMAGES_PER_NODE,
)

SGP18_NODES = (4, 8, 16, 32)
SGP18_SECONDS: dict[str, list[float]] = PUBLISHED["sgp18_seconds"]

TWO_PEERS = "SGP, two peers"
PARTS = {
    "ar": {"AllReduce": 90},
    "dpsgd": {"D-PSGD": 90},
    "adpsgd": {"AD-PSGD": 90},
    "sgp": {"SGP": 90},
    "1p": {"SGP": 90},
    "2p": {TWO_PEERS: 90},
    "ar-1p": {"AllReduce": 30, "SGP": 60},
    "2p-1p": {TWO_PEERS: 30, "SGP": 60},
    "biased-1-osgp": {"biased 1-OSGP": 90},
    "1-osgp": {"1-OSGP": 90},
}
"""Row of the presets' tables -> what ran, one after another, and for how many epochs."""
SGP19_TABLES: dict[int, Mapping[str, Mapping[int, Sequence[str]]]] = {
    1: sgp19.TABLE_1,
    2: {  # InfiniBand
        "ar": {4: ("8.8",), 16: ("2.5",)},
        "sgp": {4: ("8.2",), 16: ("2.2",)},
    },
    3: sgp19.TABLE_3,
    4: {row: {16: figures} for row, figures in sgp19.TABLE_4.items()},
    5: {row: {32: figures} for row, figures in sgp19.TABLE_5.items()},
}
"""Table of SGP-19 -> row -> nodes -> figures, of which the last are hours."""


SLOWMO_NODES = 32
SLOWMO_SECONDS: dict[str, float] = PUBLISHED["slowmo_seconds"]

UTILIZATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
REPLICAS = 2
DILOCO_EVERY = 100
LAYERS_PER_FRAGMENT = 3
BYTES_PER_GBIT = 1e9 / 8
MODELS = {
    "1B": (Workload(1e9, 0.1), 24),
    "10B": (Workload(10e9, 0.8), 48),
    "100B": (Workload(100e9, 4.9), 108),
}
"""Name -> the model and its computation, and the layers of the transformer."""
BANDWIDTH_GRID = np.logspace(-1, 3, 50)
"""Gbit/s: the grid on which all figures of the table lie."""


MEASURED_NODES = 4
MEASURED_MODEL = Workload(30_846_720, 0.02585)  # 25 to 26.7 ms of computation in a step
MEASURED_GBITS = (0.05, 0.2, 1.0, 5.0)
MEASURED_PERIODS = {"128": 180}  # their window with H = 128 had 180 steps and one average


class Row(NamedTuple):
    """A published figure and the model's."""

    table: str  # where it was published
    name: str  # of the method
    nodes: int  # N
    predicted: float  # by the model
    published: float  # by the paper
    unit: str  # of both
    is_fitted: bool = False  # whether the network is fitted on this method at this number of nodes

    @property
    def error(self) -> float:
        """`predicted / published - 1`."""
        return self.predicted / self.published - 1


@functools.cache
def make_sgp_method(name: str, nodes: int) -> Method:
    """The method of that name in the SGP papers, as they ran it.

    Their all-reduce follows a tree, which is our inference. D-PSGD and AD-PSGD exchange models with
    a peer that answers: sending and receiving wait for each other. D-PSGD waits for it after the
    computation, AD-PSGD beside.
    """
    peer = one_peer_exponential(nodes)
    pairs = bipartite_exponential(nodes)
    if name == "AllReduce":
        return from_transform(gx.allreduce(), name, kind="tree")
    if name == "D-PSGD":
        late = gx.dpsgd(pairs, order="adapt-then-combine")
        return from_transform(late, name, is_half_duplex=True)
    if name == "AD-PSGD":
        return from_transform(gx.dpsgd(pairs), name, awaits="link", is_half_duplex=True)
    schedule = k_peer_exponential(nodes, 2) if name == TWO_PEERS else peer
    return from_transform((gx.osgp if "OSGP" in name else gx.sgp)(schedule), name)


def make_slowmo_method(name: str) -> Method:
    """The method of that name in SlowMo's Table 2; its all-reduce is a ring."""
    peer = one_peer_exponential(SLOWMO_NODES)
    transforms = {
        "AllReduce": gx.allreduce(),
        "SGP": gx.sgp(peer),
        "SGP with SlowMo": gx.outer(gx.sgp(peer), optax.sgd(1.0), every=48),
        "OSGP": gx.osgp(peer),
        "Local SGD": gx.outer(optax.identity(), optax.sgd(1.0), every=12),
    }
    return from_transform(transforms[name], name)


def make_diloco_method(name: str, layers: int) -> Method:
    """The method of that name in Streaming DiLoCo's table: all reduce beside the backward pass."""
    if name == "data parallel":
        return from_transform(gx.allreduce(wire=jnp.bfloat16), name, layers=layers)
    options: dict[str, Any] = {"every": DILOCO_EVERY, "delay": int("overlap" in name)}
    # One scale: the paper counts 4 bits.
    options["wire"] = gx.wire.int4(block=2**20) if "4 bits" in name else jnp.bfloat16
    options["fragments"] = 1 if name == "DiLoCo" else layers // LAYERS_PER_FRAGMENT
    transform = gx.outer(optax.identity(), optax.sgd(1.0), **options)
    return from_transform(transform, name, layers=layers)


def fit_sgp_ethernet() -> Network:
    """The bandwidth and the copies that fit the 16 seconds of SGP-18 Table 2 best.

    `networks.SGP_ETHERNET` has the result, rounded.
    """
    published = np.array(list(SGP18_SECONDS.values()))

    def find_errors(values: np.ndarray) -> np.ndarray:
        network = Network(bandwidth=1e9 / values[0], host_copy=1e9 / values[1])
        rows = [[predict_seconds(name, n, network) for n in SGP18_NODES] for name in SGP18_SECONDS]
        return (np.array(rows) / published - 1).ravel()

    fitted = least_squares(find_errors, [0.8, 0.8]).x  # seconds per gigabyte, nearly linear
    return Network(bandwidth=1e9 / fitted[0], host_copy=1e9 / fitted[1])


def fit_slowmo_compute() -> float:
    """The seconds of computation that fit SlowMo's Table 2 best, on the network of SGP-18."""
    network = networks.remove_host_copies(networks.SGP_ETHERNET)

    def find_errors(compute: np.ndarray) -> list[float]:
        workload = dataclasses.replace(RESNET50, compute_seconds=float(compute[0]))
        return [
            predict_step(make_slowmo_method(name), workload, network, SLOWMO_NODES).seconds / s - 1
            for name, s in SLOWMO_SECONDS.items()
        ]

    return float(least_squares(find_errors, [0.2]).x[0])


def predict_seconds(name: str, nodes: int, network: Network = networks.SGP_ETHERNET) -> float:
    """Seconds of a step of a method of the SGP papers."""
    return predict_step(make_sgp_method(name, nodes), RESNET50, network, nodes).seconds


def compare_sgp18() -> list[Row]:
    """Table 2: seconds of a step over Ethernet, on which the network is fitted."""
    return [
        Row("SGP-18 Table 2", name, nodes, predict_seconds(name, nodes), seconds, "s", True)
        for name, row in SGP18_SECONDS.items()
        for nodes, seconds in zip(SGP18_NODES, row, strict=True)
    ]


def compare_sgp19(table: int) -> list[Row]:
    """Hours of a table of SGP-19: Ethernet, but for InfiniBand in Table 2, which is nominal.

    Tables: 1, and iterations of SGP-18 Table 2, which is fitted; 3, of hybrids and two peers; 4,
    with overlap; 5, of 270 epochs.
    """
    network = networks.SGP_INFINIBAND if table == 2 else networks.SGP_ETHERNET
    rows = []
    for row, columns in SGP19_TABLES[table].items():
        parts = PARTS[row]
        is_fitted = table != 2 and SGP18_SECONDS.keys() >= parts.keys()
        for nodes, figures in columns.items():
            factor = 3 if table == 5 and row != "ar" else 1  # times the epochs
            seconds = sum(
                factor * epochs * STEPS_PER_EPOCH / nodes * predict_seconds(name, nodes, network)
                for name, epochs in parts.items()
            )
            fields = (f"SGP-19 Table {table}", ", then ".join(parts), nodes, seconds / 3600)
            rows.append(Row(*fields, float(figures[-1]), "h", is_fitted))
    return rows


def compare_sgp18_hours() -> list[Row]:
    """Hours in the text of SGP-18, over 32 nodes."""
    nodes = SGP18_NODES[-1]
    rows = []
    for name, published in PUBLISHED["sgp18_hours"].items():
        method = name.partition(", section")[0]
        is_fast = name.endswith("InfiniBand")
        network = networks.SGP_INFINIBAND if is_fast else networks.SGP_ETHERNET
        hours = 90 * STEPS_PER_EPOCH / nodes * predict_seconds(method, nodes, network) / 3600
        rows.append(Row("SGP-18 text", name, nodes, hours, published, "h"))
    return rows


def compare_diloco_measured() -> list[Row]:
    """Shares of computation of the measured DiLoCo: a ring of nominal bandwidth, nothing fitted."""
    rows = []
    for every, shares in PUBLISHED["measured_shares"].items():
        for gbits, published in zip(MEASURED_GBITS, shares, strict=True):
            steps = MEASURED_PERIODS.get(every, int(every))
            local = gx.outer(optax.identity(), optax.sgd(1.0), every=steps)
            method = from_transform(local, "DiLoCo")
            network = Network(gbits * BYTES_PER_GBIT)
            seconds = predict_step(method, MEASURED_MODEL, network, MEASURED_NODES).seconds
            share = 100 * MEASURED_MODEL.compute_seconds / seconds
            name = f"DiLoCo, H = {every}, {gbits:g} Gbit/s"
            rows.append(Row("diloco-measured", name, MEASURED_NODES, share, published, "%"))
    return rows


def compare_slowmo() -> list[Row]:
    """Table 2: seconds of a step on the network of SGP-18, without copies, with a ring all-reduce.

    The computation, which SlowMo does not give, is fitted: one number for five figures.
    """
    network = networks.remove_host_copies(networks.SGP_ETHERNET)
    workload = dataclasses.replace(RESNET50, compute_seconds=fit_slowmo_compute())
    rows = []
    for name, seconds in SLOWMO_SECONDS.items():
        predicted = predict_step(make_slowmo_method(name), workload, network, SLOWMO_NODES).seconds
        rows.append(Row("SlowMo Table 2", name, SLOWMO_NODES, predicted, seconds, "s"))
    return rows


@functools.cache
def compare_streaming_diloco() -> list[Row]:
    """Table 4: bandwidths for shares of the time that is computation; compare by `count_cells`.

    Two replicas, 16 bits per parameter. Nothing is fitted.
    """
    rows = []
    for model, methods in PUBLISHED["streaming_diloco"].items():
        for method, bandwidths in methods.items():
            for utilization, gbits in zip(UTILIZATIONS, bandwidths, strict=True):
                cell = find_cell(model, method, utilization)
                predicted = float(BANDWIDTH_GRID[max(0, cell)])
                name = f"{model}, {method}, {utilization:.0%}"
                where = ("Streaming DiLoCo Table 4", name, REPLICAS)
                rows.append(Row(*where, predicted, gbits, "Gbit/s"))
    return rows


def find_cell(model: str, name: str, utilization: float) -> int:
    """The cell of the grid in which that share of the time is computation.

    It is the largest index whose bandwidth is not enough: the lower edge of the cell, by which the
    table seems to name it; -1 below the grid.
    """
    workload, layers = MODELS[model]
    method = make_diloco_method(name, layers)
    low = -1
    high = len(BANDWIDTH_GRID)
    while high - low > 1:
        middle = (low + high) // 2
        network = Network(float(BANDWIDTH_GRID[middle]) * BYTES_PER_GBIT)
        seconds = predict_step(method, workload, network, REPLICAS).seconds
        if workload.compute_seconds / seconds < utilization:
            low = middle
        else:
            high = middle
    return low


def count_cells(row: Row) -> int:
    """How many cells of `BANDWIDTH_GRID` the prediction is above the published figure."""
    cells = [
        abs(np.log(BANDWIDTH_GRID / gbits)).argmin() for gbits in (row.predicted, row.published)
    ]
    return int(cells[0] - cells[1])


def compare_what_if() -> list[Row]:
    """AllReduce's seconds over SGP's at 32 nodes, as published and if it were run otherwise.

    The published factor, in all rows, is that of a tree with copies through the host.
    """
    nodes = SGP18_NODES[-1]
    published = SGP18_SECONDS["AllReduce"][-1] / SGP18_SECONDS["SGP"][-1]
    direct = networks.remove_host_copies(networks.SGP_ETHERNET)
    rows = []
    tree, ring = (from_transform(gx.allreduce(), "AllReduce", kind) for kind in ("tree", "ring"))
    for name, method, network in (
        ("tree, host copies", tree, networks.SGP_ETHERNET),
        ("ring, host copies", ring, networks.SGP_ETHERNET),
        ("ring, no copies", ring, direct),
    ):
        seconds = predict_step(method, RESNET50, network, nodes).seconds
        factor = seconds / predict_seconds("SGP", nodes, network)
        rows.append(Row("What if", name, nodes, factor, published, "AllReduce / SGP"))
    return rows


# The section of the report

FIT_BOUND = 0.12
BOUND = 0.15
SHARE_BOUND = 0.3  # of a stranger's shares of computation, of which nothing is fitted
CAUSES = {  # of the table -> what is known where the model misses it
    "SGP-19 Table 2": "The model takes the nominal bandwidth of InfiniBand, and knows nothing that "
    "slows it.",
    "SGP-18 text": "SGP-18 says that steps this short on InfiniBand may wait for data. Two peers "
    "took 2.1 h in SGP-18, and 2.5 h in Table 3 of SGP-19.",
}


def find_section(scale: Scale, results: Results) -> Findings:
    """Compares predicted with published figures."""
    del scale, results
    seconds = compare_sgp18()
    fast = compare_sgp19(2)
    slowmo = compare_slowmo()
    text = compare_sgp18_hours()
    measured = compare_diloco_measured()
    hours = [compare_sgp19(table) for table in (1, 3, 4, 5)]
    timed = [seconds, *hours, fast, text, slowmo, measured]
    diloco = compare_streaming_diloco()
    what_if = compare_what_if()
    claims = []
    for rows in timed:
        bound = {id(seconds): FIT_BOUND, id(measured): SHARE_BOUND}.get(id(rows), BOUND)
        numbers = {
            "table": rows[0].table,
            "bound": bound,
            "count": len(rows),
            "fitted": sum(row.is_fitted for row in rows),
            "range": find_range(rows),
            "cause": CAUSES.get(rows[0].table, ""),
        }
        errors = {f"{row.name}, {row.nodes} nodes": exact(row.error) for row in rows}
        claims += read_claims("cost-model", {"errors": errors}, numbers, "fits")
    ring = what_if[-1]
    cells = {row.name: exact(count_cells(row)) for row in diloco}
    figures = {"cells": cells, "factor": exact(ring.predicted)}
    numbers = {"range": find_range(diloco), "half": 0.5 * ring.published}
    claims += read_claims("cost-model", figures, numbers)
    records = [
        row._asdict() | {"difference": row.error, "fitted": "yes" if row.is_fitted else "no"}
        for rows in timed
        for row in rows
    ]
    factors = [
        (row.name, f"{row.predicted:.2f}", "-" if index else f"{row.published:.2f}")
        for index, row in enumerate(what_if)
    ]
    tables = [
        tabulate("cost-model", records, "-"),
        tabulate_cells(diloco),
        read_table("cost-model", factors, 1),
    ]
    return Findings(claims, tables)


def find_range(rows: Sequence[Row]) -> str:
    """Returns the range of published figures."""
    figures = [row.published for row in rows]
    return f"{min(figures):g} to {max(figures):g} {rows[0].unit}"


def tabulate_cells(rows: Sequence[Row]) -> Table:
    """Returns a row per model and method, a column per share of the time that is computation."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        name, _, share = row.name.rpartition(", ")
        count = count_cells(row)
        text = f"{row.predicted:.3g} / {row.published:.3g}{f' ({count:+d})' if count else ''}"
        cells.setdefault(name, {})[share] = text
    return read_table("cost-model", [(name, *texts.values()) for name, texts in cells.items()], 2)


SECTION = read_section(
    name="cost-model",
    list_runs=lambda _: [],
    find=find_section,
    judges_when_quick=True,
)
