"""Seconds per iteration of the network measurement, by the cost model. Modelled."""

from experiments.results import Record
from experiments.speed.modelled.methods import make_modelled_method
from experiments.speed.network.rows import CENTRALIZED, Row
from gossipjax.cost_model import Network, Workload, predict_step


def make_network(row: Row, configuration: Record) -> Network:
    """The links: of the goodput of plain TCP streams in the same run.

    That of one stream for the parameter server, which has one busy link; else that of all at once.
    """
    is_single = row.algorithm == CENTRALIZED
    goodput = configuration["goodput_one_link" if is_single else "goodput_all_links"]
    return Network(goodput, name=configuration["bandwidth"] or "loopback")


def predict_row(row: Row, configuration: Record, compute_seconds: float) -> float | None:
    """Seconds per iteration of a row; None of what the cost model does not have.

    Args:
      row: the algorithm and the form of its messages.
      configuration: an entry of `configurations` in `summary.json`.
      compute_seconds: of an iteration, with what the processor does for the exchange: as the hosts
        share the cores of one machine, that is measured, not modelled.
    """
    method = make_modelled_method(row)
    if method is None:
        return None
    workload = Workload(
        configuration["parameters"], compute_seconds, configuration["examples_per_host"]
    )
    hosts = configuration["hosts"]
    return predict_step(method, workload, make_network(row, configuration), hosts).seconds
