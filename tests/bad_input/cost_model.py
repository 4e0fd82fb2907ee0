"""Bad inputs of the cost model."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

import math

import networkx

import gossipjax as gx
from bad_input.rows import Call, calls
from gossipjax import cost_model as cm

SCHEDULE = gx.topology.one_peer_exponential(8)
NETWORK = cm.Network(1e9)
WORKLOAD = cm.Workload()
NO_QUANTITIES = [0, math.nan, "10gbit"]
NO_COUNTS = [0, 2.5, 10**9]


def predict(method: object = None, nodes: object = 8, network: object = NETWORK) -> object:
    return cm.predict_step(cm.sgp(SCHEDULE) if method is None else method, WORKLOAD, network, nodes)


ROWS: list[Call] = [
    *calls("bandwidth", cm.Network, NO_QUANTITIES, "bandwidth of Network must be"),
    *calls("latency", lambda x: cm.Network(1e9, x), [-1, math.nan, "1ms"], "latency of Network"),
    *calls(
        "host copy", lambda x: cm.Network(1e9, host_copy=x), [0, -1, math.nan, "inf"], "host_copy"
    ),
    *calls(
        "gossip bandwidth",
        lambda x: cm.Network(1e9, gossip_bandwidth=x),
        [0, -1, math.nan],
        "gossip_bandwidth",
    ),
    *calls("fabric", lambda x: cm.Network(1e9, fabric=x), ["torus"], "fabric of"),
    *calls("torus shape", cm.Torus, [16, (), (0, 2)], "shape of Torus"),
    *calls("island size", lambda x: cm.Islands(x, 1e9), [0, 1.5, None], "size of Islands"),
    *calls("island bandwidth", lambda x: cm.Islands(8, x), [0, math.nan], "bandwidth of Islands"),
    *calls("workload parameters", cm.Workload, NO_QUANTITIES, "parameters of Workload must be"),
    *calls(
        "workload seconds",
        lambda x: cm.Workload(compute_seconds=x),
        [-1, math.nan, "0.2"],
        "compute_seconds",
    ),
    *calls("workload examples", lambda x: cm.Workload(examples=x), [0, -1], "examples of"),
    *calls("nodes", lambda n: predict(cm.single(), n), NO_COUNTS, "nodes must be"),
    *calls("nodes of another schedule", lambda n: predict(None, n), [4, 9], "of the schedule"),
    *calls("all-reduce kind", cm.allreduce, ["star", "gossip"], "kind of an all-reduce"),
    *calls("layers", lambda x: cm.allreduce(layers=x), [-1, 1.5], "layers"),
    *calls("wire", lambda x: cm.allreduce(wire=x), ["int7", 0], "wire must be"),
    *calls("order of the model", lambda x: cm.sgp(SCHEDULE, x), ["cwa", None], "order must be"),
    *calls("schedule of the model", cm.sgp, [None, "ring", 8], "schedule of an exchange"),
    *calls("overlap of the model", lambda x: cm.osgp(SCHEDULE, x), [-1, 1.5], "overlap of osgp"),
    *calls("local steps", cm.local_sgd, [0, 2.5, None], "every must be"),
    *calls("fragments", lambda x: cm.streaming_diloco(10, x), [0, 11, 1.5], "fragments of"),
    *calls("delay", lambda x: cm.streaming_diloco(10, 2, x), [-1, 10], "delay of"),
    *calls("kind of slowness", cm.Slowness, ["slow", None, 2], "kind of Slowness"),
    *calls("factor of slowness", lambda x: cm.Slowness("constant", x), [0, -2, math.nan], "factor"),
    *calls(
        "factor of another slowness",
        lambda kind: cm.Slowness(kind, factor=4.0),
        ["none", "random", "lognormal"],
        "factor of Slowness must be left out",
    ),
    *calls("relay without a tree", cm.relay, [None, "chain", gx.topology.ring(4)], "graph must be"),
    *calls("outer steps of noloco", lambda x: cm.noloco(SCHEDULE, x), [0, 2.5], "every must be"),
    *calls("tracking schedule", cm.gradient_tracking, [None, "ring"], "schedule of an exchange"),
    *calls(
        "name of slowness",
        cm.parse_slowness,
        ["x", "0x", "2"],
        "slowness must",
    ),
    *calls("slow nodes", lambda n: cm.Slowness().draw(n, 5), NO_COUNTS, "nodes must be"),
    *calls("slow steps", lambda k: cm.Slowness().draw(2, k), [0, 1.5, 10**9], "steps must be"),
    *calls(
        "receivers", lambda r: NETWORK.congestion(r), [[], [2, 0], [0.5], "1"], "receivers must"
    ),
    *calls("measured", lambda x: cm.fit_network(x, NETWORK), [[], None, 3], "measurements must"),
    *calls(
        "measured seconds",
        lambda x: cm.Measurement(cm.single(), WORKLOAD, 4, x),
        [0, -1, math.nan],
        "seconds of a measurement",
    ),
    Call(
        "fit without copies",
        lambda: cm.fit_network([cm.Measurement(cm.single(), WORKLOAD, 4, 1.0)] * 2, NETWORK),
        "host_copy of the network must be finite",
    ),
    Call(
        "fit of a name",
        lambda: cm.fit_network(
            [cm.Measurement(cm.single(), WORKLOAD, 4, 1.0)], NETWORK, ["latency"]
        ),
        "a name of fit_network",
    ),
    Call(
        "fit of what does not depend on it",
        lambda: cm.fit_network(
            [cm.Measurement(cm.single(), WORKLOAD, 4, 1.0)] * 2, NETWORK, ["bandwidth"]
        ),
        "measurements must determine bandwidth",
    ),
    Call(
        "fit without an end",
        lambda: cm.fit_network(
            [cm.Measurement(cm.sgp(SCHEDULE), WORKLOAD, 8, 0.2)], NETWORK, ["bandwidth"]
        ),
        "measurements must",
    ),
    Call(
        "relay with a cycle",
        lambda: cm.relay(networkx.cycle_graph(4)),
        "tree of relay must have no cycle, got 4 edges",
    ),
    Call(
        "layers of gossip",
        lambda: cm.Exchange(schedule=SCHEDULE, layers=4),
        "layers of an exchange must be 0 for gossip",
    ),
    Call("two-level without islands", lambda: predict(cm.allreduce("two-level")), "Islands"),
    Call(
        "parts of islands",
        lambda: predict(network=cm.Network(1e9, fabric=cm.Islands(3, 1e10))),
        "multiple of the 3",
    ),
    Call(
        "torus of other nodes",
        lambda: predict(network=cm.Network(1e9, fabric=cm.Torus((3, 3)))),
        "nodes must be 9",
    ),
    Call(
        "dpsgd of one way",
        lambda: cm.dpsgd(gx.topology.star(4, "uniform")),
        "doubly stochastic",
    ),
    Call(
        "two schedules",
        lambda: cm.Method(
            "m", (*cm.sgp(SCHEDULE).exchanges, *cm.sgp(gx.topology.ring(4)).exchanges)
        ),
        "one number of nodes",
    ),
    Call(
        "gossip without a schedule", lambda: cm.Exchange(kind="gossip"), "schedule of an exchange"
    ),
    Call("unknown waiting", lambda: cm.Exchange(kind="ring", awaits="some"), "awaits of"),
]
