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
from jax.sharding import PartitionSpec as P

import gossipjax as gx
from bad_input.rows import Call, calls

RING = gx.topology.ring(4)
STAR = gx.topology.star(4)
ONE_PEER = gx.topology.one_peer_exponential(4)
DIRECTED = gx.topology.directed_ring(16)
NAN = float("nan")
PARAMS = {"a": jnp.ones((4, 2)), "b": jnp.ones((4, 3))}
SGD = optax.sgd(0.1)
MOMENTUM = optax.sgd(0.7, momentum=0.9)
INT8 = gx.wire.int8()
TOP_K = gx.wire.top_k(0.1)
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
TRANSFORMS = {
    **{name: factory(RING) for name, factory in FACTORIES.items()},
    "easgd": gx.easgd(0.1),
    "d2": gx.d2(gx.topology.complete(4)),
    "relay": gx.relay(nx.path_graph(4)),
    "outer": gx.outer(gx.sgp(RING), optax.sgd(0.7), 4),
    "choco": gx.choco(RING, TOP_K, 0.1),
    "deepsqueeze": gx.deepsqueeze(RING, TOP_K, 0.1),
    "sgp, int8": gx.sgp(RING, wire=INT8),
}


def identity(tree: Any) -> Any:
    return tree


def on_nodes(function: Callable[[Any], Any], nodes: int = 4) -> Any:
    """Traces a per-node function of parameters."""
    params = jax.tree.map(lambda x: x[:nodes], PARAMS)
    return jax.eval_shape(jax.vmap(function, axis_name="nodes"), params)


def update(
    tx: Any,
    updates: Callable[[Any], Any] = identity,
    state_of: Any = None,
    params: Callable[[Any], Any] = identity,
    step: Any = 0,
    nodes: int = 4,
) -> Any:
    """An update, with updates, state or parameters of another form."""

    def run(tree: Any) -> Any:
        state = (tx if state_of is None else state_of).init(tree)
        return tx.update(updates(tree), state, params(tree), step=step)

    return on_nodes(run, nodes)


def without(tree: Any) -> Any:
    return {"a": tree["a"]}


def reshaped(tree: Any) -> Any:
    return {"a": tree["a"], "b": tree["b"][:1]}


def outer(argument: str) -> Callable[[Any], Any]:
    return lambda value: gx.outer(SGD, SGD, **{"every": 4, argument: value})


ROWS: list[Call] = []
for name, factory in FACTORIES.items():
    for argument, value, message in (
        ("wire", "int8", "wire must be a codec, such as gx.wire.int8(), or a floating-point type"),
        ("wire", TOP_K, "Use gx.choco(schedule, codec, gamma)"),
        ("axis_name", ("nodes",), "axis_name"),
        ("local_axis_name", "nodes", "local_axis_name"),
    ):
        ROWS += calls(
            f"{name} {argument}",
            lambda value, make=factory, argument=argument: make(RING, **{argument: value}),
            [value],
            message,
        )
    ROWS += calls(f"{name} schedule", factory, ["ring", np.eye(4)], "must be a gx.Schedule")

for name in ("dpsgd", "adpsgd", "quasi_global", "quasi_global_adam", "mixed_momentum"):
    ROWS += calls(f"{name} star", FACTORIES[name], [STAR], "doubly stochastic")
for name in ("choco", "deepsqueeze"):
    compress = getattr(gx, name)
    ROWS += calls(
        f"{name} codec",
        lambda codec, make=compress: make(RING, codec, 0.1),
        [None, "top_k", gx.wire.int8],
        f"the codec of {name} must be a codec",
    )
    ROWS += calls(
        f"{name} gamma",
        lambda gamma, make=compress: make(RING, INT8, gamma),
        [0, 1.1, NAN, "1"],
        f"gamma of {name}",
    )
    ROWS += calls(
        f"{name} schedule", lambda s, make=compress: make(s, INT8, 0.1), [STAR], "doubly stochastic"
    )
for name in ("quasi_global", "quasi_global_adam", "mixed_momentum"):
    ROWS += calls(
        f"{name} rate",
        lambda rate, name=name: getattr(gx, name)(RING, rate),
        [None, "0.1", 0, NAN, jnp.ones(2)],
        "must be a number above 0",
    )
for name, make in {"top_k": gx.wire.top_k, "random_k": gx.wire.random_k}.items():
    ROWS += calls(
        f"{name} fraction",
        make,
        [0, 1.1, NAN, "0.1"],
        f"fraction of {name} must be a number above 0 and at most 1",
    )

GRAPHS_WITH_CYCLES = {
    "cycle": nx.cycle_graph(3),
    "cycle behind a chain": nx.Graph([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 2)]),
    "loop": nx.Graph([(0, 1), (1, 1)]),
    "pair": nx.MultiGraph([(0, 1), (1, 0)]),
}
for name, graph in GRAPHS_WITH_CYCLES.items():
    ROWS += calls(f"relay {name}", gx.relay, [graph], "tree must have no cycle")

for name, function, values, message in (
    ("int8 block", gx.wire.int8, [0, 3, 2.0, "256"], "power of two"),
    ("int4 block", gx.wire.int4, [100], "block of int4 must be a power of two"),
    ("int8 seed", lambda s: gx.wire.int8(seed=s), [-1, 1.5], "seed of int8"),
    ("random_k seed", lambda s: gx.wire.random_k(0.1, s), [2**32, "x"], "seed of random_k"),
    ("make_wire", lambda d: gx.wire.make_wire("nodes", None, d), ["x", int], "wire must be"),
    ("choco rounds", lambda s: gx.choco(s, INT8, 0.1), [ONE_PEER], "must be a static graph"),
    (
        "choco copies",
        lambda copies: gx.choco(RING, INT8, 0.1, copies=copies),
        ["new"],
        "copies of choco must be 'updated' or 'previous'",
    ),
    ("osgp overlap", lambda k: gx.osgp(RING, k), [-1, 1.5, None, "1"], "overlap of osgp"),
    ("sgp order", lambda order: gx.sgp(RING, order), ["adapt", None], "'adapt-then-combine'"),
    ("dpsgd order", lambda order: gx.dpsgd(RING, order), ["combine"], "'adapt-then-combine'"),
    (
        "dpsgd second round",
        gx.dpsgd,
        [gx.topology.from_matrices([np.full((2, 2), 0.5), [[0.5, 0.25], [0.5, 0.75]]])],
        "got a round 1 whose row 0 sums to 0.75. Use sgp",
    ),
    (
        "adpsgd delays",
        lambda delays: gx.adpsgd(RING, delays),
        [-1, 1.5, "1", [1, 2, 3], [[1, -1, 0, 0]], np.ones((2, 3), int), [[1], [1, 2]], 2**40],
        "delays",
    ),
    ("d1d_psgd", gx.d1d_psgd, [0, 2.5, None], "must be an integer >= 1"),
    ("easgd alpha", gx.easgd, [0, 1.0, NAN, "x", None], "alpha of easgd must be a number above 0"),
    ("easgd period", lambda p: gx.easgd(0.1, p), [0, 1.5], "period of easgd must be an integer"),
    ("d2 schedule", gx.d2, ["ring", np.eye(4)], "must be a gx.Schedule"),
    ("d2 star", gx.d2, [STAR], "doubly stochastic"),
    ("d2 rounds", gx.d2, [ONE_PEER], "must be static"),
    ("d2 directed", gx.d2, [gx.topology.directed_ring(4)], "must be symmetric"),
    ("d2 eigenvalues", gx.d2, [RING, gx.topology.ring(16)], "got -0.333333. Use (W + I) / 2"),
    ("quasi_global momentum", lambda b: gx.quasi_global(RING, 0.1, b), [1.0, -1], "momentum"),
    ("mixed_momentum", lambda b: gx.mixed_momentum(RING, 0.1, b), [1.0, "0.9"], "momentum"),
    ("quasi_global mu", lambda mu: gx.quasi_global(RING, 0.1, mu=mu), [1, NAN], "mu of"),
    ("quasi_global diverges", lambda s: gx.quasi_global(s, 0.1), [DIRECTED], "must be stable"),
    ("adam b1", lambda b: gx.quasi_global_adam(RING, 0.1, b1=b), [1.0, None], "b1"),
    ("adam b2", lambda b: gx.quasi_global_adam(RING, 0.1, b2=b), [-1], "b2"),
    ("adam eps", lambda e: gx.quasi_global_adam(RING, 0.1, eps=e), [0, float("inf")], "eps"),
    (
        "adam gradient_weight",
        lambda weight: gx.quasi_global_adam(RING, 0.1, gradient_weight=weight),
        [0, NAN],
        "gradient_weight of quasi_global_adam must be a number above 0",
    ),
    (
        "relay missing",
        lambda m: gx.relay(nx.path_graph(3), missing=m),
        ["x0"],
        "'own' or 'initial'",
    ),
    ("relay graph", gx.relay, [4, np.eye(4), RING], "must be a networkx graph"),
    ("relay directed", gx.relay, [nx.DiGraph(nx.path_graph(3))], "must be undirected"),
    ("relay no node", gx.relay, [nx.Graph()], "at least one node"),
    ("relay parts", gx.relay, [nx.Graph([(0, 1), (2, 3)])], "got no path from [0, 1] to [2, 3]"),
    ("relay labels", gx.relay, [nx.path_graph("abc")], "must be 0, ..., 2, got"),
    ("allreduce wire", lambda w: gx.allreduce(wire=w), ["int8", 8], "wire must be a codec"),
    ("delays n", lambda n: gx.random_delays(n, 3, 0), [0, 1.5], "must be an integer"),
    ("delays rounds", lambda r: gx.random_delays(4, r, 0), [0, 10**12], "rounds"),
    ("delays seed", lambda s: gx.random_delays(4, 3, s), [-1], "seed"),
    ("delays mean", lambda m: gx.random_delays(4, 3, 0, m), [-1.0, NAN, 1e300], "mean_delay"),
    ("delays max", lambda m: gx.random_delays(4, 3, 0, 1.0, m), [-1, 1.5], "max_delay"),
    ("finite inner", gx.apply_if_finite, [None], "inner of apply_if_finite must be an optax.Grad"),
    (
        "finite errors",
        lambda n: gx.apply_if_finite(SGD, "nodes", n),
        [-1],
        "max_consecutive_errors must be an integer >= 0",
    ),
    ("accumulate every", lambda k: gx.accumulate(SGD, k), [0, 1.5], "every of accumulate must be"),
    ("accumulate tx", lambda tx: gx.accumulate(tx, 2), [1], "tx of accumulate must be an optax"),
    (
        "accumulate twice",
        lambda tx: gx.accumulate(tx, 2).init(PARAMS),
        [gx.accumulate(SGD, 2), optax.MultiSteps(SGD, 2).gradient_transformation()],
        "tx of accumulate must not accumulate itself",
    ),
    (
        "accumulate axis",
        lambda name: gx.accumulate(gx.sgp(RING), 2, name).init(PARAMS),
        ["other"],
        "must be that of tx, 'nodes', got 'other'",
    ),
    (
        "accumulate inside",
        lambda tx: gx.outer(tx, SGD, 4).init(PARAMS),
        [gx.accumulate(SGD, 2)],
        "write gx.accumulate(gx.outer",
    ),
    (
        "accumulate inside sharded",
        lambda tx: gx.sharded(tx, dict.fromkeys(PARAMS, P())).init(PARAMS),
        [gx.accumulate(gx.sgp(RING), 2)],
        "tx of sharded must not accumulate",
    ),
    (
        "accumulate_gradients",
        lambda k: gx.accumulate_gradients(lambda z: (z, None), k),
        [0],
        "every of accumulate_gradients must be an integer",
    ),
    ("outer inner", lambda tx: gx.outer(tx, SGD, 4), [None, "sgd"], "inner of outer"),
    ("outer outer_tx", lambda tx: gx.outer(SGD, tx, 4), [None, 0.7], "outer_tx of outer"),
    ("outer every", outer("every"), [0, 1.5, None], "every of"),
    ("outer average", outer("average"), ["mean", np.eye(4), STAR], "must be"),
    ("outer fragments", outer("fragments"), [0, 1.5, 5], "fragments of"),
    ("outer delay", outer("delay"), [-1, 4, 1.5], "delay of"),
    ("outer mix", outer("mix"), [-0.1, 1, NAN, "0"], "mix of"),
    ("outer pull", outer("pull"), [-1, NAN], "pull of"),
    ("outer wire", outer("wire"), ["x", TOP_K], "wire"),
    (
        "outer reset of fragments",
        lambda p: gx.outer(SGD, SGD, 4, fragments=p, reset_inner=True),
        [2],
        "reset_inner of outer must be False",
    ),
    (
        "outer leaves",
        lambda p: gx.outer(SGD, SGD, 4, fragments=p).init(PARAMS),
        [3],
        "at most the number of leaves, 2",
    ),
    (
        "outer optimizer of another kind",
        lambda tx: gx.outer(SGD, tx, 4).init(PARAMS),
        [optax.lbfgs(), gx.allreduce(), optax.contrib.sam(SGD, SGD, opaque_mode=True)],
        "outer_tx of outer must make its update of the outer gradient",
    ),
    (
        "outer optimizer that gossips",
        lambda tx: gx.outer(SGD, tx, 4).init(PARAMS),
        [optax.chain(SGD, gx.dpsgd(RING))],
        "outer_tx of outer must exchange nothing",
    ),
    (
        "outer around",
        lambda tx: gx.outer(tx, SGD, 4).init(PARAMS),
        [
            gx.easgd(0.1),
            gx.adpsgd(RING, 2),
            gx.outer(SGD, SGD, 2),
            optax.masked(gx.sgp(RING), {"a": True, "b": False}),
        ],
        "inner of outer must hold no",
    ),
    (
        "outer parts around osgp",
        lambda fields: gx.outer(gx.osgp(RING), SGD, 4, **fields).init(PARAMS),
        [{"fragments": 2}, {"mix": 0.5}],
        "around gx.osgp",
    ),
    (
        "outer average that diverges",
        lambda schedule: gx.outer(SGD, MOMENTUM, 4, schedule),
        [DIRECTED, gx.topology.one_peer_exponential(16)],
        "outer must be stable",
    ),
    (
        "outer average of others than the gossip",
        lambda schedule: gx.outer(gx.sgp(schedule), SGD, 5, gx.topology.ring(16)),
        [RING],
        "as many nodes as the gossip inside, 4, got 16",
    ),
):
    ROWS += calls(name, function, values, message)

for name, tx in TRANSFORMS.items():
    ROWS += [
        Call(
            f"{name} updates of another structure",
            lambda tx=tx: update(tx, without),
            "must have the structure",
        ),
        Call(
            f"{name} updates of another shape", lambda tx=tx: update(tx, reshaped), "must be like"
        ),
        Call(
            f"{name} no params",
            lambda tx=tx: update(tx, params=lambda _: None),
            "got None: call tx.update(updates, state, params)",
        ),
        Call(f"{name} step", lambda tx=tx: update(tx, step=1.5), "step must be an integer"),
        Call(
            f"{name} empty state",
            lambda tx=tx: on_nodes(lambda x: tx.update(x, optax.EmptyState(), x, step=0)),
            "state",
        ),
        Call(
            f"{name} integers",
            lambda tx=tx: on_nodes(lambda x: tx.init({"a": jnp.ones(2, int)})),
            "params['a'] must be floating-point",
        ),
        Call(
            f"{name} outside of an axis",
            lambda tx=tx: tx.update(PARAMS, tx.init(PARAMS), PARAMS, step=0),
            "must be a mapped axis, got 'nodes'",
        ),
    ]
    if name not in ("easgd", "outer"):
        ROWS.append(
            Call(
                f"{name} on another number of nodes",
                lambda tx=tx: update(tx, nodes=3),
                "as many nodes as the schedule, 4, got 3",
            )
        )

OTHERS: dict[str, tuple[Any, Any, str]] = {
    "schedule": (gx.sgp(RING), gx.sgp(ONE_PEER), "its schedule, "),
    "axis": (gx.easgd(0.1), gx.easgd(0.1, axis_name="servers"), "its wire, "),
    "local axis": (gx.sgp(RING), gx.sgp(RING, local_axis_name="local"), "its wire, "),
    "wire": (gx.osgp(RING), gx.osgp(RING, wire=jnp.bfloat16), "its wire, "),
    "overlap": (gx.osgp(RING), gx.osgp(RING, 2), "its overlap, 1, got one of 2"),
    "period": (gx.easgd(0.1, 2), gx.easgd(0.1, 3), "its period, 2, got one of 3"),
    "delay": (gx.adpsgd(RING, 3), gx.adpsgd(RING, 4), "extra"),
    "outer every": (TRANSFORMS["outer"], gx.outer(gx.sgp(RING), optax.sgd(0.7), 5), "its every"),
    "outer average": (
        TRANSFORMS["outer"],
        gx.outer(gx.sgp(RING), optax.sgd(0.7), 4, "none"),
        "its average",
    ),
    "outer_tx": (TRANSFORMS["outer"], gx.outer(gx.sgp(RING), MOMENTUM, 4), "its outer_tx"),
    "finite": (gx.apply_if_finite(SGD), optax.apply_if_finite(SGD, 5), "must be made by its init"),
}
ROWS += [
    Call(f"state of another {name}", lambda tx=tx, other=other: update(tx, state_of=other), message)
    for name, (tx, other, message) in OTHERS.items()
]
for name in ("osgp", "adpsgd", "easgd"):
    tx = gx.adpsgd(RING, 3) if name == "adpsgd" else TRANSFORMS[name]
    ROWS.append(
        Call(
            f"{name} state of other parameters",
            lambda tx=tx: on_nodes(lambda x: tx.update(x, tx.init(without(x)), x, step=0)),
            "must be made for these parameters by this algorithm",
        )
    )


def mixed(**changes: Any) -> Callable[[], Any]:
    arguments = {"weight": 1.0, "schedule": RING, "step": 0} | changes
    return lambda: on_nodes(lambda x: gx.mix(x, **arguments))


KEYS = jax.random.split(jax.random.key(0))
ROWS += [
    Call("mix schedule", mixed(schedule=None), "gx.Schedule"),
    Call("mix size", mixed(schedule=gx.topology.ring(3)), "must"),
    Call("mix step", mixed(step=None), "step must be an integer"),
    Call("mix axis", mixed(axis_name="servers"), "servers"),
    Call("mix wire", mixed(wire="int8"), "wire"),
    Call("mix a sparse wire", mixed(wire=TOP_K), "gx.choco"),
    Call("mix without a key", mixed(wire=INT8), "key must be a PRNG key for int8(block=256)"),
    Call("mix a number as key", mixed(wire=INT8, key=3), "key must be one PRNG key"),
    Call("mix several keys", mixed(wire=INT8, key=KEYS), "one PRNG"),
    Call("encode without a key", lambda: INT8.encode(jnp.ones(9), None), "key must be a PRNG key"),
    Call("mix weight of nodes", mixed(weight=jnp.ones(4)), "weight"),
    Call("mix integers", lambda: on_nodes(lambda x: gx.mix(3, 1.0, RING, 0)), "floating-point"),
    Call("exchange nothing", lambda: on_nodes(lambda x: gx.exchange(None, 0)), "must"),
    Call(
        "exchange what is not early",
        lambda: on_nodes(lambda x: gx.exchange(gx.sgp(RING).init(x), 0)),
        "must need nothing of its step, as that of gx.osgp",
    ),
    Call(
        "received from elsewhere",
        lambda: on_nodes(lambda x: gx.osgp(RING).update(x, gx.osgp(RING).init(x), x, received=x)),
        "received must be what gx.exchange",
    ),
    Call(
        "easgd over too many nodes",
        lambda: update(gx.easgd(0.5), nodes=3),
        "over N = 3 nodes, got 0.5",
    ),
    Call("canonical_step", lambda: gx.canonical_step(TRANSFORMS["sgp"].init(PARAMS), 1.5), "step"),
    Call("gossip_state of nothing", lambda: gx.gossip_state(None), "opt_state must"),
    Call("two gossips", lambda: gx.gossip_state((TRANSFORMS["sgp"].init(PARAMS),) * 2), "must"),
]
