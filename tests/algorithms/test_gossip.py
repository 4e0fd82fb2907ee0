"""`gx.gossip`: what a `combine` of one's own is given, and what is noticed of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import run_history
from jax.sharding import PartitionSpec as P
from modes import make_mesh
from promotion import apply_updates

import gossipjax as gx

N = 4
RNG = np.random.default_rng(0)
START = RNG.normal(size=(N, 3))
UPDATES = RNG.normal(size=(3, N, 3))
DIRECTED = gx.topology.from_matrices(oracle.column_stochastic(RNG, N))
RING = gx.topology.ring(N)


def run_steps(tx, mode):
    """The models, and the state, after all updates."""

    with jax.enable_x64(True):
        args = jnp.asarray(START), jnp.asarray(UPDATES.swapaxes(0, 1))
        _, models, states, _, _ = run_history(mode, tx, "traced", *args)
    return models[:, -1], jax.tree.map(lambda x: x[:, -1], gx.gossip_state(states))


@pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
def test_what_is_averaged_beside_numerators_equals_the_oracle(mode):
    """`P x` and `P (w m) / (P w)`: a constant stays one, whatever the weights."""

    def combine(x, u, node):
        m = optax.tree.add(optax.tree.scale(0.9, node.kept["m"]), u)
        pull = jax.tree.map(lambda m: node.weight * m, m)
        beside = m, node.kept["one"]
        x, (m, one) = node.mix(optax.tree.add(x, pull), averages=beside)
        return x, {"m": m, "one": one, "last": jnp.full((), node.step, jnp.float32)}

    keeps = {
        "m": "average",
        "one": ("average", jnp.ones_like),
        "last": ("restart", lambda params: jnp.full((), -1, jnp.float32)),
    }
    z, state = run_steps(gx.gossip(DIRECTED, combine, keeps=keeps), mode)
    x, w, m = START, np.ones((N, 1)), np.zeros_like(START)
    matrices = DIRECTED.matrices()
    for step, u in enumerate(UPDATES):
        matrix = matrices[step % len(matrices)]
        m = 0.9 * m + u
        x, m, w = matrix @ (x + w * m), matrix @ (w * m) / (matrix @ w), matrix @ w
    np.testing.assert_allclose(z, x / w, rtol=1e-12)
    np.testing.assert_allclose(state.kept("m"), m, rtol=1e-12)
    np.testing.assert_allclose(state.kept("one"), 1, rtol=1e-12)
    assert (state.kept("last") == len(UPDATES) - 1).all()


@pytest.mark.parametrize(
    ("schedule", "mode"), [(RING, "vmap"), (DIRECTED, "shard_map_check_vma")], ids=str
)
def test_several_exchanges_in_a_step(schedule, mode):
    """Two rounds one after another; on a ring, Chebyshev's combination of them."""

    def combine(x, u, node):
        once = node.mix(optax.tree.add(x, u))
        twice = node.mix(once)
        if not schedule.is_doubly_stochastic:
            return twice
        return jax.tree.map(lambda a, b: 1.2 * a - 0.2 * b, twice, once)

    z, _ = run_steps(gx.gossip(schedule, combine), mode)
    x, w = START, np.ones((N, 1))
    matrices = schedule.matrices()
    for step, u in enumerate(UPDATES):
        matrix = matrices[step % len(matrices)]
        once = matrix @ (x + u)
        x = matrix @ once
        if schedule.is_doubly_stochastic:
            x = 1.2 * x - 0.2 * once
        else:
            w = matrix @ matrix @ w
    np.testing.assert_allclose(z, x / w, rtol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "mode"),
    [(DIRECTED, "vmap"), (DIRECTED, "shard_map_check_vma"), (RING, "pmap")],
    ids=str,
)
def test_a_node_hears_each_neighbour_by_itself(schedule, mode):
    """Epidemic Learning's plain mean of what comes, numbers of nodes, rates and keys beside it."""

    def combine(x, u, node):
        messages, weights = node.receive(optax.tree.add(x, u))
        is_heard = weights > 0
        heard = jnp.where(is_heard[:, None], messages, 0).sum(axis=0) - jnp.asarray(
            node.rate, x.dtype
        )
        x = (optax.tree.add(x, u) + heard) / (1 + is_heard.sum()).astype(x.dtype)
        mark = jnp.where(is_heard, 1 + node.senders, 0).sum().astype(jnp.float32)
        draw = jax.random.uniform(node.key, dtype=jnp.float32)
        return x, {"from": mark, "index": node.index.astype(jnp.float32), "draw": draw}

    keeps: dict[str, Any] = dict.fromkeys(
        ("from", "index", "draw"), ("restart", lambda z: jnp.float32(0))
    )
    rate = optax.linear_schedule(0.5, 0.25, 1)
    tx = gx.gossip(schedule, combine, keeps=keeps, rate=rate, row_stochastic=True)
    z, state = run_steps(tx, mode)
    x = START
    links = np.zeros((N, N))
    matrices = schedule.matrices()
    for step, u in enumerate(UPDATES):
        links = (matrices[step % len(matrices)] > 0) & ~np.eye(N, dtype=bool)
        x = (x + u + links @ (x + u) - (0.5, 0.25)[min(step, 1)]) / (1 + links.sum(1))[:, None]
    np.testing.assert_allclose(z, x, rtol=1e-6)
    np.testing.assert_array_equal(state.kept("from"), links @ np.arange(1, N + 1))
    np.testing.assert_array_equal(state.kept("index"), np.arange(N))
    assert len(np.unique(state.kept("draw"))) == N


@pytest.mark.parametrize("where", ["blocks", "local", "parts"])
def test_what_is_heard_is_the_same_wherever_nodes_run(where):
    """Several nodes on a device, several devices of a node, and parts of a model."""
    schedule = gx.topology.one_peer_exponential(N)
    rule = gx.contrib.ClippedGossip(1.0)
    start = {"w": jnp.asarray(3 * RNG.normal(size=(N, 4, 6)), jnp.float32), "b": jnp.ones((N, 3))}
    specs = {"w": P("fsdp"), "b": P()}

    def run(nodes, wrap=lambda tx: tx):
        tx = wrap(gx.contrib.robust_gossip(schedule, rule, wire=jnp.bfloat16))

        def step(x):
            u, _ = tx.update(jax.tree.map(jnp.zeros_like, x), tx.init(x), x, step=1)
            return apply_updates(x, u)

        is_sharded = where == "parts" and nodes.mesh is not None
        x = nodes.put(start, specs) if is_sharded else start
        return nodes.spmd(step)(x)

    expected = run(gx.Nodes(N))
    if where == "blocks":
        got = run(gx.Nodes(N, mesh=make_mesh(2)))
    elif where == "local":
        got = run(gx.Nodes(mesh=make_mesh(N, 2)))
    else:
        got = run(gx.Nodes(mesh=make_mesh(N, 2, "fsdp")), lambda tx: gx.sharded(tx, specs))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, expected)


@pytest.mark.parametrize(
    ("combine", "options", "message"),
    [
        (lambda x, u, node: node.receive(x)[0][0], {}, "row_stochastic=True"),
        (lambda x, u, node: node.mix(x), {"row_stochastic": True}, "needs push-sum weights"),
    ],
    ids=["receive", "mix"],
)
def test_averages_that_would_be_biased_are_refused(combine, options, message):
    with pytest.raises(ValueError, match=message):
        run_steps(gx.gossip(DIRECTED, combine, **options), "vmap")
