"""Bad inputs of algorithms: factories, updates of another form, states of another algorithm."""

# The types are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax

import gossipjax as gx
from bad_input.rows import Call, calls

RING = gx.topology.ring(4)
PARAMS = {"a": jnp.ones((4, 2)), "b": jnp.ones((4, 3))}
FACTORIES: dict[str, Callable[..., Any]] = {
    "sgp": gx.sgp,
    "osgp": gx.osgp,
    "dpsgd": gx.dpsgd,
    "adpsgd": gx.adpsgd,
    "gradient_tracking": gx.gradient_tracking,
    "quasi_global": partial(gx.quasi_global, rate=0.1),
    "quasi_global_adam": partial(gx.quasi_global_adam, rate=0.1),
    "mixed_momentum": partial(gx.mixed_momentum, rate=0.1),
}
INT8 = gx.wire.int8()
SPARSE = {"top_k": gx.wire.top_k(0.1), "random_k": gx.wire.random_k(0.1)}
TRANSFORMS = {
    "sgp": gx.sgp(RING),
    "osgp": gx.osgp(RING),
    "dpsgd": gx.dpsgd(RING),
    "adpsgd": gx.adpsgd(RING),
    "easgd": gx.easgd(0.1),
    "gradient_tracking": gx.gradient_tracking(RING),
    "d2": gx.d2(gx.topology.complete(4)),
    "quasi_global": gx.quasi_global(RING, 0.1),
    "quasi_global_adam": gx.quasi_global_adam(RING, 0.1),
    "mixed_momentum": gx.mixed_momentum(RING, 0.1),
    "relay": gx.relay(nx.path_graph(4)),
    "outer": gx.outer(gx.sgp(RING), optax.sgd(0.7), 4),
    "choco": gx.choco(RING, SPARSE["top_k"], 0.1),
    "deepsqueeze": gx.deepsqueeze(RING, SPARSE["top_k"], 0.1),
    "sgp, int8": gx.sgp(RING, wire=INT8),
}


def identity(tree: Any) -> Any:
    return tree


def update(
    tx: Any,
    updates: Callable[[Any], Any] = identity,
    state_of: Any = None,
    params: Callable[[Any], Any] = identity,
    step: Any = 0,
) -> Any:
    """An update of four nodes, with updates, state or parameters of another form."""

    def run(tree: Any) -> Any:
        state = (tx if state_of is None else state_of).init(tree)
        return tx.update(updates(tree), state, params(tree), step=step)

    return jax.vmap(run, axis_name="nodes")(PARAMS)


def update_with_state(tx: Any, state: Any) -> Any:
    return jax.vmap(lambda x: tx.update(x, state, x, step=0), axis_name="nodes")(PARAMS)


def without(tree: Any) -> Any:
    return {"a": tree["a"]}


def reshaped(tree: Any) -> Any:
    return {"a": tree["a"], "b": tree["b"][:1]}


ROWS: list[Call] = []
for name, factory in FACTORIES.items():
    ROWS += calls(
        f"{name} schedule", factory, [None, "ring", np.eye(4), 4], "must be a gx.Schedule"
    )
    ROWS += calls(
        f"{name} wire",
        lambda wire, factory=factory: factory(RING, wire=wire),
        ["int8", "x", jnp.int32, 8, gx.wire.int8],
        "wire must be a codec, such as gx.wire.int8(), or a floating-point type",
    )
    ROWS += calls(
        f"{name} sparse wire",
        lambda wire, factory=factory: factory(RING, wire=wire),
        list(SPARSE.values()),
        "Use gx.choco(schedule, codec, gamma)",
    )
ROWS += calls("int8 block", gx.wire.int8, [0, -1, 3, 255, 2.0, True, None, "256"], "power of two")
ROWS += calls("int4 block", gx.wire.int4, [0, 100], "block of int4 must be a power of two")
ROWS += calls("int8 seed", lambda s: gx.wire.int8(seed=s), [-1, 2**32, 1.5, None], "seed of int8")
for name, make in {"top_k": gx.wire.top_k, "random_k": gx.wire.random_k}.items():
    ROWS += calls(
        f"{name} fraction",
        make,
        [0, -0.1, 1.1, float("nan"), "0.1", None, True],
        f"fraction of {name} must be a number above 0 and at most 1",
    )
ROWS += calls(
    "random_k seed", lambda s: gx.wire.random_k(0.1, s), [-1, 2**32, "x"], "seed of random_k"
)
for name in ("choco", "deepsqueeze"):
    factory = getattr(gx, name)
    ROWS += calls(
        f"{name} codec",
        lambda codec, factory=factory: factory(RING, codec, 0.1),
        [None, "top_k", jnp.int8, gx.wire.int8],
        f"the codec of {name} must be a codec",
    )
    ROWS += calls(
        f"{name} gamma",
        lambda gamma, factory=factory: factory(RING, INT8, gamma),
        [0, -0.1, 1.1, float("nan"), "1", None, True],
        f"gamma of {name}",
    )
    ROWS += calls(
        f"{name} schedule",
        lambda schedule, factory=factory: factory(schedule, INT8, 0.1),
        [gx.topology.star(4), gx.topology.random_peer(4, 3, seed=0)],
        "doubly stochastic",
    )
ROWS += calls(
    "choco rounds",
    lambda schedule: gx.choco(schedule, INT8, 0.1),
    [
        gx.topology.one_peer_exponential(4),
        gx.topology.piecewise({0: RING, 3: gx.topology.complete(4)}),
    ],
    "must be a static graph",
)
ROWS += calls("osgp overlap", lambda k: gx.osgp(RING, k), [-1, 1.5, None, True, "1"], "overlap")
ROWS += calls("sgp order", lambda order: gx.sgp(RING, order), ["adapt", None, 1], "order")
ROWS += calls("dpsgd order", lambda order: gx.dpsgd(RING, order), ["combine", None], "order")
ROWS += calls("dpsgd star", lambda s: gx.dpsgd(s), [gx.topology.star(4)], "doubly stochastic")
ROWS += calls("adpsgd star", lambda s: gx.adpsgd(s), [gx.topology.star(4)], "doubly stochastic")
ROWS += calls(
    "adpsgd delays",
    lambda delays: gx.adpsgd(RING, delays),
    [-1, 1.5, None, "1", [1, 2, 3], [[1, -1, 0, 0]], np.ones((2, 3), int), 10**7, 2**40],
    "delays",
)
ROWS += calls("d1d_psgd", gx.d1d_psgd, [0, -1, 2.5, None], "must be an integer")
SGD = optax.sgd(0.1)
ROWS += calls("outer inner", lambda tx: gx.outer(tx, SGD, 4), [None, "sgd", 1], "inner of outer")
ROWS += calls("outer outer_tx", lambda tx: gx.outer(SGD, tx, 4), [None, 0.7], "outer_tx of outer")
ROWS += calls("outer every", lambda k: gx.outer(SGD, SGD, k), [0, -1, 1.5, None, True], "every of")
ROWS += calls(
    "outer average",
    lambda average: gx.outer(SGD, SGD, 4, average),
    ["mean", None, 1, np.eye(4), gx.topology.star(4)],
    "must be",
)
ROWS += calls(
    "outer fragments", lambda p: gx.outer(SGD, SGD, 4, fragments=p), [0, 1.5, 5], "fragments of"
)
ROWS += calls("outer delay", lambda k: gx.outer(SGD, SGD, 4, delay=k), [-1, 4, 1.5], "delay of")
ROWS += calls(
    "outer mix", lambda mix: gx.outer(SGD, SGD, 4, mix=mix), [-0.1, 1.0, "x", None], "mix of"
)
ROWS += calls(
    "outer pull", lambda pull: gx.outer(SGD, SGD, 4, RING, pull=pull), [-1.0, None, "1"], "pull of"
)
ROWS += calls("outer pull alone", lambda pull: gx.outer(SGD, SGD, 4, pull=pull), [0, 2.0], "pull")
ROWS += calls("outer wire", lambda d: gx.outer(SGD, SGD, 4, wire=d), ["int8", 16], "wire must be")
ROWS += calls(
    "outer wire of nothing",
    lambda codec: gx.outer(SGD, SGD, 4, "none", wire=codec),
    [gx.wire.int4()],
    "wire of outer must be None",
)
ROWS += calls(
    "outer reset_inner", lambda reset: gx.outer(SGD, SGD, 4, reset_inner=reset), [1, None], "reset"
)
ROWS += calls(
    "outer reset of fragments",
    lambda p: gx.outer(SGD, SGD, 4, fragments=p, reset_inner=True),
    [2],
    "reset_inner of outer must be False",
)
ROWS += calls(
    "outer leaves",
    lambda p: gx.outer(SGD, SGD, 4, fragments=p).init(PARAMS),
    [3, 4],
    "at most the number of leaves, 2",
)
ROWS += calls(
    "outer optimizer of another kind",
    lambda tx: gx.outer(SGD, tx, 4).init(PARAMS),
    [
        optax.lbfgs(),
        optax.polyak_sgd(),
        gx.allreduce(),
        optax.contrib.sam(SGD, SGD, opaque_mode=True),
    ],
    "outer_tx of outer must make its update of the outer gradient",
)
ROWS += calls(
    "outer optimizer that gossips",
    lambda tx: gx.outer(SGD, tx, 4).init(PARAMS),
    [gx.sgp(RING), optax.chain(SGD, gx.dpsgd(RING))],
    "outer_tx of outer must exchange nothing",
)
ROWS += calls(
    "outer around",
    lambda tx: gx.outer(tx, SGD, 4).init(PARAMS),
    [
        gx.easgd(0.1),
        gx.adpsgd(RING, 2),
        gx.outer(SGD, SGD, 2),
        optax.masked(gx.sgp(RING), {"a": True, "b": False}),
    ],
    "inner of outer must hold no",
)
ROWS += calls(
    "outer parts around osgp",
    lambda fields: gx.outer(gx.osgp(RING), SGD, 4, **fields).init(PARAMS),
    [{"fragments": 2}, {"mix": 0.5}],
    "around gx.osgp",
)
ROWS += calls("easgd alpha", gx.easgd, [-0.1, 0, 2.0, float("nan"), "x", None], "alpha")
ROWS += calls("easgd period", lambda p: gx.easgd(0.1, p), [0, 1.5, None], "period")
ROWS += calls("d2 schedule", gx.d2, [None, "ring", np.eye(4), 4], "must be a gx.Schedule")
ROWS += calls("d2 star", gx.d2, [gx.topology.star(4)], "doubly stochastic")
ROWS += calls("d2 rounds", gx.d2, [gx.topology.one_peer_exponential(4)], "must be static")
ROWS += calls("d2 directed", gx.d2, [gx.topology.directed_ring(4)], "must be symmetric")
ROWS += calls(
    "d2 eigenvalues", gx.d2, [RING, gx.topology.ring(16)], "got -0.333333. Use (W + I) / 2"
)
for name in ("quasi_global", "quasi_global_adam", "mixed_momentum"):
    ROWS += calls(
        f"{name} star", FACTORIES[name], [gx.topology.star(4)], "must be doubly stochastic"
    )
    ROWS += calls(
        f"{name} rate",
        lambda rate, name=name: getattr(gx, name)(RING, rate),
        [None, "0.1", 0, -1.0, float("nan"), jnp.ones(2)],
        "must be a positive number",
    )
ROWS += calls(
    "quasi_global momentum", lambda b: gx.quasi_global(RING, 0.1, b), [1.0, -1, None], "momentum"
)
ROWS += calls("quasi_global mu", lambda mu: gx.quasi_global(RING, 0.1, mu=mu), [1, None], "mu of")
ROWS += calls(
    "quasi_global_adam gradient_weight",
    lambda weight: gx.quasi_global_adam(RING, 0.1, gradient_weight=weight),
    [0, -1.0, "1", float("nan")],
    "gradient_weight of quasi_global_adam must be a positive number",
)
ROWS += calls(
    "relay missing",
    lambda missing: gx.relay(nx.path_graph(3), missing=missing),
    [None, "x0", 0],
    "missing of relay must be 'own' or 'initial'",
)
ROWS += calls(
    "choco copies",
    lambda copies: gx.choco(RING, INT8, 0.1, copies=copies),
    [None, "new", True],
    "copies of choco must be 'updated' or 'previous'",
)
ROWS += calls(
    "outer average that diverges",
    lambda schedule: gx.outer(SGD, optax.sgd(0.7, momentum=0.9), 4, schedule),
    [gx.topology.directed_ring(16), gx.topology.one_peer_exponential(16)],
    "outer must be stable",
)
ROWS += calls(
    "quasi_global that diverges",
    lambda schedule: gx.quasi_global(schedule, 0.1),
    [gx.topology.directed_ring(16)],
    "quasi_global must be stable",
)
ROWS += calls("relay graph", gx.relay, [None, 4, np.eye(4), RING], "must be a networkx graph")
ROWS += calls("relay directed", gx.relay, [nx.DiGraph(nx.path_graph(3))], "must be undirected")
ROWS += calls("relay no node", gx.relay, [nx.Graph()], "at least one node")
ROWS += calls("relay cycle", gx.relay, [nx.cycle_graph(3)], "no cycle, got 1 - 0 - 2 - 1")
ROWS += calls(
    "relay cycle behind a chain",
    gx.relay,
    [nx.Graph([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 2)])],
    "no cycle, got 4 - 3 - 2 - 5 - 4",
)
ROWS += calls("relay loop", gx.relay, [nx.Graph([(0, 1), (1, 1)])], "no cycle, got 1 - 1")
ROWS += calls("relay pair", gx.relay, [nx.MultiGraph([(0, 1), (1, 0)])], "no cycle, got")
ROWS += calls(
    "relay parts",
    gx.relay,
    [nx.Graph([(0, 1), (2, 3)])],
    "must be connected, got 2 parts, [0, 1] and [2, 3]",
)
ROWS += calls(
    "relay labels",
    gx.relay,
    [nx.path_graph("abc")],
    "must be 0, ..., 2, got",
)
ROWS += calls("allreduce wire", lambda w: gx.allreduce(wire=w), ["int8", 8], "wire must be")
ROWS += calls("delays n", lambda n: gx.random_delays(n, 3, 0), [0, 1.5, None], "must be an integer")
ROWS += calls("delays rounds", lambda r: gx.random_delays(4, r, 0), [0, 2.5, 10**12], "rounds")
ROWS += calls("delays seed", lambda s: gx.random_delays(4, 3, s), [-1, None], "seed")
ROWS += calls(
    "delays mean",
    lambda m: gx.random_delays(4, 3, 0, m),
    [-1.0, float("nan"), float("inf"), "x", 1e300],
    "mean_delay",
)
ROWS += calls(
    "delays max", lambda m: gx.random_delays(4, 3, 0, 1.0, m), [-1, 1.5, 10**30], "max_delay"
)
for name, tx in TRANSFORMS.items():
    other = TRANSFORMS["dpsgd" if name != "dpsgd" else "osgp"]
    ROWS += [
        Call(
            f"{name} updates of another structure",
            lambda tx=tx: update(tx, without),
            "must have the structure",
        ),
        Call(
            f"{name} updates of another shape", lambda tx=tx: update(tx, reshaped), "must be like"
        ),
        Call(f"{name} no params", lambda tx=tx: update(tx, params=lambda _: None), "must"),
        Call(f"{name} step", lambda tx=tx: update(tx, step=1.5), "step must be an integer"),
        Call(
            f"{name} state of another algorithm",
            lambda tx=tx, other=other: update(tx, state_of=other),
            "must",
        ),
        Call(f"{name} no state", lambda tx=tx: update_with_state(tx, None), "state"),
        Call(
            f"{name} empty state", lambda tx=tx: update_with_state(tx, optax.EmptyState()), "state"
        ),
        Call(
            f"{name} integers",
            lambda tx=tx: jax.vmap(tx.init, axis_name="nodes")({"a": jnp.ones((4, 2), int)}),
            "floating-point",
        ),
        Call(
            f"{name} outside of an axis",
            lambda tx=tx: tx.update(PARAMS, tx.init(PARAMS), PARAMS, step=0),
            "must",
        ),
    ]


ROWS += [
    Call(
        f"outer state of another {name}",
        lambda other=other: update(TRANSFORMS["outer"], state_of=other),
        f"have been made with its {name}",
    )
    for name, other in {
        "every": gx.outer(gx.sgp(RING), optax.sgd(0.7), 5),
        "average": gx.outer(gx.sgp(RING), optax.sgd(0.7), 4, "none"),
        "delay": gx.outer(gx.sgp(RING), optax.sgd(0.7), 4, delay=1),
        "wire": gx.outer(gx.sgp(RING), optax.sgd(0.7), 4, wire="bfloat16"),
        "outer_tx": gx.outer(gx.sgp(RING), optax.sgd(0.7, momentum=0.9), 4),
    }.items()
]


def on_nodes(function: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: jax.vmap(function, axis_name="nodes")(PARAMS)


def mixed(**changes: Any) -> Callable[[], Any]:
    arguments = {"weight": 1.0, "schedule": RING, "step": 0} | changes
    return on_nodes(lambda x: gx.mix(x, **arguments))


ROWS += [
    Call("mix schedule", mixed(schedule=None), "gx.Schedule"),
    Call("mix size", mixed(schedule=gx.topology.ring(3)), "must"),
    Call("mix step", mixed(step=None), "step must be an integer"),
    Call("mix step of floats", mixed(step=0.5), "step must be an integer"),
    Call("mix axis", mixed(axis_name="servers"), "servers"),
    Call("mix wire", mixed(wire="int8"), "wire must be"),
    Call("mix a sparse wire", mixed(wire=SPARSE["top_k"]), "gx.choco"),
    Call("mix without a key", mixed(wire=INT8), "key must be a PRNG key for int8(block=256)"),
    Call("mix a number as key", mixed(wire=INT8, key=3), "key must be one PRNG key"),
    Call("mix several keys", mixed(wire=INT8, key=jax.random.split(jax.random.key(0))), "one PRNG"),
    Call("encode without a key", lambda: INT8.encode(jnp.ones(9)), "key must be a PRNG key"),
    Call("mix weight of nodes", mixed(weight=jnp.ones(4)), "weight"),
    Call("mix text as weight", mixed(weight="one"), "weight"),
    Call("mix a function as weight", mixed(weight=jnp.ones), "weight"),
    Call("mix a complex weight", mixed(weight=1j), "weight"),
    Call("mix integers", on_nodes(lambda x: gx.mix(3, 1.0, RING, 0)), "floating-point"),
    Call("exchange without a state", on_nodes(lambda x: gx.exchange(None, 0)), "must"),
    Call("canonical_step", lambda: gx.canonical_step(TRANSFORMS["sgp"].init(PARAMS), 1.5), "step"),
    Call("gossip_state of nothing", lambda: gx.gossip_state(None), "opt_state must"),
    Call("two gossips", lambda: gx.gossip_state((TRANSFORMS["sgp"].init(PARAMS),) * 2), "must"),
]
