"""A run that continues: `Checkpoints.resume` and `after`, SIGTERM, other nodes and chains."""

import functools
import json
import os
import signal
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modes import make_mesh
from promotion import apply_updates
from short_runs import assert_equal_bits, average_densely, make_chain, names_in, snapshot

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, Preempted, TrainState

N = 4
NODES = gx.Nodes(N)
MESH = gx.Nodes(mesh=make_mesh(N))
UNFINISHED = "9.orbax-checkpoint-tmp"
# What a state holds is the algorithm's, where it is the placement's. Those with several parts.
CASES = [("osgp 1", MESH), ("osgp 1", gx.Nodes(N, mesh=make_mesh(2))), ("osgp 3", NODES)]
CASES += [("adpsgd", NODES), ("sgp, int8", MESH), ("choco, top_k", MESH)]


def make_tx(metadata):
    return make_chain(metadata.get("algorithm", "osgp 3"), metadata["nodes"])


def make_start(nodes, dtype=jnp.float32, **metadata):
    tx = make_tx(metadata | {"nodes": nodes.size})
    params, opt_state = nodes.init(tx, jnp.zeros(3, dtype))
    keys = nodes.replicate(jax.random.key(1), fold_in=True)
    return TrainState(
        0, params, opt_state, {"mean": nodes.replicate(jnp.zeros(2)), "key": keys}, metadata
    )


@functools.cache
def make_step(algorithm, nodes):
    """A step whose gradients are random, by a key that is a part of the state."""
    tx = make_tx({"algorithm": algorithm, "nodes": nodes})

    def step(params, opt_state, rest, k):
        node = jax.lax.axis_index("nodes").astype(jnp.float32)
        key, noise = jax.random.split(rest["key"])
        goal = jnp.arange(3.0) + node + 0.1 * jax.random.normal(noise, (3,))
        grads = params - goal.astype(params.dtype)
        updates, opt_state = tx.update(grads, opt_state, params, step=k)
        rest = {"mean": 0.9 * rest["mean"] + 0.1 * node, "key": key}
        return apply_updates(params, updates), opt_state, rest

    return step


def train(state, nodes, steps, checkpoints=None):
    """Trains until `steps`; the metadata have the position in the batches."""
    metadata = state.metadata or {}
    step = make_step(metadata.get("algorithm", "osgp 3"), nodes.size)
    while state.step < steps:
        arrays = nodes.run(step, *state.arrays, nodes.shared(np.int32(state.step)))
        batches = [state.step, state.step + 1]
        state = TrainState(state.step + 1, *arrays, metadata=metadata | {"batches": batches})
        if checkpoints is not None:
            checkpoints.after(state, last=state.step == steps)
    return state


@pytest.mark.smoke
@pytest.mark.parametrize(("algorithm", "nodes"), CASES)
def test_bit_for_bit(algorithm, nodes, tmp_path):
    """Saved at every third step and at the last; the metadata come back, with the nodes."""
    dtype = jnp.bfloat16 if nodes is NODES else jnp.float32
    start = make_start(nodes, dtype, algorithm=algorithm)
    uninterrupted = train(start, nodes, 9)
    with Checkpoints(tmp_path, every=3) as checkpoints:
        assert checkpoints.resume(start, nodes, make_tx) is start
        assert checkpoints.resize_report is checkpoints.resumed_from is None
        train(start, nodes, 7, checkpoints)
    with Checkpoints(tmp_path, every=3) as checkpoints:
        assert checkpoints.wait() == [3, 6, 7]
        state = checkpoints.resume(start, nodes, make_tx)
        assert checkpoints.resize_report is None
        assert checkpoints.resumed_from == tmp_path
        metadata = {"algorithm": algorithm, "batches": [6, 7], "nodes": N}
        assert (state.step, state.metadata) == (7, metadata)
        gossip = gx.gossip_state(state.opt_state)
        assert gossip is not None
        if algorithm.startswith("osgp"):
            assert np.abs(np.asarray(gossip.in_flight.x, np.float32)).max() > 0.1
        for a, b in zip(*map(jax.tree.leaves, (state.arrays, start.arrays)), strict=True):
            assert a.sharding == b.sharding
        state = train(state, nodes, 9, checkpoints)
    assert_equal_bits(state.arrays, uninterrupted.arrays)


@pytest.mark.smoke
@pytest.mark.parametrize("nodes", [gx.Nodes(3), gx.Nodes(mesh=make_mesh(6))], ids=["3", "6"])
def test_another_number_of_nodes(nodes, tmp_path):
    with Checkpoints(tmp_path, every=5) as checkpoints:
        saved = train(make_start(NODES), NODES, 5, checkpoints)
    start = make_start(nodes)
    with Checkpoints(tmp_path, every=2) as checkpoints:
        state = checkpoints.resume(start, nodes, make_tx)
        report = checkpoints.resize_report
        assert report is not None
        assert (report.before, report.after, state.step) == (N, nodes.size, 5)
        assert report.weight == pytest.approx(N, rel=1e-6)
        expected = average_densely(saved.params, saved.opt_state)
        assert nodes.one(state.params) == pytest.approx(expected, rel=1e-5)
        mean = np.asarray(saved.rest["mean"]).mean(axis=0)
        assert nodes.one(state.rest["mean"]) == pytest.approx(mean, rel=1e-6)
        for a, b in zip(*map(jax.tree.leaves, (state.arrays, start.arrays)), strict=True):
            assert (a.sharding, a.shape, a.dtype) == (b.sharding, b.shape, b.dtype)
        state = train(state, nodes, 8, checkpoints)
    with Checkpoints(tmp_path) as checkpoints:
        again = checkpoints.resume(start, nodes, make_tx)
        assert checkpoints.resize_report is None
    assert again.metadata is not None
    assert again.metadata["nodes"] == nodes.size
    assert_equal_bits(again.arrays, state.arrays)


def test_another_algorithm_and_init_from_another_folder(tmp_path):
    first = tmp_path / "first"
    second = tmp_path / "second"
    with Checkpoints(first, every=5) as checkpoints:
        saved = train(make_start(NODES, algorithm="osgp 3"), NODES, 5, checkpoints)
    expected = average_densely(saved.params, saved.opt_state)
    nodes = gx.Nodes(3)
    start = make_start(nodes, algorithm="d1d_psgd")
    with Checkpoints(second, every=4) as checkpoints:
        state = checkpoints.resume(start, nodes, make_tx, init_from=first)
        assert (state.step, checkpoints.resumed_from) == (5, first)
        assert checkpoints.resize_report is not None
        assert jax.tree.structure(state.opt_state) == jax.tree.structure(start.opt_state)
        assert nodes.one(state.params) == pytest.approx(expected, rel=1e-5)
        assert (state.metadata or {})["algorithm"] == "osgp 3"  # as it was saved
        checkpoints.after(state._replace(step=8, metadata=start.metadata))
    with Checkpoints(second) as checkpoints:  # the run's newest checkpoint goes first
        state = checkpoints.resume(start, nodes, make_tx, init_from=first)
        assert (state.step, checkpoints.resumed_from) == (8, second)
        assert checkpoints.resize_report is None
    with (
        Checkpoints(tmp_path / "third") as empty,
        pytest.raises(ValueError, match=f"got {tmp_path / 'missing'}, which holds none"),
    ):
        empty.resume(start, nodes, make_tx, init_from=tmp_path / "missing")
    assert (names_in(first), names_in(second)) == (["5"], ["8"])
    assert not (tmp_path / "missing").exists()


def test_the_folder_of_another_run_is_only_read(tmp_path):
    """It is saving. A program that only looks must not end that; the first save cleans."""
    others = tmp_path / "others"
    start = make_start(NODES)
    with Checkpoints(others, every=1) as checkpoints:
        checkpoints.after(start._replace(step=1))
        checkpoints.after(start._replace(step=2))
    (others / UNFINISHED).mkdir()
    (others / UNFINISHED / "part").write_text("half of it")
    before = snapshot(others)
    with Checkpoints(tmp_path / "mine", every=1) as checkpoints:
        assert checkpoints.resume(start, NODES, make_tx, init_from=others).step == 2
    with Checkpoints(others, read_only=True) as checkpoints:
        assert checkpoints.wait() == [1, 2]
        assert checkpoints.resume(start, NODES, make_tx).step == 2
        assert checkpoints.restore(start.arrays, step=1) is not None
        with pytest.raises(ValueError, match=r"read_only must be False for a save in .*others"):
            checkpoints.save(3, start.arrays, {})
    assert snapshot(others) == before
    with Checkpoints(tmp_path / "missing", read_only=True) as checkpoints:
        assert checkpoints.resume(start, NODES, make_tx) is start
    assert not (tmp_path / "missing").exists()
    with Checkpoints(others, every=1) as checkpoints:
        checkpoints.resume(start, NODES, make_tx)
        assert (others / UNFINISHED / "part").exists()
        checkpoints.after(start._replace(step=3))
        assert not (others / UNFINISHED).exists()


SETTINGS = {"lr": 0.1, "sgd": {"momentum": 0.9, "betas": (0.9, 0.99)}}


@pytest.mark.parametrize(
    ("saved", "current", "nodes", "message"),
    [
        (None, SETTINGS, NODES, None),
        (SETTINGS, None, gx.Nodes(3), None),
        (SETTINGS, SETTINGS | {"lr": 0.2}, gx.Nodes(3), "lr was 0.1, is 0.2"),
        (
            SETTINGS | {"text": "x"},
            SETTINGS | {"a": None},
            NODES,
            "text was 'x', is not there; a was not there, is None",
        ),
    ],
)
def test_settings_that_differ_are_named_once(saved, current, nodes, message, tmp_path):
    """The run has its settings from then on."""

    def resume(nodes, settings):
        start = make_start(nodes, **({} if settings is None else {"settings": settings}))
        with Checkpoints(tmp_path, every=1) as checkpoints:
            state = checkpoints.resume(start, nodes, make_tx)
            checkpoints.after(state._replace(step=state.step + 1))
        return (state.metadata or {}).get("settings")

    resume(NODES, saved)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = resume(nodes, current)
        resume(nodes, current)  # as it was saved
    assert json.dumps(kept) == json.dumps(saved if current is None else current)
    texts = [str(warning.message) for warning in caught]
    assert texts == [f"settings of the resumed run differ: {message}."] * (message is not None)


@pytest.fixture
def received():
    """The signals that the program's handler of SIGTERM, from before the context, receives."""
    numbers = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, former)


class TestSigterm:
    def test_saves_and_ends(self, tmp_path, received):
        """And the former handler is back, and gets nothing any more."""
        handler = signal.getsignal(signal.SIGTERM)
        start = make_start(NODES)._replace(metadata={"seed": 3, "nodes": 99})

        def run():
            with Checkpoints(tmp_path, every=100) as checkpoints:
                checkpoints.after(start._replace(step=2))
                os.kill(os.getpid(), signal.SIGTERM)
                checkpoints.after(start._replace(step=3))

        with pytest.raises(Preempted, match=f"saved after step 3 in {tmp_path};") as preempted:
            run()
        assert preempted.value.code == 143
        assert isinstance(preempted.value, SystemExit)
        assert signal.getsignal(signal.SIGTERM) == handler
        assert received == []
        with Checkpoints(tmp_path) as checkpoints:
            resumed = checkpoints.resume(make_start(NODES), NODES, make_tx)
            assert (resumed.step, resumed.metadata) == (3, {"seed": 3, "nodes": N})
            os.kill(os.getpid(), signal.SIGTERM)  # not caught without `every`
            assert received == [signal.SIGTERM]

    def test_in_the_last_write_completes_it(self, tmp_path, received):
        """And ends as at any step."""

        def run():
            with Checkpoints(tmp_path, every=1) as checkpoints:
                checkpoints.after(make_start(NODES)._replace(step=2), last=True)
                os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(Preempted):
            run()
        assert received == []
        with Checkpoints(tmp_path) as checkpoints:  # the lock is free
            assert checkpoints.wait() == [2]

    @pytest.mark.filterwarnings("default:.*could not be written")
    @pytest.mark.parametrize(("step", "message"), [(1, "after step 1 in"), (None, "nothing is")])
    def test_a_state_that_cannot_be_written(self, step, message, tmp_path, received, limit_files):
        """The message must not promise what is not there."""
        noise = np.random.default_rng(0).normal(size=(N, 50_000)).astype(np.float32)
        state = TrainState(1, NODES.put(noise), gx.allreduce().init(noise))

        def run():
            with Checkpoints(tmp_path, every=1) as checkpoints:
                if step is not None:
                    checkpoints.after(state)
                    checkpoints.wait()
                os.kill(os.getpid(), signal.SIGTERM)
                limit_files(100_000)
                checkpoints.after(state._replace(step=2))

        with (
            pytest.warns(UserWarning, match="step 2 could not be written"),
            pytest.raises(Preempted, match=message) as preempted,
        ):
            run()
        assert preempted.value.step == step
