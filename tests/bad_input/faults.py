"""Bad inputs of gx.faults."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx
from bad_input.rows import Call

F = gx.faults
N = 4
RING = gx.topology.ring(N)
ONE_PEER = gx.topology.one_peer_exponential(N)
CYCLIC = F.cyclic_activity(N, 2, 1)
PLAIN = F.Faults(N)
SLEEPY = F.Faults(N, active=CYCLIC)
OTHERS = F.Faults(N, active=~CYCLIC | CYCLIC[::-1])
LATE = F.Faults(N, delays=1)
SGD = optax.sgd(0.1)


def init(gossip: Any, faults: F.Faults = SLEEPY) -> Any:
    chain = F.inactive(optax.chain(SGD, gossip), faults)
    return jax.eval_shape(jax.vmap(chain.init, axis_name="nodes"), jnp.ones((N, 3)))


def update_three_nodes() -> Any:
    tx = F.inactive(SGD, PLAIN)
    update = jax.vmap(lambda x: tx.update(x, tx.init(x), x), axis_name="nodes")
    return jax.eval_shape(update, jnp.ones((3, 3)))


CALLS: list[Call] = [
    (lambda: F.independent_drops(N, 9, 0, 10), "rate of independent_drops"),  # of percent
    (lambda: F.Faults(N, arrives=CYCLIC), "arrives of Faults"),
    (lambda: F.Faults(N, arrives=np.ones((2, N, N))), "arrives of Faults"),
    (lambda: F.Faults(N, active=CYCLIC[:, :2]), "active of"),
    (lambda: F.Faults(N, delays=CYCLIC.astype(int)), "delays of Faults"),
    (lambda: F.Faults(N, deaths={4: 1}), "death"),
    (lambda: F.apply(RING, F.Faults(3)), "faults of apply"),
    (lambda: F.apply(RING, LATE), "no delays"),
    (lambda: F.apply(RING, F.Faults(N, noise=1)), "no delays"),
    (lambda: F.apply(RING, PLAIN, keep="receiver"), "keep of apply"),
    (lambda: F.apply(ONE_PEER, PLAIN, keep="both"), "symmetric"),
    (
        lambda: F.apply(RING, F.Faults(N, arrives=np.zeros((2, N, N), bool))),
        "must connect all",
    ),
    (lambda: F.dpsgd(gx.topology.star(N), PLAIN), "doubly stochastic"),
    (lambda: F.dpsgd(ONE_PEER, LATE), "one round"),
    (lambda: init(gx.easgd(0.1)), "by a schedule"),
    (lambda: init(gx.sgp(RING)), "gx.faults.apply"),
    (lambda: init(gx.osgp(F.apply(RING, SLEEPY))), "overlap=1"),
    (lambda: init(gx.outer(SGD, SGD, 2)), "without gx.outer"),
    (lambda: init(gx.sgp(F.apply(RING, SLEEPY)), OTHERS), "must exchange nothing"),
    (update_three_nodes, "must have as many nodes as the faults"),
    (
        lambda: F.account(jnp.ones(3), gx.sgp(RING).init(jnp.ones(3))),
        "opt_state of gx.faults.account",
    ),
]
