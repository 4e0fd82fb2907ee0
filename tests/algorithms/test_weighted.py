"""Nodes that count by their share of the data: `gx.weighted`, weights of `gx.outer`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import run_history, weigh_nodes
from promotion import promoting

import gossipjax as gx

N = 4
RNG = np.random.default_rng(0)
COUNTS = np.array([90.0, 10.0, 25.0, 75.0])
SHARES = N * COUNTS / COUNTS.sum()
START = RNG.normal(size=(N, 6))
UPDATES = RNG.normal(size=(5, N, 6))
SCHEDULE = gx.topology.from_matrices(oracle.column_stochastic(RNG, N))
EXAMPLES = [90, 10]
TARGETS = jnp.array([0.0, 10.0])
POOLED = 1.0
ORDER = gx.topology.one_peer_exponential(2)
OUTER_SGD = optax.sgd(1.0)


@pytest.mark.parametrize(
    ("mode", "per_step"), [("vmap", True), ("shard_map_check_vma", True), ("pmap", False)]
)
def test_updates_before_push_sum_count_by_shares(mode, per_step):
    """Each model equals a dense oracle, and numerators grow by `sum_i N p_i u_i` at each step."""
    tx = optax.chain(gx.weighted(None if per_step else COUNTS), gx.sgp(SCHEDULE))
    tx = weigh_nodes(tx, np.tile(COUNTS, (len(UPDATES), 1))) if per_step else tx
    with jax.enable_x64(True):
        args = jnp.asarray(START), jnp.asarray(UPDATES.swapaxes(0, 1))
        _, models, _, masses, _ = run_history(mode, tx, "static", *args)
    x, w = START.copy(), np.ones(N)
    total = START.sum(0)
    matrices = SCHEDULE.matrices()
    for step, updates in enumerate(UPDATES):
        u = SHARES[:, None] * updates
        matrix = matrices[step % len(matrices)]
        x, w = matrix @ (x + u), matrix @ w
        total = total + u.sum(0)
        np.testing.assert_allclose(models[:, step], x / w[:, None], rtol=1e-12)
        np.testing.assert_allclose(masses[0, step], total, rtol=1e-12)


@pytest.mark.parametrize(
    ("fragments", "per_step", "mode"), [(1, False, "shard_map"), (2, True, "vmap")]
)
def test_an_outer_average_counts_models_by_shares(fragments, per_step, mode):
    """`a <- a + outer_tx(a - sum_i p_i x_i)`, by what was counted since a fragment's last."""
    weights = "counted" if per_step else COUNTS
    tx = gx.outer(optax.sgd(0.1), optax.sgd(0.7), 4, fragments=fragments, weights=weights)
    rng = np.random.default_rng(1)
    grads = rng.normal(size=(12, N, 2))
    tokens = rng.uniform(1, 9, (12, N)) if per_step else np.tile(COUNTS, (12, 1))

    tx = weigh_nodes(tx, tokens) if per_step else tx
    with jax.enable_x64(True):
        updates = {name: jnp.asarray(grads[..., i].T) for i, name in enumerate("ab")}
        args = {"a": jnp.zeros(N), "b": jnp.zeros(N)}, updates
        models = run_history(mode, tx, "traced", *args)[1]
    for leaf, name in enumerate("ab"):
        expected, anchor, counted = np.zeros(N), 0.0, np.zeros(N)
        for step in range(12):
            expected = expected - 0.1 * grads[step, :, leaf]
            counted += tokens[step]
            if (step + 1) % 4 == (2 if fragments == 2 and name == "a" else 0):
                anchor -= 0.7 * (anchor - np.average(expected, weights=counted))
                expected, counted = np.full(N, anchor), np.zeros(N)
        np.testing.assert_allclose(models[name][:, -1], expected, rtol=1e-6, atol=1e-9)


def end_of(tx, extra_args=None):
    """Where the average model stands after 3,000 steps on 90 and 10 examples."""

    def gradients(z, target):
        return z - target, jnp.where(target < 5, 90, 10)

    nodes = gx.Nodes(2)
    train_step = gx.TrainStep(gradients, tx, nodes=nodes, extra_args=extra_args)
    z, state = nodes.init(tx, jnp.float32(5))
    targets = jnp.tile(TARGETS, (1000, 1))
    for step in (0, 1000, 2000):
        z, state, _ = train_step.scan(step, z, state, targets)
    return float(z.mean())


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_where_90_and_10_examples_end(name):
    """At the pooled minimum, where theory says so; by Adam after local updates, with the many."""
    momentum = optax.sgd(0.05, momentum=0.9)
    optimizer = momentum if name == "momentum" else promoting(optax.adam(0.02))
    weighted = gx.weighted(EXAMPLES)
    assert end_of(optax.chain(optimizer, gx.sgp(ORDER))) == pytest.approx(5, abs=1e-3)
    end = end_of(optax.chain(weighted, gx.allreduce(), optimizer))
    assert end == pytest.approx(POOLED, abs=1e-3)
    end = end_of(optax.chain(optimizer, weighted, gx.sgp(ORDER)))
    assert (abs(end - POOLED) < 1e-3) if name == "momentum" else (abs(end - 0.1) < 0.11)
    counted = optax.chain(optimizer, gx.weighted(), gx.sgp(ORDER))
    assert end_of(counted, lambda n: {"node_weight": n}) == pytest.approx(end, abs=1e-3)


@pytest.mark.parametrize("overlap_in_thread", [False, True])
def test_nodes_reduce_their_rates_together(overlap_in_thread):
    """Alone, nodes whose losses stand still would lower their rates, and others not."""

    def gradients(z, target):
        return z - target, jnp.abs(target)

    plateau = promoting(optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    tx = optax.chain(optax.sgd(0.1), plateau, gx.osgp(gx.topology.one_peer_exponential(N)))
    nodes = gx.Nodes(N)
    train_step = gx.TrainStep(
        gradients,
        tx,
        nodes=nodes,
        extra_args=lambda loss: {"value": loss},
        overlap_in_thread=overlap_in_thread,
    )
    z, state = nodes.init(tx, jnp.float32(0))
    losses = np.tile(np.arange(1.0, N + 1), (8, 1))
    losses[:, 0] -= np.linspace(0, 0.8, 8)  # one node's falls, the mean with it
    losses[4:, 1] += 5.0
    for step in range(8):
        z, state, _ = train_step(step, z, state, jnp.asarray(losses[step], jnp.float32))
    rates = np.asarray(state[1].scale)
    assert (rates == rates[0]).all()
    assert rates[0] < 1
    train_step.close()


@pytest.mark.parametrize("is_gossip", [False, True])
def test_a_node_without_data_may_have_a_loss_of_nan(is_gossip):
    """The mean over no examples is 0 / 0, and counts nothing."""
    nodes = gx.Nodes(3)
    masks = jnp.array([[0.0, 0, 0], [1.0, 1, 1], [1.0, 1, 0]])

    def loss(z, mask):
        return (mask * (z - 1.0) ** 2).sum() / mask.sum(), mask.sum()

    sgd = optax.sgd(0.1)
    parts = (sgd, gx.weighted(), gx.sgp(gx.topology.complete(3)))
    tx = optax.chain(*(parts if is_gossip else (gx.weighted(), gx.allreduce(), sgd)))
    step = gx.TrainStep(
        jax.grad(loss, has_aux=True), tx, nodes, extra_args=lambda count: {"node_weight": count}
    )
    z, state = nodes.init(tx, jnp.zeros(()))
    for k in range(2):
        z, state, _ = step(k, z, state, masks)
    np.testing.assert_allclose(z, 0.36, rtol=1e-6)
