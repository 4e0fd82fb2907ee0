"""Settings of XLA and NCCL for gossip on GPUs, with their sources. Nothing sets them silently."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

XLA_FLAGS = "XLA_FLAGS"


class GpuSetting(NamedTuple):
    """A flag of XLA, whose name starts with `--`, or an environment variable of NCCL.

    `purpose` says what the setting does, and `source` says where it is described.

    >>> GpuSetting("NCCL_SOCKET_NTHREADS", "4", "sockets", "NCCL's manual").name
    'NCCL_SOCKET_NTHREADS'
    """

    name: str
    value: str
    purpose: str
    source: str

    @property
    def is_flag(self) -> bool:
        """Whether the setting is a flag in `XLA_FLAGS`."""
        return self.name.startswith("--")


USER_GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
CHANNELS = GpuSetting(
    "NCCL_NCHANNELS_PER_NET_PEER",
    "4",
    "more of the network for one peer: NCCL sends as if to all nodes at once",
    "https://github.com/NVIDIA/nccl/issues/1272",
)
SOCKETS = (
    GpuSetting("NCCL_SOCKET_NTHREADS", "4", "threads of a TCP connection", USER_GUIDE),
    GpuSetting("NCCL_NSOCKS_PERTHREAD", "4", "sockets of each of these threads", USER_GUIDE),
)
COMPONENTS = GpuSetting(
    "--xla_gpu_collective_permute_connected_components",
    "true",
    "runs a permutation within the nodes that it joins, not within a clique of all",
    "https://github.com/openxla/xla/pull/40505",
)


def gpu_settings(
    *, sockets: bool = False, connected_components: bool = False
) -> tuple[GpuSetting, ...]:
    """Returns the settings of NCCL and XLA that matter for gossip on GPUs, and sets none.

    In a round, each node sends to each peer and receives from it. NCCL sends and receives more
    slowly than it all-reduces, unless a setting lets it use more of the network for one peer. The
    flag of XLA exists in jaxlib 0.10 to 0.12; XLA ends a process that sets a flag that XLA does not
    know.

    Args:
      sockets: whether hosts are joined by TCP without RDMA, at about 100 Gbit/s.
      connected_components: whether each component of a permutation becomes a clique of NCCL;
        docs/guides/topologies.md lists the components. XLA may hang if a permutation leaves a node
        out, or if two permutations of a program share only some of their components (XLA pull
        request 44530).

    >>> from gossipjax import launch
    >>> [setting.name for setting in launch.gpu_settings(sockets=True)]
    ['NCCL_NCHANNELS_PER_NET_PEER', 'NCCL_SOCKET_NTHREADS', 'NCCL_NSOCKS_PERTHREAD']
    """
    return (
        CHANNELS,
        *(SOCKETS if sockets else ()),
        *((COMPONENTS,) if connected_components else ()),
    )


def set_gpu_settings(
    *, sockets: bool = False, connected_components: bool = False
) -> dict[str, str]:
    """Sets `gpu_settings` in this process's environment, except variables that are set already.

    Call it before you first use JAX, before or after `initialize`. Flags are added to `XLA_FLAGS`.

    Returns:
      The settings that were made, by name.

    Raises:
      RuntimeError: if JAX has started its backends, which have then read their settings already.

    >>> set_gpu_settings()  # doctest: +SKIP
    {'NCCL_NCHANNELS_PER_NET_PEER': '4'}
    """
    settings = gpu_settings(sockets=sockets, connected_components=connected_components)
    flags = os.environ.get(XLA_FLAGS, "").strip()
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
    """Whether JAX has started its backends, and so refuses another number of CPU devices."""
    import jax  # the launcher starts without JAX

    count = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", 2 if count == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False
