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
from bad_input.rows import Call, each
from gossipjax.topology import Round

T = gx.topology
RING = T.ring(4)
STAR = T.star(4)
ONE_PEER = T.one_peer_exponential(4)
EYE = np.eye(2)
PAIRS = np.kron(EYE, np.full((2, 2), 0.5))  # two, which never meet
DIRECTED = nx.DiGraph([(0, 1), (1, 0)])
IN_TWO_PARTS = nx.Graph([(0, 1), (2, 3)])
NAN = float("nan")

CALLS: list[Call] = [
    *each(T.ring, "must be an integer >= 1", 0, 2.0),
    *each(lambda k: T.k_peer_exponential(8, k), "peers", 0, 4),
    (lambda: T.k_peer_exponential(8, 2, hops="ours"), "'paper' or 'authors'"),
    *each(lambda n: T.k_peer_exponential(n, 3, hops="authors"), "hops=", 3, 8, 12),
    *each(lambda k: T.base_graph(5, k), "peers", 0, 5),
    (lambda: T.random_peer(4, 3, 0, graph="ring"), "'complete'"),
    (lambda: T.random_pairs(3, 3, 0), "must be even"),
    (lambda: T.hypercube(12), "8 or 16"),
    (lambda: T.bipartite_exponential(7), "6 or 8"),
    (lambda: T.star(4, weights="equal"), "'uniform' or 'metropolis'"),
    *each(T.piecewise, "step 0", {}, {3: RING}),
    (lambda: T.piecewise({0: RING, 2: T.piecewise({0: RING, 4: ONE_PEER})}), "piecewise itself"),
    (lambda: T.piecewise({0: RING, 2: T.ring(5)}), "size"),
    (lambda: gx.Schedule([Round(np.eye(1)), Round(EYE)]), "same size"),
    *each(gx.Schedule, "gx.topology.from_matrices takes matrices", EYE, [EYE]),
    *each(T.from_matrices, "[N, N]", EYE[0], np.zeros((1, 2, 3))),
    (lambda: T.from_matrices([[0.2, 0.8], [0.3, 0.7]]), "transpose"),
    (lambda: T.from_matrices([[0.5, 0.5], [0.4, 0.5]]), "got 0.9 for column 0"),
    (lambda: T.from_matrices([[0, 0.5], [1, 0.5]]), "P[0, 0] = 0"),
    (lambda: T.from_matrices([[1.5, 0.5], [-0.5, 0.5]]), "P[1, 0] = -0.5"),
    (lambda: T.from_matrices(PAIRS), "node 0 can never send to node 2"),
    (lambda: T.from_matrices([[0.5, 0], [0.5, 1]]), "can never receive from node 1"),
    (lambda: T.from_graph(IN_TWO_PARTS), "connect all 4 nodes"),
    (lambda: T.from_graph(nx.path_graph(3), weights="equal"), "'uniform'"),
    (lambda: T.from_graph(DIRECTED, weights="metropolis"), "undirected"),
    *each(T.optimal_weights, "graph must", DIRECTED, IN_TWO_PARTS),
    *each(RING.every, "k of every", 0, 1.5),
    *each(lambda phase: RING.every(3, phase), "phase of every", 3, -1),
    (lambda: T.spectral_gap(T.star(5000)), "must"),
]

PARAMS = {"a": jnp.ones((4, 2)), "b": jnp.ones((4, 3))}
SGD = optax.sgd(0.1)
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
SGP = gx.sgp(RING)
OSGP = gx.osgp(RING)
OUTER = gx.outer(SGP, optax.sgd(0.7), 4)
TRANSFORMS = [SGP, gx.easgd(0.1), OUTER]  # one frame checks the calls of all other algorithms


def on_nodes(function: Callable[[Any], Any], nodes: int = 4) -> Any:
    """Traces a per-node function of parameters."""
    params = jax.tree.map(lambda x: x[:nodes], PARAMS)
    return jax.eval_shape(jax.vmap(function, axis_name="nodes"), params)


def update(tx: Any, state_of: Any = None, change: Any = None, step: Any = 0, nodes: int = 4) -> Any:
    """An update; `change` makes other updates and parameters."""

    def run(tree: Any) -> Any:
        state = (tx if state_of is None else state_of).init(tree)
        updates, params = (tree, tree) if change is None else change(tree)
        return tx.update(updates, state, params, step=step)

    return on_nodes(run, nodes)


def outer(**options: Any) -> Any:
    return gx.outer(SGD, SGD, **{"every": 4, **options})


def init_outer(inner: Any = SGD, **options: Any) -> Any:
    return gx.outer(inner, SGD, 4, **options).init(PARAMS)


def init_layers(**options: Any) -> Any:
    fragments = gx.layer_fragments(**{"count": 2, **options})
    params = {"a": np.zeros((6, 4)), "b": np.zeros((3, 40))}
    return gx.outer(SGD, SGD, 9, fragments=fragments).init(params)


for make in FACTORIES.values():
    CALLS += each(make, "must be a gx.Schedule", np.eye(4))
    CALLS += each(lambda wire, make=make: make(RING, wire=wire), "wire", "int8")
    CALLS += each(lambda wire, make=make: make(RING, wire=wire), "gx.choco", TOP_K)
CALLS += [
    (
        lambda: update(gx.gossip(RING, lambda x, u, node: optax.tree.add(x, u))),
        "must call node.mix or node.receive, got no call",
    ),
    (
        lambda: update(gx.gossip(RING, lambda x, u, node: node.mix(node.mix(x)), models=1)),
        "must be what combine sends by node.mix, 2 trees",
    ),
    (
        lambda: gx.gossip(RING, lambda x, u, node: (node.mix(x), {}), keeps={"c": "zeros"}),
        "keeps['c'] of gossip",
    ),
    (
        lambda: update(gx.gossip(RING, lambda x, u, node: node.mix(x), keeps={"m": "average"})),
        "return x, {'m': ...}",
    ),
    *each(lambda c: gx.dpsgd(RING, strength=c), "strength of dpsgd", -0.1, 1.1, NAN, "1"),
    *(
        (partial(FACTORIES[name], STAR), "doubly stochastic")
        for name in ("dpsgd", "adpsgd", "quasi_global")
    ),
    *each(lambda wire: gx.choco(RING, wire, 0.1), "wire of choco", None, gx.wire.int8),
    *each(gx.wire.low_rank, "rank of low_rank", 0, 1.5, "4"),
    (lambda: gx.sgp(RING, wire=gx.wire.low_rank(1)), "averaged over all nodes at once"),
    (lambda: outer(wire=gx.wire.low_rank(1)), "error_feedback=1"),
    *each(lambda c: gx.choco(RING, INT8, c), "strength of choco", 0, 1.1, NAN),
    (lambda: gx.choco(STAR, INT8, 0.1), "schedule of choco"),
    (lambda: gx.choco(ONE_PEER, INT8, 0.1), "static"),
    *each(gx.wire.top_k, "fraction of top_k", 0, 1.1, NAN),
    *each(gx.wire.random_k, "fraction of random_k", 0, 1.1, NAN),
    *each(gx.wire.int8, "block of int8", 0, 4, 12),
    *each(gx.wire.block_top_k, "count of block_top_k", 0, 1.5, 4097),
    *each(lambda k: gx.osgp(RING, k), "overlap of osgp", -1, 1.5),
    (lambda: gx.sgp(RING, order="adapt"), "'adapt-then-combine'"),
    *each(
        lambda delays: gx.adpsgd(RING, delays),
        "delays",
        *(-1, 1.5, [1, 2, 3], [[1, -1, 0, 0]], 2**40),
    ),
    *each(lambda every: gx.easgd(0.1, every), "every of easgd", 0, 1.5),
    (lambda: gx.allreduce(wire="int8"), "wire must be a codec"),
    (lambda: gx.weighted([1.0, -1.0]), "one number >= 0 for each node"),
    (lambda: gx.weighted([0, 0]), "not all 0"),
    (lambda: gx.dirichlet_split([[0] * 9], 5, 1.0), "shape"),
    *each(lambda alpha: gx.dirichlet_split(np.zeros(9), 5, alpha), "above 0", 0.0, NAN),
    (lambda: gx.outer(None, SGD, 4), "inner of outer"),
    (lambda: gx.outer(SGD, 0.7, 4), "outer_tx of outer"),
    (lambda: outer(weights=[1, 2, 3, 4], average=RING), "average is 'exact'"),
    (lambda: outer(weights="counted", delay=1), "delay of outer must be 0"),
    (
        lambda: init_outer(SGP, weights=[1, 2, 3, 4]),
        "got gossip of nodes that have weights",
    ),
    *each(lambda every: outer(every=every), "every of", 0, 1.5),
    *each(lambda average: outer(average=average), "must be", "mean", STAR),
    *each(
        lambda average: outer(average=average),
        "by itself that adapts, then combines",
        *(SGD, OSGP, gx.sgp(RING, order="combine-while-adapting")),
        *(gx.choco(RING, TOP_K, 0.1), gx.easgd(0.1), optax.chain(SGD, SGP)),
    ),
    *each(
        lambda options: outer(average=SGP, **options),
        "whole models at once",
        *({"fragments": 2}, {"delay": 1}, {"strength": 0.5}),
    ),
    (lambda: init_outer(SGP, average=SGP), "got gossip where average is one"),
    *each(lambda count: outer(fragments=count), "fragments of", 0, 5),
    *each(lambda delay: outer(delay=delay), "delay of", -1, 4),
    *each(lambda strength: outer(strength=strength), "strength of", 0, 1.1, NAN),
    *each(lambda strength: outer(anchor_strength=strength), "anchor_strength of", -1, NAN),
    *each(lambda wire: outer(wire=wire), "wire", "x", TOP_K),
    *each(
        lambda options: outer(error_feedback=0.9, **options),
        "error_feedback of outer must be None unless",
        *({}, {"wire": TOP_K, "delay": 1}, {"wire": TOP_K, "average": RING}),
    ),
    *each(
        lambda options: outer(**options),
        "mean_over of outer",
        {"mean_over": "all"},
        {"mean_over": "senders"},
        {"mean_over": "senders", "wire": INT8, "error_feedback": 1},
        {"mean_over": "senders", "wire": TOP_K, "error_feedback": 1, "weights": "counted"},
    ),
    (lambda: outer(fragments=2, reset_inner=True), "reset_inner of outer"),
    (lambda: init_outer(fragments=3), "number of leaves, 2"),
    *each(
        lambda options: init_layers(**options),
        "layer_fragments",
        {"count": 0, "axes": 0},
        {"axes": -1},
        {"axes": {"a": 2, "b": None}},
        {"axes": {"a": 0}},
        {"axes": 0},
        {"count": 5, "axes": {"a": 0, "b": None}},
        {},
    ),
    *each(
        lambda tx: gx.outer(SGD, tx, 4).init(PARAMS),
        "outer_tx of outer",
        *(gx.allreduce(), optax.chain(SGD, gx.dpsgd(RING))),
    ),
    *each(
        init_outer,
        "inner of outer",
        *(gx.easgd(0.1), gx.adpsgd(RING, 2), gx.outer(SGD, SGD, 2)),
        optax.masked(SGP, {"a": True, "b": False}),
    ),
    *each(
        lambda options: init_outer(OSGP, **options),
        "got gx.osgp, whose messages",
        *({"fragments": 2}, {"strength": 0.5}),
    ),
    (lambda: update(gx.easgd(0.5), nodes=3), "N = 3 nodes, got 0.5"),
    (lambda: update(gx.weighted([1, 2, 3])), "of 4 nodes, got 3"),
    (lambda: update(gx.weighted()), "node_weight must be given to each"),
    (lambda: gx.gossip_state((SGP.init(PARAMS),) * 2), "must"),
]
OUTSIDE = "must be a mapped axis, got 'nodes'"
INTEGERS = {"a": jnp.ones(2, int)}
CALLS += each(lambda tx: update(tx, change=lambda x: (drop_b(x), x)), "structure", *TRANSFORMS)
CALLS += each(lambda tx: update(tx, change=lambda x: (x, None)), "got None", *TRANSFORMS)
CALLS += each(lambda tx: update(tx, step=1.5), "step must be an integer", *TRANSFORMS)
CALLS += each(lambda tx: update(tx, SGD), "state", *TRANSFORMS)
CALLS += each(
    lambda tx: on_nodes(lambda x: tx.init(INTEGERS)),
    "params['a'] must be floating-point",
    *TRANSFORMS,
)
CALLS += each(lambda tx: tx.update(PARAMS, tx.init(PARAMS), PARAMS, step=0), OUTSIDE, *TRANSFORMS)
CALLS += each(lambda tx: update(tx, nodes=3), "4, got 3", SGP, gx.choco(RING, TOP_K, 0.1))
CALLS += [
    (lambda: update(SGP, gx.sgp(ONE_PEER)), "its schedule, "),
    (lambda: update(gx.easgd(0.1), gx.easgd(0.1, axis_name="servers")), "its wire, "),
    (lambda: update(OSGP, gx.osgp(RING, 2)), "its overlap, 1, got one of 2"),
    (lambda: update(gx.easgd(0.1, 2), gx.easgd(0.1, 3)), "its period, 2, got one of 3"),
    (lambda: update(OUTER, gx.outer(SGP, optax.sgd(0.7), 5)), "its every"),
    (
        lambda: update(gx.apply_if_finite(SGD), optax.apply_if_finite(SGD, 5)),
        "ApplyIfFiniteState",
    ),
    (
        lambda: update(gx.allreduce(wire=INT8), SGD),
        "must be of type ErrorFeedback, got",
    ),
]


def mix(**changes: Any) -> Any:
    arguments = {"weight": 1.0, "schedule": RING, "step": 0} | changes
    return on_nodes(lambda x: gx.mix(x, **arguments))


def drop_b(tree: Any) -> Any:
    return {"a": tree["a"]}


def with_state(function: Callable[[Any, Any], Any], tx: Any = SGP) -> Any:
    return on_nodes(lambda x: function(x, tx.init(x)))


D = gx.diagnostics
ON_MODELS = (D.consensus_distance, D.layer_consensus_distance, gx.average_batch_stats)
ON_STATES = (D.total_mass, gx.average_model)
CALLS += [
    (lambda: mix(schedule=EYE), "gx.Schedule"),
    (lambda: mix(schedule=T.ring(3)), "must"),
    (lambda: mix(axis_name="servers"), "servers"),
    (lambda: mix(wire=TOP_K), "gx.choco"),
    (lambda: mix(wire=INT8), "key must be a PRNG key"),
    (lambda: with_state(lambda x, s: gx.exchange(s, 0)), "gx.osgp"),
    (
        lambda: gx.average_batch_stats(PARAMS),
        "gx.average_batch_stats(stats, nodes=nodes)",
    ),
    *each(lambda f: on_nodes(lambda x: f(INTEGERS)), "floating-point", *ON_MODELS),
    *each(lambda f: on_nodes(lambda x: f(x, axis_name="servers")), "servers", *ON_MODELS),
    *each(lambda f: f(PARAMS, SGP.init(PARAMS)), OUTSIDE, *ON_STATES),
    *each(lambda f: on_nodes(lambda x: f(INTEGERS, ())), "floating", *ON_STATES),
    *each(lambda f: with_state(lambda x, s: f(x, s, axis_name="servers")), "servers", *ON_STATES),
    *each(lambda f: with_state(lambda x, s: f(s, x)), "must be", *ON_STATES),
    *each(lambda f: with_state(lambda x, s: f(drop_b(x), s), OSGP), "params", *ON_STATES),
    *each(
        lambda f: with_state(lambda x, s: f(x | {"b": x["b"][:1]}, s), OSGP), "params", *ON_STATES
    ),
    (lambda: with_state(lambda x, s: gx.local_model(s, x, x)), "must be"),
    (lambda: with_state(lambda x, s: gx.mix_batch_stats(x, s, 0.5)), "step must be"),
    (lambda: gx.mix_batch_stats(PARAMS, SGP.init(PARAMS), 0), "nodes"),
]
