"""One of two processes with two nodes each, under the launcher.

`FOLDER` is theirs. They save in one folder if `SHARED` is True, else each in its own.
"""

import errno
import os
import resource
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import gossipjax as gx
from gossipjax import launch, processes
from gossipjax.checkpoint import Checkpoints, Preempted, TrainState

N = 4
STEPS = 7
RANK = launch.initialize().process_id
FOLDER = Path(os.environ.get("FOLDER", ""))  # pytest imports this file, too
SHARED = os.environ.get("SHARED") == "True"
NODES = gx.Nodes(mesh=launch.mesh())


def say(*words):
    print(*words, flush=True)


def own(name):
    """The folder of this name, or the one in it that is of this process."""
    return FOLDER / name if SHARED else FOLDER / name / str(RANK)


def make_tx(metadata):
    schedule = gx.topology.ring(metadata["nodes"])
    return optax.chain(optax.sgd(0.1, momentum=0.9), gx.osgp(schedule))


def make_rows(size, seed):
    return np.random.default_rng(seed).normal(size=(size, 1000)).astype(np.float32)


def make_start(nodes=NODES, seed=0):
    params = {"w": nodes.put(make_rows(nodes.size, seed)[nodes.local])}
    key = nodes.replicate(jax.random.key(3))
    return TrainState(0, params, nodes.run(make_tx({"nodes": nodes.size}).init, params), key)


def move(state, by):
    arrays = jax.tree.map(lambda x: x + by, state.params)
    return state._replace(step=state.step + by, params=arrays, metadata={"at": state.step + by})


def assert_equal(one, other):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        for c, d in zip(a.addressable_shards, b.addressable_shards, strict=True):
            is_key = processes.is_key(a)
            c, d = (jax.random.key_data(x.data) if is_key else x.data for x in (c, d))
            np.testing.assert_array_equal(c, d)


def advance(params, opt_state):
    updates, opt_state = make_tx({"nodes": N}).update(params, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def train(state, steps, checkpoints=None):
    while state.step < steps:
        params, opt_state = NODES.run(advance, state.params, state.opt_state)
        state = TrainState(state.step + 1, params, opt_state, state.rest)
        if checkpoints is not None:
            checkpoints.after(state)
    return state


def check_processes():
    is_first = RANK == 0
    assert processes.is_main_process() == is_first
    assert not processes.all_processes(is_first)
    assert processes.any_process(is_first)
    assert not processes.processes_agree(is_first)
    assert processes.processes_agree(False)
    assert processes.broadcast_text(f"from {RANK}") == "from 0"


def check_nodes():
    """Each process puts its rows, and gets the whole back; keys and averages, too."""
    rows = make_rows(N, seed=1)
    stacked = NODES.put(rows[NODES.local])
    np.testing.assert_array_equal(NODES.to_host(stacked), rows)
    model = NODES.one(NODES.run(lambda x: jax.lax.pmean(x, "nodes"), stacked))
    np.testing.assert_allclose(model, rows.mean(axis=0), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="the rows of all nodes must be equal"):
        NODES.one(stacked)
    assert NODES.replicate(jax.random.key(3)).shape == (N,)


def check_failed_writes():
    """What one process cannot begin to write, or to complete, no other waits for."""
    state = train(make_start(), 2)
    mkdir = os.mkdir

    def refuse(path, *args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(own("full"), shared=SHARED) as checkpoints:
        os.mkdir = refuse if RANK == 0 else mkdir
        checkpoints.save(1, state.arrays, {})
        with pytest.raises(OSError, match="step 1 could not be written"):
            checkpoints.wait()
        os.mkdir = mkdir
        checkpoints.save(2, state.arrays, {})
        assert checkpoints.wait() == [2]
        if RANK == 1:  # met in the thread that writes
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        checkpoints.save(3, state.arrays, {})
        with pytest.warns(UserWarning, match="step 3 could not be written"):
            assert checkpoints.wait() == [2]
        checkpoints.save(4, state.arrays, {})
        with pytest.raises(OSError, match="step 4 could not be written"):
            checkpoints.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Run:
    """A run that saves steps 1, 2 and 3, and what becomes of it when it is resumed."""

    def __init__(self, name, nodes=None, seed=0):
        self.folder = own(name)
        self.nodes = nodes or NODES
        self.start = make_start(self.nodes, seed)
        with self.open() as checkpoints:
            for step in (1, 2, 3):
                checkpoints.after(move(self.start, step))
        processes.barrier()

    def open(self, folder=None):
        return Checkpoints(folder or self.folder, every=1, max_to_keep=2, shared=SHARED)

    def resume(self, folder=None, nodes=None) -> tuple[Any, Any, str]:
        """The state, the checkpoints and what was said, which an error is, too."""
        processes.barrier()
        nodes = nodes or self.nodes
        with warnings.catch_warnings(record=True) as caught, self.open(folder) as checkpoints:
            warnings.simplefilter("always")
            try:
                state = checkpoints.resume(make_start(nodes, 1), nodes, make_tx)
            except (OSError, ValueError) as error:
                return None, checkpoints, str(error)
        return state, checkpoints, " ".join(str(warning.message) for warning in caught)


def step_of(run, folder=None):
    state, _, said = run.resume(folder)
    assert state is not None, said
    assert_equal(state.arrays, move(run.start, state.step).arrays)
    assert state.metadata == {"at": state.step, "nodes": run.nodes.size}
    return state.step, said


def check_same_bits():
    with pytest.raises(OSError, match="With shared=False each process needs a folder of its own"):
        Checkpoints(FOLDER / "one", shared=False)
    run = Run("same")
    assert sorted(path.name for path in run.folder.iterdir()) == [".lock", "2", "3"]
    assert step_of(run) == (3, "")
    with run.open() as checkpoints:  # of an older one, as on a shared disk
        restored = checkpoints.restore(run.start.arrays, step=2)
        assert restored is not None
        assert_equal(restored.state, move(run.start, 2).arrays)
        with pytest.raises(ValueError, match=r"\['host'\] must be an array on the devices of all"):
            checkpoints.save(4, {"host": np.ones(3)}, {})
    nodes = gx.Nodes(2 * N, mesh=launch.mesh())
    state, checkpoints, said = run.resume(nodes=nodes)
    assert (said, checkpoints.resize_report.after) == ("", 2 * N)
    mean = make_rows(N, 0).mean(axis=0) + 3
    np.testing.assert_allclose(nodes.one(state.params)["w"], mean, rtol=1e-5, atol=1e-6)
    assert step_of(run, run.folder.with_name(str(1 - RANK))) == (3, "")  # disks that were swapped


def check_damage_in_one():
    """What one process cannot read is passed over by both."""
    run = Run("damaged")
    if RANK == 1:
        files = (run.folder / "3" / "state" / "ocdbt.process_1" / "d").iterdir()
        path = max(files, key=lambda path: path.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    step, said = step_of(run)
    assert step == 2
    assert "step 3" in said
    assert "is damaged" in said
    with run.open() as checkpoints:
        checkpoints.resume(run.start, run.nodes, make_tx)
        checkpoints.after(move(run.start, 3))
    assert step_of(run) == (3, "")
    assert (run.folder / "3.corrupted").is_dir()


def check_shared_folder():
    """One lock is the job's, and all of it is refused another; each reads the whole."""
    run = Run("whole")
    with run.open() as checkpoints:
        with pytest.raises(OSError, match="Close it first"):
            run.open()
        forms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run.start.params)
        checkpoints.save(4, run.start.params, {"nodes": N})
        restored = checkpoints.restore(forms)
    assert restored is not None
    np.testing.assert_array_equal(restored.state["w"], make_rows(N, 0))


def check_other_steps():
    """The newest that both have, of one run; the same steps of two runs are refused."""
    run, other = Run("steps"), Run("other", seed=7)
    if RANK == 1:
        shutil.rmtree(run.folder / "3")
    assert step_of(run) == (2, "")
    _, _, said = run.resume((run if RANK == 0 else other).folder)
    assert "must have checkpoints of one run, got several of step 2" in said, said


def check_lost_folder():
    run = Run("lost")
    if RANK == 1:
        shutil.rmtree(run.folder)
    state, checkpoints, said = run.resume()
    assert state is not None, said
    assert "processes [1] have no checkpoint" in said
    assert "average model of nodes [0, 1] at step 3" in said
    assert (state.step, state.metadata) == (3, {"at": 3, "nodes": N})
    report = checkpoints.resize_report
    assert (report.before, report.after) == (2, N)
    rows = make_rows(N, 0)[:2] + 3
    np.testing.assert_allclose(run.nodes.one(state.params)["w"], rows.mean(axis=0), rtol=1e-6)
    with run.open() as checkpoints:
        with pytest.raises(OSError, match=r"of processes \[1\]: .* starts from the average"):
            checkpoints.restore(run.start.arrays)
        checkpoints.after(move(state, 4))
    state, checkpoints, said = run.resume()
    assert (state.step, said, checkpoints.resize_report) == (7, "", None)


def check_sharded_nodes():
    """Nodes of several devices, of one process each or of both."""
    devices = np.array(jax.devices()).reshape(2, 2)
    for name, places in (("inside", devices), ("across", devices.T)):
        mesh = jax.sharding.Mesh(places, ("nodes", "local"))
        nodes = gx.Nodes(mesh=mesh)
        run = Run(name, nodes)
        assert step_of(run) == (3, "")
        spec = jax.sharding.PartitionSpec("nodes", "local")
        sharding = jax.sharding.NamedSharding(mesh, spec)
        rows = np.arange(80, dtype=np.float32).reshape(2, 40)
        whole = jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)
        with run.open(run.folder / "sharded") as checkpoints:
            checkpoints.save(1, {"w": whole}, {})
            restored = checkpoints.restore({"w": whole})
        assert restored is not None
        assert_equal(restored.state, {"w": whole})
        processes.barrier()
        if RANK == 0:
            shutil.rmtree(run.folder)
        state, _, said = run.resume()
        if name == "inside":
            assert "average model of nodes [1] at step 3" in said, said
            expected = make_rows(2, 0)[1] + 3
            np.testing.assert_allclose(nodes.one(state.params)["w"], expected, rtol=1e-6)
        else:
            assert "must be whole in the folder of a process" in said, said


def kill_in_the_save_of_step_4():
    """Ends process 0 when the arrays are written, and have no name yet."""
    rename = os.rename

    def rename_or_die(source, target):
        if Path(target) == own("run") / "4":
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    os.rename = rename_or_die


CHECKS = {
    True: (check_processes, check_nodes, check_damage_in_one, check_shared_folder),
    False: (
        check_same_bits,
        check_damage_in_one,
        check_other_steps,
        check_lost_folder,
        check_sharded_nodes,
    ),
}


def main():
    if os.environ["GOSSIPJAX_RESTART"] == "0":
        for check in (*CHECKS[SHARED], check_failed_writes):
            check()
        say("checked")
        if RANK == 0:
            kill_in_the_save_of_step_4()
    with Checkpoints(own("run"), every=2, shared=SHARED) as checkpoints:
        state = checkpoints.resume(make_start(), NODES, make_tx)
        names = sorted(path.name for path in own("run").iterdir())
        say(f"starts at {state.step} with {state.metadata}", names if RANK == 0 else "")
        state = train(state, STEPS, checkpoints)
        assert_equal(state.arrays, train(make_start(), STEPS).arrays)
        say("as if never killed")
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            train(state, STEPS + 1, checkpoints)
        except Preempted as preempted:
            say(f"ends after step {preempted.step}")
            raise


if __name__ == "__main__":
    main()
