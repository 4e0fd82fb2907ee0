"""Settings of XLA and NCCL for gossip on GPUs, each with its source; nothing sets them silently."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import jax

XLA_FLAGS = "XLA_FLAGS"


class GpuSetting(NamedTuple):
    """A flag of XLA, whose name starts with `--`, or an environment variable of NCCL.

    Attributes:
      name: as it is spelled.
      value: the value to set.
      purpose: what it is for.
      source: who says so.
    """

    name: str
    value: str
    purpose: str
    source: str

    @property
    def is_flag(self) -> bool:
        """Whether it goes into `XLA_FLAGS`."""
        return self.name.startswith("--")


SETTINGS = (
    GpuSetting(
        "--xla_gpu_enable_latency_hiding_scheduler",
        "true",
        "orders a step so that an exchange runs beside computation that does not need it",
        "https://docs.jax.dev/en/latest/gpu_performance_tips.html",
    ),
    GpuSetting(
        "NCCL_NCHANNELS_PER_NET_PEER",
        "4",
        "a pair of nodes uses more of the network: NCCL's channels are chosen for an all-to-all",
        "https://github.com/NVIDIA/nccl/issues/1272",
    ),
)
CONNECTED_COMPONENTS = GpuSetting(
    "--xla_gpu_collective_permute_connected_components",
    "true",
    "runs a permutation within the nodes that it joins, and not within a clique of all",
    "https://github.com/openxla/xla/pull/40505",
)


def gpu_settings(connected_components: bool = False) -> tuple[GpuSetting, ...]:
    """The settings of XLA and NCCL that matter for gossip on GPUs; sets none.

    All exist in jaxlib 0.10 and 0.11; XLA ends the process at a flag that it does not know.

    Args:
      connected_components: whether NCCL's cliques are the components of a permutation. Faster where
        these are small, such as the pairs of `gx.topology.bipartite_exponential`. Only for programs
        of one permutation in which no node is idle: XLA can hang where a permutation leaves a node
        out, or where two permutations of a program have one component in common and not the others.

    Raises:
      ValueError: if `connected_components` is not True or False.

    References:
      XLA pull requests 40505 (components) and 44530 (what hangs); NCCL issues 464 and 1272 (send
      and receive between two hosts).

    >>> from gossipjax import launch
    >>> for setting in launch.gpu_settings():
    ...     print(f"{setting.name}={setting.value}")
    --xla_gpu_enable_latency_hiding_scheduler=true
    NCCL_NCHANNELS_PER_NET_PEER=4
    """
    if not isinstance(connected_components, bool):
        raise ValueError(
            f"connected_components must be True or False, got {connected_components!r}."
        )
    return (*SETTINGS, CONNECTED_COMPONENTS) if connected_components else SETTINGS


def set_gpu_settings(connected_components: bool = False) -> dict[str, str]:
    """Sets `gpu_settings` in this process's environment, except those that are set there already.

    Call it before JAX's first use; `initialize` may come before or after it. Flags are added to
    those of `XLA_FLAGS`. Nothing else of this library calls it.

    Args:
      connected_components: as of `gpu_settings`.

    Returns:
      What was set, by name.

    Raises:
      ValueError: if `connected_components` is not True or False, or `XLA_FLAGS` is the name of a
        file, which is left as it is.
      RuntimeError: if JAX has read its settings already, so that these would have no effect.
    """
    settings = gpu_settings(connected_components)
    flags = os.environ.get(XLA_FLAGS, "").strip()
    if flags and not flags.startswith("-"):
        raise ValueError(
            f"{XLA_FLAGS} must be flags, to which others can be added, got the name of a file, "
            f"{flags!r}: add those of gx.launch.gpu_settings() to it."
        )
    if _is_jax_initialized():
        raise RuntimeError(
            "set_gpu_settings must be called before JAX's first use, got a process in which JAX "
            "has started its backends: call it at the top of the program, or set the variables "
            "before it starts."
        )
    given = {*os.environ, *re.findall(r"(?:^|\s)(--\w+)", flags)}
    missing = [setting for setting in settings if setting.name not in given]
    added = [f"{setting.name}={setting.value}" for setting in missing if setting.is_flag]
    if added:
        os.environ[XLA_FLAGS] = " ".join(filter(None, [flags, *added]))
    os.environ.update({s.name: s.value for s in missing if not s.is_flag})
    return {setting.name: setting.value for setting in missing}


def _is_jax_initialized() -> bool:
    """Whether JAX has started its backends: it then refuses another number of CPU devices."""
    count = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", 2 if count == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False
