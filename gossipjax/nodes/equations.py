"""The equations of a traced program, and the programs inside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

AXIS_PARAMS = ("axes", "axis_name", "axis")  # where the primitives name the axes of a collective


def name_of(eqn: Any) -> str:
    """Returns the name of an equation's primitive, or of what it calls instead; see `params_of`."""
    hidden = eqn.params.get("_prim")
    return eqn.primitive.name if hidden is None else type(hidden).__name__


def params_of(eqn: Any) -> dict[str, Any]:
    """Returns the parameters of an equation.

    With `JAX_REMAT3` or `JAX_CUSTOM_VJP3` the equation of `jax.checkpoint` or `jax.custom_vjp` has
    an object as its parameter `_prim`, and this object has the parameters.
    """
    hidden = eqn.params.get("_prim")
    return eqn.params if hidden is None else hidden.params


def programs_in(eqn: Any) -> list[Any]:
    """Returns the programs inside an equation, such as the body of a loop, without their constants.

    Raises:
      ValueError: if an equation hides its program, which may have collectives.
    """
    params = params_of(eqn)
    # A `custom_vjp` has its program as "traced"; after `vmap` it is inside of "prim".
    traced = params.get("traced", params.get("prim"))
    while traced is not None and not hasattr(traced, "jaxpr"):
        traced = traced.params.get("traced", traced.params.get("prim"))
    programs = [*jaxprs_in_params(params), *(() if traced is None else [traced.jaxpr.jaxpr])]
    hidden = eqn.params.get("_prim")
    # Primitives of JAX that hide a program, such as that of `jnp.searchsorted`, exchange nothing.
    if not programs and hidden is not None and not type(hidden).__module__.startswith("jax."):
        raise ValueError(
            "a primitive must show its program, so that collectives in it are seen, got "
            f"{name_of(eqn)}: write it by jax.custom_vjp or jax.checkpoint."
        )
    return programs


def all_equations(eqns: Sequence[Any]) -> Iterator[Any]:
    """Yields equations, and all equations of the programs inside them, at any depth."""
    for eqn in eqns:
        yield eqn
        for jaxpr in programs_in(eqn):
            yield from all_equations(jaxpr.eqns)


def is_collective_over(axis_name: str, eqn: Any) -> bool:
    """Says whether an equation is a collective over an axis; `axis_index` counts as one."""
    names = [eqn.params.get(param) for param in AXIS_PARAMS]
    return any(axis_name in (name if isinstance(name, tuple | list) else (name,)) for name in names)
