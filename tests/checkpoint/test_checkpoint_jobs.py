"""Jobs of two processes, killed in a save, started again, and ended by SIGTERM."""

import re
from pathlib import Path

import pytest
from launch.launching import run_job
from short_runs import names_in


@pytest.mark.smoke
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own folders"])
def test_two_processes_write_their_rows_and_agree(shared, tmp_path):
    """On what is damaged, on one model, and to end when one of them is asked to.

    worker.py checks much else before, because each launch takes seconds.
    After SIGKILL in a save the launcher starts the job again at once: its own lock, which was left,
    does not stop it.
    """
    worker = Path(__file__).with_name("worker.py").read_text()
    options = ("--processes", 2, "--local-devices", 2, "--max-restarts", 1, "--restart-delay", 0)
    job = run_job(worker, *options, FOLDER=str(tmp_path), SHARED=str(shared))
    # Its peer may end first: the kernel closes the sockets of a process before it reports its end.
    killed = r"rank 0 failed \(SIGKILL, signal 9\)|process 1 of 2 ends: process 0"
    assert re.search(killed, job.stderr), job.stderr
    assert "failed (exit status 143)" in job.stderr, job.stderr
    for rank in range(2):
        lines = [line for line in job.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        lines = [line.removeprefix(f"[{rank}] ").rstrip() for line in lines]
        names = [["['.lock']", "['.lock', '2', '4.orbax-checkpoint-tmp']"], ["", ""]][rank]
        # Threads of Gloo print there too, and mix their lines.
        gloo = re.compile(r"Gloo|connected (to|peer)|^\d*$")
        assert [line for line in lines if not gloo.search(line)] == [
            "checked",
            f"starts at 0 with None {names[0]}".rstrip(),
            f"starts at 2 with {{'nodes': 4}} {names[1]}".rstrip(),
            "as if never killed",
            "ends after step 8",
        ]
    for folder in [tmp_path / "run"] if shared else (tmp_path / "run").iterdir():
        assert names_in(folder) == ["4", "6", "8"]


MACHINES = """
import os, sys
from pathlib import Path
import jax.numpy as jnp, numpy as np, optax, gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState
rank = gx.launch.initialize().process_id
*machines, steps = sys.argv[1].split()
nodes = gx.Nodes(mesh=gx.launch.mesh())
def make_tx(saved):
    return optax.chain(optax.sgd(0.1), gx.osgp(gx.topology.one_peer_exponential(saved["nodes"])))
tx = make_tx({"nodes": nodes.size})
train_step = gx.TrainStep(lambda x, goal: (x - goal, None), tx, nodes=nodes)
goal = nodes.put(np.array([float(machines[node]) for node in nodes.local], np.float32))
with Checkpoints(Path(os.environ["FOLDER"], machines[rank]), every=10, shared=False) as checkpoints:
    state = TrainState(0, *nodes.init(tx, jnp.zeros(3)))
    state = checkpoints.resume(state, nodes, make_tx)
    print("begins at", state.step, nodes.to_host(state.params)[:, 0].tolist(), file=sys.stderr)
    while state.step < int(steps):
        params, opt_state, _ = train_step(state.step, state.params, state.opt_state, goal)
        state = TrainState(state.step + 1, params, opt_state)
        checkpoints.after(state)
model = gx.average_model(state.params, state.opt_state, nodes=nodes)
print("ends with", float(model[0]), file=sys.stderr)
"""


def test_machines_come_and_go(tmp_path):
    """Who comes gets the average of those that have their parts; old saves do not count.

    They print to stderr, as Gloo mixes its lines with those on stdout.
    """
    ends = 0
    model = 0.0
    for machines, says in (
        (["0", "1"], ""),
        (["1", "2", "0"], "processes [1] have no checkpoint of step 10 in their folders"),
        (["2"], "nodes [0, 2] that saved it are in no folder"),
        (["2", "0"], "processes [1] have no checkpoint of step 30 in their folders"),
    ):
        first = ends
        ends += 10
        command = MACHINES.replace("sys.argv[1]", repr(" ".join([*machines, str(ends)])))
        job = run_job(command, "--processes", len(machines), FOLDER=str(tmp_path))
        assert job.returncode == 0, job.stderr
        begins = re.findall(r"\[\d\] begins at (\d+) \[(.*)\]", job.stderr)
        assert [int(step) for step, _ in begins] == [first] * len(machines)
        rows = {float(row) for _, values in begins for row in values.split(", ")}
        assert len(rows) == 1, "all start from one model"
        assert says in job.stderr
        if machines == ["2", "0"]:  # of which only 2 was there before
            assert rows.pop() == pytest.approx(model, rel=1e-6)
        model = float(re.findall("ends with (.*)", job.stderr)[0])
