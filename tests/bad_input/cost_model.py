"""Bad inputs of the cost model."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

import gossipjax as gx
from bad_input.rows import Call
from gossipjax import cost_model as cm

SGP = cm.from_transform(gx.sgp(gx.topology.one_peer_exponential(8)), "sgp")
AVERAGE = gx.allreduce()
SITUATION = (cm.Workload(), cm.Network(1e9))
CALLS: list[Call] = [
    (lambda: cm.predict_step(SGP, *SITUATION, 9), "of the schedule"),
    (lambda: cm.simulate(SGP, *SITUATION, 4), "of the schedule"),
    (lambda: cm.simulate(SGP, *SITUATION, 8, [1.0, 2.0]), "factors of slowness"),
    (lambda: cm.from_transform(AVERAGE, "", "star"), "kind of an exchange"),
    (lambda: cm.from_transform(AVERAGE, "", awaits="all"), "awaits of"),
    (lambda: cm.from_transform(AVERAGE, "", awaits="nobody"), "must be 'peers'"),
    (lambda: cm.from_transform(gx.allreduce(wire=gx.wire.low_rank(1)), ""), "params must be given"),
    (lambda: cm.Slowness("slow"), "kind of Slowness"),
    (lambda: cm.Slowness("random", 4.0), "factor of Slowness must be left out"),
    (lambda: cm.parse_slowness("0x"), "slowness must"),
    (lambda: cm.parse_slowness("2"), "slowness must"),
]
