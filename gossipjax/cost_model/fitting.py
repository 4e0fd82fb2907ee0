"""Fits of a network, or of the computation, to measured steps: least squares. NumPy only."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gossipjax.cost_model._require import require_choice, require_number_of_nodes, require_quantity
from gossipjax.cost_model.exchange import Workload
from gossipjax.cost_model.methods import Method
from gossipjax.cost_model.network import Network
from gossipjax.cost_model.prediction import predict_step

FITTED = ("bandwidth", "host_copy")
MAX_ITERATIONS = 50
MIN_RATIO = 0.1  # of a value to that of the iteration before
MAX_RATIO = 10.0
DIFFERENCE = 1e-6  # relative, of the numerical derivatives
TOLERANCE = 1e-9
MIN_SENSITIVITY = 1e-6  # relative change of a prediction per relative change of a fitted value


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A step that somebody measured.

    >>> from gossipjax.cost_model import allreduce
    >>> Measurement(allreduce(), Workload(25.6e6, 0.228, 256), nodes=8, seconds=0.4).seconds
    0.4
    """

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

    The sum of `((predicted - measured) / measured)^2` is least (Gauss-Newton on the seconds per
    byte, in which predictions are nearly linear).

    Args:
      measurements: at least as many as names.
      network: where to begin; what is not fitted is kept.
      names: what is fitted, of "bandwidth" and "host_copy".

    Raises:
      ValueError: if the measurements do not determine what is fitted, or the fit does not converge.

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

    def predict(values: np.ndarray) -> np.ndarray:
        return _predict(measurements, change(values))

    return change(_fit(predict, start, measurements, names))


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
    values: np.ndarray,
    measurements: Sequence[Measurement],
    names: Sequence[str],
) -> np.ndarray:
    """The positive values whose predictions have the least squares of relative errors."""
    measured = np.array([measurement.seconds for measurement in measurements])
    for _ in range(MAX_ITERATIONS):
        errors = predict(values) / measured - 1
        columns = [
            (predict(values * (1 + DIFFERENCE * unit)) / measured - 1 - errors) / DIFFERENCE
            for unit in np.eye(len(values))
        ]
        jacobian = np.stack(columns, axis=1)  # by relative changes of the values
        change = np.linalg.lstsq(jacobian, -errors, rcond=MIN_SENSITIVITY)[0]
        moved = values * np.clip(1 + change, MIN_RATIO, MAX_RATIO)
        if (abs(moved - values) <= TOLERANCE * values).all():
            if np.linalg.matrix_rank(jacobian, MIN_SENSITIVITY) < len(names):
                raise ValueError(
                    f"measurements must determine {' and '.join(names)}, got {len(jacobian)} whose "
                    "times do not depend on each of them by itself: add other methods, other "
                    "numbers of nodes or of parameters, or fit fewer names."
                )
            return moved
        values = moved
    raise ValueError(
        f"measurements must be fitted within {MAX_ITERATIONS} iterations, got no best "
        f"{' and '.join(names)} for {len(measured)}: begin nearer, or fit fewer names."
    )


def _require_enough(measurements: Any, count: int) -> None:
    if not isinstance(measurements, Sequence) or len(measurements) < max(1, count):
        raise ValueError(
            f"measurements must be a list of at least {max(1, count)}, got {measurements!r}."
        )
