"""EASGD: the center, its stability, its mass, and which steps exchange."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from modes import make_mesh, run

import gossipjax as gx

N = 4


def center_of(opt_state) -> Any:
    state = gx.gossip_state(opt_state)
    assert state is not None
    assert state.extra is not None
    return state.extra["center"].value


def with_center(state, center):
    extra = state.extra["center"]
    return state._replace(extra={"center": type(extra)(center, extra.on_resize, extra.is_mass)})


@pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
def test_every_node_has_the_same_center_from_the_start(mode):
    starts = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.float32)
    center = np.asarray(center_of(run(mode, gx.easgd(0.1).init, N)(starts)))
    np.testing.assert_allclose(center, np.tile(starts.mean(axis=0), (N, 1)), rtol=1e-5)
    assert (center == center[0]).all()


def test_init_outside_of_the_axis_takes_the_parameters_themselves():
    center = center_of(gx.easgd(0.1).init(jnp.arange(3.0)))
    np.testing.assert_array_equal(center, np.arange(3.0))


def test_the_gap_to_the_center_shrinks_as_the_docstring_says():
    alpha = 0.2
    tx = gx.easgd(alpha, period=2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.float32)
    state = gx.spmd(tx.init, nodes=N)(x)
    state = with_center(state, center_of(state) + 1)
    mass = np.asarray(x).sum(axis=0) + np.asarray(center_of(state)[0])
    gap = np.asarray(x.mean(axis=0) - center_of(state)[0])
    nodes = gx.Nodes(N)
    for k in range(6):
        step = gx.spmd(lambda x, s, k=k: tx.update(jnp.zeros_like(x), s, x, step=k), nodes=N)
        updates, state = step(x, state)
        x = x + updates
        gap = gap * (1 - alpha * (N + 1) if k % 2 == 0 else 1)
        np.testing.assert_allclose(x.mean(axis=0) - center_of(state)[0], gap, atol=1e-5)
        total, weight = nodes.run(gx.diagnostics.total_mass, x, state)
        np.testing.assert_allclose(total[1], mass, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(weight, N)
        average = nodes.run(gx.average_model, x, state)
        np.testing.assert_allclose(average[2], x.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_steps_without_an_exchange_have_no_collective():
    tx = gx.easgd(0.1, period=3)
    x = jnp.ones((8, 5))
    state = gx.spmd(tx.init)(x)
    counts = []
    for k in range(4):
        program = gx.spmd(lambda x, s, k=k: tx.update(x, s, x, step=k))
        counts.append(program.lower(x, state).compile().as_text().count(" all-reduce("))
    assert counts == [1, 0, 0, 1]


@pytest.mark.parametrize("period", [1, 3])
def test_canonical_steps_count_within_a_period(period):
    tx = optax.chain(optax.sgd(0.1), gx.easgd(0.1, period))
    for opt_state in (tx.init(jnp.ones(3)), gx.Nodes(N).init(tx, jnp.ones(3))[1]):
        assert [gx.canonical_step(opt_state, k) for k in range(11)] == [
            k % period for k in range(11)
        ]
        assert gx.canonical_steps(opt_state) == list(range(period))


@pytest.mark.parametrize("static", [True, False], ids=["static", "traced"])
def test_statistics_are_averaged_when_the_models_are(static):
    tx = gx.easgd(0.1, period=2)
    argnums: Any = {"static_argnums": 1} if static else {"shared_argnums": 1}
    program = gx.spmd(lambda s, k: gx.mix_batch_stats(s, tx.init(s), k), nodes=N, **argnums)
    stats = {"mean": jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)), jnp.float32)}
    for k in range(4):
        mixed = program(stats, k if static else jnp.int32(k))["mean"]
        mean = np.tile(stats["mean"].mean(axis=0), (N, 1))
        np.testing.assert_allclose(mixed, stats["mean"] if k % 2 else mean, rtol=1e-5, atol=1e-6)


class TestServersOfSeveralDevices:
    """A mesh of 4 nodes of 2 devices each, `local_axis_name="local"`."""

    mesh = make_mesh(N, local=2)

    def test_they_are_nodes(self):
        """The same numbers as without, round by round, and as the oracle's."""
        rng = np.random.default_rng(0)
        starts = rng.normal(size=(N, 13))  # which two devices do not divide
        updates = rng.normal(size=(5, N, 13))
        histories = []
        for local, nodes in ((None, gx.Nodes(N)), ("local", gx.Nodes(mesh=self.mesh))):
            tx = gx.easgd(0.2, 2, local_axis_name=local)

            def steps(x, updates, tx=tx):
                state = tx.init(x)
                models = []
                for k in range(5):
                    change, state = tx.update(updates[k], state, x, step=k)
                    x = x + change
                    models.append((x, center_of(state)))
                return models

            program = nodes.spmd(steps, check_vma=True)
            histories.append(
                program(
                    jnp.asarray(starts, jnp.float32),
                    jnp.asarray(updates.swapaxes(0, 1), jnp.float32),
                )
            )
        expected = oracle.easgd(None, starts, updates, 0.2, 2)
        for one_device, two_devices, (x, _, _) in zip(*histories, expected, strict=True):
            np.testing.assert_allclose(two_devices[0], x, rtol=1e-5, atol=1e-5)
            for one, other in zip(one_device, two_devices, strict=True):
                np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize(("local", "sent"), [(None, "f32[1000]"), ("local", "f32[500]")])
    def test_each_device_sends_its_share_only(self, local, sent):
        """The sum over the nodes is of half the model; the halves are gathered inside a server."""
        tx = gx.easgd(0.1, local_axis_name=local)
        x = jnp.ones((N, 1000))
        state = gx.spmd(tx.init, mesh=self.mesh)(x)
        program = gx.spmd(lambda x, s: tx.update(x, s, x, step=0), mesh=self.mesh)
        text = program.lower(x, state).compile().as_text()
        assert re.findall(r" = (\S+)\{0\} all-reduce\(", text) == [sent]


def test_an_alpha_of_numpy_does_not_widen():
    tx = gx.easgd(np.float64(0.1), period=1)
    with jax.enable_x64(True):
        x = jnp.ones((2, 3), jnp.float32)
        state = gx.spmd(tx.init, nodes=2)(x)
        _, state = gx.spmd(tx.update, nodes=2)(x, state, x)
        assert center_of(state).dtype == jnp.float32
