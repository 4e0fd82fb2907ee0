"""Cuts a traced program of one node into several, which run one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import eval_jaxpr
from jax.extend.core import DebugInfo, Jaxpr, Literal

from gossipjax.nodes.equations import name_of

DEBUG_INFO = DebugInfo("jit", "part", None, None)  # what errors and profiles call a part


class Traced(NamedTuple):
    """A traced program as a list of equations, in which jitted functions are inlined."""

    eqns: list[Any]
    arguments: list[Any]
    results: list[Any]  # variables, or literals for numbers that are known
    constants: dict[Any, Any]  # variable -> value
    structure: Any  # of what the program returns
    has_effects: bool  # it prints, for example


class Part(NamedTuple):
    """A part of a program: `run` maps the values of `reads` to those of `results` and `writes`."""

    run: Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]
    reads: list[Any]  # variables
    results: list[Any]  # what the part was cut for; variables or literals
    writes: list[Any]  # variables that only later parts read

    def note(self, known: dict[Any, Any], results: list[Any], writes: list[Any]) -> None:
        """Adds to `known` what `run` has returned, where later parts find what they read."""
        pairs = zip(self.results + self.writes, results + writes, strict=True)
        known.update((var, value) for var, value in pairs if not isinstance(var, Literal))


def trace(fn: Callable[..., Any], *args: Any) -> Traced:
    """Traces `fn`, a function of trees, and inlines the jitted functions that it calls.

    Call it while the program of a node is traced, so that collectives over the nodes are known.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)

    def run_inlined(*leaves: Any) -> list[Any]:
        return _run_inlined(closed.jaxpr, closed.consts, leaves)

    flat = jax.make_jaxpr(run_inlined)(*jax.tree.leaves(args))
    jaxpr = flat.jaxpr
    constants = dict(zip(jaxpr.constvars, flat.consts, strict=True))
    structure = jax.tree.structure(shapes)
    has_effects = bool(jaxpr.effects)
    return Traced(jaxpr.eqns, jaxpr.invars, jaxpr.outvars, constants, structure, has_effects)


def cut(traced: Traced, wanted: Sequence[list[Any]]) -> list[Part]:
    """Returns a part of the program for each list of wanted results, in this order.

    A part has the equations that its results need and that no part before it has. So it reads only
    the arguments of the program and what parts before it have made.
    """
    eqns_of_parts: list[list[Any]] = []
    done: set[int] = set()
    for results in wanted:
        needed = set(variables(results))
        eqns: list[Any] = []
        for i, eqn in reversed(list(enumerate(traced.eqns))):
            if i not in done and not needed.isdisjoint(eqn.outvars):
                needed.update(variables(eqn.invars))
                eqns.insert(0, eqn)
                done.add(i)
        eqns_of_parts.append(eqns)
    reads = [
        _find_reads(eqns, results, traced.constants)
        for eqns, results in zip(eqns_of_parts, wanted, strict=True)
    ]
    parts = []
    for k, eqns in enumerate(eqns_of_parts):
        made = {var for eqn in eqns for var in eqn.outvars} - set(variables(wanted[k]))
        read_later = dict.fromkeys(var for read in reads[k + 1 :] for var in read)
        writes = [var for var in read_later if var in made]
        run = _make_function(eqns, traced.constants, reads[k], wanted[k], writes)
        parts.append(Part(run, reads[k], wanted[k], writes))
    return parts


def variables(values: Iterable[Any]) -> list[Any]:
    """Returns the variables among operands or results, which can also be literals."""
    return [value for value in values if not isinstance(value, Literal)]


def _find_reads(eqns: Iterable[Any], results: list[Any], constants: dict[Any, Any]) -> list[Any]:
    """Returns the variables that equations and results read but these equations do not make."""
    made = {var for eqn in eqns for var in eqn.outvars} | constants.keys()
    used = [*(var for eqn in eqns for var in eqn.invars), *results]
    return list(dict.fromkeys(var for var in variables(used) if var not in made))


def _make_function(
    eqns: list[Any],
    constants: dict[Any, Any],
    reads: list[Any],
    results: list[Any],
    writes: list[Any],
) -> Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]:
    """Makes the function of some equations: values of `reads` -> those of `results`, `writes`."""
    jaxpr = Jaxpr((), [*constants, *reads], [*results, *writes], eqns, debug_info=DEBUG_INFO)

    def run(values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        made = eval_jaxpr(jaxpr, (), *constants.values(), *values)
        return made[: len(results)], made[len(results) :]

    return run


def _run_inlined(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Runs a program equation by equation, also through the jitted functions that it calls.

    If you trace this, the result is the same program without calls of jitted functions, so `cut`
    can put the equations of one function into several parts.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(value: Any) -> Any:
        return value.val if isinstance(value, Literal) else known[value]

    for eqn in jaxpr.eqns:
        if name_of(eqn) in ("jit", "pjit"):
            inside = eqn.params["jaxpr"]
            results = _run_inlined(inside.jaxpr, inside.consts, list(map(read, eqn.invars)))
        else:
            reads = _find_reads([eqn], [], {})
            program = Jaxpr((), reads, eqn.outvars, [eqn], debug_info=DEBUG_INFO)
            results = eval_jaxpr(program, (), *map(known.get, reads))
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))
