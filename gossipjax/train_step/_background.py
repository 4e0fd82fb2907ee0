"""Programs beside the step: compiled in the calling thread and run by another."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from gossipjax.spmd import Nodes
from gossipjax.spmd.program import Program

COLLECTIVE = re.compile(r"stablehlo\.(all_|reduce_scatter|collective_)")


def spmd_by_step(fn: Callable[..., Any], nodes: Nodes, is_static: bool, **argnums: Any) -> Program:
    """`nodes.spmd(fn)` of a function whose first argument is the step."""
    kind = "static_argnums" if is_static else "shared_argnums"
    return nodes.spmd(fn, **{kind: 0}, **argnums)


def has_collectives(program: Program, *args: Any) -> bool:
    """Whether a program exchanges anything between devices; arrays matter by their shapes only."""

    def describe(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf

    return COLLECTIVE.search(program.lower(*jax.tree.map(describe, args)).as_text()) is not None


class Background:
    """A program that is compiled in the calling thread and run by another, call after call.

    A thread has none of the caller's JAX context (x64, matrix precision, mesh), which matters
    while a program is traced and compiled, and not while it runs.
    """

    def __init__(self, program: Program):
        self._program = program
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        # The thread ends with the step that owns it, also if nobody closes it.
        self.close = weakref.finalize(self, self._executor.shutdown, wait=False)

    def start(self, *args: Any) -> Future[Any]:
        """Dispatches the program; the result of the future is on the devices."""
        return self._executor.submit(self._program.prepare(*args))
