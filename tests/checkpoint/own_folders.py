"""One of two processes with two devices each, whose folders below `FOLDER` are not shared."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gossipjax as gx
from gossipjax import launch, processes
from gossipjax.checkpoint import Checkpoints, TrainState

N = 4
INFO = launch.initialize()
RANK = INFO.process_id


def make_tx(metadata):
    schedule = gx.topology.ring(metadata["nodes"])
    return optax.chain(optax.sgd(0.1, momentum=0.9), gx.osgp(schedule))


def make_start(nodes, seed):
    rows = np.random.default_rng(seed).normal(size=(nodes.size, 1000)).astype(np.float32)
    params = {"w": nodes.put(rows[nodes.local])}
    key = nodes.replicate(jax.random.key(3))
    return TrainState(0, params, nodes.run(make_tx({"nodes": nodes.size}).init, params), key)


def move(state, by):
    arrays = jax.tree.map(lambda x: x + by, state.params)
    return state._replace(step=state.step + by, params=arrays, metadata={"at": state.step + by})


def assert_equal(one, other):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        for c, d in zip(a.addressable_shards, b.addressable_shards, strict=True):
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                c, d = jax.random.key_data(c.data), jax.random.key_data(d.data)
                np.testing.assert_array_equal(c, d)
            else:
                np.testing.assert_array_equal(c.data, d.data)


class Run:
    """A run that saves steps 1, 2 and 3, and what becomes of it when it is resumed."""

    def __init__(self, name, nodes=None, seed=0):
        self.folder = Path(os.environ["FOLDER"], name, str(RANK))
        self.nodes = nodes or gx.Nodes(N, mesh=launch.mesh())
        self.start = make_start(self.nodes, seed)
        with self.open() as checkpoints:
            for step in (1, 2, 3):
                checkpoints.after(move(self.start, step))
        processes.barrier()

    def open(self, folder=None):
        return Checkpoints(folder or self.folder, every=1, max_to_keep=2, shared=False)

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
        Checkpoints(Path(os.environ["FOLDER"], "one"), shared=False)
    run = Run("same")
    assert sorted(path.name for path in run.folder.iterdir()) == [".lock", "2", "3"]
    assert step_of(run) == (3, "")
    with run.open() as checkpoints:  # of an older one, as on a shared disk
        restored = checkpoints.restore(run.start.arrays, step=2)
        assert restored is not None
        assert_equal(restored.state, move(run.start, 2).arrays)
        with pytest.raises(ValueError, match=r"\['host'\] must be an array on the devices of all"):
            checkpoints.save(4, {"host": np.ones(3)}, {})
    _, _, said = run.resume(nodes=gx.Nodes(2 * N, mesh=launch.mesh()))
    assert "must be restored by the processes and nodes that saved it" in said, said
    _, _, said = run.resume(folder=run.folder.with_name(str(1 - RANK)))
    assert "must be restored by the processes and nodes that saved it" in said, said


def check_damage_in_one():
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
    assert step_of(run) == (2, "")
    assert (run.folder / "3.corrupted").is_dir()


def check_other_steps():
    """The newest that both have, of one run; the same steps of two runs are refused."""
    run = Run("steps")
    if RANK == 1:
        shutil.rmtree(run.folder / "3")
    assert step_of(run) == (2, "")
    other = Run("other", seed=7)
    _, _, said = run.resume((run if RANK == 0 else other).folder)
    assert "must have a checkpoint of one run and step in common" in said, said


def check_lost_folder():
    run = Run("lost")
    if RANK == 1:
        shutil.rmtree(run.folder)
    state, checkpoints, said = run.resume()
    assert state is not None, said
    assert "process 1 has no checkpoint" in said
    assert "average model of nodes [0, 1] at step 3" in said
    assert (state.step, state.metadata) == (3, {"at": 3, "nodes": N})
    report = checkpoints.resize_report
    assert (report.before, report.after) == (2, N)
    rows = np.random.default_rng(0).normal(size=(N, 1000)).astype(np.float32)[:2] + 3
    np.testing.assert_allclose(run.nodes.one(state.params)["w"], rows.mean(axis=0), rtol=1e-6)
    with run.open() as checkpoints:
        with pytest.raises(OSError, match=r"of process 1: Checkpoints\.resume starts its"):
            checkpoints.restore(run.start.arrays)
        checkpoints.after(move(state, 4))
    state, checkpoints, said = run.resume()
    assert (state.step, said, checkpoints.resize_report) == (7, "", None)


def check_first_checkpoint_of_one():
    """It was not complete: nothing is lost, and the run starts anew."""
    run = Run("first")
    for step in ("2", "3"):
        shutil.rmtree(run.folder / step)
    with run.open() as checkpoints:
        checkpoints.after(move(run.start, 1))
    processes.barrier()
    if RANK == 1:
        shutil.rmtree(run.folder / "1")
    state, _, said = run.resume()
    assert (state.step, said) == (0, "")


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
            expected = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)[1] + 3
            np.testing.assert_allclose(nodes.one(state.params)["w"], expected, rtol=1e-6)
        else:
            assert "at least one node must be whole" in said, said


if __name__ == "__main__":
    for check in (
        check_same_bits,
        check_damage_in_one,
        check_other_steps,
        check_lost_folder,
        check_first_checkpoint_of_one,
        check_sharded_nodes,
    ):
        check()
        print(check.__name__, "done", flush=True)
