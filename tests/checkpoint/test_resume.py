"""Another number of nodes, topology or algorithm: the average model stays, training goes on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from modes import mesh, run

import gossipjax as gx
from gossipjax.resume import average_nodes, change_nodes
from gossipjax.state import GossipState, find_state

D = 6
DELAYS = {n: np.random.default_rng(7).integers(0, 4, (3, n)) for n in (5, 8)}
GOSSIP = {
    "sgp": lambda n: gx.sgp(gx.topology.random_peer(n, 3, seed=1)),
    "osgp 1": lambda n: gx.osgp(gx.topology.random_peer(n, 3, seed=1), 1),
    "osgp 3": lambda n: gx.osgp(gx.topology.random_peer(n, 3, seed=1), 3),
    "biased": lambda n: gx.osgp(gx.topology.random_peer(n, 3, seed=1), 2, biased=True),
    "dpsgd": lambda n: gx.dpsgd(gx.topology.ring(n)),
    "adpsgd": lambda n: gx.adpsgd(gx.topology.ring(n), DELAYS[n]),
    "d1d": gx.d1d_psgd,
    "easgd": lambda n: gx.easgd(0.9 / n, 2),
    "allreduce": lambda n: gx.allreduce(),
}
OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adamw(optax.linear_schedule(0.1, 0.0, 50)),
}


def chain(name, nodes, optimizer="momentum"):
    first, last = OPTIMIZERS[optimizer](), GOSSIP[name](nodes)
    return optax.chain(last, first) if name == "allreduce" else optax.chain(first, last)


def train(tx, nodes, params, state, steps):
    """A quadratic per node."""
    targets = jnp.asarray(np.random.default_rng(0).normal(size=(nodes, D)), jnp.float32)

    def step(z, state, target, k):
        grads = jax.tree.map(lambda x: x - target.astype(x.dtype), z)
        updates, state = tx.update(grads, state, z, step=k)
        return optax.apply_updates(z, updates), state

    program = run("vmap", step, nodes, shared=(3,))
    for k in steps:
        params, state = program(params, state, targets, jnp.int32(k))
    return params, state


def start(name, nodes, steps, dtype=jnp.float32, optimizer="momentum"):
    """A state in mid-cycle and in mid-flight, of one array `[N, D]`."""
    tx = chain(name, nodes, optimizer)
    z = jnp.asarray(np.random.default_rng(1).normal(size=(nodes, D)) + 1, dtype)
    state = gx.spmd(tx.init, nodes=nodes)(z)
    return train(tx, nodes, z, state, range(steps))


def dense_average(name, z, state):
    """In float64, from the arrays themselves: a message is the weight, if any, and the model."""
    z = np.asarray(z, np.float64)
    found = find_state(state)
    if found is None:
        return z.mean(axis=0)
    w = np.asarray(found.weight, np.float64) if name[:4] in ("sgp", "osgp") else np.ones(len(z))
    x = np.asarray(found.numerator, np.float64) if np.size(found.numerator) else w[:, None] * z
    x, w = x.sum(axis=0), w.sum()
    if name in ("osgp 1", "osgp 3", "biased"):
        (flying,) = (np.asarray(b, np.float64) for b in found.in_flight.buffers)
        flying = flying.sum(axis=0).ravel()
        assert np.abs(flying).max() > 0.1  # in mid-flight
        if name != "biased":
            w, flying = w + flying[0], flying[1:]
        x = x + flying[:D]
    return x / w


def relative(found, true):
    return np.linalg.norm(np.asarray(found, np.float64) - true) / np.linalg.norm(true)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, jnp.float32) for name in GOSSIP]
    + [(name, jnp.bfloat16) for name in ("sgp", "osgp 3", "adpsgd", "allreduce")],
)
def test_eight_five_eight_nodes_keep_the_average_model(name, dtype):
    before, steps = 8, 5
    params, state = start(name, before, steps, dtype)
    for after in (5, 8):
        true = dense_average(name, params, state)
        momentum = np.mean(np.asarray(jax.tree.leaves(state)[0], np.float64), axis=0)
        tx = chain(name, after)
        params, state, report = change_nodes(params, state, tx, after)
        assert (report.before, report.after) == (before, after)
        assert report.weight == pytest.approx(before, rel=1e-6)
        assert f"{before} nodes became {after}" in str(report)
        found = find_state(state)
        wide = found.numerator if found is not None and np.size(found.numerator) else params
        assert params.dtype == dtype
        assert wide.dtype == (dtype if found is None else jnp.float32)
        tolerance = 1e-6 if found is not None or dtype == jnp.float32 else 2.0**-8
        for node in range(after):
            assert relative(wide[node], true) < tolerance
            assert relative(params[node], true) < (1e-6 if dtype == jnp.float32 else 2.0**-8)
            assert relative(jax.tree.leaves(state)[0][node], momentum) < 2.0**-8
        if name != "easgd":
            mass, weight = gx.spmd(gx.diagnostics.total_mass, nodes=after)(params, state)
            np.testing.assert_allclose(weight, after, rtol=1e-6)
            np.testing.assert_allclose(mass[0], after * true, rtol=max(tolerance, 1e-5), atol=1e-6)
        if found is not None:
            assert (found.count == steps).all()
        params, state = train(tx, after, params, state, range(steps, steps + 4))
        assert np.isfinite(np.asarray(params, np.float32)).all()
        assert relative(dense_average(name, params, state), true) > 1e-3
        before, steps = after, steps + 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sgp", "osgp 3"),
        ("osgp 3", "allreduce"),
        ("allreduce", "sgp"),
        ("easgd", "adpsgd"),
        ("d1d", "easgd"),
        ("biased", "dpsgd"),
    ],
)
def test_from_one_algorithm_to_another(old, new):
    optimizer = "momentum" if old == "sgp" else "adam"
    params, state = start(old, 8, 5, optimizer=optimizer)
    true = dense_average(old, params, state)
    tx = chain(new, 5, optimizer)
    params, changed, report = change_nodes(params, state, tx, 5)
    expected = gx.spmd(tx.init, nodes=5)(params)
    assert jax.tree.structure(changed) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(changed), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
    for node in range(5):
        assert relative(params[node], true) < 1e-6
    assert len(report.averaged) == (1 if optimizer == "momentum" else 2)
    if optimizer == "adam":
        counts = [x for x in jax.tree.leaves(changed) if x.dtype == jnp.int32]
        assert all((count == (5 if old != "allreduce" else count[0])).all() for count in counts)
    params, _ = train(tx, 5, params, changed, range(5, 9))
    assert np.isfinite(params).all()


def test_training_goes_on_on_a_mesh_and_donates():
    params, state = start("osgp 1", 8, 5)
    tx = chain("osgp 3", 5)
    params, state, _ = change_nodes(params, state, tx, 5)
    true = params[0].copy()

    def step(z, state, k):
        updates, state = tx.update(jnp.zeros_like(z), state, z, step=k)
        return optax.apply_updates(z, updates), state

    program = gx.spmd(step, mesh=mesh(5), shared_argnums=2, donate_argnums=(0, 1))
    for k in range(5, 9):
        params, state = program(params, state, np.int32(k))
    assert not np.array_equal(params[0], true)  # the momentum


def test_sixty_four_nodes_with_real_weights():
    tx = optax.chain(optax.sgd(0.1), gx.osgp(gx.topology.random_peer(64, 10, seed=0)))
    z = jnp.asarray(np.random.default_rng(2).normal(size=(64, D)), jnp.float32)
    z, state = train(tx, 64, z, gx.spmd(tx.init, nodes=64)(z), range(7))
    found = find_state(state)
    assert found is not None
    assert np.ptp(found.weight) > 0.3
    true = dense_average("osgp 1", z, state)
    params, after, report = change_nodes(z, state, tx, 64)
    assert relative(params[0], true) < 1e-6
    assert report.weight == pytest.approx(64, rel=1e-6)
    sent = np.asarray(found.in_flight.buffers[0], np.float64)[:, 0, 0].sum()
    assert report.in_flight == pytest.approx(sent / 64, rel=1e-6)
    assert report.in_flight is not None
    assert 0.3 < report.in_flight < 0.7
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_the_numerators_are_those_of_the_average_that_was_not_rounded():
    params, state = start("sgp", 8, 5, jnp.bfloat16)
    true = dense_average("sgp", params, state)
    held, after, _ = change_nodes(params, state, chain("osgp 1", 3), 3)
    found = find_state(after)
    assert isinstance(found, GossipState)
    assert relative(found.numerator[0], true) < 1e-6 < relative(held[0], true)


def test_the_center_stays():
    params, state = start("easgd", 8, 5)
    old, after = find_state(state), change_nodes(params, state, chain("easgd", 5), 5)[1]
    new = find_state(after)
    assert old is not None
    assert new is not None
    np.testing.assert_allclose(new.center, np.broadcast_to(old.center[0], (5, D)), rtol=1e-6)
    assert relative(new.center[0], np.asarray(params, np.float64).mean(axis=0)) > 1e-3


def test_trees_of_several_types_and_shapes():
    """Messages of two types have two buffers; the weight is in one of them."""
    rng = np.random.default_rng(0)
    with jax.enable_x64():
        z = {
            "a": jnp.asarray(rng.normal(size=(4, 2, 3)), jnp.float64),
            "b": jnp.asarray(rng.normal(size=(4, 5)), jnp.bfloat16),
        }
        tx = gx.osgp(gx.topology.ring(4), 3)
        program = gx.spmd(lambda z, s, k: tx.update(z, s, z, step=k), nodes=4, shared_argnums=2)
        u, state = program(z, gx.spmd(tx.init, nodes=4)(z), jnp.int32(0))
        z2 = jax.tree.map(lambda a, b: (a + b).astype(a.dtype), z, u)
        params, after, report = change_nodes(z2, state, gx.osgp(gx.topology.ring(3), 3), 3)
        found = find_state(after)
        assert found is not None
        for name in z:  # the update is z itself
            true = 2 * np.asarray(z[name], np.float64).mean(axis=0)
            assert params[name].dtype == z[name].dtype
            assert relative(found.numerator[name][2], true) < 1e-6
    assert report.in_flight == pytest.approx(2 / 3, rel=1e-6)


def test_statistics_and_keys():
    tree = {"mean": np.array([[1.0], [3.0]], np.float32), "seen": np.array([4, 4])}
    found = average_nodes(tree | {"key": jax.random.split(jax.random.key(0), 2)}, 3)
    assert found["mean"].tolist() == [[2.0]] * 3
    assert found["seen"].tolist() == [4] * 3
    assert found["key"].shape == (3,)


class TestBadInput:
    def test_another_optimizer(self):
        params, state = start("sgp", 8, 1)
        tx = optax.chain(optax.adam(0.1), GOSSIP["sgp"](5))
        with pytest.raises(
            ValueError, match=r"has opt_state\[0\]\[0\].trace, \[6\] per node, where"
        ):
            change_nodes(params, state, tx, 5)

    def test_fewer_arrays(self):
        params, state = start("sgp", 8, 1)
        with pytest.raises(ValueError, match="new optimizer has nothing more"):
            change_nodes(params, state, optax.chain(optax.sgd(0.1), GOSSIP["sgp"](5)), 5)

    def test_not_node_stacked(self):
        params, state = start("sgp", 8, 1)
        with pytest.raises(ValueError, match=r"opt_state\[0\].* has \[8\] where params has \[5\]"):
            change_nodes(params[:5], state, chain("sgp", 5), 5)

    @pytest.mark.parametrize("nodes", [0, 2.5])
    def test_no_number_of_nodes(self, nodes):
        params, state = start("sgp", 8, 1)
        with pytest.raises(ValueError, match="nodes is a whole number of at least 1"):
            change_nodes(params, state, chain("sgp", 5), nodes)
