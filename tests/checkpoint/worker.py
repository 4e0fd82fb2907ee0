"""One of two processes with two nodes each, under the launcher; `FOLDER` is theirs."""

import os
import signal
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx
from gossipjax import launch, processes
from gossipjax.checkpoint import Checkpoints, Preempted, TrainState

N = 4


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


def local_rows(tree):
    return [np.asarray(s.data) for x in jax.tree.leaves(tree) for s in x.addressable_shards]


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def damage_rows_of_process_1(folder, process_id):
    processes.barrier()
    if process_id == 1:
        for path in folder.rglob("ocdbt.process_1/d/*"):
            path.write_bytes(b"")
    processes.barrier()


def check_damage(checkpoints, start, step, process_id):
    """What one process cannot read is passed over by both."""
    template = abstract(start.arrays)
    arrays = start.arrays
    for k in range(6):
        if k in (2, 4):
            checkpoints.save(k, arrays, {"nodes": N})
        arrays = step(*arrays, np.int32(k))
    assert checkpoints.wait() == [2, 4]
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restored = checkpoints.restore(template)
        print(f"restored step {restored.step} with {len(caught)} warnings", flush=True)
        assert restored.metadata == {"nodes": N}
        resumed = restored.state
        for k in range(restored.step, 6):
            resumed = step(*resumed, np.int32(k))
        for a, b in zip(local_rows(resumed), local_rows(arrays), strict=True):
            np.testing.assert_array_equal(a, b)
        if restored.step == 4:
            damage_rows_of_process_1(checkpoints.folder / "4", process_id)
    without_shardings = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), template)
    whole = checkpoints.restore(without_shardings)
    assert whole.state[0].shape == (N, 1000)


def check_lock(folder):
    """One lock is the job's, and all of it is refused another."""
    try:
        Checkpoints(folder)
    except OSError as error:
        print(str(error).partition("That is ")[2].partition(":")[0], "has the lock", flush=True)


def main(folder):
    process_id, _ = launch.initialize()
    nodes = gx.Nodes(mesh=launch.mesh())
    print(f"process {process_id} holds nodes {nodes.local}", flush=True)
    rng = np.random.default_rng(0)
    check_processes(process_id)
    check_nodes(nodes, rng.normal(size=(N, 3)).astype(np.float32))
    tx = make_tx({"nodes": N})

    def update(params, opt_state, batch_stats, k):
        updates, opt_state = tx.update(params, opt_state, params, step=k)
        return optax.apply_updates(params, updates), opt_state, batch_stats

    step = nodes.spmd(update, shared_argnums=3, donate_argnums=(0, 1))
    rows = rng.normal(size=(N, 1000)).astype(np.float32)

    def make_start():
        params = nodes.put(rows[nodes.local])
        return TrainState(0, params, nodes.run(tx.init, params))

    with Checkpoints(folder) as checkpoints:
        check_lock(folder)
        check_damage(checkpoints, make_start(), step, process_id)
    with Checkpoints(folder, every=100) as checkpoints:
        state = checkpoints.resume(make_start(), nodes, make_tx)
        print(f"resumed step {state.step} with {state.metadata}", flush=True)
        for k in range(state.step, 9):
            state = TrainState(k + 1, *step(*state.arrays, np.int32(k)))
            if process_id == 1 and state.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            try:
                checkpoints.after(state)
            except Preempted as preempted:
                print(f"ends after step {preempted.step}", flush=True)
                raise


if __name__ == "__main__":
    main(Path(os.environ["FOLDER"]))
