"""A run that continues: `Checkpoints.resume` and `after`, SIGTERM, other nodes and chains."""

import functools
import os
import resource
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from modes import make_mesh
from promotion import promoting
from short_runs import assert_equal_bits, average_densely, names_in, snapshot

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, Preempted, TrainState, change_nodes

N = 4
PLACEMENTS = {"mesh": gx.Nodes(mesh=make_mesh(N)), "vmap": gx.Nodes(N)}
NODES = PLACEMENTS["vmap"]
UNFINISHED = "9.orbax-checkpoint-tmp"
ALGORITHMS = {"osgp": lambda n: gx.osgp(gx.topology.random_peer(n, 3, seed=1)), "d1d": gx.d1d_psgd}


def make_tx(metadata):
    algorithm = ALGORITHMS[metadata.get("algorithm", "osgp")]
    return optax.chain(optax.sgd(0.1, momentum=0.9), algorithm(metadata["nodes"]))


def make_accumulating(every):
    return gx.accumulate(optax.chain(optax.sgd(0.1, 0.9), gx.osgp(gx.topology.ring(N))), every)


class TestAccumulation:
    @staticmethod
    def train(tx, state, steps) -> Any:
        def gradients(z, batch):
            return z - batch, ()

        train_step = gx.TrainStep(gradients, tx, nodes=NODES)
        z, opt_state = state.params, state.opt_state
        for k in range(state.step, steps):
            batch = np.random.default_rng(k).normal(size=(N, 3)).astype(np.float32)
            z, opt_state, _ = train_step(k, z, opt_state, batch)
        return state._replace(step=steps, params=z, opt_state=opt_state)

    def start(self, every):
        return TrainState(0, *NODES.init(make_accumulating(every), jnp.zeros(3)), metadata={})

    def test_resumes_at_any_step_with_the_same_every(self, tmp_path):
        tx = make_accumulating(3)
        state = self.start(3)
        for step in (4, 5, 6):
            state = self.train(tx, state, step)
            with Checkpoints(tmp_path, every=1) as checkpoints:
                checkpoints.after(state, last=True)
            with Checkpoints(tmp_path) as checkpoints:
                resumed = checkpoints.resume(self.start(3), NODES, lambda metadata: tx)
            assert resumed.step == step
            assert_equal_bits(resumed.arrays, state.arrays)
        message = r"accumulate.every: 2, as this run, got .*accumulate.every: 3. It is of another"
        with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=message):
            checkpoints.resume(self.start(2), NODES, lambda metadata: make_accumulating(2))

    def test_other_nodes_go_on_with_the_mean_of_the_sums(self):
        state = self.train(make_accumulating(3), self.start(3), 5)
        ring = gx.topology.ring(N + 2)
        tx = gx.accumulate(optax.chain(optax.sgd(0.1, 0.9), gx.osgp(ring)), 3)
        new: Any
        _, new, _ = change_nodes(state.params, state.opt_state, tx, N + 2)
        np.testing.assert_array_equal(new.pending, np.full(N + 2, 2))
        mean = np.mean(state.opt_state.total, axis=0)
        np.testing.assert_allclose(new.total, np.tile(mean, (N + 2, 1)), rtol=1e-6)


def make_start(nodes, **metadata):
    params, opt_state = nodes.init(make_tx(metadata | {"nodes": nodes.size}), jnp.zeros(3))
    batch_stats = {"mean": nodes.replicate(jnp.zeros(2))}
    return TrainState(0, params, opt_state, batch_stats, metadata)


@functools.cache
def make_step(algorithm, nodes):
    tx = make_tx({"algorithm": algorithm, "nodes": nodes})

    def step(params, opt_state, batch_stats, k):
        node = jax.lax.axis_index("nodes").astype(jnp.float32)
        grads = params - jnp.arange(3.0) - node
        updates, opt_state = tx.update(grads, opt_state, params, step=k)
        batch_stats = jax.tree.map(lambda x: 0.9 * x + 0.1 * node, batch_stats)
        return optax.apply_updates(params, updates), opt_state, batch_stats

    return step


def train(state, nodes, steps, checkpoints=None):
    """Trains until `steps`; the metadata have the position in the batches."""
    metadata = state.metadata or {}
    step = make_step(metadata.get("algorithm", "osgp"), nodes.size)
    while state.step < steps:
        arrays = nodes.run(step, *state.arrays, nodes.shared(np.int32(state.step)))
        batches = [state.step, state.step + 1]
        state = TrainState(state.step + 1, *arrays, metadata=metadata | {"batches": batches})
        if checkpoints is not None:
            checkpoints.after(state, last=state.step == steps)
    return state


class TestResume:
    def test_nothing_saved(self, tmp_path):
        start = make_start(NODES)
        with Checkpoints(tmp_path, every=2) as checkpoints:
            assert checkpoints.resume(start, NODES, make_tx) is start
            assert checkpoints.resize_report is None
            assert checkpoints.resumed_from is None

    @pytest.mark.smoke
    @pytest.mark.parametrize("nodes", PLACEMENTS.values(), ids=PLACEMENTS)
    def test_bit_for_bit(self, nodes, tmp_path):
        uninterrupted = train(make_start(nodes), nodes, 9)
        with Checkpoints(tmp_path, every=3) as checkpoints:
            train(make_start(nodes), nodes, 7, checkpoints)
        with Checkpoints(tmp_path, every=3) as checkpoints:
            assert checkpoints.wait() == [3, 6, 7]
            start = make_start(nodes)
            state = checkpoints.resume(start, nodes, make_tx)
            assert checkpoints.resize_report is None
            assert checkpoints.resumed_from == tmp_path
            assert state.step == 7
            assert state.metadata == {"batches": [6, 7], "nodes": N}
            gossip = gx.gossip_state(state.opt_state)
            assert gossip is not None
            assert np.abs(gossip.in_flight.buffers[0]).max() > 0.1
            for a, b in zip(*map(jax.tree.leaves, (state.arrays, start.arrays)), strict=True):
                assert a.sharding == b.sharding
            state = train(state, nodes, 9, checkpoints)
        assert_equal_bits(state.arrays, uninterrupted.arrays)

    @pytest.mark.smoke
    @pytest.mark.parametrize("nodes", [gx.Nodes(3), gx.Nodes(mesh=make_mesh(6))], ids=["3", "6"])
    def test_another_number_of_nodes(self, nodes, tmp_path):
        with Checkpoints(tmp_path, every=5) as checkpoints:
            saved = train(make_start(NODES), NODES, 5, checkpoints)
        with Checkpoints(tmp_path, every=2) as checkpoints:
            state = checkpoints.resume(make_start(nodes), nodes, make_tx)
            report = checkpoints.resize_report
            assert report is not None
            assert (report.before, report.after) == (N, nodes.size)
            assert 0 < (report.fraction_in_flight or 0) < 1
            assert state.step == 5
            expected = average_densely(saved.params, saved.opt_state)
            assert nodes.one(state.params) == pytest.approx(expected, rel=1e-5)
            mean = np.asarray(saved.batch_stats["mean"]).mean(axis=0)
            assert nodes.one(state.batch_stats["mean"]) == pytest.approx(mean, rel=1e-6)
            start = make_start(nodes)
            for a, b in zip(*map(jax.tree.leaves, (state.arrays, start.arrays)), strict=True):
                assert (a.sharding, a.shape, a.dtype) == (b.sharding, b.shape, b.dtype)
            state = train(state, nodes, 8, checkpoints)
        with Checkpoints(tmp_path) as checkpoints:
            again = checkpoints.resume(make_start(nodes), nodes, make_tx)
            assert checkpoints.resize_report is None
            assert again.metadata is not None
            assert again.metadata["nodes"] == nodes.size
        assert_equal_bits(again.arrays, state.arrays)

    def test_a_chain_whose_state_has_no_arrays(self, tmp_path):
        """Only the parameters show that the number of nodes is another."""

        def make_bare_tx(metadata):
            return optax.chain(gx.allreduce(), optax.sgd(0.1))

        start = TrainState(0, *NODES.init(make_bare_tx({}), jnp.ones(3)))
        with Checkpoints(tmp_path, every=1) as checkpoints:
            checkpoints.after(start._replace(step=1))
        few = gx.Nodes(2)
        start = TrainState(0, *few.init(make_bare_tx({}), jnp.zeros(3)))
        with Checkpoints(tmp_path) as checkpoints:
            state = checkpoints.resume(start, few, make_bare_tx)
            assert checkpoints.resize_report is not None
        assert isinstance(state.params, jax.Array)
        assert state.params.tolist() == [[1.0] * 3] * 2

    def test_another_algorithm_in_the_same_folder(self, tmp_path):
        with Checkpoints(tmp_path, every=5) as checkpoints:
            saved = train(make_start(NODES, algorithm="osgp"), NODES, 5, checkpoints)
        start = make_start(NODES, algorithm="d1d")
        with Checkpoints(tmp_path) as checkpoints:
            state = checkpoints.resume(start, NODES, make_tx)
            assert checkpoints.resize_report is not None
        assert jax.tree.structure(state.opt_state) == jax.tree.structure(start.opt_state)
        expected = average_densely(saved.params, saved.opt_state)
        assert NODES.one(state.params) == pytest.approx(expected, rel=1e-5)
        assert state.metadata is not None
        assert state.metadata["algorithm"] == "osgp"  # as it was saved

    def test_init_from_another_folder(self, tmp_path):
        first = tmp_path / "first"
        second = tmp_path / "second"
        with Checkpoints(first, every=5) as checkpoints:
            saved = train(make_start(NODES, algorithm="osgp"), NODES, 5, checkpoints)
        nodes = gx.Nodes(3)
        start = make_start(nodes, algorithm="d1d")
        with Checkpoints(second, every=4) as checkpoints:
            state = checkpoints.resume(start, nodes, make_tx, init_from=first)
            assert checkpoints.resumed_from == first
            assert checkpoints.resize_report is not None
            expected = average_densely(saved.params, saved.opt_state)
            assert nodes.one(state.params) == pytest.approx(expected, rel=1e-5)
            assert state.step == 5
            train(state._replace(metadata=start.metadata), nodes, 8, checkpoints)
        assert names_in(second) == ["8"]
        with Checkpoints(second) as checkpoints:  # the run's newest checkpoint goes first
            state = checkpoints.resume(start, nodes, make_tx, init_from=first)
            assert (state.step, checkpoints.resumed_from) == (8, second)
            assert checkpoints.resize_report is None
        assert names_in(first) == ["5"]

    def test_init_from_a_folder_without_checkpoints(self, tmp_path):
        (tmp_path / "empty").mkdir()
        start = make_start(NODES)
        with Checkpoints(tmp_path / "run") as checkpoints:
            for name in ("empty", "missing"):
                message = f"init_from must be a folder of checkpoints, got {tmp_path / name}, which"
                with pytest.raises(ValueError, match=message):
                    checkpoints.resume(start, NODES, make_tx, init_from=tmp_path / name)
        assert not (tmp_path / "missing").exists()

    def test_another_model_or_optimizer(self, tmp_path):
        def make_adam(metadata):
            return optax.chain(promoting(optax.adam(0.1)), ALGORITHMS["osgp"](metadata["nodes"]))

        with Checkpoints(tmp_path, every=1) as checkpoints:
            checkpoints.after(make_start(NODES)._replace(step=1))
        nodes = gx.Nodes(3)
        with Checkpoints(tmp_path) as checkpoints:
            params, opt_state = nodes.init(make_adam({"nodes": 3}), jnp.zeros(3))
            start = make_start(nodes)._replace(params=params, opt_state=opt_state)
            with pytest.raises(ValueError, match=r"step 1 must have .* It is of another model, o"):
                checkpoints.resume(start, nodes, make_adam)
            start = TrainState(0, *nodes.init(make_tx({"nodes": 3}), jnp.zeros(7)))
            with pytest.raises(ValueError, match=r"\[4, 7\] float32, as this run, got .*\[4, 3\]"):
                checkpoints.resume(start, nodes, make_tx)


class TestTheFolderOfAnotherRun:
    @pytest.fixture
    def others(self, tmp_path):
        """It is saving."""
        folder = tmp_path / "others"
        with Checkpoints(folder, every=1) as checkpoints:
            checkpoints.after(make_start(NODES)._replace(step=1))
            checkpoints.after(make_start(NODES)._replace(step=2))
        (folder / UNFINISHED).mkdir()
        (folder / UNFINISHED / "part").write_text("half of it")
        return folder

    def test_is_only_read(self, others, tmp_path):
        before = snapshot(others)
        start = make_start(NODES)
        with Checkpoints(tmp_path / "mine", every=1) as checkpoints:
            state = checkpoints.resume(start, NODES, make_tx, init_from=others)
            assert state.step == 2
            checkpoints.after(state._replace(step=3))
        with Checkpoints(others, read_only=True) as checkpoints:
            assert checkpoints.wait() == [1, 2]
            assert checkpoints.resume(start, NODES, make_tx).step == 2
            assert checkpoints.restore(start.arrays, step=1) is not None
            with pytest.raises(ValueError, match=r"read_only must be False for a save in .*others"):
                checkpoints.save(3, start.arrays, {})
        assert snapshot(others) == before
        with pytest.raises(OSError, match=r"can read, got .*missing: there is no such folder"):
            Checkpoints(tmp_path / "missing", read_only=True)
        assert not (tmp_path / "missing").exists()

    def test_is_cleaned_at_the_first_save(self, others):
        """A program that only looks must not end a save in progress."""
        with Checkpoints(others, every=1) as checkpoints:
            checkpoints.resume(make_start(NODES), NODES, make_tx)
            assert (others / UNFINISHED / "part").exists()
            checkpoints.after(make_start(NODES)._replace(step=3))
            assert not (others / UNFINISHED).exists()


class TestAfter:
    def test_every_k_steps_and_the_last(self, tmp_path):
        with Checkpoints(tmp_path, every=3, max_to_keep=9) as checkpoints:
            train(make_start(NODES), NODES, 7, checkpoints)
            assert checkpoints.wait() == [3, 6, 7]

    def test_keeps_the_metadata_and_adds_the_nodes(self, tmp_path):
        with Checkpoints(tmp_path, every=1) as checkpoints:
            metadata = {"seed": 3, "nodes": 99}
            state = make_start(NODES)._replace(step=1, metadata=metadata)
            checkpoints.after(state)
            restored = checkpoints.restore(state.arrays)
            assert restored is not None
            assert restored.metadata == {"seed": 3, "nodes": N}
            assert metadata["nodes"] == 99


@pytest.fixture
def received():
    """The signals that the program's handler of SIGTERM, from before the context, receives."""
    numbers = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, former)


class TestSigterm:
    def test_saves_and_ends(self, tmp_path, received):
        start = make_start(NODES)
        with Checkpoints(tmp_path, every=100) as checkpoints:
            state = train(start, NODES, 2)
            checkpoints.after(state)
            os.kill(os.getpid(), signal.SIGTERM)
            state = train(state, NODES, 3)
            with pytest.raises(Preempted) as preempted:
                checkpoints.after(state)
        assert preempted.value.code == 143
        assert isinstance(preempted.value, SystemExit)
        assert str(preempted.value).startswith(f"asked to end: saved after step 3 in {tmp_path};")
        with Checkpoints(tmp_path) as checkpoints:
            assert checkpoints.resume(start, NODES, make_tx).step == 3

    def test_ends_the_context(self, tmp_path, received):
        """As a program sees it: the former handler is back, and gets nothing any more."""
        handler = signal.getsignal(signal.SIGTERM)

        def run_until_sigterm():
            with Checkpoints(tmp_path, every=1) as checkpoints:
                assert signal.getsignal(signal.SIGTERM) != handler
                os.kill(os.getpid(), signal.SIGTERM)
                checkpoints.after(make_start(NODES)._replace(step=1))

        with pytest.raises(Preempted):
            run_until_sigterm()
        assert signal.getsignal(signal.SIGTERM) == handler
        assert received == []
        assert names_in(tmp_path) == ["1"]

    def test_after_the_last_step_reaches_the_former_handler(self, tmp_path, received):
        with Checkpoints(tmp_path, every=2) as checkpoints:
            train(make_start(NODES), NODES, 2, checkpoints)
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == []
        assert received == [signal.SIGTERM]
        assert names_in(tmp_path) == ["2"]

    def test_is_not_caught_without_every(self, tmp_path, received):
        with Checkpoints(tmp_path):
            os.kill(os.getpid(), signal.SIGTERM)
            assert received == [signal.SIGTERM]

    @pytest.mark.filterwarnings("default:.*could not be written")
    @pytest.mark.parametrize(("step", "message"), [(1, "after step 1 in"), (None, "nothing is")])
    def test_a_state_that_cannot_be_written(self, step, message, tmp_path, received):
        """The message must not promise what is not there."""
        noise = np.random.default_rng(0).normal(size=(N, 50_000)).astype(np.float32)
        tx = gx.allreduce()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        with Checkpoints(tmp_path, every=1) as checkpoints:
            if step is not None:
                checkpoints.after(TrainState(step, NODES.put(noise), tx.init(noise)))
                checkpoints.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            try:
                with (
                    pytest.warns(UserWarning, match="step 2 could not be written"),
                    pytest.raises(Preempted, match=message) as preempted,
                ):
                    checkpoints.after(TrainState(2, NODES.put(noise), tx.init(noise)))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert preempted.value.step == step
