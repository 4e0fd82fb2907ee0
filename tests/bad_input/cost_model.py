"""Bad inputs of the cost model."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

import math

import networkx

import gossipjax as gx
from bad_input.rows import Call, calls
from gossipjax import cost_model as cm

SCHEDULE = gx.topology.one_peer_exponential(8)
RING = gx.topology.ring(4)
NETWORK = cm.Network(1e9)
WORKLOAD = cm.Workload()
MEASURED = [cm.Measurement(cm.single(), WORKLOAD, 4, 1.0)] * 2
NO_QUANTITIES = [0, math.nan, "10gbit"]
NO_COUNTS = [0, 2.5, 10**9]


def predict(method: object = None, nodes: object = 8, network: object = NETWORK) -> object:
    return cm.predict_step(cm.sgp(SCHEDULE) if method is None else method, WORKLOAD, network, nodes)


def on_fabric(fabric: object) -> object:
    return predict(network=cm.Network(1e9, fabric=fabric))


ROWS: list[Call] = []
for name, function, values, message in (
    ("bandwidth", cm.Network, NO_QUANTITIES, "bandwidth of Network"),
    ("latency", lambda x: cm.Network(1e9, x), [-1, math.nan, "1ms"], "latency of Network"),
    ("host copy", lambda x: cm.Network(1e9, host_copy=x), [0, -1, math.nan], "host_copy"),
    ("gossip", lambda x: cm.Network(1e9, gossip_bandwidth=x), [0, math.nan], "gossip_bandwidth"),
    ("fabric", lambda x: cm.Network(1e9, fabric=x), ["torus"], "fabric of"),
    ("torus shape", cm.Torus, [(), (0, 2)], "shape of Torus"),
    ("island size", lambda x: cm.Islands(x, 1e9), [0, 1.5], "size of Islands"),
    ("island bandwidth", lambda x: cm.Islands(8, x), [0, math.nan], "bandwidth of Islands"),
    ("workload parameters", cm.Workload, NO_QUANTITIES, "parameters of Workload"),
    ("seconds", lambda x: cm.Workload(compute_seconds=x), [-1, math.nan], "compute_seconds"),
    ("workload examples", lambda x: cm.Workload(examples=x), [0, -1], "examples of"),
    ("nodes", lambda n: predict(cm.single(), n), NO_COUNTS, "nodes must be"),
    ("nodes of another schedule", lambda n: predict(None, n), [4, 9], "of the schedule"),
    ("nodes of a fabric", on_fabric, [cm.Islands(3, 1e10), cm.Torus((3, 3))], "nodes must be"),
    ("two levels", predict, [cm.allreduce("two-level")], "Islands"),
    ("all-reduce kind", cm.allreduce, ["star", "gossip"], "kind of an all-reduce"),
    ("layers", lambda x: cm.allreduce(layers=x), [-1, 1.5], "layers"),
    ("layers of gossip", lambda x: cm.Exchange(schedule=SCHEDULE, layers=x), [4], "layers"),
    ("wire", lambda x: cm.allreduce(wire=x), ["int7"], "wire must be"),
    ("order", lambda x: cm.sgp(SCHEDULE, x), ["cwa"], "order must be"),
    ("schedule", cm.sgp, [None, "ring"], "schedule of an exchange"),
    ("tracking schedule", cm.gradient_tracking, [None], "schedule of an exchange"),
    ("schedule of one way", cm.dpsgd, [gx.topology.star(4, "uniform")], "doubly stochastic"),
    ("gossip without a schedule", lambda x: cm.Exchange(kind=x), ["gossip"], "schedule of an"),
    (
        "two schedules",
        lambda other: cm.Method("m", (*cm.sgp(SCHEDULE).exchanges, *cm.sgp(other).exchanges)),
        [RING],
        "one number of nodes",
    ),
    ("waiting", lambda x: cm.Exchange(kind="ring", awaits=x), ["some"], "awaits of"),
    ("overlap", lambda x: cm.osgp(SCHEDULE, x), [-1, 1.5], "overlap of osgp"),
    ("local steps", cm.local_sgd, [0, 2.5], "every must be"),
    ("fragments", lambda x: cm.streaming_diloco(10, x), [0, 11], "fragments of"),
    ("delay", lambda x: cm.streaming_diloco(10, 2, x), [-1, 10], "delay of"),
    ("outer steps of noloco", lambda x: cm.noloco(SCHEDULE, x), [0], "every must be"),
    ("outer steps of gossip", lambda x: cm.push_sum_outer(SCHEDULE, x), [0], "every must be"),
    ("relay without a tree", cm.relay, ["chain", RING], "graph must be"),
    ("relay with a cycle", cm.relay, [networkx.cycle_graph(4)], "cycle"),
    ("kind of slowness", cm.Slowness, ["slow"], "kind of Slowness"),
    ("factor", lambda x: cm.Slowness("constant", x), [0, math.nan], "factor"),
    ("factor of another", lambda x: cm.Slowness(x, factor=4.0), ["none", "random"], "factor of"),
    ("name of slowness", cm.parse_slowness, ["x", "0x", "2"], "slowness must"),
    ("slow nodes", lambda n: cm.Slowness().draw(n, 5), NO_COUNTS, "nodes must be"),
    ("slow steps", lambda k: cm.Slowness().draw(2, k), NO_COUNTS, "steps must be"),
    ("receivers", lambda r: NETWORK.congestion(r), [[], [2, 0], [0.5]], "receivers must"),
    ("measured", lambda x: cm.fit_network(x, NETWORK), [[]], "measurements must"),
    (
        "measured seconds",
        lambda x: cm.Measurement(cm.single(), WORKLOAD, 4, x),
        [0, math.nan],
        "seconds of a measurement",
    ),
    ("fit without copies", lambda n: cm.fit_network(MEASURED, n), [NETWORK], "host_copy"),
    ("fit of", lambda x: cm.fit_network(MEASURED, NETWORK, [x]), ["latencies"], "a name of"),
    ("fit of too little", lambda x: cm.fit_network(MEASURED, NETWORK, [x]), ["bandwidth"], "must"),
):
    ROWS += calls(name, function, values, message)
