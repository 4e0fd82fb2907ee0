"""The arguments of the program that is being traced, for what is called deep inside it.

A transform sees its own part of the optimizer's state. What stands around it, or before it in its
chain, shows in the state that the program was given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

_arguments: ContextVar[tuple[Any, ...]] = ContextVar("arguments", default=())


def traced_arguments() -> tuple[Any, ...]:
    """The arguments, node-stacked, of the `gx.spmd` that is being traced; empty outside of one."""
    return _arguments.get()


def showing_arguments(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose arguments are the `traced_arguments` while it runs."""

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        token = _arguments.set(args)
        try:
            return fn(*args)
        finally:
            _arguments.reset(token)

    return run
