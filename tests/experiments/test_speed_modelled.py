"""The cost model beside the measurements: its methods are the rows, its seconds those by hand."""

import numpy as np
import pytest

from experiments.speed.modelled.methods import make_modelled_method
from experiments.speed.modelled.network import count_copied_bytes, predict_row
from experiments.speed.modelled.stragglers import simulate_run
from experiments.speed.network.rows import DEFAULT_ALGORITHMS, make_row
from experiments.speed.outer_rows import OuterTimes
from experiments.speed.stragglers.problem import BATCH_SIZE_PER_NODE
from experiments.speed.stragglers.setting import Setting
from experiments.training.methods import ALGORITHMS, WireName, spell_name
from gossipjax.cost_model import Network, Workload, predict_step

PARAMETERS = 5_000_000  # 20 MB
CONFIGURATION = {
    "hosts": 4,
    "bandwidth": "200mbit",
    "parameters": PARAMETERS,
    "examples_per_host": 8,
    "goodput_all_links": 25e6,
    "goodput_one_link": 20e6,
    "goodput_busy_hosts": 16e6,
}
MODEL = 0.8  # seconds of a model on a link
BESIDE = 1.25  # beside computation


def end_alone(seconds: float) -> float:
    """Seconds of an exchange that takes so long beside computation, of which there are 0.5."""
    return 0.5 + (seconds - 0.5) * MODEL / BESIDE


def predict(
    algorithm: str, wire: WireName = "float32", cpu: float = 0.0, packing: float = 0.0
) -> float:
    row = make_row(algorithm, wire, 4, outer=OuterTimes())
    seconds = predict_row(row, CONFIGURATION, 0.5, cpu, packing)
    assert seconds is not None
    return seconds


@pytest.mark.parametrize(
    ("algorithm", "seconds"),
    [
        ("allreduce", 0.5 + 1.5 * MODEL),
        ("centralized", 0.5 + 6 * 20e6 / 20e6),  # one stream at a time
        ("sgp", 0.5 + MODEL),
        ("sgp@two_peer_exponential", 0.5 + 2 * MODEL),
        ("dpsgd@ring", end_alone(2 * BESIDE)),
        ("dpsgd-adapt-then-combine", 0.5 + 2 * MODEL),
        ("sgp-cwa", end_alone(BESIDE)),
        ("1-osgp", end_alone(BESIDE)),
        ("2-osgp", end_alone(BESIDE / 2)),
        ("gradient-tracking", 0.5 + 4 * MODEL),
        ("easgd", 0.5 + 1.5 * MODEL),
        ("d1d-psgd", end_alone(1.5 * BESIDE)),
        ("async-sgp", 0.5),
        ("diloco", 0.5 + 1.5 * MODEL / 12),
        ("streaming-diloco", 0.5),
    ],
)
def test_seconds_by_hand(algorithm, seconds):
    assert predict(algorithm) == pytest.approx(seconds, rel=1e-3)


def test_buckets_hide_a_part():
    """A quarter of the exchange follows the last quarter of the backward pass at least."""
    assert 0.5 + 1.5 * MODEL / 4 < predict("allreduce-buckets") < predict("allreduce")


@pytest.mark.parametrize(("wire", "bits"), [("bfloat16", 16), ("int8", 8.125), ("int4", 4.125)])
def test_narrow_messages_take_less(wire, bits):
    method = make_modelled_method(make_row("sgp", wire, 4))
    assert method is not None
    assert method.exchanges[0].bits == pytest.approx(bits, rel=1e-3)
    assert predict("sgp", wire) == pytest.approx(0.5 + MODEL * bits / 32, rel=1e-3)


def test_processor_time_is_added_where_it_cannot_hide():
    """Beside the computation it makes that longer; packing comes before the wire."""
    assert predict("sgp", cpu=0.3, packing=0.1) == pytest.approx(0.5 + MODEL + 0.1)
    assert predict("allreduce", cpu=0.3, packing=0.1) == pytest.approx(0.5 + 1.5 * MODEL + 0.1)
    assert predict("centralized", packing=0.1) == pytest.approx(6.6)
    assert predict("2-osgp", cpu=0.3, packing=0.05) == pytest.approx(0.8)
    beside, alone = BESIDE + 2 * 0.1, MODEL + 0.1  # half of the cores
    expected = 0.6 + (beside - 0.6) * alone / beside
    assert predict("1-osgp", cpu=0.1, packing=0.1) == pytest.approx(expected)
    assert predict("async-sgp", cpu=0.3) == pytest.approx(0.8)


def test_bytes_are_those_of_the_rows():
    """What the model sends is what the row counts, for every algorithm that it has."""
    names = [spell_name(name, overlap=1) for name, row in ALGORITHMS.items() if row.exchanges]
    workload = Workload(PARAMETERS, 0.5)
    for name in dict.fromkeys([*names, *DEFAULT_ALGORITHMS]):
        row = make_row(name, "float32", 4)
        method = make_modelled_method(row)
        if "/" in name:
            assert method is None
        elif not name.startswith(("async", "centralized")):
            assert method is not None
            sent = np.mean([row.count_sent_bytes(k, PARAMETERS) for k in range(12)])
            predicted = predict_step(method, workload, Network(25e6), 4).sent_bytes
            assert predicted == pytest.approx(sent, rel=1e-3), name


def test_rows_without_a_model():
    assert make_modelled_method(make_row("allreduce", "top_k", 4)) is None
    assert make_modelled_method(make_row("choco", "top_k", 4)) is not None
    hybrid = make_row("sgp@complete/one_peer_exponential", "float32", 4)
    assert predict_row(hybrid, CONFIGURATION, 0.5, 0.0, 0.0) is None


@pytest.mark.parametrize(
    ("algorithm", "kept"), [("allreduce", 0.25), ("1-osgp", 0.25), ("async-sgp", 0.8125)]
)
def test_one_slow_node(algorithm, kept):
    setting = Setting(nodes=4, steps=40, compute_seconds=0.1)
    full = 4 * BATCH_SIZE_PER_NODE / 0.1
    assert simulate_run(algorithm, "none", setting) == pytest.approx(full, rel=1e-3)
    assert simulate_run(algorithm, "4x", setting) == pytest.approx(kept * full, rel=0.02)


def test_a_limited_link_is_in_the_simulation():
    setting = Setting(4, 20, 0.1, megabytes=2.5, bits_per_second=200_000_000)
    full = 4 * BATCH_SIZE_PER_NODE
    assert simulate_run("sgp", "none", setting) == pytest.approx(full / 0.2, rel=1e-3)
    assert simulate_run("sgp@complete/ring", "none", setting) is None


@pytest.mark.parametrize("goodput", [24.3e6, 1.17e8, 1 / 3])
def test_what_is_not_copied_has_no_packing(goodput):
    """Rounding of seconds is not taken for bytes."""
    workload = Workload(PARAMETERS, 0.287)
    for name in DEFAULT_ALGORITHMS:
        method = make_modelled_method(make_row(name, "float32", 4))
        if method is not None:
            copied = count_copied_bytes(method, workload, Network(goodput), 4)
            assert copied == 0 or copied > 1000, name
