"""The bandwidth that keeps computation busy, as in Table 4 of Streaming DiLoCo, modelled."""

import numpy as np

from gossipjax.cost_model.methods import Method, allreduce, diloco, streaming_diloco
from gossipjax.cost_model.network import Network
from gossipjax.cost_model.prediction import predict_step
from gossipjax.cost_model.published import _figures as figures
from gossipjax.cost_model.workload import Workload

REPLICAS = 2
WIRE = "bfloat16"
NARROW_WIRE = 4.0  # bits
DELAY = 1  # steps
BYTES_PER_GBIT = 1e9 / 8
BANDWIDTH_GRID = np.logspace(-1, 3, 50)
"""Gbit/s: the grid on which all figures of the table lie."""


def make_method(name: str, layers: int) -> Method:
    """The method of that name in the table. All reduce beside the backward pass."""
    if name == "data parallel":
        return allreduce(wire=WIRE, layers=layers)
    if name == "DiLoCo":
        return diloco(figures.DILOCO_EVERY, wire=WIRE, layers=layers)
    return streaming_diloco(
        figures.DILOCO_EVERY,
        fragments=layers // figures.LAYERS_PER_FRAGMENT,
        delay=DELAY if "overlap" in name else 0,
        wire=NARROW_WIRE if "4 bits" in name else WIRE,
        layers=layers,
    )


def find_cell(requirement: figures.Requirement, utilization: float) -> int:
    """The cell of the grid in which that share of the time is computation.

    It is the largest index whose bandwidth is not enough: the lower edge of the cell, by which the
    table seems to name it; -1 below the grid.
    """
    parameters, compute_seconds, layers = figures.MODELS[requirement.model]
    workload = Workload(parameters, compute_seconds)
    method = make_method(requirement.method, layers)
    low = -1
    high = len(BANDWIDTH_GRID)
    while high - low > 1:
        middle = (low + high) // 2
        network = Network(float(BANDWIDTH_GRID[middle]) * BYTES_PER_GBIT)
        seconds = predict_step(method, workload, network, REPLICAS).seconds
        if compute_seconds / seconds < utilization:
            low = middle
        else:
            high = middle
    return low


def find_nearest_cell(gbits: float) -> int:
    """The index of the grid that a figure of the table is.

    >>> find_nearest_cell(1.4)
    14
    """
    return int(abs(np.log(BANDWIDTH_GRID / gbits)).argmin())
