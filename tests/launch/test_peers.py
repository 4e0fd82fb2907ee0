"""What the connections between processes are for: who has ended, who is missing, who agrees."""

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from launching import TIMEOUT, free_address, run_job, started_processes, two_machines

from gossipjax.launch import ProcessInfo, peers


@pytest.fixture
def three(monkeypatch):
    """Three processes on threads."""
    monkeypatch.setattr(peers, "NOTICE_SECONDS", 0.2)
    pairs = {i: socket.socketpair() for i in (1, 2)}
    first = peers.Peers(ProcessInfo(0, 3), {i: (pairs[i][0], f"process {i}") for i in pairs})
    others = [peers.Peers(ProcessInfo(i, 3), {0: (pairs[i][1], "process 0")}) for i in pairs]
    yield [first, *others]
    for pair in pairs.values():
        for end in pair:
            end.close()


def gather_all(processes, name, values, timeout=float(TIMEOUT)):
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(process.gather, name, value, timeout)
            for process, value in zip(processes, values, strict=True)
            if value is not None
        ]
        return [str(call.exception() or call.result()) for call in calls]


def test_all_learn_the_values_of_all_in_any_order_of_the_names(three):
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(three[i].gather, "slow", i, TIMEOUT) for i in (1, 2)]
        for k in range(20):
            assert gather_all(three, "fast", [k, 1, 2]) == [str([k, 1, 2])] * 3
        assert three[0].gather("slow", 0, TIMEOUT) == [0, 1, 2]
        assert [call.result() for call in slow] == [[0, 1, 2]] * 2


@pytest.mark.parametrize("missing", [0, 1])
def test_who_is_missing_is_named_with_the_line_that_waits(three, missing, capsys):
    values = [None if i == missing else "here" for i in range(3)]
    errors = gather_all(three, "read", values, timeout=0.5)
    for error in errors:
        assert "has waited for 0.5 s at " in error
        assert f"for process {missing}: look why" in error
    assert capsys.readouterr().err.count("has waited for 0.2 s") == 2


@pytest.mark.parametrize("lost", [0, 2])
def test_those_that_wait_for_a_process_that_ends_learn_its_name(three, lost, capsys):
    with ThreadPoolExecutor(2) as pool:
        survivors = [i for i in range(3) if i != lost]
        calls = [pool.submit(three[i].gather, "next", 1, TIMEOUT) for i in survivors]
        three[lost].leave()
        for connection, _ in three[lost]._connections.values():
            connection.shutdown(socket.SHUT_RDWR)
        for i, call in zip(survivors, calls, strict=True):
            text = f"process {i} of 3 ends: process {lost} has ended or cannot be reached"
            assert text in str(call.exception())
            assert three[i].has_lost(0)
    assert capsys.readouterr().err.count("has ended or cannot be reached. Start all") == 2


TRAINS = """
import os, sys, time, jax, jax.numpy as jnp, gossipjax as gx
info = gx.launch.initialize(heartbeat_timeout=3)
victim = int(os.environ["VICTIM"])
both = gx.spmd(lambda x: jax.lax.psum(x, "nodes"), gx.Nodes(mesh=gx.launch.mesh()))
for step in range(10**6):
    {work}
    if step == 20: print("steps", os.getpid(), flush=True)
"""
WORK = {
    "a collective": "jax.block_until_ready(both(jnp.ones(2)))",
    "agreement": "gx.processes.barrier()",
    "python": "time.sleep(0.01)",
    "its end": "if step > 20: time.sleep(100) if info.process_id == victim else sys.exit()",
}


@pytest.mark.lab
@pytest.mark.parametrize(
    ("work", "victim"),
    [("a collective", 0), ("agreement", 1), ("python", 0), ("python", 1), ("its end", 1)],
)
def test_a_survivor_ends_and_names_the_process_that_died(work, victim):
    """In a line of ours where an exception reaches Python, and else in JAX's."""
    variables = two_machines(free_address(), JAX_NUM_CPU_DEVICES="1", VICTIM=f"{victim}")
    with started_processes(TRAINS.format(work=WORK[work]), variables) as processes:
        for process in processes:
            assert process.stdout is not None
            while "steps" not in process.stdout.readline():
                assert process.poll() is None, process.communicate()
        processes[victim].send_signal(signal.SIGKILL)
        start = time.monotonic()
        survivor = processes[1 - victim]
        _, errors = survivor.communicate(timeout=TIMEOUT)
        seconds = time.monotonic() - start
    ours = [line for line in errors.splitlines() if line.startswith("gossipjax:")]
    assert len(ours) == (work != "its end"), errors
    assert all(f"{1 - victim} of 2 ends: process {victim} (" in line for line in ours)
    raises = work in ("a collective", "agreement")
    assert survivor.returncode == (1 if raises else -signal.SIGABRT)
    assert "Traceback" not in errors
    assert raises or victim == 0 or "unhealthy (stopped sending heartbeats)" in errors
    assert seconds < 60  # JAX takes 100 by default


@pytest.mark.lab
def test_loops_of_unequal_length_end_together():
    code = (
        "import numpy as np, gossipjax as gx\n"
        "rank = gx.launch.initialize().process_id\n"
        "nodes = gx.Nodes(mesh=gx.launch.mesh())\n"
        "loaders = [[np.ones(4) for _ in range(n - rank)] for n in (5, 3)]\n"
        "both = [gx.prefetch(map(nodes.split, l), together=True) for l in loaders]\n"
        "print('batches', [sum(1 for _ in loader) for loader in reversed(both)])\n"
    )
    done = run_job(code, "--processes", 2)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # nobody misses a process that has ended
    assert sorted(done.stdout.splitlines()) == [f"[{i}] batches [2, 4]" for i in (0, 1)]
