"""Joining a job: process information, and jobs of two real processes."""

import socket
import subprocess
import sys
from typing import Any

import pytest
from launching import TIMEOUT, environment, free_address, run_job, started_processes

from gossipjax import launch
from gossipjax.launch import ProcessInfo, _initialize, peers

ENGINES = {  # the variables of process 3 of 4
    "python -m gossipjax.launch, kubernetes.yaml, jobset.yaml, skypilot.yaml": {
        "GOSSIPJAX_COORDINATOR_ADDRESS": "node-0:1",
        "GOSSIPJAX_NUM_PROCESSES": "4",
        "GOSSIPJAX_PROCESS_ID": "3",
    },
    "Kubeflow Trainer": {
        "JAX_COORDINATOR_ADDRESS": "node-0:1",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "3",
    },
    "Open MPI": {
        "GOSSIPJAX_COORDINATOR_ADDRESS": "node-0:1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "3",
    },
}


@pytest.mark.parametrize("variables", ENGINES.values(), ids=ENGINES)
def test_each_engine_says_who_a_process_is(variables, fresh_process):
    for name, value in variables.items():
        fresh_process.setenv(name, value)
    calls = []
    fresh_process.setattr(_initialize, "meet", lambda *args, **_: calls.append(args[:2]) or {})
    fresh_process.setattr(peers, "kept", None)
    fresh_process.setattr(_initialize, "reach", lambda *_: socket.socket())
    fresh_process.setattr(_initialize, "_initialize_jax", lambda *_, **given: calls.append(given))
    assert launch.initialize() == ProcessInfo(3, 4)
    met, given = calls
    assert met == ("node-0:1", ProcessInfo(3, 4))
    # By default JAX's coordinator, which lets everybody in, would listen at all addresses.
    assert given["coordinator_bind_address"] == "node-0:1"


def test_variables_of_an_engine_stand_behind_ours_and_must_be_complete(fresh_process):
    for name, value in ENGINES["Kubeflow Trainer"].items():
        fresh_process.setenv(name, value)
    fresh_process.setenv("GOSSIPJAX_NUM_PROCESSES", "1")  # of a job inside of the engine's
    assert launch.initialize() == ProcessInfo(0, 1)
    fresh_process.setattr(_initialize, "_initialized", None)
    fresh_process.setenv("GOSSIPJAX_NUM_PROCESSES", "2")
    with pytest.raises(ValueError, match=r"\(GOSSIPJAX_COORDINATOR_ADDRESS .*None, 2 and None"):
        launch.initialize()
    fresh_process.delenv("GOSSIPJAX_NUM_PROCESSES")
    fresh_process.setenv("JAX_NUM_PROCESSES", "four")
    with pytest.raises(ValueError, match=r"JAX_NUM_PROCESSES must be an integer .* got 'four'"):
        launch.initialize()
    fresh_process.delenv("JAX_NUM_PROCESSES")
    with pytest.raises(ValueError, match=r"\(JAX_COORDINATOR_ADDRESS .*node-0:1, None and 3"):
        launch.initialize()
    fresh_process.delenv("JAX_PROCESS_ID")

    def find_nothing(*_, **options):
        raise ValueError("Number of processes must be defined.")  # as JAX's detection says

    fresh_process.setattr(_initialize, "_initialize_jax", find_nothing)
    for call in (launch.initialize, launch.find_node):
        with pytest.raises(ValueError, match=r"must come with JAX_NUM_PROCESSES.*node-0:1 alone"):
            call()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GOSSIPJAX_INITIALIZATION_TIMEOUT", "soon", "INITIALIZATION_TIMEOUT.* got 'soon'"),
        ("GOSSIPJAX_NUM_PROCESSES", "four", "GOSSIPJAX_NUM_PROCESSES.*'four'"),
        ("GOSSIPJAX_HEARTBEAT_TIMEOUT", "0", "heartbeat_timeout .* a number of seconds > 0.* '0'"),
        ("JAX_COORDINATOR_BIND_ADDRESS", "all", "JAX_COORDINATOR_BIND_ADDRESS must be HOST:PORT"),
        ("SLURM_STEP_NUM_TASKS", "two", "SLURM_STEP_NUM_TASKS must be an integer .* got 'two'"),
    ],
)
def test_bad_environment_variables(variable, value, message, fresh_process):
    fresh_process.setenv("SLURM_PROCID", "0")
    fresh_process.setenv(variable, value)
    arguments: Any = (free_address(), 2, 0) if variable.endswith("BIND_ADDRESS") else ()
    with pytest.raises(ValueError, match=message):
        launch.initialize(*arguments)


def test_a_pod_that_is_of_no_job_learns_how_to_be_a_single_process(fresh_process):
    """It is never one by itself: four pods of a job would train four models."""
    fresh_process.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")

    def detect(*_, **options):
        raise RuntimeError("Kubernetes API Error: 403 - Forbidden")

    fresh_process.setattr(_initialize, "_initialize_jax", detect)
    with pytest.raises(RuntimeError, match="403") as found:
        launch.initialize()
    assert "set GOSSIPJAX_NUM_PROCESSES=1" in found.value.__notes__[0]
    fresh_process.setenv("GOSSIPJAX_NUM_PROCESSES", "1")
    assert launch.initialize() == ProcessInfo(0, 1)


def test_a_secret_guards_no_job_in_lockstep(fresh_process):
    """Until 0.4.0 it signed the meeting, so who still sets it must learn that it does not."""
    fresh_process.setenv("GOSSIPJAX_SECRET", "0123456789abcdef")

    def meet(*_, **options):
        raise ConnectionError("met nobody")

    fresh_process.setattr(_initialize, "meet", meet)
    with pytest.raises(ConnectionError), pytest.warns(UserWarning, match="nodes alone since"):
        launch.initialize("127.0.0.1:1", 2, 0)


def test_a_job_step_of_one_process_is_a_single_process(fresh_process):
    fresh_process.setenv("SLURM_STEP_NUM_TASKS", "1")
    fresh_process.setenv("SLURM_PROCID", "0")
    assert launch.initialize() == ProcessInfo(0, 1)
    assert launch.initialize() == launch.initialize(num_processes=1) == ProcessInfo(0, 1)
    with pytest.raises(ValueError, match="got process 1 of 2 in process 0 of 1"):
        launch.initialize("127.0.0.1:1", 2, 1)


def test_an_address_is_enough_where_a_scheduler_numbers_the_processes(fresh_process):
    fresh_process.setenv("OMPI_COMM_WORLD_SIZE", "4")
    fresh_process.setenv("OMPI_COMM_WORLD_RANK", "3")
    with pytest.raises(ConnectionError, match=r"process 3 of 4 .* 127\.0\.0\.1:1 within 0\.1 s"):
        launch.initialize("127.0.0.1:1", initialization_timeout=0.1)
    fresh_process.setenv("GOSSIPJAX_INITIALIZATION_TIMEOUT", "0.2")
    with pytest.raises(ConnectionError, match=r"within 0\.2 s"):
        launch.initialize("127.0.0.1:1")


def test_without_any_sign_of_a_job_there_is_one_process():
    code = (
        "import jax; from gossipjax import launch\n"
        "print(launch.initialize(), launch.initialize(), jax.distributed.is_initialized())"
    )
    job_variables = ("GOSSIPJAX_", "SLURM_", "OMPI_", "KUBERNETES_", "TPU_")
    kept = {k: v for k, v in environment().items() if not k.startswith(job_variables)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=TIMEOUT)
    info = "ProcessInfo(process_id=0, num_processes=1)"
    assert done.stdout.split("\n")[0] == f"{info} {info} False", done.stderr


CLUSTER = """
import os, signal, sys, time
import jax, jax.numpy as jnp
import gossipjax as gx
from gossipjax import launch
signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
info = launch.initialize(initialization_timeout=50)
assert launch.initialize() == info
mesh = launch.mesh(nodes=2, local=2)
"""


def test_two_processes_exchange_and_end_seconds_apart():
    """Process 0, the coordinator, ends first; it waits for process 1, longer than a heartbeat."""
    code = CLUSTER + (
        "assert [[d.process_index for d in node] for node in mesh.devices] == [[0, 0], [1, 1]]\n"
        "def both(x):\n"
        "    return jax.lax.psum(x, 'nodes'), jax.lax.ppermute(x, 'nodes', [(0, 1), (1, 0)])\n"
        "total, other = gx.spmd(both, gx.Nodes(mesh=mesh))(jnp.array([3.0, 5.0]))\n"
        "values = [int(a.addressable_shards[0].data[0]) for a in (total, other)]\n"
        "print('result', *info, launch.mesh().shape['nodes'], *values, flush=True)\n"
        "if info.process_id == 0: launch.exit_process(0)\n"
        "time.sleep(7)\n"
        "print('end')"
    )
    more = {"GOSSIPJAX_HEARTBEAT_TIMEOUT": "5"}
    done = run_job(code, "--processes", 2, "--local-devices", 2, **more)
    assert done.returncode == 0, done.stderr
    # Threads of Gloo print there too, and mix their lines.
    lines = [line for line in done.stdout.splitlines() if "result" in line or "end" in line]
    assert sorted(lines) == ["[0] result 0 2 4 8 5", "[1] end", "[1] result 1 2 4 8 3"]


LISTENING = """
from pathlib import Path
links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
rows = [line.split() for kind in ("tcp", "tcp6")
        for line in Path("/proc/self/net", kind).read_text().splitlines()[1:]]
for row in rows:
    if row[3] == "0A" and f"socket:[{row[9]}]" in links:
        print("listens at", row[1].partition(":")[0][-8:], flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_where_a_job_of_the_launcher_listens():
    """The coordinator on the loopback, and Gloo where the name of this machine leads."""
    program = (
        f"{CLUSTER}"
        "total = gx.Nodes(mesh=mesh).run(lambda x: jax.lax.psum(x, 'nodes'), jnp.ones(2))\n"
        "print(total.shape)\n"
        f"{LISTENING}"
        "launch.exit_process(0)"
    )
    done = run_job(program, "--processes", 2, "--local-devices", 2)
    assert done.returncode == 0, done.stderr
    found = sorted(line for line in done.stdout.splitlines() if "listens" in line)
    name = socket.inet_aton(socket.gethostbyname(socket.gethostname()))[::-1].hex().upper()
    gloo = [f"[{number}] listens at {name}" for number in range(2)]
    assert found == sorted([*gloo, "[0] listens at 0100007F"])
    asynchronous = (
        "import os, jax.numpy as jnp, optax, gossipjax as gx\n"
        "assert os.environ['NCCL_SOCKET_IFNAME'] == 'lo'\n"
        "node = gx.asynchronous.join(optax.sgd(0.1), jnp.zeros(3),\n"
        "    algorithm=gx.asynchronous.sgp())\n"
        f"{LISTENING}"
    )
    done = run_job(asynchronous, "--processes", 1, "--asynchronous")
    assert done.stdout == "[0] listens at 0100007F\n", done.stderr


def test_jax_detects_slurm():
    code = (
        "import jax; from gossipjax import launch\n"
        "print(launch.initialize(initialization_timeout=50), jax.device_count())"
    )
    port = free_address().rpartition(":")[2]
    slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "2"}
    slurm |= {"SLURM_NTASKS": "2", "JAX_COORDINATOR_PORT": port, "JAX_NUM_CPU_DEVICES": "1"}
    tasks = [slurm | {"SLURM_PROCID": i, "SLURM_LOCALID": i} for i in ("0", "1")]
    with started_processes(code, tasks) as processes:
        for i, process in enumerate(processes):
            output = process.communicate(timeout=TIMEOUT)[0]
            assert f"ProcessInfo(process_id={i}, num_processes=2) 2\n" in output


def test_a_failing_process_of_a_cluster_does_not_wait_for_the_others():
    """And SIGTERM reaches the program's handler, which JAX had replaced."""
    code = CLUSTER + "if info.process_id == 1: raise RuntimeError('no luck')\ntime.sleep(1000)"
    done = run_job(code, "--processes", 2, "--local-devices", 2, "--grace", 1000)
    assert done.returncode == 1
    assert "Error: no luck" in done.stderr
    assert "rank 1 failed (exit status 1)" in done.stderr
