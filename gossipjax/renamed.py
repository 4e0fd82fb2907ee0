"""Names that gossipjax 0.5.0 changed: who uses an old name gets an error with the new one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

# WENT: an old name, without "gx." -> what to use instead, as the end of the error.
_IN_CONTRIB = ("adaptive_consensus", "d2", "deepsqueeze", "desloc", "mixed_momentum")
_IN_CONTRIB += ("quasi_global_adam", "relay", "sparta")
_IN_TOPOLOGY = ("rounds_to_exact_average", "second_singular_value", "spectral_gap")
WENT = {name: f"use gx.contrib.{name}" for name in _IN_CONTRIB}
WENT |= {f"diagnostics.{name}": f"use gx.topology.{name}" for name in _IN_TOPOLOGY}
WENT |= {
    f"diagnostics.{name}": f"use gx.{name}"
    for name in ("average_model", "latest_model", "local_model")
}
WENT |= {
    "accumulate": "use gx.accumulate_gradients",
    "asynchronous.refuse_outliers": "use gx.refuse_outliers",
    "asynchronous.measure_delays": "use the module experiments.training.delays of a checkout",
    "asynchronous.replay": "use the module experiments.fault_injection.replay of a checkout",
    "asynchronous.ReplayedStep": "use the module experiments.fault_injection.replay of a checkout",
    "launch.GpuSetting": "use the variables in docs/guides/gpus.md",
    "launch.gpu_settings": "use the variables in docs/guides/gpus.md",
    "launch.secret_from_env": "use the variable GOSSIPJAX_SECRET, which gx.asynchronous.join reads",
    "launch.set_gpu_settings": "use the variables in docs/guides/gpus.md",
    "MAX_PROGRAMS": "give gx.TrainStep max_programs",
    "Program": "gx.spmd and gx.Nodes.spmd return one",
    "donate_on_accelerators": "give donate_argnums, on CPU ()",
    "topology.Schedule": "use gx.Schedule",
    "wire.decode": "use the method decode of a codec",
    "wire.encode": "use the method encode of a codec",
    "wire.make_wire": "give wire and axis_name to a transform",
}
_METHODS = ("adpsgd", "allreduce", "async_sgp", "centralized", "diloco", "dpsgd", "from_plan")
_METHODS += ("noloco", "osgp", "sgp", "slowmo", "sparse_loco", "streaming_diloco")
WENT |= {
    f"cost_model.{name}": "use gx.cost_model.from_transform(tx, name); the changelog says which tx"
    for name in _METHODS
}


def old_names(module: str) -> Callable[[str], NoReturn]:
    """Makes a `__getattr__` for `gossipjax.{module}`, or for gossipjax itself if `module` is "".

    It raises `AttributeError`, which for an old name says what to use instead.
    """

    def refuse(name: str) -> NoReturn:
        old_name = f"{module}.{name}" if module else name
        if old_name in WENT:
            raise AttributeError(f"gx.{old_name} went: {WENT[old_name]}.")
        module_name = f"gossipjax.{module}" if module else "gossipjax"
        raise AttributeError(f"module {module_name!r} has no attribute {name!r}")

    return refuse


def renamed(**new: str) -> Callable[[F], F]:
    """Makes a function raise `TypeError`, with the new name, if an argument has an old name.

    `new` maps an old name to the new name, or to text such as `'order="adapt-then-combine"'`.

    >>> @renamed(alpha="strength")
    ... def pull(strength):
    ...     return strength
    >>> pull(alpha=0.5)
    Traceback (most recent call last):
    TypeError: pull takes strength instead of alpha since gossipjax 0.5.0.
    """

    def decorate(fn: Any) -> Any:
        @functools.wraps(fn)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for old in new.keys() & kwargs.keys():
                # Of a class, the error names the class, as in the call.
                call = fn.__qualname__.removesuffix(".__init__").removesuffix(".__new__")
                raise TypeError(f"{call} takes {new[old]} instead of {old} since gossipjax 0.5.0.")
            return fn(*args, **kwargs)

        return checked

    return decorate
