"""Saves the state of a node, and reads it when the node is started again."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from gossipjax import launch
from gossipjax.asynchronous._messages import Mass
from gossipjax.asynchronous._model import move

KEPT = 2  # complete checkpoints


@jax.jit
def divide(x: tuple[Any, ...], w: Any, moved: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """Returns the model `x / w` after the local updates `moved`, and `m / w` for a momentum."""
    x = x if moved is None else move(x, moved, w, None)  # without an outer step
    return tuple(b / jnp.asarray(w, b.dtype) for b in x)


class Saves:
    """The checkpoints of a node, each with `(x / w, opt_state)`. A restored node has weight 1."""

    def __init__(self, folder: Path | None, every: int, x: tuple[Any, ...], opt_state: Any):
        # The newest checkpoint, or None. Its step counts the steps of the node, and its state is
        # `(x / w, opt_state)`. Its metadata are `clock`, the step of the schedules in `opt_state`,
        # and `branch`, to which the mass belonged (0.4.0 did not save it).
        self.restored: Any = None
        # A context that is open while the program uses the node in a `with` block.
        self.block: Any = contextlib.nullcontext()
        self.checkpoints: Any = None
        self._every = every
        if folder is None:
            return
        from gossipjax.checkpoint import Checkpoints  # needs orbax; other nodes do not

        self.checkpoints = Checkpoints(folder, every=every, max_to_keep=KEPT)
        self.block = self._open()
        self.restored = self.checkpoints.restore((x, opt_state))

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Handles SIGHUP (a closed terminal) and Ctrl-C as `Checkpoints` handles SIGTERM."""
        signals = [signal.SIGHUP]
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signals.append(signal.SIGINT)
        with self.checkpoints, launch.signal_handlers(signals, self._ask_to_end):
            yield

    def _ask_to_end(self, number: int, frame: Any) -> None:
        """Handles a signal: the next step saves and ends. A second Ctrl-C interrupts at once."""
        if self.is_asked_to_end and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        self.checkpoints.is_preempted = True

    @property
    def is_asked_to_end(self) -> bool:
        """Says whether this process has got SIGTERM, SIGINT or SIGHUP."""
        return self.checkpoints is not None and self.checkpoints.is_preempted

    def is_due(self, steps: int) -> bool:
        """Says whether the node must save now: at every `every`-th step, or to end."""
        return self.checkpoints is not None and (self.is_asked_to_end or steps % self._every == 0)

    def save(self, steps: int, mass: Mass, moved: Any, opt_state: Any, metadata: Any) -> None:
        """Begins to write a checkpoint if the node has mass; returns when the arrays are copied."""
        if mass.w:
            state = divide(mass.x, mass.w, moved), opt_state
            self.checkpoints.save(steps, state, metadata)

    def end(self, place: int, has_heir: bool) -> NoReturn:
        """Waits until the save is written, prints what the node does, and raises `Preempted`."""
        from gossipjax.checkpoint import Preempted

        step = max(self.checkpoints.wait(), default=None)  # of the newest checkpoint
        saved = "nothing" if step is None else f"step {step}"
        mass = "hands its model and weight to" if has_heir else "leaves nothing to"
        print(
            f"gossipjax: asked to end: node {place} has saved {saved}, {mass} another node.",
            file=sys.stderr,
            flush=True,
        )
        raise Preempted(step, self.checkpoints.folder)
