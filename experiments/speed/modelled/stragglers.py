"""Examples per second beside slow nodes, by the simulation of the cost model. Modelled."""

from experiments.speed.modelled.methods import make_modelled_method
from experiments.speed.network.rows import make_row
from experiments.speed.stragglers.problem import BATCH_SIZE_PER_NODE, FLOAT_BYTES
from experiments.speed.stragglers.setting import Setting
from experiments.speed.stragglers.slowness import draw_factors
from gossipjax.cost_model import Network, Workload, simulate

LOOPBACK = 2e9  # bytes/s: 20 MB take about 10 ms
REPEATS = 10  # of the steps in lockstep
MIN_PARAMETERS = 7850  # of softmax regression on digits


def simulate_run(algorithm: str, slowness: str, setting: Setting) -> float | None:
    """Examples per second of all nodes in simulated time; None of what the cost model has not.

    The nodes sleep by the factors of the measurement. Nothing else of it is used: the processor
    time of a step, for which a few processes share the cores, is left out.

    >>> simulate_run("allreduce", "4x", Setting(nodes=4, steps=10, compute_seconds=0.1)) < 325
    True
    """
    method = make_modelled_method(make_row(algorithm, "float32", setting.nodes, setting.steps))
    if method is None:
        return None
    parameters = max(MIN_PARAMETERS, setting.megabytes * 1e6 / FLOAT_BYTES)
    workload = Workload(parameters, setting.compute_seconds, BATCH_SIZE_PER_NODE)
    bits = setting.bits_per_second
    network = Network(LOOPBACK if bits is None else bits / 8)
    factors = draw_factors(slowness, setting.nodes, setting.steps * setting.nodes)
    steps = setting.steps
    if not method.is_asynchronous:
        # Repeated, as fast nodes end up to a step before the slowest, until which is measured.
        factors = factors[:steps]
        steps *= REPEATS
    simulation = simulate(method, workload, network, setting.nodes, factors, steps, warm_up=0)
    return simulation.examples_per_second
