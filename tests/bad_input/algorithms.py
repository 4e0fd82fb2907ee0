"""Bad inputs of schedules, algorithms, diagnostics and batch statistics."""

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
from gossipjax.topology import Round

T = gx.topology
RING = T.ring(4)
STAR = T.star(4)
ONE_PEER = T.one_peer_exponential(4)
HYBRID = T.piecewise({0: RING, 4: T.complete(4)})
EYE = np.eye(2)
PAIRS = np.kron(EYE, np.full((2, 2), 0.5))  # two, which never meet
NAN = float("nan")


ROWS: list[Call] = []
for name, function, values, message in (
    ("ring", T.ring, [0, 2.0], "must be an integer >= 1"),
    ("k_peer peers", lambda k: T.k_peer_exponential(8, k), [0, 4], "peers"),
    ("hops", lambda h: T.k_peer_exponential(8, 2, hops=h), ["ours"], "'paper' or 'authors'"),
    ("hops of the authors", lambda n: T.k_peer_exponential(n, 3, hops="authors"), [8, 12], "hops="),
    ("base_graph peers", lambda k: T.base_graph(5, k), [0, 5], "peers"),
    ("random_peer graph", lambda g: T.random_peer(4, 3, 0, graph=g), ["ring"], "'complete'"),
    ("random_pairs n", lambda n: T.random_pairs(n, 3, 0), [0, 3], "must be"),
    ("hypercube size", T.hypercube, [12], "8 or 16"),
    ("bipartite size", T.bipartite_exponential, [7], "6 or 8"),
    ("star weights", lambda w: T.star(4, weights=w), ["equal"], "'uniform' or 'metropolis'"),
    ("piecewise start", T.piecewise, [{}, {3: RING}], "step 0"),
    ("piecewise sizes", lambda s: T.piecewise({0: RING, 2: s}), [T.ring(5)], "size"),
    ("matrix shape", T.from_matrices, [EYE[0], np.zeros((1, 2, 3))], "[N, N]"),
    ("matrix rows", T.from_matrices, [[[0.2, 0.8], [0.3, 0.7]]], "transpose"),
    ("matrix sum", T.from_matrices, [[[0.5, 0.5], [0.4, 0.5]]], "got 0.9 for column 0"),
    ("matrix self", T.from_matrices, [[[0, 0.5], [1, 0.5]]], "P[0, 0] = 0"),
    ("matrix sign", T.from_matrices, [[[1.5, 0.5], [-0.5, 0.5]]], "P[1, 0] = -0.5"),
    ("matrix of two parts", T.from_matrices, [PAIRS], "node 0 can never send to node 2"),
    ("matrix one way", T.from_matrices, [[[0.5, 0], [0.5, 1]]], "can never receive from node 1"),
    ("from_graph parts", T.from_graph, [nx.Graph([(0, 1), (2, 3)])], "connect all 4 nodes"),
    (
        "from_graph weights",
        lambda w: T.from_graph(nx.path_graph(3), weights=w),
        ["equal"],
        "'uniform'",
    ),
    (
        "from_graph directed",
        lambda graph: T.from_graph(graph, weights="metropolis"),
        [nx.DiGraph([(0, 1), (1, 0)])],
        "undirected",
    ),
    (
        "optimal_weights",
        T.optimal_weights,
        [nx.DiGraph([(0, 1), (1, 0)]), nx.Graph([(0, 1), (2, 3)])],
        "graph must",
    ),
    ("round_at", RING.round_at, [0.5], "step must be an integer"),
    ("every", RING.every, [0, 1.5], "k of every"),
    ("every phase", lambda phase: RING.every(3, phase), [3, -1], "phase of every"),
    ("spectral_gap", T.spectral_gap, [T.star(5000)], "must"),
):
    ROWS += calls(name, function, values, message)
ROWS += [
    Call("rounds of other sizes", lambda: gx.Schedule([Round(np.eye(1)), Round(EYE)]), "same size"),
]

PARAMS = {"a": jnp.ones((4, 2)), "b": jnp.ones((4, 3))}
SGD = optax.sgd(0.1)
MOMENTUM = optax.sgd(0.7, momentum=0.9)
INT8 = gx.wire.int8()
TOP_K = gx.wire.top_k(0.1)


def make_gossip(schedule: Any, **options: Any) -> Any:
    return gx.gossip(schedule, lambda x, u, node: node.mix(optax.tree.add(x, u)), **options)


FACTORIES: dict[str, Callable[..., Any]] = {
    "gossip": make_gossip,
    "sgp": gx.sgp,
    "osgp": gx.osgp,
    "dpsgd": gx.dpsgd,
    "adpsgd": gx.adpsgd,
    "gradient_tracking": gx.gradient_tracking,
    "quasi_global": partial(gx.quasi_global, rate=0.1),
}
TRANSFORMS = {
    **{name: factory(RING) for name, factory in FACTORIES.items()},
    "easgd": gx.easgd(0.1),
    "outer": gx.outer(gx.sgp(RING), optax.sgd(0.7), 4),
    "choco": gx.choco(RING, TOP_K, 0.1),
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


for name, factory in FACTORIES.items():
    ROWS += calls(f"{name} schedule", factory, [np.eye(4)], "must be a gx.Schedule")
    for argument, value in (("wire", "int8"), ("wire", TOP_K)):
        ROWS += calls(
            f"{name} {argument} {value}",
            lambda value, make=factory, argument=argument: make(RING, **{argument: value}),
            [value],
            argument if value != TOP_K else "gx.choco",
        )
for name, keeps, combine, message in (
    (
        "no exchange",
        None,
        lambda x, u, node: optax.tree.add(x, u),
        "must call node.mix, got no call",
    ),
    ("keeps zeros", {"c": "zeros"}, lambda x, u, node: (node.mix(x), {}), "keeps['c'] of gossip"),
    ("keeps nothing", {"m": "average"}, lambda x, u, node: node.mix(x), "return x, {'m': ...}"),
):
    ROWS += calls(
        f"gossip {name}",
        lambda combine, keeps=keeps: update(gx.gossip(RING, combine, keeps=keeps)),
        [combine],
        message,
    )
ROWS += calls(
    "strength",
    lambda c: gx.dpsgd(RING, strength=c),
    [-0.1, 1.1, NAN, "1"],
    "strength of dpsgd",
)
for name in ("dpsgd", "adpsgd", "quasi_global"):
    ROWS += calls(f"{name} star", FACTORIES[name], [STAR], "doubly stochastic")
for argument, function, values in (
    ("wire", lambda wire: gx.choco(RING, wire, 0.1), [None, gx.wire.int8]),
    ("strength", lambda strength: gx.choco(RING, INT8, strength), [0, 1.1, NAN]),
    ("schedule", lambda s: gx.choco(s, INT8, 0.1), [STAR]),
):
    ROWS += calls(f"choco {argument}", function, values, f"{argument} of choco")
for name in ("top_k", "random_k"):
    ROWS += calls(f"{name} fraction", getattr(gx.wire, name), [0, 1.1, NAN], f"fraction of {name}")

for name, function, values, message in (
    ("int8 block", gx.wire.int8, [0, 4, 12], "block of int8"),
    ("choco rounds", lambda s: gx.choco(s, INT8, 0.1), [ONE_PEER], "static"),
    ("block_top_k count", gx.wire.block_top_k, [0, 1.5, 4097], "count of block_top_k"),
    ("osgp overlap", lambda k: gx.osgp(RING, k), [-1, 1.5], "overlap of osgp"),
    ("sgp order", lambda order: gx.sgp(RING, order=order), ["adapt"], "'adapt-then-combine'"),
    (
        "adpsgd delays",
        lambda delays: gx.adpsgd(RING, delays),
        [-1, 1.5, [1, 2, 3], [[1, -1, 0, 0]], 2**40],
        "delays",
    ),
    ("easgd every", lambda p: gx.easgd(0.1, p), [0, 1.5], "every of easgd"),
    ("allreduce wire", lambda w: gx.allreduce(wire=w), ["int8"], "wire must be a codec"),
    ("accumulate_gradients", lambda k: gx.accumulate_gradients(identity, k), [0], "every of"),
    ("weighted", gx.weighted, [[1.0, -1.0]], "one number >= 0 for each node"),
    ("weighted zeros", gx.weighted, [[0, 0]], "not all 0"),
    (
        "outer weights",
        lambda fields: gx.outer(SGD, SGD, 4, **{"weights": [1, 2, 3, 4], **fields}),
        [{"average": RING}],
        "average is 'exact'",
    ),
    (
        "outer weights that are counted",
        lambda delay: gx.outer(SGD, SGD, 4, delay=delay, weights="counted"),
        [1],
        "delay of outer must be 0",
    ),
    (
        "outer weights around gossip",
        lambda tx: gx.outer(tx, SGD, 4, weights=[1, 2, 3, 4]).init(PARAMS),
        [gx.sgp(RING)],
        "got gossip of nodes that have weights",
    ),
    ("dirichlet_split labels", lambda x: gx.dirichlet_split(x, 5, 1.0), [[[0] * 9]], "shape"),
    ("outer inner", lambda tx: gx.outer(tx, SGD, 4), [None], "inner of outer"),
    ("outer outer_tx", lambda tx: gx.outer(SGD, tx, 4), [0.7], "outer_tx of outer"),
    ("outer every", outer("every"), [0, 1.5], "every of"),
    ("outer average", outer("average"), ["mean", STAR], "must be"),
    (
        "outer average by a transform",
        outer("average"),
        [
            SGD,
            gx.allreduce(),
            gx.sgp(RING, order="combine-while-adapting"),
            gx.osgp(RING),
            gx.choco(RING, TOP_K, 0.1),
            gx.easgd(0.1),
            optax.chain(SGD, gx.sgp(RING)),
        ],
        "by itself that adapts, then combines",
    ),
    (
        "outer average by a gossip",
        lambda options: gx.outer(SGD, SGD, 4, average=gx.sgp(RING), **options),
        [{"fragments": 2}, {"delay": 1}, {"strength": 0.5}],
        "whole models at once",
    ),
    (
        "outer gossips twice",
        lambda tx: gx.outer(tx, SGD, 4, average=gx.sgp(RING)).init(PARAMS),
        [gx.sgp(RING)],
        "got gossip where average is one",
    ),
    ("outer fragments", outer("fragments"), [0, 5], "fragments of"),
    ("outer delay", outer("delay"), [-1, 4], "delay of"),
    ("outer strength", outer("strength"), [0, 1.1, NAN], "strength of"),
    ("outer anchor_strength", outer("anchor_strength"), [-1, NAN], "anchor_strength of"),
    ("outer wire", outer("wire"), ["x", TOP_K], "wire"),
    (
        "outer error_feedback of what has none",
        lambda fields: gx.outer(SGD, SGD, 4, error_feedback=0.9, **fields),
        [{}, {"wire": TOP_K, "delay": 1}, {"wire": TOP_K, "average": RING}],
        "error_feedback of outer must be None unless",
    ),
    (
        "outer mean_over",
        lambda fields: gx.outer(SGD, SGD, 4, **fields),
        [
            {"mean_over": "all"},
            {"mean_over": "senders"},
            {"mean_over": "senders", "wire": INT8, "error_feedback": 1},
            {"mean_over": "senders", "wire": TOP_K, "error_feedback": 1, "weights": "counted"},
        ],
        "mean_over of outer",
    ),
    (
        "outer reset of fragments",
        lambda p: gx.outer(SGD, SGD, 4, fragments=p, reset_inner=True),
        [2],
        "reset_inner of outer",
    ),
    (
        "outer leaves",
        lambda p: gx.outer(SGD, SGD, 4, fragments=p).init(PARAMS),
        [3],
        "number of leaves, 2",
    ),
    (
        "layers of fragments",
        lambda fields: gx.outer(
            SGD, SGD, 9, fragments=gx.layer_fragments(**{"count": 2, **fields})
        ).init({"a": np.zeros((6, 4)), "b": np.zeros((3, 40))}),
        [
            {"count": 0, "axes": 0},
            {"axes": -1},
            {"axes": {"a": 2, "b": None}},
            {"axes": {"a": 0}},
            {"axes": None},
            {"axes": 0},
            {"count": 5, "axes": {"a": 0, "b": None}},
            {},
        ],
        "layer_fragments",
    ),
    (
        "outer optimizer that exchanges",
        lambda tx: gx.outer(SGD, tx, 4).init(PARAMS),
        [
            gx.allreduce(),
            optax.chain(SGD, gx.dpsgd(RING)),
        ],
        "outer_tx of outer",
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
        "inner of outer",
    ),
    (
        "outer parts around osgp",
        lambda fields: gx.outer(gx.osgp(RING), SGD, 4, **fields).init(PARAMS),
        [{"fragments": 2}, {"strength": 0.5}],
        "got gx.osgp, whose messages",
    ),
):
    ROWS += calls(name, function, values, message)

for name, tx in TRANSFORMS.items():
    ROWS += [
        Call(f"{name} structure", lambda tx=tx: update(tx, without), "structure"),
        Call(f"{name} no params", lambda tx=tx: update(tx, params=lambda _: None), "got None"),
        Call(f"{name} step", lambda tx=tx: update(tx, step=1.5), "step must be an integer"),
        Call(f"{name} state", lambda tx=tx: update(tx, state_of=SGD), "state"),
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
        ROWS.append(Call(f"{name} nodes", lambda tx=tx: update(tx, nodes=3), "4, got 3"))

OUTER = TRANSFORMS["outer"]
for name, tx, other, message in (
    ("schedule", gx.sgp(RING), gx.sgp(ONE_PEER), "its schedule, "),
    ("axis", gx.easgd(0.1), gx.easgd(0.1, axis_name="servers"), "its wire, "),
    ("overlap", gx.osgp(RING), gx.osgp(RING, 2), "its overlap, 1, got one of 2"),
    ("period", gx.easgd(0.1, 2), gx.easgd(0.1, 3), "its period, 2, got one of 3"),
    ("outer every", OUTER, gx.outer(gx.sgp(RING), optax.sgd(0.7), 5), "its every"),
    ("finite", gx.apply_if_finite(SGD), optax.apply_if_finite(SGD, 5), "ApplyIfFiniteState"),
    ("allreduce", gx.allreduce(wire=INT8), SGD, "must be of type ErrorFeedback, got"),
):
    ROWS += calls(
        f"state of another {name}", lambda o, tx=tx: update(tx, state_of=o), [other], message
    )


def mix(**changes: Any) -> Callable[[], Any]:
    arguments = {"weight": 1.0, "schedule": RING, "step": 0} | changes
    return lambda: on_nodes(lambda x: gx.mix(x, **arguments))


ROWS += [
    Call("mix schedule", mix(schedule=EYE), "gx.Schedule"),
    Call("mix size", mix(schedule=T.ring(3)), "must"),
    Call("mix axis", mix(axis_name="servers"), "servers"),
    Call("mix a sparse wire", mix(wire=TOP_K), "gx.choco"),
    Call("mix without a key", mix(wire=INT8), "key must be a PRNG key"),
    Call(
        "exchange what is not early",
        lambda: on_nodes(lambda x: gx.exchange(gx.sgp(RING).init(x), 0)),
        "gx.osgp",
    ),
    Call("easgd of too many nodes", lambda: update(gx.easgd(0.5), nodes=3), "N = 3 nodes, got 0.5"),
    Call("weights of 3 nodes", lambda: update(gx.weighted([1, 2, 3])), "of 4 nodes, got 3"),
    Call("weights of no step", lambda: update(gx.weighted()), "node_weight must be given to each"),
    Call("two gossips", lambda: gx.gossip_state((gx.sgp(RING).init(PARAMS),) * 2), "must"),
]

D = gx.diagnostics
SGP = gx.sgp(RING)
OSGP = gx.osgp(RING)
INTEGERS = {"n": jnp.ones(2, int)}


def with_state(function: Callable[[Any, Any], Any], tx: Any = SGP) -> Callable[[], Any]:
    return lambda: on_nodes(lambda x: function(x, tx.init(x)))


OUTSIDE = "must be a mapped axis, got 'nodes'"
for measure, outside in (
    (D.consensus_distance, OUTSIDE),
    (D.layer_consensus_distance, OUTSIDE),
    (gx.average_batch_stats, "gx.average_batch_stats(stats, nodes=nodes)"),
):
    name = measure.__name__
    ROWS += [
        Call(f"{name} integers", with_state(lambda x, s, m=measure: m(INTEGERS)), "floating-point"),
        Call(f"{name} no axis", lambda m=measure: m(PARAMS), outside),
        Call(
            f"{name} axis", with_state(lambda x, s, m=measure: m(x, axis_name="servers")), "servers"
        ),
    ]
for measure in (D.total_mass, gx.average_model):
    name = measure.__name__
    ROWS += [
        Call(f"{name} integers", with_state(lambda x, s, m=measure: m(INTEGERS, ())), "floating"),
        Call(f"{name} no axis", lambda m=measure: m(PARAMS, SGP.init(PARAMS)), OUTSIDE),
        Call(
            f"{name} axis",
            with_state(lambda x, s, m=measure: m(x, s, axis_name="servers")),
            "servers",
        ),
        Call(f"{name} swapped", with_state(lambda x, s, m=measure: m(s, x)), "must be"),
        Call(f"{name} keys", with_state(lambda x, s, m=measure: m(without(x), s), OSGP), "params"),
        Call(
            f"{name} shape", with_state(lambda x, s, m=measure: m(reshaped(x), s), OSGP), "params"
        ),
    ]
ROWS += [
    Call("local swapped", with_state(lambda x, s: gx.local_model(s, x, x)), "must be"),
    Call("stats step", with_state(lambda x, s: gx.mix_batch_stats(x, s, 0.5)), "step must be"),
    Call("stats outside", lambda: gx.mix_batch_stats(PARAMS, SGP.init(PARAMS), 0), "nodes"),
]
