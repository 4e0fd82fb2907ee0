"""Bad inputs of the cost model."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

import math

import gossipjax as gx
from bad_input.rows import Call, calls
from gossipjax import cost_model as cm

SCHEDULE = gx.topology.one_peer_exponential(8)
NETWORK = cm.Network(1e9)


def predict(nodes: object) -> object:
    return cm.predict_step(cm.sgp(SCHEDULE), cm.Workload(), NETWORK, nodes)


ROWS: list[Call] = []
for name, function, values, message in (
    ("bandwidth", cm.Network, [0, math.nan, "10gbit"], "bandwidth of Network"),
    ("latency", lambda x: cm.Network(1e9, x), [-1], "latency of Network"),
    ("seconds", lambda x: cm.Workload(compute_seconds=x), [-1], "compute_seconds"),
    ("nodes of another schedule", predict, [4, 9], "of the schedule"),
    ("all-reduce kind", cm.allreduce, ["star"], "kind of an exchange"),
    ("wire", lambda x: cm.allreduce(wire=x), ["int7"], "wire must be"),
    ("order", lambda x: cm.sgp(SCHEDULE, x), ["cwa"], "order must be"),
    (
        "schedule of one way",
        cm.dpsgd,
        [gx.topology.star(4, weights="uniform")],
        "doubly stochastic",
    ),
    ("schedule", cm.sgp, ["ring"], "schedule of an exchange"),
    ("outer steps", cm.diloco, [0], "every of an exchange"),
    ("fragments", lambda x: cm.streaming_diloco(10, x), [11], "fragments of"),
    ("delay", lambda x: cm.streaming_diloco(10, 2, x), [10], "delay of"),
    ("name of slowness", cm.parse_slowness, ["0x", "2"], "slowness must"),
):
    ROWS += calls(name, function, values, message)
