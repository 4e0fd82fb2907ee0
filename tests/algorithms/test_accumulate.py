"""What gx.accumulate and gx.accumulate_gradients do between updates, and what they refuse."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.rows import ROWS
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from modes import MODES, make_mesh, run

import gossipjax as gx

N = 4
EVERY = 3
RING = gx.topology.ring(N)
SCHEDULE = gx.topology.from_matrices(oracle.column_stochastic(np.random.default_rng(0), N))
NODES = gx.Nodes(N)
START = jnp.asarray(np.random.default_rng(1).normal(size=(N, 5)), jnp.float32)
BATCHES = jnp.asarray(np.random.default_rng(2).normal(size=(4 * EVERY, N, 5)), jnp.float32)


def chain(gossip):
    return optax.chain(optax.sgd(0.1, 0.9), gossip)


def train(tx, batches, nodes=NODES, z=START, state=None, first=0):
    """Parameters, state, and all models `[S, N, D]`, by one program with a traced step."""

    def train_node(z, state, batches):
        def take(carry, inputs):
            z, state = carry
            step, batch = inputs
            updates, state = tx.update(z - batch, state, z, step=step)
            z = optax.apply_updates(z, updates)
            return (z, state), z

        carry = (z, tx.init(z) if state is None else state)
        steps = first + jnp.arange(len(batches))
        (z, state), models = jax.lax.scan(take, carry, (steps, batches))
        return z, state, models

    z, state, models = nodes.run(train_node, z, state, jnp.swapaxes(jnp.asarray(batches), 0, 1))
    return z, state, np.asarray(models, np.float32).swapaxes(0, 1)


def mean_batches(batches=BATCHES, every=EVERY):
    return batches.reshape(-1, every, *batches.shape[1:]).mean(axis=1)


class TestAccumulate:
    @pytest.mark.parametrize(
        ("mode", "style"),
        [*zip(MODES, ["static", "counted", "traced", "traced"], strict=True)],
    )
    def test_in_every_mode(self, mode, style):
        """In a scan, where the types of the carry must stay the same, and step by step."""
        tx = gx.accumulate(chain(gx.sgp(SCHEDULE)), EVERY)

        def take(carry, inputs):
            z, state = carry
            step, batch = inputs
            updates, state = tx.update(z - batch, state, z, step=step)
            return (z + updates, state), None

        def train_node(z, batches):
            carry = (z, tx.init(z))
            if style != "static":
                steps = jnp.arange(len(batches)) if style == "traced" else None
                return jax.lax.scan(take, carry, (steps, batches))[0][0]
            for k, batch in enumerate(batches):
                carry, _ = take(carry, (k, batch))
            return carry[0]

        z = run(mode, train_node, N)(START, jnp.swapaxes(BATCHES, 0, 1))
        expected, *_ = train(chain(gx.sgp(SCHEDULE)), mean_batches())
        np.testing.assert_allclose(z, expected, rtol=1e-5, atol=1e-6)

    def test_nothing_moves_between_updates(self):
        tx = gx.accumulate(chain(gx.gradient_tracking(SCHEDULE)), EVERY)
        z, state, _ = train(tx, BATCHES[:EVERY])
        mass = NODES.run(gx.diagnostics.total_mass, z, state)
        average = NODES.run(gx.average_model, z, state)
        for k in range(EVERY - 1):
            new_z, new_state, _ = train(tx, BATCHES[k : k + 1], z=z, state=state, first=EVERY + k)
            jax.tree.map(np.testing.assert_array_equal, (z, state.inner), (new_z, new_state.inner))
            jax.tree.map(
                np.testing.assert_array_equal,
                (mass, average),
                (
                    NODES.run(gx.diagnostics.total_mass, new_z, new_state),
                    NODES.run(gx.average_model, new_z, new_state),
                ),
            )
            state = new_state
        np.testing.assert_array_equal(state.pending, np.full(N, EVERY - 1))

    @pytest.mark.parametrize("first", [1, 4])
    def test_a_run_that_starts_between_updates_takes_what_came(self, first):
        """The first update is that of fewer gradients, by the round of its number."""
        tx = chain(gx.sgp(SCHEDULE))
        count = EVERY - first % EVERY
        _, _, models = train(gx.accumulate(tx, EVERY), BATCHES[: count + EVERY], first=first)
        parts = (BATCHES[:count], BATCHES[count : count + EVERY])
        means = np.stack([part.mean(axis=0) for part in parts])
        expected = train(tx, means, first=first // EVERY)[2]
        np.testing.assert_allclose(models[[count - 1, -1]], expected, rtol=1e-5, atol=1e-6)

    def test_sums_of_bfloat16_are_float32(self):
        """In bfloat16, 256 + 1 is 256: the mean of 256 and eight ones would be 256 / 9."""
        tx = gx.accumulate(optax.chain(optax.sgd(1.0), gx.dpsgd(gx.topology.ring(1))), 9)
        state: Any = tx.init(jnp.zeros(1, jnp.bfloat16))
        assert state.total.dtype == jnp.float32

        def update(z, gradients) -> Any:
            state, updates = tx.init(z), None
            for k in range(9):
                updates, state = tx.update(gradients[k], state, z, step=k)
            return updates

        gradients = jnp.array([[256.0] + [1.0] * 8], jnp.bfloat16)
        start = jnp.zeros(1, jnp.bfloat16)
        update_: Any = jax.vmap(update, axis_name="nodes")(start, gradients)
        assert update_.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(update_, np.float32), -264 / 9, rtol=2**-8)

    def test_statistics_are_mixed_by_the_steps_that_make_an_update(self):
        plain = chain(gx.sgp(SCHEDULE))
        tx = gx.accumulate(plain, EVERY)
        state = NODES.run(tx.init, START)
        for program in (
            lambda k: NODES.spmd(gx.mix_batch_stats, static_argnums=2)(START, state, k),
            lambda k: NODES.spmd(gx.mix_batch_stats, shared_argnums=2)(START, state, jnp.int32(k)),
        ):
            for k in range(2 * EVERY):
                expected = START
                if (k + 1) % EVERY == 0:
                    mix = NODES.spmd(gx.mix_batch_stats, static_argnums=2)
                    expected = mix(START, state.inner, k // EVERY)
                np.testing.assert_allclose(program(k), expected, rtol=1e-6)

    def test_exchange(self):
        """The first half of an update, by its number; of other steps there is none."""
        tx = chain(gx.osgp(SCHEDULE))
        accumulating = gx.accumulate(tx, EVERY)

        def step(k, z, state, batch):
            received = {} if (k + 1) % EVERY else {"received": gx.exchange(state, k)}
            updates, state = accumulating.update(z - batch, state, z, step=k, **received)
            return z + updates, state

        program = NODES.spmd(step, static_argnums=0)
        z, state = START, NODES.run(accumulating.init, START)
        for k, batch in enumerate(BATCHES):
            z, state = program(k, z, state, batch)
        np.testing.assert_allclose(z, train(tx, mean_batches())[0], rtol=1e-5, atol=1e-6)
        with pytest.raises(
            ValueError, match="step must be one that makes an update, the last of 3"
        ):
            jax.vmap(lambda s: gx.exchange(s, 1), axis_name="nodes")(state)

    def test_of_a_model_that_is_sharded_inside_a_node(self):
        mesh = Mesh(np.array(jax.devices()).reshape(N, 2), ("nodes", "fsdp"))
        islands = gx.Nodes(mesh=mesh)
        specs = {"w": P("fsdp")}
        params = {"w": jnp.arange(4.0)}
        tx = gx.accumulate(chain(gx.sharded(gx.sgp(SCHEDULE), specs)), 2)
        whole = chain(gx.sgp(SCHEDULE))
        node_specs = gx.state_specs(whole.init(params), params, specs)
        specs_of: Any = gx.state_specs(gx.accumulate(whole, 2).init(params), params, specs)
        assert specs_of.total == specs
        assert specs_of.inner == node_specs
        targets = jnp.asarray(np.random.default_rng(3).normal(size=(4, N, 4)), jnp.float32)

        def gradients(z, target):
            return {"w": z["w"] - target}, ()

        results = []
        for nodes, chain_, goals in (
            (islands, tx, targets),
            (NODES, whole, mean_batches(targets, 2)),
        ):
            z, state = nodes.init(chain_, params)
            train_step = gx.TrainStep(gradients, chain_, nodes=nodes)
            for k, goal in enumerate(goals):
                z, state, _ = train_step(k, z, state, nodes.put(goal))
            results.append(z["w"])
            if nodes is islands:
                assert state.total["w"].sharding.spec == P("nodes", "fsdp")
        np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


class TestApplyIfFinite:
    def test_inside_it_skips_an_update_and_the_others_keep_their_steps(self):
        """A bad gradient at step 4 spoils the second of four updates, on all nodes."""
        plain = gx.apply_if_finite(chain(gx.sgp(SCHEDULE)))
        bad = BATCHES.at[4, 1].set(jnp.nan)
        z, state, models = train(gx.accumulate(plain, EVERY), bad)
        expected = train(plain, mean_batches(bad))[2]
        np.testing.assert_allclose(models[EVERY - 1 :: EVERY], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(models[3 : 2 * EVERY], models[[2] * 3])
        np.testing.assert_array_equal(state.inner.total_notfinite, np.ones(N))
        assert np.isfinite(z).all()

    def test_around_it_is_refused(self):
        """A skipped step could be the one that makes the update."""
        tx = gx.apply_if_finite(gx.accumulate(chain(gx.sgp(SCHEDULE)), EVERY))
        with pytest.raises(ValueError, match=r"write gx.accumulate\(gx.apply_if_finite\(tx\)"):
            tx.init(jnp.zeros(3))


def make_gossip(name):
    schedule = RING if name.startswith("choco") else gx.topology.complete(N)
    return ROWS[name].transform(schedule)


def trace_step(tx, **step_argument):
    """Traces a step of a loop of one's own."""

    def update(z, state):
        updates, state = tx.update(z, state, z, **step_argument)
        return z + updates, state

    with jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(NODES.spmd(update), START, jax.eval_shape(NODES.spmd(tx.init), START))


NEED_GRADIENTS = ["gradient_tracking", "quasi_global"]
NEED_NONE = ["sgp", "osgp 2", "dpsgd", "adpsgd", "choco, top_k"]


class TestMultiSteps:
    @pytest.mark.parametrize("name", NEED_GRADIENTS + NEED_NONE)
    def test_before_gossip(self, name):
        """Refused where the state moves by zeros: it hands these on between its updates."""
        inner = optax.MultiSteps(optax.identity(), 4).gradient_transformation()
        tx = optax.chain(inner, make_gossip(name))
        for trace in (
            lambda: trace_step(tx, step=3),
            lambda: trace_step(tx),
            lambda: gx.canonical_step(tx.init(jnp.zeros(3)), 3),
        ):
            if name in NEED_GRADIENTS:
                with pytest.raises(ValueError, match="every update must carry a gradient"):
                    trace()
            else:
                trace()

    def test_around_gossip(self):
        """Right where steps are counted, refused where their number is not that of an update."""
        tx = optax.MultiSteps(chain(gx.sgp(SCHEDULE)), EVERY).gradient_transformation()
        trace_step(tx)
        state = tx.init(jnp.zeros(3))
        for refuse in (
            lambda: trace_step(tx, step=3),
            lambda: gx.canonical_step(state, 3),
            lambda: gx.canonical_steps(state),
            lambda: gx.mix_batch_stats(jnp.zeros(3), state, 3),
            lambda: gx.TrainStep(lambda z: (z, ()), tx, nodes=NODES)(
                0, START, NODES.run(tx.init, START)
            ),
        ):
            with pytest.raises(ValueError, match="must not stand inside optax"):
                refuse()

    def test_around_outer_steps(self):
        outer = gx.outer(optax.sgd(0.1), optax.sgd(1.0), 2)
        tx = optax.MultiSteps(outer, EVERY).gradient_transformation()
        trace_step(tx)
        with pytest.raises(ValueError, match="must not stand inside optax"):
            trace_step(tx, step=3)


class TestRefusals:
    def test_a_state_of_another_every(self):
        tx = chain(gx.sgp(SCHEDULE))
        state = NODES.run(gx.accumulate(tx, 2).init, START)
        with pytest.raises(ValueError, match="made with its every, 3, got one of 2"):
            train(gx.accumulate(tx, 3), BATCHES[:1], state=state)
        with pytest.raises(ValueError, match="must be of type AccumulationState, got tuple"):
            train(gx.accumulate(tx, 3), BATCHES[:1], state=NODES.run(tx.init, START))


def loss(params, batch, keys=None):
    del keys
    return jnp.mean(jnp.square(batch["x"] @ params - batch["y"])), batch["y"].sum()


BATCH = {
    "x": jnp.asarray(np.random.default_rng(4).normal(size=(N, 12, 5)), jnp.float32),
    "y": jnp.asarray(np.random.default_rng(5).normal(size=(N, 12)), jnp.float32),
}


class TestAccumulateGradients:
    @pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
    def test_is_the_gradient_of_the_whole_batch(self, mode):
        gradients = jax.grad(loss, has_aux=True)
        accumulated = gx.accumulate_gradients(gradients, EVERY)
        grads, aux = run(mode, accumulated, N)(START, BATCH)
        expected, total = jax.vmap(gradients)(START, BATCH)
        np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-6)
        assert aux.shape == (N, EVERY)
        np.testing.assert_allclose(aux.sum(axis=1), total, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("check_vma", [False, True])
    def test_of_one_model_on_all_nodes(self, check_vma):
        """Gradients may vary over an axis where the parameters do not."""

        def gradients(z, batch):
            return z - batch.mean(axis=0), None

        def accumulate(z, batch):
            grads: Any = gx.accumulate_gradients(gradients, 2)(z, batch[0])[0]
            return grads[None]

        program = jax.shard_map(
            accumulate,
            mesh=make_mesh(N),
            in_specs=(P(), P("nodes")),
            out_specs=P("nodes"),
            check_vma=check_vma,
        )
        batch = BATCHES[:4].swapaxes(0, 1)
        expected = START[:1] - batch.mean(axis=1)
        np.testing.assert_allclose(program(START[0], batch), expected, rtol=1e-5, atol=1e-6)

    def test_a_key_for_each_part(self):
        def draw(z, batch, keys):
            return z * 0, jax.random.uniform(keys[0], ())

        keys = jax.random.split(jax.random.key(0), 3)
        _, drawn = gx.accumulate_gradients(draw, 3)(jnp.zeros(2), jnp.zeros(6), keys)
        np.testing.assert_array_equal(drawn, jax.vmap(jax.random.uniform)(keys))

    def test_sums_of_bfloat16_are_float32(self):
        def gradients(z, batch):
            return batch.sum(axis=0), None

        batch = jnp.array([[256.0]] + [[1.0]] * 8, jnp.bfloat16)
        grads: Any
        grads, _ = gx.accumulate_gradients(gradients, 9)(jnp.zeros(1, jnp.bfloat16), batch)
        assert grads.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(grads, np.float32), 264 / 9, rtol=2**-8)

    @pytest.mark.parametrize(
        ("name", "overlap_in_thread"), [("gradient_tracking", None), ("osgp 2", True)]
    )
    def test_before_any_chain(self, name, overlap_in_thread):
        """A thread's exchange then runs beside all parts of the batch."""
        tx = chain(ROWS[name].transform(SCHEDULE))
        gradients = jax.grad(loss, has_aux=True)
        results = []
        for fn in (gradients, gx.accumulate_gradients(gradients, EVERY)):
            in_thread = None if fn is gradients else overlap_in_thread
            train_step = gx.TrainStep(fn, tx, nodes=NODES, overlap_in_thread=in_thread)
            z, state = NODES.init(tx, jnp.zeros(5))
            for k in range(5):
                z, state, _ = train_step(k, z, state, BATCH)
            results.append(z)
        np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)

    def test_errors(self):
        accumulated = gx.accumulate_gradients(jax.grad(loss, has_aux=True), 5)
        message = r"input 0\['x'\] of accumulated gradients must have a leading axis of examples "
        with pytest.raises(ValueError, match=message + r"that every = 5 divides, got shape \[12"):
            accumulated(START[0], jax.tree.map(lambda x: x[0], BATCH))
        with pytest.raises(ValueError, match=r"input 1 of .* got shape \[\]: give batches"):
            gx.accumulate_gradients(loss, 3)(START[0], jnp.zeros(3), jax.random.key(0))
        with pytest.raises(ValueError, match="every of accumulate_gradients must be an integer"):
            gx.accumulate_gradients(loss, 0)
        with pytest.raises(ValueError, match=r"gradients must return a pair \(grads, aux\)"):
            gx.accumulate_gradients(lambda z, x: z, 3)(START[0], jnp.zeros(3))
