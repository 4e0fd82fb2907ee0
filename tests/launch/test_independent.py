"""The launcher of nodes that wait for nobody: each is started again without the others."""

import itertools
import json
import os
import signal
import time

import pytest
from launching import TIMEOUT, is_alive, read_pids, run_job, started_job, wait_for

from gossipjax.launch import NodeInfo, find_node
from gossipjax.launch.__main__ import main

# The beginning of the small programs, as in `launching`, with the variables of such a job.
PROLOGUE = """
import json, os, signal, socket, sys, time
from pathlib import Path
place, restart = int(os.environ["GOSSIPJAX_NODE"]), int(os.environ["GOSSIPJAX_RESTART"])
def announce(name):
    new = Path(os.environ["FOLDER"], f"{name}.{os.getpid()}.new")
    new.write_text(str(os.getpid()))
    new.rename(Path(os.environ["FOLDER"], f"{name}.pid"))
def wait_for(*names):
    while not all(Path(os.environ["FOLDER"], f"{name}.pid").exists() for name in names):
        time.sleep(0.01)
"""
PRINT_VARIABLES = "print(json.dumps(dict(os.environ)))\n"


def run_nodes(code, *options, **more):
    """Runs three nodes; of options that are given twice, the last one counts."""
    return run_job(PROLOGUE + code, "--asynchronous", "--processes", 3, *options, **more)


def started_nodes(code, *options, **more):
    return started_job(PROLOGUE + code, "--asynchronous", "--processes", 2, *options, **more)


def read_output(done, place):
    prefix = f"[{place}] "
    lines = done.stdout.splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def find_node_with(monkeypatch, variables):
    """What `find_node` returns in a process with these variables."""
    with monkeypatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("GOSSIPJAX_")]:
            patch.delenv(name)
        for name, value in variables.items():
            if name.startswith("GOSSIPJAX_"):
                patch.setenv(name, value)
        node = find_node()
        assert node is not None
        return node


def test_each_node_gets_its_place_and_its_output_a_prefix(monkeypatch):
    code = (
        "print('to stderr', file=sys.stderr)\n"
        "host, port = os.environ['GOSSIPJAX_NODE_ADDRESSES'].split(',')[place].split(':')\n"
        "socket.create_server((host, int(port))).close()\n"  # it may listen there
    )
    # Variables of another job, in which the launcher itself may run, do not reach the nodes.
    outer = {"GOSSIPJAX_COORDINATOR_ADDRESS": "a:1", "GOSSIPJAX_PROCESS_ID": "7"}
    outer |= {"GOSSIPJAX_NUM_PROCESSES": "9", "GOSSIPJAX_RESTART": "5", "GOSSIPJAX_NODE": "8"}
    done = run_nodes(code + PRINT_VARIABLES, "--local-devices", 2, **outer)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == [f"[{place}] to stderr" for place in range(3)]
    variables = [json.loads(read_output(done, place)[0]) for place in range(3)]
    nodes = [find_node_with(monkeypatch, values) for values in variables]
    addresses = [node.listen for node in nodes]
    assert len(set(addresses)) == 3
    job = nodes[0].job
    assert job
    for place, node in enumerate(nodes):
        contacts = tuple(address for address in addresses if address != addresses[place])
        assert node == NodeInfo(place, 3, addresses[place], contacts, False, job)
    assert len({values["GOSSIPJAX_SECRET"] for values in variables}) == 1
    for place, values in enumerate(variables):
        assert values["JAX_NUM_CPU_DEVICES"] == "2"
        assert values["JAX_LOCAL_DEVICE_IDS"] == f"{2 * place},{2 * place + 1}"
        assert not {"GOSSIPJAX_PROCESS_ID", "GOSSIPJAX_COORDINATOR_ADDRESS"} & values.keys()


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL, signal 9"),
        ("sys.exit(3)", "exit status 3"),
    ],
)
def test_a_node_that_dies_is_started_again_and_the_others_go_on(end, reason, tmp_path, monkeypatch):
    code = (
        "announce(f'{place} {os.getpid()}'); announce(f'{place} of {restart}')\n"
        "wait_for(*(f'{i} of 0' for i in range(3)))\n" + PRINT_VARIABLES + "sys.stdout.flush()\n"
        f"if place == 1 and restart == 0: {end}\n"
        "wait_for('1 of 1')"
    )
    options = ("--max-restarts", 2, "--restart-delay", 0)
    done = run_nodes(code, *options, FOLDER=str(tmp_path))
    assert done.returncode == 0, done.stderr
    launcher_lines = [line for line in done.stderr.splitlines() if line.startswith("[launch]")]
    assert launcher_lines[0].startswith(f"[launch] rank 1 failed ({reason}), the others go on")
    assert launcher_lines[1:] == ["[launch] rank 1: restart 1 of 2 in 0 s"]
    starts = [len(list(tmp_path.glob(f"{place} [0-9]*.pid"))) for place in range(3)]
    assert starts == [1, 2, 1]
    first, second = [find_node_with(monkeypatch, json.loads(line)) for line in read_output(done, 1)]
    assert second == first._replace(is_restart=True)


@pytest.mark.parametrize(("restarts", "status"), [(0, 5), (1, 5), (2, 0)])
def test_restarts(restarts, status, tmp_path):
    """The others go on when a node has failed for good, and the job's status says that it has."""
    code = (
        "announce(f'{place} of {restart}')\n"
        "if place == 1 and restart < 2: sys.exit(5)\n"
        f"wait_for('1 of {restarts}')\n"
        "time.sleep(0.3); print('goes on')"
    )
    options = ("--max-restarts", restarts, "--restart-delay", 0)
    done = run_nodes(code, *options, FOLDER=str(tmp_path))
    assert done.returncode == status
    assert done.stderr.count("rank 1 failed (exit status 5)") == min(2, restarts + 1)
    assert done.stderr.count("rank 1: restart") == restarts
    assert read_output(done, 0) == read_output(done, 2) == ["goes on"]
    assert read_output(done, 1) == (["goes on"] if status == 0 else [])


def test_each_node_has_its_own_restarts_and_delays():
    code = "print(time.time()); sys.exit(5 + place)"
    options = ("--processes", 2, "--max-restarts", 2, "--restart-delay", 0.2)
    done = run_nodes(code, *options)
    assert done.returncode in (5, 6)  # that of the node that failed for good first
    for place in range(2):
        assert f"rank {place}: restart 1 of 2 in 0.2 s\n" in done.stderr
        assert f"rank {place}: restart 2 of 2 in 0.4 s\n" in done.stderr
        times = list(map(float, read_output(done, place)))
        delays = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert len(delays) == 2
        assert delays[0] >= 0.2
        assert delays[1] >= 0.4


def test_bad_usage_is_not_tried_again():
    done = run_nodes("sys.exit(2 if place == 1 else 0)", "--max-restarts", 5)
    assert done.returncode == 2
    assert done.stderr.count("failed") == 1
    assert "restart" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_all_nodes_save(number, tmp_path):
    code = (
        "def save(*_):\n"
        "    print('saved'); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, save); announce(place); time.sleep(1000)"
    )
    with started_nodes(code, "--max-restarts", 3, FOLDER=str(tmp_path)) as launcher:
        wait_for(lambda: len(read_pids(tmp_path)) == 2)
        launcher.send_signal(number)
        out, err = launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 128 + number, err
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert "restart" not in err


@pytest.mark.parametrize("second", [True, False])
def test_nodes_that_ignore_sigterm_are_killed(second, tmp_path):
    """After the grace period, or by a second signal."""
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); announce(place); time.sleep(1000)"
    options = ("--grace", 1000 if second else 0.2)
    with started_nodes(code, *options, FOLDER=str(tmp_path)) as launcher:
        wait_for(lambda: len(read_pids(tmp_path)) == 2)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.stderr is not None
        assert "SIGTERM" in launcher.stderr.readline()
        if second:
            launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 143
    assert not any(map(is_alive, read_pids(tmp_path)))


def test_a_signal_ends_the_delay_before_a_restart():
    with started_nodes("sys.exit(5)", "--max-restarts", 3, "--restart-delay", 1000) as launcher:
        assert launcher.stderr is not None
        while "in 1000 s" not in launcher.stderr.readline():
            pass
        start = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=TIMEOUT)
        assert time.monotonic() - start < 30
    assert launcher.returncode == 143


def test_output_that_nobody_reads_stops_the_job(tmp_path):
    code = "announce(place)\nwhile True: print('more')"
    with started_nodes(code, "--max-restarts", 3, FOLDER=str(tmp_path)) as launcher:
        assert launcher.stdout is not None
        assert "more" in launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(TIMEOUT) == 128 + signal.SIGPIPE
    assert not any(map(is_alive, read_pids(tmp_path)))


def test_no_orphan_when_the_launcher_is_killed(tmp_path):
    code = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0: announce(f'child of {place}'); time.sleep(1000)\n"
        "announce(place); time.sleep(1000)"
    )
    with started_nodes(code, FOLDER=str(tmp_path)) as launcher:
        wait_for(lambda: len(read_pids(tmp_path)) == 4)
        launcher.kill()
        wait_for(lambda: not any(map(is_alive, read_pids(tmp_path))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--elastic --max-restarts 1", "--elastic must not come with --asynchronous"),
        ("--elastic", "--elastic must come with --max-restarts, got none"),
        ("--processes 0", "--processes must be from 1 to 1024, got 0"),
        ("--max-restarts -1", "--max-restarts must be from 0 to 1e+06, got -1"),
        ("--restart-delay nan", "--restart-delay must be from 0 to 1e+06, got nan"),
    ],
)
def test_bad_input_to_the_launcher(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["--asynchronous", "--processes", "2", *arguments.split(), "--", "true"])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_process_that_cannot_be_started(capsys):
    too_long = "x" * 2**18
    assert main(["--asynchronous", "--processes", "2", "--", "true", too_long]) == 1
    assert "error: cannot start rank 0: [Errno 7] Argument list too long" in capsys.readouterr().err
