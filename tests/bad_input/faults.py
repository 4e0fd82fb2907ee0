"""Bad inputs of gx.faults."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

from functools import partial
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

DRAWS = {
    "independent_drops": partial(F.independent_drops, rate=0.1),
    "gilbert_elliott": partial(F.gilbert_elliott, rate=0.1),
    "markov_activity": F.markov_activity,
    "poisson_activity": F.poisson_activity,
    "uniform_delays": partial(F.uniform_delays, max_delay=1),
}


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
for name, draw in DRAWS.items():
    ROWS += calls(f"{name} n", lambda n, draw=draw: draw(n, 5, 0), [0, 1.5], f"n of {name}")
    ROWS += calls(f"{name} steps", lambda t, draw=draw: draw(N, t, 0), [0, 2**28], name)
    ROWS += calls(f"{name} seed", lambda s, draw=draw: draw(N, 5, s), [-1, None], f"seed of {name}")
for name, function, values, message in (
    ("rate of drops", lambda r: F.independent_drops(N, 5, 0, r), [-0.1, 1.1, NAN, "1"], "rate of"),
    ("rate of bursts", lambda r: F.gilbert_elliott(N, 5, 0, r), [2], "rate of gilbert_elliott"),
    ("bad_to_good", lambda r: F.gilbert_elliott(N, 5, 0, 0.1, r), [-1], "bad_to_good"),
    ("good_to_bad", lambda r: F.gilbert_elliott(N, 5, 0, 0.1, 0.1, r), [NAN], "good_to_bad"),
    ("wake", lambda r: F.markov_activity(N, 5, 0, r), [1.5], "wake of"),
    ("sleep", lambda r: F.markov_activity(N, 5, 0, 0.5, r), [True], "sleep of"),
    ("mean", lambda m: F.poisson_activity(N, 5, 0, m), [-1, NAN], "mean of"),
    ("on", lambda k: F.cyclic_activity(N, k, 1), [0], "on of"),
    ("off", lambda k: F.cyclic_activity(N, 1, k), [-1], "off of"),
    ("offsets", lambda k: F.cyclic_activity(N, 1, 1, k), [[0], [0, 1, 2, -1]], "offsets"),
    ("max_delay", lambda d: F.uniform_delays(N, 5, 0, d), [-1, 2**11], "max_delay of"),
    ("size", F.Faults, [0, 2.0], "size of Faults"),
    ("arrives", with_faults("arrives"), [CYCLIC, np.ones((2, N, N)), True], "arrives of Faults"),
    ("active", with_faults("active"), [CYCLIC[:, :2], [[1, 0], [1]], CYCLIC[:0]], "active of"),
    ("delays", with_faults("delays"), [-1, 2**11, 1.0, CYCLIC.astype(int)], "delays of Faults"),
    ("noise", with_faults("noise"), [-1, NAN, True], "noise of Faults"),
    ("seed of faults", with_faults("seed"), [-1, 2**32], "seed of Faults"),
    ("deaths", with_faults("deaths"), [[1], {4: 1}, {0: -1}], "death"),
    ("all die", with_faults("deaths"), [dict.fromkeys(range(N), 3)], "must leave a node"),
    ("apply schedule", lambda s: F.apply(s, PLAIN), [np.eye(N)], "schedule of apply"),
    ("apply faults", lambda f: F.apply(RING, f), [None, F.Faults(3)], "faults of apply"),
    ("apply late", lambda f: F.apply(RING, f), [LATE, F.Faults(N, noise=1)], "no delays"),
    ("apply keep", lambda k: F.apply(RING, PLAIN, k), ["receiver", None], "keep of apply"),
    ("apply both", lambda s: F.apply(s, PLAIN, "both"), [ONE_PEER], "symmetric"),
    ("apply overlap", lambda k: F.apply(RING, PLAIN, overlap=k), [-1], "overlap of apply"),
    ("noise std", F.noise, [-1, NAN, None], "std of noise"),
    ("noise seed", lambda s: F.noise(0.1, s), [-1], "seed of noise"),
    ("sgp schedule", lambda s: F.sgp(s, PLAIN), [np.eye(N)], "must be a gx.Schedule"),
    ("sgp faults", lambda f: F.sgp(RING, f), [0.1, F.Faults(3)], "faults of gx.faults.sgp"),
    ("sgp running_sums", lambda r: F.sgp(RING, PLAIN, r), [1, "lossy"], "running_sums"),
    ("dpsgd schedule", lambda s: F.dpsgd(s, PLAIN), [gx.topology.star(N)], "doubly stochastic"),
    ("dpsgd late", lambda s: F.dpsgd(s, LATE), [ONE_PEER], "one round"),
    ("inactive inner", lambda tx: F.inactive(tx, PLAIN), [None], "inner of inactive"),
    ("inactive faults", lambda f: F.inactive(SGD, f), [CYCLIC], "faults of inactive"),
    ("inactive all at once", init, [gx.easgd(0.1)], "by a schedule"),
    ("inactive average of all", init, [gx.d1d_psgd(N)], "must exchange nothing"),
    (
        "inactive schedule",
        init,
        [gx.sgp(RING), gx.dpsgd(gx.topology.complete(N))],
        "gx.faults.apply",
    ),
    ("inactive overlap", init, [gx.osgp(F.apply(RING, SLEEPY))], "overlap=1"),
    ("inactive outer", init, [gx.outer(SGD, SGD, 2)], "without gx.outer"),
    ("inactive nodes", update, [SLEEPY], "as many nodes as the faults"),
):
    ROWS += calls(name, function, values, message)
ROWS += [
    Call(
        "apply, too many rounds",
        lambda: F.apply(RING, F.Faults(N, np.ones((509, N, N), bool), np.ones((503, N), bool))),
        "65536",
    ),
    Call(
        "apply, nothing arrives",
        lambda: F.apply(RING, F.Faults(N, np.zeros((2, N, N), bool))),
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
