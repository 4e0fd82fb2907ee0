"""Launching: the place in a job, the roll call, meshes, and processes that end together."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AxisType

from gossipjax import launch
from gossipjax.rendezvous import Place, meet, parse_address

ROOT = Path(__file__).parent.parent
PATIENCE = 60  # seconds, for what takes a few at most


def job(code: str, *options: object) -> list[str]:
    return [
        *(sys.executable, "-m", "gossipjax.launch", *map(str, options)),
        *("--", sys.executable, "-c", code),
    ]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    return {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **more}


def run(code: str, *options: object, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        job(code, *options),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(**more),
    )


@contextlib.contextmanager
def started(code: str, *options: object, **more: str) -> Iterator["subprocess.Popen[str]"]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(job(code, *options), env=environment(**more), **pipes) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(process: int) -> bool:
    """Zombies, which wait for whoever adopted them, are not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def numbers(folder: Path) -> list[int]:
    """The processes that have written `NAME.pid` there."""
    return [int(path.read_text()) for path in folder.glob("*.pid") if path.read_text()]


# What the small programs begin with: a rank, and a file in which a process says that it is there.
SMALL = """
import os, signal, subprocess, sys, time
from pathlib import Path
rank, restart = int(os.environ["GOSSIPJAX_PROCESS"]), int(os.environ["GOSSIPJAX_RESTART"])
def here(name):
    Path(os.environ["FOLDER"], f"{name}.pid").write_text(str(os.getpid()))
def wait_for(*names):
    while not all(Path(os.environ["FOLDER"], f"{name}.pid").exists() for name in names):
        time.sleep(0.01)
"""


def test_each_process_has_its_place_and_its_output_a_prefix():
    code = SMALL + (
        "import json; print('to stderr', file=sys.stderr); print('one\\ntwo')\n"
        "print(json.dumps(dict(os.environ)), end='')"
    )
    done = run(code, "--processes", 3, "--local-devices", 2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] to stderr" for rank in range(3)]
    ports = set()
    for rank in range(3):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines[:2] == [f"[{rank}] one", f"[{rank}] two"]
        found = json.loads(lines[2].removeprefix(f"[{rank}] "))
        ports.add(found["GOSSIPJAX_COORDINATOR"])
        assert found["GOSSIPJAX_PROCESS"] == str(rank)
        assert found["GOSSIPJAX_PROCESSES"] == found["GOSSIPJAX_PROCESSES_AT_START"] == "3"
        assert found["JAX_NUM_CPU_DEVICES"] == "2"
        assert found["JAX_LOCAL_DEVICE_IDS"] == f"{2 * rank},{2 * rank + 1}"
        assert int(found["NPROC"]) >= 4
    assert len(ports) == 1
    assert done.stdout.count("\n") == 9


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("sys.exit(3)", 3, "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL, signal 9"),
    ],
)
def test_one_failure_ends_all(end, status, words, tmp_path):
    code = SMALL + (
        "here(rank); wait_for(0, 1, 2)\n"
        "if rank != 1: time.sleep(1000)\n"
        "for i in range(50): print('line', i)\n"
        f"print('last words', end=''); {end}"
    )
    done = run(code, "--processes", 3, FOLDER=str(tmp_path))
    assert done.returncode == status
    said = done.stderr.splitlines()
    assert "rank 1 failed" in said[0]
    assert words in said[0]
    assert said[1:] == [f"    line {i}" for i in range(31, 50)] + ["    last words"]
    assert not any(map(is_alive, numbers(tmp_path)))


def test_what_ignores_sigterm_is_killed_and_grandchildren_too(tmp_path):
    code = SMALL + (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0: here(f'child of {rank}'); time.sleep(1000)\n"
        "wait_for('child of 0', 'child of 1'); here(rank)\n"
        "if rank == 0: sys.exit(7)\n"
        "time.sleep(1000)"
    )
    done = run(code, "--processes", 2, "--grace", 0.1, FOLDER=str(tmp_path))
    assert done.returncode == 7
    assert len(numbers(tmp_path)) == 4
    assert not any(map(is_alive, numbers(tmp_path)))


def test_what_a_process_leaves_behind_ends_with_it(tmp_path):
    code = SMALL + ("if os.fork() == 0: here('child'); time.sleep(1000)\nwait_for('child')")
    assert run(code, "--processes", 1, FOLDER=str(tmp_path)).returncode == 0
    assert not any(map(is_alive, numbers(tmp_path)))


def test_no_orphan_when_the_launcher_is_killed(tmp_path):
    code = SMALL + (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0: here(f'child of {rank}'); time.sleep(1000)\n"
        "here(rank); time.sleep(1000)"
    )
    with started(code, "--processes", 2, FOLDER=str(tmp_path)) as launcher:
        wait_for(lambda: len(numbers(tmp_path)) == 4)
        launcher.kill()
        wait_for(lambda: not any(map(is_alive, numbers(tmp_path))))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_processes_save(number, tmp_path):
    code = SMALL + (
        "def save(*_):\n"
        "    print('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); here(rank); time.sleep(1000)"
    )
    with started(code, "--processes", 2, "--max-restarts", 3, FOLDER=str(tmp_path)) as launcher:
        wait_for(lambda: len(numbers(tmp_path)) == 2)
        launcher.send_signal(number)
        out, err = launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 128 + number, err
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert "restart" not in err


def test_a_second_signal_kills(tmp_path):
    code = SMALL + "signal.signal(signal.SIGTERM, signal.SIG_IGN); here(rank); time.sleep(1000)"
    with started(code, "--processes", 2, "--grace", 1000, FOLDER=str(tmp_path)) as launcher:
        wait_for(lambda: len(numbers(tmp_path)) == 2)
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr is not None
        assert "SIGINT" in launcher.stderr.readline()
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=PATIENCE)
    assert launcher.returncode == 130
    assert not any(map(is_alive, numbers(tmp_path)))


def test_output_that_nobody_reads_ends_the_job(tmp_path):
    code = SMALL + "here(rank)\nwhile True: print('more')"
    with started(code, "--processes", 2, FOLDER=str(tmp_path)) as launcher:
        assert launcher.stdout is not None
        assert "more" in launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(PATIENCE) == 128 + signal.SIGPIPE
    assert not any(map(is_alive, numbers(tmp_path)))


@pytest.mark.parametrize(("restarts", "status"), [(1, 5), (2, 0)])
def test_restarts(restarts, status):
    code = SMALL + "print('attempt', restart); sys.exit(5 if restart < 2 and rank == 1 else 0)"
    done = run(code, "--processes", 2, "--max-restarts", restarts)
    assert done.returncode == status
    assert done.stderr.count("rank 1 failed") == 2
    assert done.stderr.count("[launch] restart") == restarts
    assert f"[1] attempt {restarts}" in done.stdout


def test_bad_usage_is_not_tried_again():
    done = run(
        "import argparse; argparse.ArgumentParser().error('no')",
        *("--processes", 1, "--max-restarts", 5),
    )
    assert done.returncode == 2
    assert "restart" not in done.stderr


def test_elastic_restarts_on_the_processes_that_are_left(tmp_path):
    """Two are killed, and one fails because of it: that one is not lost."""
    code = SMALL + (
        "from gossipjax import launch\n"
        "print('nodes', launch.nodes_left(8), 'rank', rank)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == 1 else lambda *_: sys.exit(1))\n"
        "here(f'{rank} of {restart}')\n"
        "if restart == 0 and rank == 1:\n"
        "    wait_for(*(f'{i} of 0' for i in range(4)))\n"
        "    for i in (3, 1):\n"
        "        os.kill(int(Path(os.environ['FOLDER'], f'{i} of 0.pid').read_text()), 9)\n"
        "if restart == 0: time.sleep(1000)\n"
    )
    done = run(code, "--processes", 4, "--max-restarts", 1, "--elastic", FOLDER=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1, with 2 processes" in done.stderr
    after = [line for line in done.stdout.splitlines() if "nodes 4" in line]
    assert sorted(after) == ["[0] nodes 4 rank 0", "[1] nodes 4 rank 1"]


def test_nodes_left(monkeypatch):
    assert launch.nodes_left(6) == 6
    monkeypatch.setenv("GOSSIPJAX_PROCESSES_AT_START", "4")
    monkeypatch.setenv("GOSSIPJAX_PROCESSES", "3")
    assert launch.nodes_left(8) == 6
    with pytest.raises(ValueError, match=r"6 nodes began on 4 processes.* 3 are left: 4\.5 nodes"):
        launch.nodes_left(6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--processes 0 -- python", "--processes is at least 1; given 0"),
        ("--processes 2 --local-devices 0 -- python", "--local-devices is at least 1"),
        ("--processes 2 --grace -1 -- python", "--grace is at least 0"),
        ("--processes 2 --grace nan -- python", "--grace is at least 0"),
        ("--processes 2 --elastic -- python", "give --max-restarts"),
        ("--processes 2", "no command"),
        ("--processes 2 --", "no command"),
        ("--processes 2 -- no-such-program", "command not found, or not executable: no-such"),
        ("--processes two -- python", "invalid int value"),
        ("-- python", "--processes"),
    ],
)
def test_bad_input_to_the_launcher(arguments, words, capsys):
    with pytest.raises(SystemExit) as raised:
        launch.main(arguments.split())
    assert raised.value.code == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def alone(monkeypatch):
    """No place in a job yet."""
    monkeypatch.setattr(launch, "_place", None)
    for name in list(os.environ):
        if name.startswith(("GOSSIPJAX_", "SLURM_", "OMPI_")):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ({"process": 0}, "without coordinator .* and processes "),
        ({"coordinator": "a:1", "processes": 2}, r"without process \(GOSSIPJAX_PROCESS\)"),
        ({"processes": 2, "process": 0}, r"without coordinator \(GOSSIPJAX_COORDINATOR\)"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, "from 0 to processes - 1; given 2"),
        ({"coordinator": "a:1", "processes": 2, "process": -1}, "from 0 to processes - 1"),
        ({"coordinator": "a:1", "processes": 0, "process": 0}, "processes=0"),
        ({"coordinator": "a:1", "processes": 2.0, "process": 0}, "processes .* whole number"),
        ({"coordinator": "a", "processes": 2, "process": 0}, "HOST:PORT.* given 'a'"),
        ({"coordinator": "a:0", "processes": 2, "process": 0}, "from 1 to 65535; given 'a:0'"),
        ({"coordinator": "::1:80", "processes": 2, "process": 0}, r"\[::1\]:1234"),
        ({"timeout": 0}, r"timeout \(GOSSIPJAX_TIMEOUT\) is .* above 0; given 0\."),
    ],
)
def test_bad_places(place, words, alone):
    with pytest.raises(ValueError, match=words):
        launch.initialize(**place)


def test_bad_places_in_the_environment(alone):
    alone.setenv("GOSSIPJAX_TIMEOUT", "soon")
    with pytest.raises(ValueError, match=r"GOSSIPJAX_TIMEOUT.* given 'soon'"):
        launch.initialize()
    alone.delenv("GOSSIPJAX_TIMEOUT")
    alone.setenv("GOSSIPJAX_PROCESSES", "four")
    with pytest.raises(ValueError, match=r"GOSSIPJAX_PROCESSES.*'four'"):
        launch.initialize()
    alone.setenv("GOSSIPJAX_PROCESSES", "4")
    with pytest.raises(ValueError, match=r"without coordinator .* and process "):
        launch.initialize()


def test_a_job_step_of_one_process_stays_alone(alone):
    alone.setenv("SLURM_STEP_NUM_TASKS", "1")
    alone.setenv("SLURM_PROCID", "0")
    assert launch.initialize() == Place(0, 1)
    assert launch.initialize() == launch.initialize(processes=1) == Place(0, 1)
    with pytest.raises(ValueError, match=r"process 0 of 1 already; .* process 1 of 2"):
        launch.initialize("127.0.0.1:1", 2, 1)


def test_a_coordinator_is_enough_where_a_scheduler_numbers_the_processes(alone):
    alone.setenv("OMPI_COMM_WORLD_SIZE", "4")
    alone.setenv("OMPI_COMM_WORLD_RANK", "3")
    with pytest.raises(ConnectionError, match=r"process 3 of 4 .* 127\.0\.0\.1:1 within 0\.1 s"):
        launch.initialize("127.0.0.1:1", timeout=0.1)
    alone.setenv("GOSSIPJAX_TIMEOUT", "0.2")
    with pytest.raises(ConnectionError, match=r"within 0\.2 s"):
        launch.initialize("127.0.0.1:1")


@pytest.mark.parametrize(("chosen", "devices"), [(None, 3), ("0,1", None)])
def test_a_scheduled_process_takes_one_gpu_with_a_coordinator_too(alone, chosen, devices):
    alone.setenv("SLURM_STEP_NUM_TASKS", "16")
    alone.setenv("SLURM_PROCID", "11")
    alone.setenv("SLURM_LOCALID", "3")
    if chosen:
        alone.setenv("JAX_LOCAL_DEVICE_IDS", chosen)
    joined = []
    alone.setattr(launch, "meet", lambda *_: None)
    alone.setattr(launch, "_join", lambda **options: joined.append(options["local_device_ids"]))
    assert launch.initialize("node-0:1234") == Place(11, 16)
    alone.setattr(launch, "_place", None)
    launch.initialize("node-0:1234", 2, 0)  # given by hand, inside of a job step
    assert joined == [devices, None]


def test_without_any_sign_of_a_job_there_is_one_process():
    code = (
        "import jax; from gossipjax import launch\n"
        "print(launch.initialize(), launch.initialize(), jax.distributed.is_initialized())"
    )
    gone = ("GOSSIPJAX_", "SLURM_", "OMPI_", "KUBERNETES_", "TPU_")
    kept = {k: v for k, v in environment().items() if not k.startswith(gone)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=PATIENCE)
    place = "Place(process=0, processes=1)"
    assert done.stdout.split("\n")[0] == f"{place} {place} False", done.stderr
    scheduled = {**kept, "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}
    done = subprocess.run(command, env=scheduled, capture_output=True, text=True, timeout=PATIENCE)
    assert "Open MPI runs 4 processes" in done.stderr
    assert "GOSSIPJAX_COORDINATOR=HOST:PORT" in done.stderr


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def errors_of_meeting(places: list[Place], timeout: float) -> list[str]:
    """What each of these processes, all at once, is told; empty where all have met."""
    address, told = free_address(), [""] * len(places)

    def attend(i: int) -> None:
        try:
            meet(address, places[i], timeout)
            if places[i].process == 0:
                servers.append(socket.create_server(parse_address(address)))  # as JAX does then
        except ConnectionError as error:
            told[i] = str(error).replace(address, "ADDRESS")

    servers: list[socket.socket] = []
    threads = [threading.Thread(target=attend, args=(i,)) for i in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for server in servers:
        server.close()
    return told


def test_all_meet():
    assert errors_of_meeting([Place(i, 5) for i in range(5)], PATIENCE) == [""] * 5


def test_missing_processes_are_named():
    told = errors_of_meeting([Place(0, 4), Place(2, 4)], 0.5)
    assert told[0] == told[1]
    assert told[0].startswith("processes 1, 3 of 4 did not come to ADDRESS within 0.5 s")


def test_doubled_processes_are_named():
    told = errors_of_meeting([Place(0, 3), Place(1, 3), Place(1, 3)], PATIENCE)
    assert told[0] == told[1] == told[2]
    assert "there are two processes 1 of 3" in told[0]
    assert f"pid {os.getpid()}" in told[0]


def test_processes_that_disagree_are_named():
    told = errors_of_meeting([Place(0, 3), Place(2, 4)], PATIENCE)
    assert told[0] == told[1]
    assert "was told of 3 processes, and process 2" in told[0]


def test_a_port_that_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"process 0 of 2 cannot listen at {address} "):
            meet(address, Place(0, 2), PATIENCE)

        def talk() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 mail.example.org\n")

        thread = threading.Thread(target=talk)
        thread.start()
        with pytest.raises(ConnectionError, match="another program's"):
            meet(address, Place(1, 2), PATIENCE)
        thread.join()


def test_a_coordinator_that_is_not_there(alone):
    address = free_address()
    with pytest.raises(ConnectionError, match=rf"process 1 of 2 .* {address} within 0\.2 s"):
        launch.initialize(address, 2, 1, timeout=0.2)


CLUSTER = """
import os, signal, sys, time
import jax, jax.numpy as jnp
import gossipjax as gx
from gossipjax import launch
signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
place = launch.initialize(timeout=50)
assert launch.initialize() == place
mesh = launch.mesh(nodes=2, local=2)
"""


def test_two_processes_exchange():
    code = CLUSTER + (
        "assert [[d.process_index for d in node] for node in mesh.devices] == [[0, 0], [1, 1]]\n"
        "def both(x):\n"
        "    return jax.lax.psum(x, 'nodes'), jax.lax.ppermute(x, 'nodes', [(0, 1), (1, 0)])\n"
        "total, other = gx.spmd(both, mesh=mesh)(jnp.array([3.0, 5.0]))\n"
        "values = [int(a.addressable_shards[0].data[0]) for a in (total, other)]\n"
        "print('found', *place, launch.mesh().shape['nodes'], *values)"
    )
    done = run(code, "--processes", 2, "--local-devices", 2)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "found" in line]  # Gloo prints, too
    assert sorted(lines) == ["[0] found 0 2 4 8 5", "[1] found 1 2 4 8 3"]


def test_jax_finds_the_place_under_slurm():
    code = (
        "import jax; from gossipjax import launch\n"
        "print(launch.initialize(timeout=50), jax.device_count())"
    )
    port = free_address().rpartition(":")[2]
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "2"}
    slurm |= {"SLURM_NTASKS": "2", "JAX_COORDINATOR_PORT": port, "JAX_NUM_CPU_DEVICES": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(**slurm, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for i in range(2):
        assert f"Place(process={i}, processes=2) 2\n" in said[i]


@pytest.mark.parametrize("end", ["raise RuntimeError('no luck')", "launch.leave('Error: no luck')"])
def test_a_failing_process_of_a_cluster_does_not_wait_for_the_others(end):
    """And SIGTERM reaches the program's own handler, which JAX had taken away."""
    code = CLUSTER + f"if place.process == 1: {end}\ntime.sleep(1000)"
    done = run(code, "--processes", 2, "--local-devices", 2, "--grace", 1000)
    assert done.returncode == 1
    assert "Error: no luck" in done.stderr
    assert "rank 1 failed (exit status 1)" in done.stderr


@pytest.mark.parametrize(
    ("nodes", "local", "shape"),
    [
        (None, None, {"nodes": 8}),
        (4, None, {"nodes": 4}),
        (None, 4, {"nodes": 2, "local": 4}),
        (2, 3, {"nodes": 2, "local": 3}),
        (8, 1, {"nodes": 8, "local": 1}),
    ],
)
def test_meshes_of_one_process(nodes, local, shape):
    mesh = launch.mesh(nodes, local)
    assert dict(mesh.shape) == shape
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh.devices.flatten().tolist() == jax.devices()[: mesh.size]


def fake_devices(processes: list[int]) -> list[SimpleNamespace]:
    """So many of each process, in an order that mixes them, as on some TPUs."""
    devices = [
        SimpleNamespace(process_index=i, id=k * len(processes) + i)
        for i, count in enumerate(processes)
        for k in range(count)
    ]
    return sorted(devices, key=lambda device: device.id)


@pytest.mark.parametrize(
    ("processes", "nodes", "local", "owners"),
    [
        ([4, 4], None, 2, [[0, 0], [0, 0], [1, 1], [1, 1]]),
        ([2, 2], 2, 2, [[0, 0], [1, 1]]),
        ([1, 1, 1, 1], 2, 2, [[0, 1], [2, 3]]),
        ([2, 2, 2], None, 1, [[0], [0], [1], [1], [2], [2]]),
    ],
)
def test_meshes_of_several_processes(processes, nodes, local, owners, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: fake_devices(processes))
    monkeypatch.setattr(launch, "Mesh", lambda devices, axes: SimpleNamespace(devices=devices))
    grid = launch.mesh(nodes, local).devices
    assert [[device.process_index for device in node] for node in grid] == owners


@pytest.mark.parametrize(
    ("nodes", "local", "words"),
    [
        (9, None, "9 nodes of 1 need 9 devices, and there are 8.*jax_num_cpu_devices"),
        (4, 4, "need 16 devices.*--local-devices 16"),
        (None, 3, "local=3 does not divide 8 devices"),
        (0, None, "nodes is a whole number of at least 1; given 0"),
        (2, 1.0, "local is a whole number"),
        (True, None, "nodes is a whole number"),
    ],
)
def test_meshes_that_cannot_be(nodes, local, words):
    with pytest.raises(ValueError, match=words):
        launch.mesh(nodes, local)


@pytest.mark.parametrize(
    ("processes", "nodes", "local", "words"),
    [
        ([4, 4], 4, None, "leave devices idle.* 2 processes with 4 each.*nodes=8"),
        ([2, 2], 8, None, "need 8 devices.*--local-devices 4"),
        ([2, 2, 2], 2, 3, "3 processes do not divide 2 nodes"),
        ([1, 1, 1], 4, None, "3 processes do not divide 4 nodes.* multiple of 3 nodes"),
        ([2, 1], None, None, r"different numbers of devices: \{0: 2, 1: 1\}"),
    ],
)
def test_meshes_of_several_processes_that_cannot_be(processes, nodes, local, words, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: fake_devices(processes))
    with pytest.raises(ValueError, match=words):
        launch.mesh(nodes, local)
