"""Bad inputs of gx.faults."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx
from bad_input.rows import Call, calls

F = gx.faults
NAN = float("nan")
N = 4
RING = gx.topology.ring(N)
ONE_PEER = gx.topology.one_peer_exponential(N)
CYCLIC = F.cyclic_activity(N, 2, 1)
PLAIN = F.Faults(N)
SLEEPY = F.Faults(N, active=CYCLIC)
LATE = F.Faults(N, delays=1)
SGD = optax.sgd(0.1)


def with_faults(field: str) -> Any:
    return lambda value: F.Faults(N, **{field: value})


def init(gossip: Any, faults: F.Faults = SLEEPY) -> Any:
    chain = F.inactive(optax.chain(SGD, gossip), faults)
    return jax.eval_shape(jax.vmap(chain.init, axis_name="nodes"), jnp.ones((N, 3)))


def update(faults: F.Faults) -> Any:
    """On three nodes."""
    tx = F.inactive(SGD, faults)
    return jax.eval_shape(
        jax.vmap(lambda x: tx.update(x, tx.init(x), x), axis_name="nodes"), jnp.ones((3, 3))
    )


ROWS: list[Call] = []
for name, function, values, message in (
    ("arrives", with_faults("arrives"), [CYCLIC, np.ones((2, N, N))], "arrives of Faults"),
    ("active", with_faults("active"), [CYCLIC[:, :2]], "active of"),
    ("delays", with_faults("delays"), [-1, 2**11, CYCLIC.astype(int)], "delays of Faults"),
    ("noise", with_faults("noise"), [-1, NAN], "noise of Faults"),
    ("deaths", with_faults("deaths"), [{4: 1}], "death"),
    ("all die", with_faults("deaths"), [dict.fromkeys(range(N), 3)], "must leave a node"),
    ("apply faults", lambda f: F.apply(RING, f), [F.Faults(3)], "faults of apply"),
    ("apply late", lambda f: F.apply(RING, f), [LATE, F.Faults(N, noise=1)], "no delays"),
    ("apply keep", lambda k: F.apply(RING, PLAIN, keep=k), ["receiver"], "keep of apply"),
    ("apply both", lambda s: F.apply(s, PLAIN, keep="both"), [ONE_PEER], "symmetric"),
    ("dpsgd schedule", lambda s: F.dpsgd(s, PLAIN), [gx.topology.star(N)], "doubly stochastic"),
    ("dpsgd late", lambda s: F.dpsgd(s, LATE), [ONE_PEER], "one round"),
    ("inactive all at once", init, [gx.easgd(0.1)], "by a schedule"),
    (
        "inactive schedule",
        init,
        [gx.sgp(RING), gx.dpsgd(gx.topology.complete(N))],
        "gx.faults.apply",
    ),
    ("inactive overlap", init, [gx.osgp(F.apply(RING, SLEEPY))], "overlap=1"),
    ("inactive outer", init, [gx.outer(SGD, SGD, 2)], "without gx.outer"),
):
    ROWS += calls(name, function, values, message)
ROWS += [
    Call(
        "apply, nothing arrives",
        lambda: F.apply(RING, F.Faults(N, arrives=np.zeros((2, N, N), bool))),
        "must connect all",
    ),
    Call(
        "account of another",
        lambda: F.account(jnp.ones(3), gx.sgp(RING).init(jnp.ones(3))),
        "opt_state of gx.faults.account",
    ),
    Call(
        "schedule of other faults",
        lambda: init(gx.sgp(F.apply(RING, SLEEPY)), F.Faults(N, active=~CYCLIC | CYCLIC[::-1])),
        "must exchange nothing",
    ),
]
