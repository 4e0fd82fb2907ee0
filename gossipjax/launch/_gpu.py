"""Settings of XLA and NCCL for gossip on GPUs, each with its source; nothing sets them silently."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

XLA_FLAGS = "XLA_FLAGS"


class GpuSetting(NamedTuple):
    """A flag of XLA, whose name starts with `--`, or an environment variable of NCCL.

    `purpose` is what it is for, `source` where it is described.

    >>> GpuSetting("NCCL_SOCKET_NTHREADS", "4", "sockets", "NCCL's manual").name
    'NCCL_SOCKET_NTHREADS'
    """

    name: str
    value: str
    purpose: str
    source: str

    @property
    def is_flag(self) -> bool:
        """Whether it goes into `XLA_FLAGS`."""
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
    """The settings of NCCL and XLA that matter for gossip on GPUs; sets none.

    A round is a send and a receive per node and peer, which NCCL runs below the speed of its
    all-reduce unless it is told to use more of the network for a peer. The flag of XLA exists in
    jaxlib 0.10 to 0.12; XLA ends the process at one that it does not know.

    Args:
      sockets: whether hosts are joined by TCP, at 100 Gbit/s or so, without RDMA.
      connected_components: whether NCCL's cliques are the components of a permutation, as
        docs/guides/topologies.md lists them. XLA may hang where a permutation leaves a node out, or
        where two permutations of a program share some components only (XLA pull request 44530).

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
    """Sets `gpu_settings` in this process's environment, except those that are set there already.

    Call it before JAX's first use, before or after `initialize`. A flag is added to those of
    `XLA_FLAGS`.

    Returns:
      What was set, by name.

    Raises:
      RuntimeError: if JAX has started its backends, which have read their settings.

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
    """Whether JAX has started its backends: it then refuses another number of CPU devices."""
    import jax  # the launcher starts without

    count = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    try:
        jax.config.update("jax_num_cpu_devices", 2 if count == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False
