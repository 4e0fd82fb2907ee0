"""Seconds of the methods of the SGP papers and of SlowMo on ResNet-50, modelled."""

import functools

from gossipjax.cost_model.fitting import Measurement, fit_compute, fit_network
from gossipjax.cost_model.methods import (
    Method,
    adpsgd,
    allreduce,
    dpsgd,
    local_sgd,
    osgp,
    sgp,
    slowmo,
)
from gossipjax.cost_model.network import Network
from gossipjax.cost_model.networks import SGP_ETHERNET, remove_host_copies
from gossipjax.cost_model.prediction import predict_step
from gossipjax.cost_model.published import _figures as figures
from gossipjax.cost_model.workload import Workload
from gossipjax.topology import bipartite_exponential, k_peer_exponential, one_peer_exponential

RESNET50 = Workload(
    parameters=figures.PARAMETERS,
    compute_seconds=1 / figures.MINI_BATCHES_PER_SECOND,
    examples=figures.IMAGES_PER_NODE,
)
FIRST_GUESS = Network(bandwidth=1.25e9, host_copy=1.25e9)  # 10 Gbit/s


@functools.cache
def make_sgp_method(name: str, nodes: int) -> Method:
    """The method of that name in the SGP papers, as they ran it.

    Their all-reduce follows a tree. D-PSGD and AD-PSGD exchange models with a peer that answers:
    sending and receiving wait for each other. D-PSGD waits for it after the computation, AD-PSGD
    beside.
    """
    if name == "AllReduce":
        return allreduce("tree")
    if name == "D-PSGD":
        pairs = bipartite_exponential(nodes)
        return dpsgd(pairs, order="adapt-then-combine", is_half_duplex=True)
    if name == "AD-PSGD":
        return adpsgd(bipartite_exponential(nodes), is_half_duplex=True)
    if name == "SGP, two peers":
        return sgp(k_peer_exponential(nodes, 2))
    if name in ("1-OSGP", "biased 1-OSGP"):
        return osgp(one_peer_exponential(nodes))
    return sgp(one_peer_exponential(nodes))


def make_slowmo_method(name: str) -> Method:
    """The method of that name in SlowMo's Table 2; its all-reduce is a ring."""
    schedule = one_peer_exponential(figures.SLOWMO_NODES)
    if name == "AllReduce":
        return allreduce("ring")
    if name == "OSGP":
        return osgp(schedule)
    if name == "Local SGD":
        return local_sgd(figures.SLOWMO_LOCAL_STEPS)
    method = sgp(schedule)
    return slowmo(method, figures.SLOWMO_EVERY) if name == "SGP with SlowMo" else method


def fit_sgp_ethernet() -> Network:
    """The bandwidth and the copies that fit the 16 seconds of SGP-18 Table 2 best.

    `networks.SGP_ETHERNET` has the result, rounded.
    """
    measurements = [
        Measurement(make_sgp_method(name, nodes), RESNET50, nodes, seconds)
        for name, row in figures.SGP18_SECONDS.items()
        for nodes, seconds in zip(figures.SGP18_NODES, row, strict=True)
    ]
    return fit_network(measurements, FIRST_GUESS)


def fit_slowmo_compute() -> float:
    """The seconds of computation that fit SlowMo's Table 2 best, on the network of SGP-18."""
    measurements = [
        Measurement(make_slowmo_method(name), RESNET50, figures.SLOWMO_NODES, seconds)
        for name, seconds in figures.SLOWMO_SECONDS.items()
    ]
    return fit_compute(measurements, remove_host_copies(SGP_ETHERNET))


def predict_seconds(name: str, nodes: int, network: Network) -> float:
    """Seconds of a step of a method of the SGP papers."""
    return predict_step(make_sgp_method(name, nodes), RESNET50, network, nodes).seconds


def predict_hours(published: figures.Hours, network: Network) -> float:
    """Hours of a run of SGP-19: steps times seconds, of all of its parts."""
    steps_per_epoch = figures.IMAGES / (figures.IMAGES_PER_NODE * published.nodes)
    return sum(
        epochs * steps_per_epoch * predict_seconds(name, published.nodes, network) / 3600
        for name, epochs in published.parts
    )
