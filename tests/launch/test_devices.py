"""Which GPU each process gets: a row for each cell of the table in docs/guides/launcher.md."""

import re
import socket
import warnings

import pytest

from gossipjax import launch
from gossipjax.launch import _devices, _initialize, peers
from gossipjax.launch.__main__ import main

TOGETHER, EACH = "--processes", "--asynchronous --processes"
NCCL = "NCCL refuses two processes on one GPU"
ADDRESS = {"GOSSIPJAX_COORDINATOR_ADDRESS": "node-0:1"}


@pytest.fixture
def set_gpus(fresh_process):
    """Sets how many GPUs a host has, and CUDA_VISIBLE_DEVICES, where JAX has its plugin."""

    def set_all(count, visible):
        for name in ("CUDA_VISIBLE_DEVICES", *_devices.MEMORY_VARIABLES):
            fresh_process.delenv(name, raising=False)
        if visible is not None:
            fresh_process.setenv("CUDA_VISIBLE_DEVICES", visible)
        fresh_process.setattr(_devices, "_has_plugin", lambda: True)
        fresh_process.setattr(_devices, "_count_gpus", lambda: count)
        fresh_process.setenv("JAX_PLATFORMS", "cuda,cpu")
        return fresh_process

    return set_all


@pytest.mark.parametrize(
    ("options", "count", "visible", "processes", "said"),
    [
        # In lockstep: as many processes as GPUs, fewer, more, one visible, one alone, no GPU.
        (f"{TOGETHER} 3", 3, None, ["0//", "1//", "2//"], ""),
        (f"{TOGETHER} 2 --local-devices 2", 4, "4,5,6,7", ["0,1/4,5,6,7/", "2,3/4,5,6,7/"], ""),
        (f"{TOGETHER} 2", 8, None, ["0//", "1//"], "2 of 8 GPUs .* CUDA_VISIBLE_DEVICES=0,1 if"),
        (f"{TOGETHER} 2", 1, None, [], rf"at most 1, .*\(0\), got 2 and 1: {NCCL}.*gx.Nodes\(2\)"),
        (f"{TOGETHER} 2", 8, "3", [], r"at most 1, .* visible GPUs \(3\).* JAX_PLATFORMS=cpu"),
        (f"{TOGETHER} 1", 8, None, ["0//"], ""),
        (f"{TOGETHER} 2", 0, None, ["0//", "1//"], ""),
        # Asynchronous nodes: the same.
        (f"{EACH} 3", 3, None, ["/0/", "/1/", "/2/"], ""),
        (f"{EACH} 2 --local-devices 2", 4, "GPU-a,GPU-b,c,d", ["/GPU-a,GPU-b/", "/c,d/"], ""),
        (f"{EACH} 2", 8, None, ["/0/", "/1/"], "2 of 8 GPUs .* CUDA_VISIBLE_DEVICES=0,1 if"),
        (f"{EACH} 3", 2, None, ["/0/0.375", "/0/0.375", "/1/0.375"], r"3 nodes share .*\(0,1\)"),
        (f"{EACH} 2 --local-devices 2", 1, None, [], "--local-devices must be at most 1"),
        (f"{EACH} 3", 8, "5", ["/5/0.250"] * 3, "0.250 .* XLA_PYTHON_CLIENT_MEM_FRACTION"),
        (f"{EACH} 1", 8, None, ["0//"], ""),
    ],
)
def test_under_the_launcher(options, count, visible, processes, said, set_gpus, capfd):
    set_gpus(count, visible)
    show = "echo $JAX_LOCAL_DEVICE_IDS/$CUDA_VISIBLE_DEVICES/$XLA_PYTHON_CLIENT_MEM_FRACTION"
    try:
        status = main([*options.split(), "--", "sh", "-c", show])
    except SystemExit as usage:
        status = usage.code
    assert status == (0 if processes else 2)
    output, errors = capfd.readouterr()
    assert sorted(line.partition(" ")[2] for line in output.splitlines()) == processes
    assert re.search(said, errors) if said else not errors


def slurm(rank, size):
    """The variables of the process `rank` on the first of two hosts."""
    return {
        "SLURM_STEP_NUM_TASKS": f"{2 * size}",
        "SLURM_PROCID": f"{rank}",
        "SLURM_LOCALID": f"{rank}",
        "SLURM_STEP_TASKS_PER_NODE": f"{size}(x2)",
    }


def open_mpi(rank, size):
    names = ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")
    values = (2 * size, rank, rank, size)
    return {f"OMPI_COMM_WORLD_{n}": f"{v}" for n, v in zip(names, values, strict=True)}


def by_hand(rank, size):
    return {"GOSSIPJAX_NUM_PROCESSES": f"{2 * size}", "GOSSIPJAX_PROCESS_ID": f"{rank}"}


MORE = rf"on a host must be at most 2, .*\(0,1\), got 4: {NCCL}.* JAX_LOCAL_DEVICE_IDS=0,1\."
IDLE = r"1 of 8 GPUs .* JAX_LOCAL_DEVICE_IDS=0,1,2,3,4,5,6,7\. .* CUDA_VISIBLE_DEVICES=0\."


@pytest.mark.parametrize("engine", [slurm, open_mpi])
@pytest.mark.parametrize(
    ("rank", "size", "count", "visible", "device", "said"),
    [
        (0, 4, 4, None, 0, ""),
        (3, 4, 4, "0,1,2,3", 3, ""),
        (0, 1, 8, None, 0, IDLE),  # once for the job
        (1, 2, 8, None, 1, ""),
        (0, 4, 2, "0,1", None, MORE),
        (3, 4, 2, "0,1", None, MORE),
        (1, 2, 1, None, None, "at most 1, .* got 2"),
        (0, 4, 1, "0", 0, ""),  # --gpus-per-task=1, with cgroups and without
        (3, 4, 1, "0", 0, ""),
        (3, 4, 8, "3", 0, ""),
        (3, 4, 0, None, 3, ""),  # no GPU of NVIDIA: as JAX does
    ],
)
def test_under_a_scheduler(engine, rank, size, count, visible, device, said, set_gpus):
    """With an address, and where JAX detects the scheduler."""
    patch = set_gpus(count, visible)
    for name, value in engine(rank, size).items():
        patch.setenv(name, value)
    for variables in (ADDRESS, {}):
        assert find_devices(patch, variables, said) == device


@pytest.mark.parametrize(
    ("count", "visible", "variables"),
    [
        (4, None, {}),  # Kubernetes, or no engine: all that the process sees
        (8, "3", {}),
        (8, None, slurm(3, 4)),  # given by hand, inside of a job step
    ],
)
def test_without_a_scheduler_jax_takes_all(count, visible, variables, set_gpus):
    assert find_devices(set_gpus(count, visible), by_hand(1, 4) | ADDRESS | variables, "") is None


def test_jax_local_device_ids_choose(set_gpus):
    chosen = {"JAX_LOCAL_DEVICE_IDS": "0,1"}  # which JAX reads
    assert find_devices(set_gpus(2, None), slurm(3, 4) | ADDRESS | chosen, "") is None


def find_devices(patch, variables, said):
    """Returns the `local_device_ids` that JAX gets; None, too, after an error."""
    for name, value in variables.items():
        patch.setenv(name, value)
    calls = [None]
    real = _devices.visible_gpus
    with patch.context() as inner, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inner.setattr(_devices, "visible_gpus", lambda _: real("cuda"))  # the tests have CPUs
        inner.setattr(_initialize, "_initialized", None)
        inner.setattr(_initialize, "meet", lambda *_, **options: {})
        inner.setattr(_initialize, "reach", lambda *_: socket.socket())
        inner.setattr(peers, "kept", None)
        inner.setattr(
            _initialize,
            "_initialize_jax",
            lambda *_, **given: calls.append(given["local_device_ids"]),
        )
        try:
            launch.initialize()
            messages = [str(warning.message) for warning in caught]
        except ValueError as error:
            messages = [str(error)]
    for name in variables:
        patch.delenv(name)
    assert len(messages) == bool(said)
    assert all(re.search(said, message) for message in messages)
    return calls[-1]


@pytest.mark.parametrize(
    ("platforms", "visible", "names"),
    [
        (None, None, ["0", "1"]),
        ("gpu", "1", ["1"]),
        ("cpu", None, []),
        ("", "1,-1,0", ["1"]),
        ("", "MIG-a", ["MIG-a"]),
    ],
)
def test_gpus_that_a_process_sees(platforms, visible, names, set_gpus):
    set_gpus(2, visible)
    assert _devices.visible_gpus(platforms) == names


def test_a_fraction_of_memory_that_is_set_stays(set_gpus):
    set_gpus(1, None).setenv("XLA_CLIENT_MEM_FRACTION", "0.2")
    shared = [{"CUDA_VISIBLE_DEVICES": "0"}] * 2
    assert _devices.divide_gpus(2, 1, asynchronous=True) == (shared, "")
