"""Joining a job: process information, and jobs of two real processes."""

import itertools
import os
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
    fresh_process.setenv("JAX_PLATFORMS", "cpu")
    here, there = socket.socketpair()
    calls = []
    fresh_process.setattr(_initialize, "find_gloo_problem", lambda *_: None)
    fresh_process.setattr(_initialize, "reach", lambda *_: socket.socket())
    fresh_process.setattr(peers, "kept", None)
    problems = iter([["Gloo of process 1 would"], [None]])
    fresh_process.setattr(peers.Peers, "gather", lambda *_: next(problems))

    def meet(*given):
        calls.append(given[:2])
        return {0: (here, "process 0")}

    fresh_process.setattr(_initialize, "meet", meet)
    fresh_process.setattr(_initialize, "_initialize_jax", lambda *_, **given: calls.append(given))
    with here, there:
        with pytest.raises(ConnectionError, match="Gloo of process 1 would"):
            launch.initialize()
        assert launch.initialize() == ProcessInfo(3, 4)
        assert peers.kept is not None
        peers.kept.leave()
    _, met, given = calls
    assert met == ("node-0:1", ProcessInfo(3, 4))
    # By default JAX's coordinator, which lets everybody in, would listen at all addresses.
    assert given["coordinator_bind_address"] == "node-0:1"


NUMBERS = {  # that each engine gives of one process of two
    "ours": {"GOSSIPJAX_NUM_PROCESSES": "2", "GOSSIPJAX_PROCESS_ID": "1"},
    "JAX's": {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    "Slurm": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
}
ARGUMENTS = {"num_processes": "2", "process_id": "1"}
PAIRS = [
    pair
    for pair in itertools.combinations({"arguments": ARGUMENTS, **NUMBERS}, 2)
    if pair != ("Open MPI", "Slurm")  # which has then numbered the daemons of mpirun
]


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("pair", PAIRS, ids=map(" and ".join, PAIRS))
def test_numbers_that_contradict_each_other_are_named_at_once(pair, column, fresh_process):
    given = {"arguments": ARGUMENTS, **NUMBERS}
    first, second = (dict(given[name]) for name in pair)
    name, other = list(first)[column], list(second)[column]
    value, right = [("3", "2"), ("0", "1")][column]
    first[name] = value
    arguments = {k: int(v) for k, v in first.items()} if pair[0] == "arguments" else {}
    for variable, text in {**second, **({} if arguments else first)}.items():
        fresh_process.setenv(variable, text)
    unset = other if arguments else name
    with pytest.raises(
        ValueError, match=f"got {name}={value} and {other}={right}.*env -u {unset} "
    ):
        launch.initialize("127.0.0.1:1", **arguments)


def test_one_process_is_a_job_by_itself_also_inside_of_another(fresh_process):
    for name, value in NUMBERS["Slurm"].items():
        fresh_process.setenv(name, value)
    assert launch.initialize(num_processes=1) == ProcessInfo(0, 1)


def test_an_argument_of_0_is_not_a_missing_one(fresh_process):
    fresh_process.setenv("GOSSIPJAX_NUM_PROCESSES", "1")
    with pytest.raises(ValueError, match="num_processes=0 and GOSSIPJAX_NUM_PROCESSES=1"):
        launch.initialize(num_processes=0)


def test_open_mpi_5_tells_jax_no_address(fresh_process):
    for name, value in NUMBERS["Open MPI"].items():
        fresh_process.setenv(name, value)
    fresh_process.setattr(_initialize, "_initialize_jax", None)  # it would ask for mpi4py
    message = r"Open MPI runs 2 processes, .* Set GOSSIPJAX_COORDINATOR_ADDRESS=HOST:PORT .* -x"
    with pytest.raises(ValueError, match=message):
        launch.initialize()


def test_variables_must_be_complete(fresh_process):
    fresh_process.setenv("GOSSIPJAX_NUM_PROCESSES", "2")
    with pytest.raises(ValueError, match=r"\(GOSSIPJAX_COORDINATOR_ADDRESS .*None, 2 and None"):
        launch.initialize()
    fresh_process.delenv("GOSSIPJAX_NUM_PROCESSES")
    fresh_process.setenv("JAX_COORDINATOR_ADDRESS", "node-0:1")
    fresh_process.setenv("JAX_PROCESS_ID", "3")
    with pytest.raises(ValueError, match=r"with JAX_\) .* got node-0:1, None and 3"):
        launch.initialize()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("GOSSIPJAX_INITIALIZATION_TIMEOUT", "soon", "INITIALIZATION_TIMEOUT.* got 'soon'"),
        ("GOSSIPJAX_NUM_PROCESSES", "four", "GOSSIPJAX_NUM_PROCESSES.*'four'"),
        ("GOSSIPJAX_HEARTBEAT_TIMEOUT", "0", "heartbeat_timeout .* a number of seconds > 0.* '0'"),
        ("JAX_COORDINATOR_BIND_ADDRESS", "all", "must be HOST:PORT .* got 'all'"),
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
LISTENING = """
from pathlib import Path
links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
rows = [line.split() for kind in ("tcp", "tcp6")
        for line in Path("/proc/self/net", kind).read_text().splitlines()[1:]]
for row in rows:
    if row[3] == "0A" and f"socket:[{row[9]}]" in links:
        print("listens at", row[1].partition(":")[0][-8:], flush=True)
"""


@pytest.mark.lab
def test_two_processes_exchange_and_end_seconds_apart():
    """Process 0, the coordinator, ends first; it waits for process 1, longer than a heartbeat.

    The coordinator listens on the loopback, and Gloo where the name of this machine leads.
    """
    code = CLUSTER + (
        "assert [[d.process_index for d in node] for node in mesh.devices] == [[0, 0], [1, 1]]\n"
        "def both(x):\n"
        "    return jax.lax.psum(x, 'nodes'), jax.lax.ppermute(x, 'nodes', [(0, 1), (1, 0)])\n"
        "total, other = gx.spmd(both, gx.Nodes(mesh=mesh))(jnp.array([3.0, 5.0]))\n"
        "values = [int(a.addressable_shards[0].data[0]) for a in (total, other)]\n"
        "print('result', *info, launch.mesh().shape['nodes'], *values, flush=True)\n"
        f"{LISTENING if sys.platform == 'linux' else ''}"
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
    if sys.platform == "linux":
        name = socket.inet_aton(socket.gethostbyname(socket.gethostname()))[::-1].hex().upper()
        gloo = [f"[{number}] listens at {name}" for number in range(2)]
        found = [line for line in done.stdout.splitlines() if "listens" in line]
        assert sorted(found) == sorted([*gloo, "[0] listens at 0100007F"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_where_an_asynchronous_node_of_the_launcher_listens():
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


def test_arrays_that_were_made_before_end_the_job_for_good():
    """As by a module that makes its model at its import."""
    program = "import jax.numpy as jnp, gossipjax as gx\njnp.ones(3)\ngx.launch.initialize()"
    job = run_job(program, "--processes", 2, "--max-restarts", 3)
    assert job.returncode == os.EX_CONFIG
    assert "must be called before the first array or device of JAX is made" in job.stderr
    assert "it is not started again" in job.stderr
