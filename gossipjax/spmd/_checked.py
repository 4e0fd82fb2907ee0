"""Compiled functions whose programs are checked when they are traced."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from gossipjax.last import GRADIENTS, mark, require_applied, takes_gradients
from gossipjax.traced import showing_arguments

if TYPE_CHECKING:
    from gossipjax.spmd import Nodes


class _NotTracedYetError(Exception):
    """Ends a trace whose program would be compiled before it is checked."""


_may_trace = contextvars.ContextVar("may_trace", default=False)


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    token = _may_trace.set(True)
    try:
        yield
    finally:
        _may_trace.reset(token)


class CheckedJit:
    """`jax.jit(run, **options)`, of which a new program is checked before it is compiled.

    The updates of a gossip must be added to the parameters as they are. JAX traces once: a call
    that would trace by itself ends at once, and `trace` leaves its result in the cache of `jit`.
    """

    def __init__(self, run: Callable[..., Any], **options: Any):
        run = showing_arguments(run)

        @functools.wraps(run)
        def checked(*args: Any) -> Any:
            if not _may_trace.get():
                raise _NotTracedYetError
            return run(*args)

        self._jitted = jax.jit(checked, **options)

    def __call__(self, *args: Any) -> Any:
        with contextlib.suppress(_NotTracedYetError):
            return self._jitted(*args)
        self.trace(*args)
        with _tracing():
            return self._jitted(*args)

    def trace(self, *args: Any) -> Any:
        with _tracing():
            traced = self._jitted.trace(*args)
        require_applied(traced.jaxpr)
        return traced

    def lower(self, *args: Any) -> Any:
        return self.trace(*args).lower()


def require_gradients(nodes: Nodes, tx: Any, params: Any, opt_state: Any) -> None:
    """Raises `ValueError` if gradients arrive negated at a gossip that is the optimizer."""

    def update(params: Any, opt_state: Any) -> Any:
        return tx.update(mark(params, GRADIENTS), opt_state, params)

    if takes_gradients(opt_state):
        with contextlib.suppress(TypeError):  # of a chain that needs more, such as the loss
            jax.eval_shape(nodes.spmd(update), params, opt_state)
