"""What the connections between processes are for: who has ended, who is missing, who agrees."""

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from launching import TIMEOUT, free_address, run_job, started_processes, two_machines, wait_for

from gossipjax.launch import ProcessInfo, peers


@pytest.fixture
def three(monkeypatch):
    """Three processes on threads, and what ended them."""
    ended = []
    monkeypatch.setattr(peers.Peers, "_let_go", lambda self: ended.append(self.describe_loss()))
    monkeypatch.setattr(peers, "LET_GO_SECONDS", 0.05)
    monkeypatch.setattr(peers, "NOTICE_SECONDS", 0.2)
    pairs = {i: socket.socketpair() for i in (1, 2)}
    monkeypatch.setattr(peers, "keep_alive", lambda _: None)  # of TCP
    first = peers.Peers(ProcessInfo(0, 3), {i: (pairs[i][0], f"process {i}") for i in pairs})
    others = [peers.Peers(ProcessInfo(i, 3), {0: (pairs[i][1], "process 0")}) for i in pairs]
    yield [first, *others], ended
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
    processes, _ = three
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(processes[i].gather, "slow", i, TIMEOUT) for i in (1, 2)]
        for k in range(20):
            assert gather_all(processes, "fast", [k, 1, 2]) == [str([k, 1, 2])] * 3
        assert processes[0].gather("slow", 0, TIMEOUT) == [0, 1, 2]
        assert [call.result() for call in slow] == [[0, 1, 2]] * 2


@pytest.mark.parametrize("missing", [0, 1])
def test_who_is_missing_is_named_with_the_line_that_waits(three, missing, capsys):
    processes, ended = three
    values = [None if i == missing else "here" for i in range(3)]
    errors = gather_all(processes, "read", values, timeout=0.5)
    for error in errors:
        assert "has waited for 0.5 s at " in error
        assert f"for process {missing}: look why" in error
    assert capsys.readouterr().err.count("has waited for 0.2 s") == 2
    assert ended == []


@pytest.mark.parametrize("lost", [0, 2])
def test_a_process_that_ends_ends_the_others_which_name_it(three, lost):
    processes, ended = three
    processes[lost]._lost = "itself"  # it says nothing more
    for connection, _ in processes[lost]._connections.values():
        connection.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: len(ended) >= 2)
    survivors = [i for i in range(3) if i != lost]
    for i in survivors:
        assert f"process {i} of 3 ends: process {lost} has ended" in processes[i].find_loss(0)
    with pytest.raises(ConnectionError, match=f"process {lost} has ended or cannot be reached"):
        processes[survivors[0]].gather("next", 1, TIMEOUT)


def test_programs_that_have_ended_mind_nothing_and_one_that_goes_on_is_told_so(three, capsys):
    processes, ended = three
    processes[1].leave()
    wait_for(lambda: "process 1 has ended its program, and process 0" in capsys.readouterr().err)
    for process in processes:
        process.leave()
    time.sleep(0.2)
    for process in processes:
        for connection, _ in process._connections.values():
            connection.shutdown(socket.SHUT_RDWR)
    time.sleep(0.2)
    assert ended == []


def test_a_connection_forwarded_outlives_its_far_end():
    """As JAX aborts when the connection to its coordinator ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = peers.forward(server.getsockname()).split(":")
        with socket.create_connection((host, int(port))) as near:
            far, _ = server.accept()
            near.sendall(b"to")
            assert far.recv(9) == b"to"
            far.sendall(b"from")
            assert near.recv(9) == b"from"
            far.close()
            near.settimeout(0.3)
            with pytest.raises(TimeoutError):
                near.recv(9)


TRAINS = """
import os, time, jax, jax.numpy as jnp, gossipjax as gx
info = gx.launch.initialize()
both = gx.spmd(lambda x: jax.lax.psum(x, "nodes"), gx.Nodes(mesh=gx.launch.mesh()))
for step in range(10**6):
    {work}
    if step == 20: print("steps", os.getpid(), flush=True)
"""
WORK = {
    "a collective": "jax.block_until_ready(both(jnp.ones(2)))",
    "agreement": "gx.processes.barrier()",
    "python": "time.sleep(0.01)",
}


@pytest.mark.parametrize(("work", "victim"), [*((w, 0) for w in WORK), ("a collective", 1)])
def test_a_survivor_lets_go_within_seconds_with_one_line(work, victim):
    variables = two_machines(free_address(), JAX_NUM_CPU_DEVICES="1")
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
    lines = errors.splitlines()
    assert survivor.returncode == 1
    assert len(lines) == 1, errors
    assert f"process {1 - victim} of 2 ends: process {victim} (" in lines[0]
    assert seconds < 30  # JAX takes 100


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
    assert sorted(done.stdout.splitlines()) == [f"[{i}] batches [2, 4]" for i in (0, 1)]
