"""Decentralized data-parallel training in JAX: gossip as optax transforms."""

# ruff: noqa: F403, F405 (what has no module of its own here is listed in _public.py)

import importlib
from typing import TYPE_CHECKING, Any

from gossipjax.renamed import old_names

if TYPE_CHECKING:
    from gossipjax import (
        asynchronous,
        checkpoint,
        contrib,
        cost_model,
        diagnostics,
        faults,
        flax,
        launch,
        processes,
        topology,
        wire,
    )
    from gossipjax._public import *

__all__ = [
    "GossipState",
    "Nodes",
    "Schedule",
    "Traffic",
    "TrainState",
    "TrainStep",
    "accumulate_gradients",
    "adpsgd",
    "allreduce",
    "apply_if_finite",
    "asynchronous",
    "average_batch_stats",
    "average_model",
    "bytes_per_step",
    "canonical_step",
    "canonical_steps",
    "checkpoint",
    "choco",
    "contrib",
    "cost_model",
    "d1d_psgd",
    "decentralize",
    "diagnostics",
    "dirichlet_split",
    "dpsgd",
    "easgd",
    "exchange",
    "faults",
    "flax",
    "fsdp_specs",
    "gossip",
    "gossip_state",
    "gradient_tracking",
    "latest_model",
    "launch",
    "layer_fragments",
    "local_model",
    "mix",
    "mix_batch_stats",
    "osgp",
    "outer",
    "prefetch",
    "processes",
    "quasi_global",
    "random_delays",
    "refuse_outliers",
    "sgp",
    "sharded",
    "spmd",
    "state_specs",
    "topology",
    "weighted",
    "wire",
]

__version__ = "0.5.0"

_MODULES = ("asynchronous", "checkpoint", "contrib", "cost_model", "diagnostics", "faults")
_MODULES += ("flax", "launch", "processes", "topology", "wire")


def __getattr__(name: str) -> Any:
    """Imports a name at its first use, so the launcher can start without JAX."""
    if name in _MODULES:
        return importlib.import_module(f"gossipjax.{name}")
    if name not in __all__:
        old_names("")(name)  # raises AttributeError
    value = getattr(importlib.import_module("gossipjax._public"), name)
    globals()[name] = value  # so the next use does not come here
    return value


def __dir__() -> list[str]:
    dunder_names = [name for name in globals() if name.startswith("__")]
    return sorted({*dunder_names, *__all__})
