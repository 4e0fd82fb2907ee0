"""Another number of nodes, topology or algorithm: the average model stays, training continues."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from promotion import apply_updates
from short_runs import (
    NAMES,
    assert_like,
    average_densely,
    make_chain,
    relative_error,
    train,
    train_from_start,
)

import gossipjax as gx
from gossipjax.checkpoint import average_nodes, change_nodes
from gossipjax.collectives import mix
from gossipjax.exchanges.model import add
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import Extra, OnResize, init_state
from gossipjax.exchanges.transform import gossip_transform

resize: Any = change_nodes  # of a model that is one array, which its types cannot say
gossip_state: Any = gx.gossip_state


def extra_mass(state):
    """The part of the mass that is not the models', from the arrays of node 0."""
    parts = [] if state is None or state.extra is None else state.extra.values()
    return sum(np.asarray(part.value, np.float64)[0] for part in parts if part.is_mass)


def check_extra(old, new, restarted, model):
    """What is averaged (a center, a momentum) stays; a history, messages, corrections restart."""
    assert (new.extra is None) == (old.extra is None)
    for key, part in (new.extra or {}).items():
        if part.on_resize == "average":
            expected = np.asarray(old.extra[key].value, np.float64).mean(axis=0)
            assert relative_error(expected, model) > 1e-3
            np.testing.assert_allclose(part.value, [expected] * len(part.value), rtol=1e-6)
        else:
            assert part.on_resize == "restart"
            jax.tree.map(np.testing.assert_array_equal, part.value, restarted.extra[key].value)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, jnp.float32) for name in NAMES] + [(name, jnp.bfloat16) for name in ("sgp", "osgp 3")],
)
def test_eight_five_eight_nodes_keep_the_average_model(name, dtype):
    """And back, where the state has messages and weights."""
    before, steps = 8, 5
    params, state = train_from_start(name, before, steps, dtype)
    for after in (5, 8) if name == "osgp 3" else (5,):
        expected = average_densely(params, state)
        momentum = np.mean(np.asarray(jax.tree.leaves(state)[0], np.float64), axis=0)
        old = gossip_state(state)
        tx = make_chain(name, after)
        params, state, report = resize(params, state, tx, after)
        assert report.weight == pytest.approx(before, rel=1e-6)
        assert f"{before} nodes became {after}" in str(report)
        gossip = gossip_state(state)
        model: Any = np.asarray(params, np.float64)
        if gossip is not None and gossip.residual is not None:
            model = model + np.asarray(gossip.residual, np.float64)
        assert params.dtype == dtype
        rounding = 1e-6 if dtype == jnp.float32 else 2.0**-8
        tolerance = rounding if gossip is None else 1e-6
        for node in range(after):
            assert relative_error(model[node], expected) < tolerance
            assert relative_error(params[node], expected) < rounding
            assert relative_error(jax.tree.leaves(state)[0][node], momentum) < 2.0**-8
        mass, weight = gx.spmd(gx.diagnostics.total_mass, nodes=after)(params, state)
        np.testing.assert_allclose(weight, after, rtol=1e-6)
        expected_mass = after * expected + extra_mass(gossip)
        np.testing.assert_allclose(mass[0], expected_mass, rtol=max(tolerance, 1e-5), atol=1e-6)
        if gossip is not None:
            assert (gossip.count == steps).all()
            if dtype == jnp.float32:
                init = gx.spmd(tx.init, nodes=after)(params)
                check_extra(old, gossip, gossip_state(init), expected)
        if name == "osgp 3" and after == 5:
            params, state = train(tx, after, params, state, range(steps, steps + 4))
            assert relative_error(average_densely(params, state), expected) > 1e-3
            before, steps = after, steps + 4


@pytest.mark.parametrize("old", NAMES[::4])
def test_from_one_algorithm_to_another(old):
    """Behind the same optimizer."""
    params, state = train_from_start(old, 8, 5, optimizer="adam")
    expected = average_densely(params, state)
    tx = make_chain(NAMES[(NAMES.index(old) + 4) % len(NAMES)], 5, "adam")
    params, changed, _ = resize(params, state, tx, 5)
    assert_like(changed, gx.spmd(tx.init, nodes=5)(params))
    for node in range(5):
        assert relative_error(params[node], expected) < 1e-6
    if gossip_state(state) is not None:
        counts = [x for x in jax.tree.leaves(changed) if x.dtype == jnp.int32]
        assert all((count == 5).all() for count in counts)
    params, _ = train(tx, 5, params, changed, range(5, 9))
    assert np.isfinite(params).all()


RULES: dict[OnResize, list[float]] = {
    "average": [1.5, 2.5],
    "max": [3, 4],
    "first": [0, 1],
    "restart": [0, 0],
}


def keeps_things(schedule):
    """An algorithm that nobody else knows, as its file would have it."""
    plan = ExchangePlan(schedule)

    def init(params):
        keep = {
            **{rule: Extra(jnp.zeros(2), rule) for rule in RULES},
            "key": Extra(jax.random.key(0), "first"),
        }
        return init_state(params, plan, push_sum=False)._replace(extra=keep)

    def combine(x, updates, state, step):
        node = jax.lax.axis_index("nodes")
        new = {
            **dict.fromkeys(RULES, (node + jnp.arange(2)).astype(jnp.float32)),
            "key": jax.random.fold_in(jax.random.key(1), node),
        }
        x, _ = mix(x, None, schedule, step)
        return add(x, updates), state.keep(**new)

    return gossip_transform("keeps_things", plan, init, combine)


def test_each_part_of_an_algorithm_follows_its_rule():
    nodes = gx.Nodes(4)
    tx = keeps_things(gx.topology.ring(4))
    params, opt_state = nodes.init(tx, jnp.arange(3.0))
    _, opt_state = nodes.run(tx.update, params, opt_state, params)
    _, opt_state, _ = resize(params, opt_state, keeps_things(gx.topology.ring(3)), 3)
    extra = {name: part.value for name, part in gossip_state(opt_state).extra.items()}
    for rule, expected in RULES.items():
        np.testing.assert_array_equal(extra[rule], np.tile(expected, (3, 1)), err_msg=rule)
    first_key = jax.random.fold_in(jax.random.key(1), 0)
    for key in extra["key"]:
        np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(first_key))


def key_data(keys):
    is_typed = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(keys) if is_typed else keys)


class TestKeys:
    """New nodes that drew the same numbers would be one node, as far as noise goes."""

    @pytest.mark.parametrize(
        ("impl", "is_typed", "shape"),
        [("threefry2x32", False, (3,)), ("rbg", False, ()), ("unsafe_rbg", True, (3,))],
    )
    @pytest.mark.filterwarnings("ignore:.*legacy")
    def test_each_node_draws_from_a_key_of_its_index(self, shape, is_typed, impl):
        keys = jax.random.split(jax.random.key(5, impl=impl), (4, *shape))
        given = keys if is_typed else jax.random.key_data(keys)
        for name in ("dropout_key", "rngs"):
            new = average_nodes({"a": {name: given}}, 5)["a"][name]
            assert (new.dtype, new.shape) == (given.dtype, (5, *given.shape[1:]))
            for node in range(5):
                for index in np.ndindex(shape):
                    expected = jax.random.fold_in(keys[0][index], node)
                    np.testing.assert_array_equal(key_data(new)[node][index], key_data(expected))
            rows = key_data(new).reshape(-1, key_data(new).shape[-1])
            assert len(np.unique(rows, axis=0)) == len(rows)

    def test_integers_that_are_no_keys(self):
        """By their name, by their form, by their type."""
        rows = np.array([[1, 9], [5, 2]])
        tree = {
            "counts": rows.astype(np.uint32),
            "monkey": rows.astype(np.uint32),
            "key": rows.astype(np.int32),
            "rng": np.array([[1, 9, 0], [5, 2, 7]], np.uint32),
            "rng_count": np.array([4, 6], np.uint32),
        }
        assert average_nodes(None, 3) is None
        for name, new in average_nodes(tree, 3).items():
            np.testing.assert_array_equal(new, [tree[name].max(axis=0)] * 3, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_not_gossiped_is_averaged_without_weights(dtype):
    def make_tx(schedule):
        mask = {"body": True, "head": False}
        return optax.masked(gx.osgp(schedule, 2), lambda params: mask)

    tx = make_tx(gx.topology.random_peer(4, 3, seed=1))
    rng = np.random.default_rng(0)
    params = {
        "body": jnp.asarray(rng.normal(size=(4, 6)), dtype),
        "head": jnp.asarray(rng.normal(size=(4, 5)), dtype),
    }
    state = gx.spmd(tx.init, nodes=4)(params)

    def step(z, state, k):
        node = jax.lax.axis_index("nodes").astype(dtype)
        updates, state = tx.update(jax.tree.map(lambda x: 0.1 * (node - x), z), state, z, step=k)
        return apply_updates(z, updates), state

    for k in range(3):
        params, state = gx.spmd(step, nodes=4, shared_argnums=2)(params, state, np.int32(k))
    expected = {
        "body": average_densely(params["body"], state, "body"),
        "head": np.asarray(params["head"], np.float64).mean(axis=0),
    }
    tx = make_tx(gx.topology.ring(3))
    new, new_state, report = resize(params, state, tx, 3)
    assert report.weight == pytest.approx(4, rel=1e-6)
    for name, model in expected.items():
        for row in new[name]:
            assert relative_error(row, model) < (1e-6 if dtype == jnp.float32 else 2.0**-8)
    assert_like(new_state, gx.spmd(tx.init, nodes=3)(jax.tree.map(jnp.asarray, new)))
    whole = resize(params, state, gx.sgp(gx.topology.ring(3)), 3)[0]  # which gossips all of it
    jax.tree.map(np.testing.assert_array_equal, whole, new)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (make_chain("sgp", 5, "adam"), r"as the new optimizer, got opt_state\[0\]\[0\].trace"),
        (gx.sgp(gx.topology.ring(5)), "must have nothing more, as the new optimizer, got opt"),
    ],
)
def test_another_optimizer(tx, message):
    params, state = train_from_start("sgp", 8, 1)
    with pytest.raises(ValueError, match=message):
        resize(params, state, tx, 5)
