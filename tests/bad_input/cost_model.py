"""Bad inputs of the cost model."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

import math

import gossipjax as gx
from bad_input.rows import Call, calls
from gossipjax import cost_model as cm

SCHEDULE = gx.topology.one_peer_exponential(8)
NETWORK = cm.Network(1e9)


AVERAGE = gx.allreduce()


def predict(nodes: object) -> object:
    method = cm.from_transform(gx.sgp(SCHEDULE), "sgp")
    return cm.predict_step(method, cm.Workload(), NETWORK, nodes)


ROWS: list[Call] = []
for name, function, values, message in (
    ("bandwidth", cm.Network, [0, math.nan, "10gbit"], "bandwidth of Network"),
    ("latency", lambda x: cm.Network(1e9, x), [-1], "latency of Network"),
    ("seconds", lambda x: cm.Workload(compute_seconds=x), [-1], "compute_seconds"),
    ("nodes of another schedule", predict, [4, 9], "of the schedule"),
    ("kind", lambda x: cm.from_transform(AVERAGE, "", x), ["star"], "kind of an exchange"),
    ("awaits", lambda x: cm.from_transform(AVERAGE, "", awaits=x), ["all", "nobody"], "awaits of"),
    ("schedule", cm.Exchange, ["ring"], "schedule of an exchange"),
    ("outer steps", lambda x: cm.Exchange(None, every=x), [0], "every of an exchange"),
    ("name of slowness", cm.parse_slowness, ["0x", "2"], "slowness must"),
):
    ROWS += calls(name, function, values, message)
