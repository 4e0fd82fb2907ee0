"""What may stand around gossip, or before it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.rows import ROWS
from modes import run
from promotion import promoting

import gossipjax as gx

N = 4
RNG = np.random.default_rng(0)
START = RNG.normal(size=(N, 3))
TARGETS = RNG.normal(size=(N, 3))
IRREGULAR = gx.topology.from_matrices(oracle.column_stochastic(RNG, N))
RING = gx.topology.ring(N)
BAD_NODE = 2


def make_start(dtype=jnp.float32):
    return jnp.asarray(START, dtype)


def gradient(z, target):
    return z - jnp.asarray(target, z.dtype)


def train(tx, steps=6, dtype=jnp.float32, bad_steps=(), mode="vmap", count=True, start=None):
    """A quadratic per node, by one program; node BAD_NODE has no finite gradient at `bad_steps`."""

    def train_node(z, target, poison):
        def body(carry, inputs):
            z, state = carry
            poison, k = inputs
            grads = gradient(z, target) + poison.astype(z.dtype)
            updates, state = tx.update(grads, state, z, **({} if count else {"step": k}))
            return (optax.apply_updates(z, updates), state), None

        return jax.lax.scan(body, (z, tx.init(z)), (poison, jnp.arange(steps)))[0]

    poison = np.zeros((N, steps), np.float32)
    poison[BAD_NODE, list(bad_steps)] = np.nan
    z = make_start(dtype) if start is None else start
    targets = jnp.asarray(TARGETS, jnp.float32)
    return run(mode, promote(train_node), N)(z, targets, jnp.asarray(poison))


def promote(step):
    """optax's wrappers promote types; under test is what they do around gossip."""

    def call(*args):
        with jax.numpy_dtype_promotion("standard"):
            return step(*args)

    return call


def as_float64(z):
    return np.asarray(z, np.float64)


def mass_of(z, state):
    return gx.spmd(gx.diagnostics.total_mass, nodes=N)(z, state)


class TestApplyIfFinite:
    @pytest.mark.parametrize("mode", ["vmap", "shard_map", "pmap"])
    def test_around_the_chain_all_nodes_skip_a_bad_step(self, mode):
        """On a mesh, nodes that decide for themselves would wait for each other forever."""
        chain = optax.chain(optax.sgd(0.1, momentum=0.9), gx.sgp(RING))
        guarded = gx.apply_if_finite(chain)
        z, state = train(guarded, 4, bad_steps=(1, 2), mode=mode)
        expected, inner = train(chain, 2, mode=mode)
        np.testing.assert_allclose(z, expected, rtol=1e-5)
        assert isinstance(state, optax.ApplyIfFiniteState)
        assert state.total_notfinite.tolist() == [2] * N
        assert state.notfinite_count.tolist() == [0] * N
        assert state.last_finite.tolist() == [True] * N
        for a, b in zip(jax.tree.leaves(state.inner_state), jax.tree.leaves(inner), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)

    def test_before_the_gossip_nodes_skip_the_optimizer_and_still_mix(self):
        tx = optax.chain(
            gx.apply_if_finite(optax.sgd(0.1)), gx.dpsgd(RING, order="adapt-then-combine")
        )
        z, _ = train(tx, 1, bad_steps=(0,))
        np.testing.assert_allclose(z, RING.matrices()[0] @ START, rtol=1e-5)

    def test_it_gives_up_as_that_of_optax_does(self):
        guarded = gx.apply_if_finite(optax.sgd(0.1), max_consecutive_errors=1)
        one, state = train(guarded, 1, bad_steps=(0,))
        assert np.isfinite(one).all()
        assert state.notfinite_count.tolist() == [1] * N
        two, _ = train(guarded, 2, bad_steps=(0, 1))
        assert np.isnan(two[BAD_NODE]).all()

    def test_around_overlap_skipped_steps_keep_messages_on_their_way(self):
        """Counted steps go on where they were, so that a message arrives by its own round."""
        chain = optax.chain(optax.sgd(0.1), gx.osgp(gx.topology.one_peer_exponential(N)))
        skipped, _ = train(gx.apply_if_finite(chain), 7, bad_steps=(1, 4))
        expected, _ = train(chain, 5)
        np.testing.assert_allclose(skipped, expected, rtol=1e-5)
        with pytest.raises(ValueError, match="step must be left out where apply_if_finite stands"):
            train(gx.apply_if_finite(chain), 1, count=False)


def test_multi_steps_around_exchanges_at_its_last_step_only():
    chain = optax.chain(optax.sgd(0.1), gx.sgp(IRREGULAR))
    tx = optax.MultiSteps(chain, 2).gradient_transformation()
    z, _ = train(promoting(tx), 6)
    expected, _ = train(chain, 3)  # a quadratic: the mean of two equal gradients
    np.testing.assert_allclose(z, expected, rtol=1e-5, atol=1e-6)


class TestTreeMapParams:
    """It asks `init` with a placeholder, which has no type and so no residual."""

    @staticmethod
    def init_with_residual(tx):
        def init(params):
            *others, gossip = tx.init(params)
            return (*others, gossip._replace(residual=params))

        return init

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    @pytest.mark.parametrize("name", ["sgp", "osgp 2", "choco, top_k", "quasi_global"])
    def test_with_specs_like_the_parameters(self, name, dtype):
        tx = optax.chain(optax.sgd(0.1, momentum=0.9), ROWS[name].transform(RING))
        state = tx.init({"a": jnp.ones(3, dtype)})
        gossip = gx.gossip_state(state)
        assert gossip is not None
        has_residual = gossip.residual is not None
        initable = self.init_with_residual(tx) if has_residual else tx
        specs: Any = optax.tree_map_params(initable, lambda _, spec: spec, state, {"a": "the spec"})
        assert specs[0][0].trace == {"a": "the spec"}
        if has_residual:
            assert specs[1].residual == {"a": "the spec"}


MASKED_PARAMS = {"a": START[:, :2], "b": START[:, 2:]}
MASKS = {
    "masked": lambda gossip: optax.masked(gossip, {"a": True, "b": False}),
    "multi_transform": lambda gossip: optax.multi_transform(
        {"shared": gossip, "local": optax.identity()}, {"a": "shared", "b": "local"}
    ),
}


class TestMasked:
    @pytest.mark.parametrize(
        ("mask", "name", "overlap_in_thread", "dtype"),
        [
            ("masked", "osgp 2", True, jnp.float32),
            ("multi_transform", "sgp", False, jnp.bfloat16),
            ("masked", "adpsgd", False, jnp.bfloat16),
            ("multi_transform", "dpsgd", True, jnp.float32),
        ],
    )
    def test_under_a_train_step(self, mask, name, overlap_in_thread, dtype):
        """The part that is gossiped is trained as by itself, the other one stays local."""
        nodes = gx.Nodes(N)
        gossip = ROWS[name].transform(RING)
        both = optax.chain(optax.sgd(0.1), MASKS[mask](gossip))
        alone = optax.chain(optax.sgd(0.1), gossip)
        results = []
        for tx, keys in ((both, "ab"), (alone, "a"), (optax.sgd(0.1), "b")):
            params = {key: jnp.asarray(MASKED_PARAMS[key], dtype) for key in keys}
            step = gx.TrainStep(
                lambda z: (jax.tree.map(jnp.sin, z), ()),
                tx,
                nodes=nodes,
                overlap_in_thread=overlap_in_thread and keys == "ab",
            )
            state = nodes.run(tx.init, params)
            for k in range(5):
                params, state, _ = step(k, params, state)
            results.append((params, state))
        (together, state), (shared, shared_state), (local, _) = results
        tolerance = 1e-6 if dtype == jnp.float32 else 2.0**-6

        def assert_close(actual, expected):
            for key, x in expected.items():
                a, b = as_float64(actual[key]), as_float64(x)
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

        assert_close(together, shared | local)
        for model in (gx.average_model, gx.latest_model):
            whole = nodes.run(model, together, state)
            assert_close(whole, nodes.run(model, shared, shared_state))
            np.testing.assert_array_equal(as_float64(whole["b"]), as_float64(together["b"]))


class TestNarrowTypes:
    """Parameters of 16 bits: updates of their type, and nothing lost by rounding."""

    @staticmethod
    def run_steps(tx, dtype, steps, mode="vmap"):
        z = make_start(dtype)

        def many(z, updates):
            def body(carry, u):
                z, state = carry
                change, state = tx.update(u, state, z)
                assert change.dtype == z.dtype
                # With no promotion allowed: the types are the same.
                return (optax.apply_updates(z, change), state), None

            return jax.lax.scan(body, (z, tx.init(z)), updates)[0]

        updates = np.random.default_rng(0).normal(size=(N, steps, 3)) * 1e-3
        updates = jnp.asarray(updates, dtype)
        z, state = run(mode, many, N)(z, updates)
        return z, state, as_float64(updates).sum(axis=(0, 1))

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            ("sgp", jnp.float16),
            *((name, jnp.bfloat16) for name in ("osgp 2", "adpsgd", "easgd", "choco, top_k")),
        ],
    )
    def test_mass_is_conserved_over_two_hundred_steps(self, name, dtype):
        """Of updates that rounding to the parameters' type would mostly swallow."""
        row = ROWS[name]
        matrices = row.matrices(np.random.default_rng(0), N)
        tx = row.transform(gx.topology.from_matrices(matrices))
        z, state, total = self.run_steps(tx, dtype, 200)
        start = as_float64(make_start(dtype))
        mass, weight = mass_of(z, state)
        expected = start.sum(axis=0) + row.extra_mass(start) + total
        np.testing.assert_allclose(mass[0], expected, rtol=1e-5, atol=row.mass_drift)
        np.testing.assert_allclose(weight, N, rtol=1e-5)

    def test_the_parameters_are_the_model_whoever_changed_them(self):
        tx = gx.sgp(RING)
        z = make_start(jnp.bfloat16)
        state = gx.spmd(tx.init, nodes=N)(z)
        mass, _ = mass_of(2 * z, state)
        np.testing.assert_allclose(mass[0], 2 * as_float64(z).sum(axis=0), rtol=1e-5)

    def test_what_is_not_finite_is_in_the_parameters_alone(self):
        """So a run goes on from parameters that are finite again."""
        tx = gx.dpsgd(RING)
        z = make_start(jnp.float16)
        state = gx.spmd(tx.init, nodes=N)(z)
        u = jnp.full_like(z, 7e4, dtype=jnp.float32)
        _, state = gx.spmd(tx.update, nodes=N)(u, state, z)
        assert np.isfinite(state.residual).all()
