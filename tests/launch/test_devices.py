"""Which GPU each process gets: a row for each cell of the table in docs/guides/launcher.md."""

import re

import pytest

from gossipjax.launch import _devices
from gossipjax.launch.__main__ import main

TOGETHER, EACH = "--processes", "--asynchronous --processes"
NCCL = "NCCL refuses two processes on one GPU"


@pytest.fixture
def set_gpus(fresh_process):
    """Sets how many GPUs a host has, and CUDA_VISIBLE_DEVICES, where JAX has its plugin."""

    def set_all(count, visible):
        for name in ("CUDA_VISIBLE_DEVICES", *_devices.MEMORY_VARIABLES):
            fresh_process.delenv(name, raising=False)
        if visible is not None:
            fresh_process.setenv("CUDA_VISIBLE_DEVICES", visible)
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
        (f"{TOGETHER} 2", 8, None, ["0//", "1//"], ""),
        (f"{TOGETHER} 2", 1, None, [], rf"at most 1, .*\(0\), got 2 and 1: {NCCL}.*gx.Nodes\(2\)"),
        (f"{TOGETHER} 2", 8, "3", [], r"at most 1, .* visible GPUs \(3\).* JAX_PLATFORMS=cpu"),
        (f"{TOGETHER} 1", 8, None, ["0//"], ""),
        (f"{TOGETHER} 2", 0, None, ["0//", "1//"], ""),
        # Asynchronous nodes: the same.
        (f"{EACH} 3", 3, None, ["/0/", "/1/", "/2/"], ""),
        (f"{EACH} 2 --local-devices 2", 4, "GPU-a,GPU-b,c,d", ["/GPU-a,GPU-b/", "/c,d/"], ""),
        (f"{EACH} 2", 8, None, ["/0/", "/1/"], ""),
        (f"{EACH} 3", 2, None, ["/0/0.375", "/0/0.375", "/1/0.375"], ""),
        (f"{EACH} 2 --local-devices 2", 1, None, [], "--local-devices must be at most 1"),
        (f"{EACH} 3", 8, "5", ["/5/0.250"] * 3, ""),
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


def slurm(rank):
    """The variables of a process of eight, on the first host."""
    return {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}"}


def open_mpi(rank):
    values = {"SIZE": 8, "RANK": rank, "LOCAL_RANK": rank}
    return {f"OMPI_COMM_WORLD_{name}": f"{value}" for name, value in values.items()}


MORE = rf"must be at most 2, .*\(0,1\), got 4 or more: {NCCL}.* JAX_LOCAL_DEVICE_IDS=0,1\."


@pytest.mark.parametrize("engine", [slurm, open_mpi])
@pytest.mark.parametrize(
    ("rank", "count", "visible", "device", "said"),
    [
        (0, 4, None, 0, ""),
        (3, 4, "0,1,2,3", 3, ""),
        (1, 8, None, 1, ""),
        (3, 2, "0,1", None, MORE),
        (1, 1, None, None, "at most 1, .* got 2"),
        (0, 1, "0", 0, ""),  # --gpus-per-task=1, with cgroups and without
        (3, 1, "0", 0, ""),
        (3, 8, "3", 0, ""),
        (3, 0, None, 3, ""),  # no GPU of NVIDIA: as JAX does
    ],
)
def test_under_a_scheduler(engine, rank, count, visible, device, said, set_gpus):
    assert find_device(set_gpus(count, visible), engine(rank), said) == device


@pytest.mark.parametrize(
    ("count", "visible", "variables"),
    [
        (4, None, {}),  # Kubernetes, or no engine: all that the process sees
        (8, "3", {}),
        (2, None, slurm(3) | {"JAX_LOCAL_DEVICE_IDS": "0,1"}),  # which JAX reads
    ],
)
def test_without_a_scheduler_jax_takes_all(count, visible, variables, set_gpus):
    assert find_device(set_gpus(count, visible), variables, "") is None


def find_device(patch, variables, said):
    """Returns what JAX gets; None, too, after an error."""
    for name, value in variables.items():
        patch.setenv(name, value)
    real = _devices.visible_gpus
    patch.setattr(_devices, "visible_gpus", lambda _: real("cuda"))  # the tests have CPUs
    if not said:
        return _devices.choose_gpu()
    with pytest.raises(ValueError, match=said):
        _devices.choose_gpu()
    return None


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
    assert _devices.divide_gpus(2, 1, asynchronous=True) == shared
