"""Fits of a network or of the computation; what the model imports."""

import dataclasses
import subprocess
import sys

import pytest

import gossipjax as gx
from gossipjax.cost_model import (
    Measurement,
    Network,
    Workload,
    fit_compute,
    fit_network,
    networks,
    predict_step,
    sgp,
    single,
)


def test_a_fit_recovers_what_made_the_figures():
    workload = Workload(25e6, 0.3)
    network = Network(2e9, host_copy=3e9)
    methods = [sgp(gx.topology.one_peer_exponential(4)), gx.cost_model.allreduce("tree")]
    measured = [
        Measurement(method, workload, 4, predict_step(method, workload, network, 4).seconds)
        for method in methods
    ]
    fitted = fit_network(measured, Network(1e8, host_copy=1e8))
    assert fitted.bandwidth == pytest.approx(2e9, rel=1e-6)
    assert fitted.host_copy == pytest.approx(3e9, rel=1e-6)
    wrong = dataclasses.replace(workload, compute_seconds=1.0)
    again = [dataclasses.replace(m, workload=wrong) for m in measured]
    assert fit_compute(again, network) == pytest.approx(0.3, rel=1e-6)


def test_a_fit_that_is_not_determined_is_refused():
    """Gossip alone does not tell the wire from the copies; what nobody waits for tells nothing."""
    workload = Workload(25e6, 0.3)
    network = Network(2e9, host_copy=3e9)
    schedule = gx.topology.one_peer_exponential(4)
    alone = [Measurement(sgp(schedule), workload, 4, seconds) for seconds in (0.38, 0.39)]
    hidden = [Measurement(sgp(schedule, "combine-while-adapting"), workload, 4, 0.3)]
    with pytest.raises(ValueError, match="must determine bandwidth and host_copy"):
        fit_network(alone, network)
    with pytest.raises(ValueError, match="must determine bandwidth, got 1"):
        fit_network(hidden, network, ["bandwidth"])


def test_networks_have_names():
    for network in networks.ALL.values():
        assert network.name
        assert predict_step(single(), Workload(), network, 256).seconds == 0.228


def test_the_model_needs_numpy_alone():
    """Of what it imports; the package around it needs JAX."""
    code = (
        "import sys, types; package = types.ModuleType('gossipjax'); "
        f"package.__path__ = {list(gx.__path__)!r}; sys.modules['gossipjax'] = package; "
        "from gossipjax import cost_model; print('jax' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "False", run.stderr
