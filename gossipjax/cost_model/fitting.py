"""Fits of a network, or of the computation, to measured steps: least squares."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import optimize

from gossipjax.cost_model._require import require_choice, require_number_of_nodes, require_quantity
from gossipjax.cost_model.exchange import Workload
from gossipjax.cost_model.methods import Method
from gossipjax.cost_model.network import Network
from gossipjax.cost_model.prediction import predict_step

FITTED = ("bandwidth", "host_copy")
TOLERANCE = 1e-12
MIN_SENSITIVITY = 1e-6  # relative change of a prediction per relative change of a fitted value


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A step that somebody measured."""

    method: Method
    workload: Workload
    nodes: int
    seconds: float  # of a step

    def __post_init__(self) -> None:
        require_number_of_nodes(self.nodes, "nodes of a measurement")
        require_quantity(self.seconds, "seconds of a measurement", "seconds")


def fit_network(
    measurements: Sequence[Measurement], network: Network, names: Sequence[str] = FITTED
) -> Network:
    """The network whose predictions are closest to the measurements.

    The sum of `((predicted - measured) / measured)^2` is least.

    Args:
      measurements: at least as many as names.
      network: where to begin; what is not fitted is kept.
      names: what is fitted, of "bandwidth" and "host_copy".

    Raises:
      ValueError: if the measurements do not determine what is fitted.

    >>> from gossipjax.cost_model import Network, Workload, allreduce
    >>> workload = Workload(parameters=25e6, compute_seconds=0.2)
    >>> measured = [Measurement(allreduce(), workload, nodes, 0.2 + 0.1 * (nodes - 1) / nodes)
    ...             for nodes in (2, 4, 8)]
    >>> round(fit_network(measured, Network(1e9), ["bandwidth"]).bandwidth / 1e9, 6)
    2.0
    """
    _require_enough(measurements, len(names))
    for name in names:
        require_choice(name, "a name of fit_network", FITTED)
    start = 1 / np.array([getattr(network, name) for name in names])
    if not start.all():
        raise ValueError(
            f"host_copy of the network must be finite to be fitted, got {network.host_copy}. Give "
            'a first guess, or leave "host_copy" out of names.'
        )

    def change(values: np.ndarray) -> Network:
        return dataclasses.replace(network, **dict(zip(names, (1 / values).tolist(), strict=True)))

    return change(
        _fit(lambda values: _predict(measurements, change(values)), start, measurements, names)
    )


def fit_compute(measurements: Sequence[Measurement], network: Network) -> float:
    """The seconds of computation, the same in all measurements, that fit them best.

    >>> from gossipjax.cost_model import Network, Workload, single
    >>> measured = [Measurement(single(), Workload(compute_seconds=1.0), 4, 0.3)]
    >>> round(fit_compute(measured, Network(1e9)), 6)
    0.3
    """
    _require_enough(measurements, 1)

    def predict(values: np.ndarray) -> np.ndarray:
        return _predict(measurements, network, compute_seconds=float(values[0]))

    start = np.array([min(m.seconds for m in measurements)])
    return float(_fit(predict, start, measurements, ["compute_seconds"])[0])


def _predict(
    measurements: Sequence[Measurement], network: Network, **workload: float
) -> np.ndarray:
    """The predicted seconds of all measurements, with other fields of their workloads."""
    changed = [dataclasses.replace(m.workload, **workload) for m in measurements]
    return np.array(
        [
            predict_step(m.method, one, network, m.nodes).seconds
            for m, one in zip(measurements, changed, strict=True)
        ]
    )


def _fit(
    predict: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    measurements: Sequence[Measurement],
    names: Sequence[str],
) -> np.ndarray:
    """The positive values whose predictions have the least squares of relative errors."""
    measured = np.array([measurement.seconds for measurement in measurements])

    def find_errors(scales: np.ndarray) -> np.ndarray:
        return predict(start * np.exp(scales)) / measured - 1

    tolerances = dict.fromkeys(("ftol", "xtol", "gtol"), TOLERANCE)
    found = optimize.least_squares(find_errors, np.zeros(len(start)), **tolerances)
    if np.linalg.matrix_rank(found.jac, MIN_SENSITIVITY) < len(names):
        raise ValueError(
            f"measurements must determine {' and '.join(names)}, got {len(measured)} whose times "
            "do not depend on each of them by itself: add other methods, other numbers of nodes "
            "or of parameters, or fit fewer names."
        )
    return start * np.exp(found.x)


def _require_enough(measurements: Any, count: int) -> None:
    if not isinstance(measurements, Sequence) or len(measurements) < max(1, count):
        raise ValueError(
            f"measurements must be a list of at least {max(1, count)}, got {measurements!r}."
        )
