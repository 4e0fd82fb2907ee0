"""One of two processes with two nodes each, under the launcher; `FOLDER` is theirs."""

import errno
import os
import resource
import signal
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gossipjax as gx
from gossipjax import launch, processes
from gossipjax.checkpoint import Checkpoints, Preempted, TrainState

N = 4
STEPS = 7


def say(*words):
    print(*words, flush=True)


def check_processes(process_id):
    is_first = process_id == 0
    assert processes.is_main_process() == is_first
    assert not processes.all_processes(is_first)
    assert processes.any_process(is_first)
    assert not processes.processes_agree(is_first)
    assert processes.processes_agree(False)
    assert processes.broadcast_text(f"from {process_id}") == "from 0"


def check_nodes(nodes, rows):
    """Each process puts its rows, and gets the whole back; keys and averages, too."""
    stacked = nodes.put(rows[nodes.local])
    np.testing.assert_array_equal(nodes.to_host(stacked), rows)
    average = nodes.run(lambda x: jax.lax.pmean(x, "nodes"), stacked)
    model = nodes.one(average)
    np.testing.assert_allclose(model + jnp.zeros(3), rows.mean(axis=0), rtol=1e-6)
    try:
        message = f"got {nodes.one(stacked)}"
    except ValueError as error:
        message = str(error)
    assert "the rows of all nodes must be equal" in message
    keys = nodes.replicate(jax.random.key(3))
    assert keys.shape == (N,)
    same = nodes.run(lambda x, y: x + y, stacked, nodes.shared(np.ones(3, np.float32)))
    np.testing.assert_array_equal(nodes.to_host(same), rows + 1)


def make_tx(metadata):
    schedule = gx.topology.ring(metadata["nodes"])
    return optax.chain(optax.sgd(0.1, momentum=0.9), gx.osgp(schedule))


def check_damage(folder, state, process_id):
    """What one process cannot read is passed over by both."""
    arrays = state.arrays
    forms = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )
    with Checkpoints(folder) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, arrays, {"nodes": N})
        assert checkpoints.wait() == [2, 4]
        try:
            Checkpoints(folder)  # one lock is the job's, and all of it is refused another
        except OSError as error:
            say(str(error).partition("has open. ")[2].partition(";")[0])
        for expected in (4, 2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                restored = checkpoints.restore(forms)
            assert restored is not None
            say(f"restored step {restored.step} with {len(caught)} warnings")
            assert (restored.step, restored.metadata) == (expected, {"nodes": N})
            assert_equal(restored.state, arrays)
            processes.barrier()
            if process_id == 1:
                for path in (folder / "4").rglob("ocdbt.process_1/d/*"):
                    path.write_bytes(b"")
            processes.barrier()
        whole = checkpoints.restore(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), forms)
        )
        assert whole is not None
        assert whole.state[0].shape == (N, 1000)


def check_failed_writes(folder, state, process_id, shared):
    """What one process cannot begin to write, or to complete, no other waits for."""
    mkdir = os.mkdir

    def refuse(path, *args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_four_times():
        with Checkpoints(folder, shared=shared) as checkpoints:
            if process_id == 0:
                os.mkdir = refuse
            checkpoints.save(1, state.arrays, {})
            with pytest.raises(OSError, match="step 1 could not be written"):
                checkpoints.wait()
            os.mkdir = mkdir
            checkpoints.save(2, state.arrays, {})
            assert checkpoints.wait() == [2]
            if process_id == 1:  # met in the thread that writes
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            checkpoints.save(3, state.arrays, {})
            with pytest.warns(UserWarning, match="step 3 could not be written"):
                assert checkpoints.wait() == [2]
            checkpoints.save(4, state.arrays, {})

    with pytest.raises(OSError, match="step 4 could not be written"):
        save_four_times()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def assert_equal(one, other):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        for c, d in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(c.data, d.data)


def kill_in_the_save_of_step_4(folder):
    """Ends process 0 when the arrays are written, and have no name yet."""
    rename = os.rename

    def rename_or_die(source, target):
        if Path(target) == folder / "4":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    os.rename = rename_or_die


def main(folder, shared):
    process_id, _ = launch.initialize()
    run = folder / "run" if shared else folder / "run" / str(process_id)
    nodes = gx.Nodes(mesh=launch.mesh())
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(N, 1000)).astype(np.float32)
    tx = make_tx({"nodes": N})
    train_step = gx.TrainStep(lambda x, goal: (x - goal, None), tx, nodes=nodes)
    goals = nodes.put(np.arange(N, dtype=np.float32)[nodes.local])

    def make_start():
        params = nodes.put(rows[nodes.local])
        return TrainState(0, params, nodes.run(tx.init, params))

    def train(state, steps, checkpoints=None):
        while state.step < steps:
            arrays = train_step(state.step, state.params, state.opt_state, goals)[:2]
            state = TrainState(state.step + 1, *arrays)
            if checkpoints is not None:
                checkpoints.after(state)
        return state

    is_first_attempt = os.environ["GOSSIPJAX_RESTART"] == "0"
    if is_first_attempt:
        say(f"process {process_id} holds nodes {nodes.local}")
        check_processes(process_id)
        check_nodes(nodes, rng.normal(size=(N, 3)).astype(np.float32))
        if shared:
            check_damage(folder / "damaged", train(make_start(), 2), process_id)
        full = folder / "full" if shared else folder / "full" / str(process_id)
        check_failed_writes(full, train(make_start(), 2), process_id, shared)
        if process_id == 0:
            kill_in_the_save_of_step_4(run)
    with Checkpoints(run, every=2, shared=shared) as checkpoints:
        state = checkpoints.resume(make_start(), nodes, make_tx)
        names = sorted(path.name for path in run.iterdir())
        say(f"starts at {state.step} with {state.metadata}", names if process_id == 0 else "")
        state = train(state, STEPS, checkpoints)
        assert_equal(state.arrays, train(make_start(), STEPS).arrays)
        say("as if never killed")
        if process_id == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            train(state, STEPS + 1, checkpoints)
        except Preempted as preempted:
            say(f"ends after step {preempted.step}")
            raise


if __name__ == "__main__":
    main(Path(os.environ["FOLDER"]), os.environ["SHARED"] == "True")
