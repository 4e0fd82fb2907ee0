"""The chips that steps are compiled for, none of which needs to be here, and their compilers."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax

Kind = Literal["tpu", "gpu"]


class Target(NamedTuple):
    """Chips to compile for, one node each."""

    words: str
    kind: Kind
    nodes: int
    topology: str  # chips side by side, or slices x hosts x GPUs of a host


TARGETS = (
    Target("8 TPU v5e", "tpu", 8, "v5e:2x4"),
    Target("64 TPU v5e", "tpu", 64, "v5e:8x8"),
    Target("8 H100", "gpu", 8, "1x8x1"),
)
COMPILERS: dict[Kind, tuple[str, ...]] = {
    "tpu": ("libtpu",),
    "gpu": (
        "jax-cuda12-plugin",
        "jax-cuda12-pjrt",
        "nvidia-cuda-nvcc-cu12",
        "nvidia-nvshmem-cu12",
    ),
}


def missing(kind: Kind) -> list[str]:
    """The packages of this kind's compiler that are not installed."""

    def absent(package: str) -> bool:
        try:
            return not version(package)
        except PackageNotFoundError:
            return True

    return [package for package in COMPILERS[kind] if absent(package)]


def chosen(kinds: tuple[Kind, ...]) -> list[Target]:
    """The targets of these kinds; of all whose compiler is installed if none is given.

    Raises:
      ValueError: where a compiler is missing; it says what to install.
    """
    wanted = kinds or tuple(kind for kind in get_args(Kind) if not missing(kind))
    for kind in wanted or get_args(Kind):
        if absent := missing(kind):
            release = f"=={jax.__version__}"
            gpu = (p + release * p.startswith("jax-") for p in COMPILERS["gpu"])
            install = {"tpu": f'"jax[tpu]{release}"', "gpu": " ".join(gpu)}
            lines = [f"  {k}: pip install {install[k]}" for k in ([kind] if kinds else install)]
            raise ValueError(
                f"no compiler for {kind if kinds else 'any target'} here: {', '.join(absent)} not "
                "installed. No accelerator is needed, but, in an environment of its own for each "
                "kind,\n" + "\n".join(lines)
            )
    return [target for target in TARGETS if target.kind in wanted]


def devices(target: Target) -> list[Any]:
    """The target's chips, good for compiling only. Before JAX's first use."""
    # Nothing is looked for: not in a cloud's metadata, and no driver is asked.
    os.environ["TPU_SKIP_MDS_QUERY"] = os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no chip that two programs could fight over
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    jax.config.update("jax_platforms", "cpu,cuda" if target.kind == "gpu" else "cpu")
    # JAX has no other public name for this.
    from jax.experimental import topologies

    if target.kind == "tpu":
        return topologies.get_topology_desc(target.topology, "tpu").devices
    described = (Path(__file__).parent / "h100.textproto").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology=target.topology, target_config=described
    ).devices
