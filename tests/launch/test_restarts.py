"""The recipe for machines that no scheduler manages: the loop for real, the unit by systemd."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from launching import ROOT, environment, two_machines, wait_for

from experiments.speed.wire import links

SECONDS_AWAY = float(os.environ.get("SECONDS_AWAY", "1"))  # the page speaks of five minutes
RECIPE = ROOT / "docs" / "recipes" / "restarts"
TWO_MACHINES = RECIPE.with_name("two_machines")
PROGRAM = """
import os, sys, time, jax, jax.numpy as jnp, optax, gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState
gx.launch.initialize()
nodes = gx.Nodes(mesh=gx.launch.mesh())
def make_tx(saved):
    return optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.one_peer_exponential(2)))
step = gx.TrainStep(lambda x, target: (x - target, None), make_tx({}), nodes=nodes)
target = nodes.put(jnp.array([3.0, 5.0])[jnp.array(nodes.local)])
with Checkpoints(sys.argv[1], every=10, shared=False) as checkpoints:
    state = TrainState(0, *nodes.init(make_tx({}), jnp.zeros(9)))
    state = checkpoints.resume(state, nodes, make_tx)
    print("starts at", state.step, flush=True)
    for k in range(state.step, 100 if state.step else 10**6):
        params, opt_state, _ = step(k, state.params, state.opt_state, target)
        state = TrainState(k + 1, params, opt_state)
        checkpoints.after(state)
        time.sleep(0.02)
        if k == 40: print("is under way", flush=True)
print("is finished", flush=True)
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))), reason="needs root, ip and tc"
)
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_machine_goes_away_and_comes_back_with_an_empty_disk(tmp_path, is_asynchronous):
    """Its cable is pulled, so that no reset says that it has gone."""
    program = PROGRAM
    if is_asynchronous:  # the one of the page, until the test says that it is over
        program = (TWO_MACHINES / "asynchronous.py").read_text()
        for old, new in (
            ("node.total_steps < int(sys.argv[1])", "not os.path.exists(sys.argv[2])"),
            ('folder="saved"', "folder=sys.argv[1], patience=3.0"),
        ):
            assert old in program
            program = program.replace(old, new)
        program = "import os\n" + program

    def start(number):
        secret = "the same on both machines"
        both = two_machines(f"{members[0].address}:1234", GOSSIPJAX_HEARTBEAT_TIMEOUT="5")
        if is_asynchronous:
            addresses = ",".join(f"{member.address}:5000" for member in members)
            both[number] = {"GOSSIPJAX_NODE_ADDRESSES": addresses, "GOSSIPJAX_SECRET": secret}
            both[number] |= {"GOSSIPJAX_NODE": str(number)}
        command = [sys.executable, "-u", "-c", program, str(tmp_path / f"disk of {number}")]
        command += [str(tmp_path / "is over")] * is_asynchronous
        paths = [tmp_path / f"{number}.{name}" for name in ("out", "err")]
        home = tmp_path / f"home of {number}"
        home.mkdir(exist_ok=True)
        with paths[0].open("ab") as out, paths[1].open("ab") as err:
            return subprocess.Popen(
                [*members[number].prefix, RECIPE / "until.sh", *command],
                cwd=home,
                env=environment(**both[number], PYTHONPATH=f"{ROOT}{os.pathsep}{TWO_MACHINES}"),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def read(name):
        return (tmp_path / name).read_text()

    running = []
    with links.make_network(2, links.parse_rate("1gbit")) as members:
        try:
            running += [start(0), start(1)]
            says = "nodes [0, 1]" if is_asynchronous else "is under way"
            wait_for(lambda: says in read("0.out"))
            cable = [*members[1].prefix, "ip", "link", "set", links.INTERFACE]
            subprocess.run([*cable, "down"], check=True)
            os.killpg(running[1].pid, signal.SIGKILL)  # its power, too
            if is_asynchronous:
                wait_for(lambda: read("0.out").splitlines()[-1].endswith("nodes [0]"))
            else:
                wait_for(lambda: "(stopped sending heartbeats):\n1\n" in read("0.err"))
            running[1].wait()
            length = len(read("1.out"))
            shutil.rmtree(tmp_path / "disk of 1")
            time.sleep(SECONDS_AWAY)
            subprocess.run([*cable, "up"], check=True)
            running.append(start(1))
            if is_asynchronous:
                wait_for(lambda: "nodes [0, 1]" in read("1.out")[length:])
                (tmp_path / "is over").touch()
            assert [running[0].wait(300), running[2].wait(300)] == [0, 0], read("0.err")
        finally:
            for loop in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(loop.pid, signal.SIGKILL)
                loop.wait()
    if is_asynchronous:
        averages = [read(name).splitlines()[-1] for name in ("0.out", "1.out")]
        assert averages[0].split()[-3:] == averages[1].split()[-3:]
        assert averages[0].startswith("average model: held out")
        return
    first, second = (line for line in read("0.out").splitlines() if "starts at" in line)
    assert first == "starts at 0"
    assert int(second.split()[-1]) >= 30  # that of step 40 was perhaps being written
    assert "processes [1] have no checkpoint of step" in read("0.err")
    assert read("1.out").endswith("is finished\n")


def test_the_loop_ends_where_another_start_would_fail():
    """A third node that lists two addresses is told once what to type."""
    program = """
import jax.numpy as jnp, optax, gossipjax as gx
gx.asynchronous.join(optax.sgd(1.0), jnp.zeros(3), algorithm=gx.asynchronous.sgp())
"""
    addresses = "127.0.0.1:5000,127.0.0.1:5001"
    variables = environment(GOSSIPJAX_NODE="2", GOSSIPJAX_NODE_ADDRESSES=addresses)
    command = [RECIPE / "until.sh", sys.executable, "-c", program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == os.EX_CONFIG
    assert f"GOSSIPJAX_NODE=2 GOSSIPJAX_NODE_ADDRESSES={addresses},HOST:PORT" in done.stderr
    assert done.stderr.count("until.sh: status 78 would come again") == 1


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_is_one(tmp_path):
    text = (RECIPE / "gossip.service").read_text()
    command = "/srv/gossip/.venv/bin/python"
    assert command in text
    unit = tmp_path / "gossip.service"
    unit.write_text(text.replace(command, sys.executable))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
