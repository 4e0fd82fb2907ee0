"""A job that is killed while it saves goes on from its last complete checkpoint, bit for bit."""

from launch.launching import PROLOGUE, run_job

JOB = """
import jax, jax.numpy as jnp, numpy as np, optax
import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState

gx.launch.initialize()
nodes = gx.Nodes(mesh=gx.launch.mesh())
folder = os.environ["FOLDER"]
STEPS = 8

def make_tx(saved):
    gossip = gx.osgp(gx.topology.one_peer_exponential(saved["nodes"]))
    return optax.chain(optax.sgd(0.1, momentum=0.9), gossip)

def train(state, checkpoints=None):
    train_step = gx.TrainStep(lambda x, goal: (x - goal, None), make_tx({"nodes": 2}), nodes=nodes)
    goals = nodes.put(np.arange(2.0, dtype=np.float32)[nodes.local])
    while state.step < STEPS:
        arrays = train_step(state.step, state.params, state.opt_state, goals)[:2]
        state = TrainState(state.step + 1, *arrays)
        if checkpoints is not None:
            checkpoints.after(state)
    return state

def make_start():
    return TrainState(0, *nodes.init(make_tx({"nodes": 2}), jnp.ones(1000)))

def rename_or_die(source, target, rename=os.rename):
    # Ends process 0 when the arrays of step 4 are written, and have no name yet.
    if restart == 0 and Path(target) == Path(folder, "4.orbax-checkpoint-tmp", "state"):
        os.kill(os.getpid(), signal.SIGKILL)
    rename(source, target)

os.rename = rename_or_die
with Checkpoints(folder, every=2) as checkpoints:
    state = checkpoints.resume(make_start(), nodes, make_tx)
    if rank == 0:
        print("starts at", state.step, sorted(os.listdir(folder)), flush=True)
    state = train(state, checkpoints)
expected = train(make_start())
for a, b in zip(jax.tree.leaves(state.arrays), jax.tree.leaves(expected.arrays), strict=True):
    np.testing.assert_array_equal(a.addressable_data(0), b.addressable_data(0))
print("as if never killed")
"""


def test_sigkill_in_a_save(tmp_path):
    """The launcher starts the job again at once: its own lock, which was left, does not stop it."""
    options = ("--processes", 2, "--max-restarts", 1, "--restart-delay", 0)
    job = run_job(PROLOGUE + JOB, *options, FOLDER=str(tmp_path))
    assert job.returncode == 0, job.stderr
    assert "rank 0 failed (SIGKILL, signal 9)" in job.stderr
    lines = [line for line in job.stdout.splitlines() if "Gloo" not in line]
    assert sorted(lines) == [
        "[0] as if never killed",
        "[0] starts at 0 ['.lock']",
        "[0] starts at 2 ['.lock', '2', '4.orbax-checkpoint-tmp']",
        "[1] as if never killed",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "6", "8"]
