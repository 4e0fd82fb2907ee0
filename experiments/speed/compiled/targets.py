"""Chips to compile for, which need not be present, and the compilers for them."""

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax

TargetKind = Literal["tpu", "gpu"]

GPU_DESCRIPTION = Path(__file__).parent / "h100.textproto"


class Target(NamedTuple):
    """Chips to compile for, one node each."""

    description: str
    kind: TargetKind
    nodes: int
    topology: str  # chips of a slice in a grid, or slices x hosts x GPUs of a host
    slices: int = 1  # of TPUs, with a data-center network between them


TARGETS = (
    Target("8 TPU v5e", "tpu", 8, "v5e:2x4"),
    Target("64 TPU v5e", "tpu", 64, "v5e:8x8"),
    Target("8 H100", "gpu", 8, "1x8x1"),
)
COMPILERS: dict[TargetKind, tuple[str, ...]] = {
    "tpu": ("libtpu",),
    "gpu": (
        "jax-cuda12-plugin",
        "jax-cuda12-pjrt",
        "nvidia-cuda-nvcc-cu12",
        "nvidia-nvshmem-cu12",
    ),
}


def find_missing_packages(kind: TargetKind) -> list[str]:
    """Packages of this kind's compiler that are not installed."""
    return [package for package in COMPILERS[kind] if not _is_installed(package)]


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def choose_targets(kinds: Sequence[TargetKind]) -> list[Target]:
    """Targets of these kinds; without any, those of all kinds whose compiler is installed.

    Raises:
      ValueError: if a compiler is missing, with the command that installs it.
    """
    every_kind: tuple[TargetKind, ...] = get_args(TargetKind)
    wanted = kinds or [kind for kind in every_kind if not find_missing_packages(kind)]
    for kind in wanted or every_kind:
        if missing := find_missing_packages(kind):
            commands = [f"  {k}: pip install {_list_packages(k)}" for k in kinds or every_kind]
            raise ValueError(
                f"the compiler for {kind if kinds else 'any target'} must be installed, got no "
                f"{', '.join(missing)}. No accelerator is needed, but a separate environment for "
                "each kind:\n" + "\n".join(commands)
            )
    return [target for target in TARGETS if target.kind in wanted]


def _list_packages(kind: TargetKind) -> str:
    """Packages of a compiler as `pip install` takes them, of the installed JAX's version."""
    release = f"=={jax.__version__}"
    if kind == "tpu":
        return f'"jax[tpu]{release}"'
    return " ".join(p + release * p.startswith("jax-") for p in COMPILERS[kind])


def make_devices(target: Target) -> list[Any]:
    """The target's chips, which can only be compiled for. Call it before JAX's first use."""
    # JAX must not search for chips: neither in a cloud's metadata nor by asking a driver.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # two programs cannot claim an absent chip
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    jax.config.update("jax_platforms", "cpu,cuda" if target.kind == "gpu" else "cpu")
    # JAX has no other public name for this.
    from jax.experimental import topologies

    if target.kind == "tpu":
        several = {"num_slices": target.slices} if target.slices > 1 else {}
        try:
            return topologies.get_topology_desc(target.topology, "tpu", **several).devices
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"the chips of a slice must be a kind and a grid, as v5e:16x16, got "
                f"{target.topology!r}: {str(error).splitlines()[0]}"
            ) from error
    return topologies.get_topology_desc(
        platform="cuda", topology=target.topology, target_config=GPU_DESCRIPTION.read_text()
    ).devices
