"""The equations of a traced program, and the programs inside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

AXIS_PARAMS = ("axes", "axis_name", "axis")


def name_of(eqn: Any) -> str:
    """The name of what an equation calls."""
    hidden = eqn.params.get("_prim")
    return eqn.primitive.name if hidden is None else type(hidden).__name__


def params_of(eqn: Any) -> dict[str, Any]:
    """The parameters of what an equation calls.

    With `JAX_REMAT3` or `JAX_CUSTOM_VJP3` the equation of `jax.checkpoint` or `jax.custom_vjp`
    calls an object that has these parameters.
    """
    hidden = eqn.params.get("_prim")
    return eqn.params if hidden is None else hidden.params


def programs_in(eqn: Any) -> list[Any]:
    """The programs inside an equation, open ones.

    Raises:
      ValueError: if the equation hides its program, which may exchange something.
    """
    params = params_of(eqn)
    traced = params.get("traced", params.get("prim"))  # of a `custom_vjp`; of what `vmap` made
    while traced is not None and not hasattr(traced, "jaxpr"):
        traced = traced.params.get("traced", traced.params.get("prim"))
    programs = [*jaxprs_in_params(params), *(() if traced is None else [traced.jaxpr.jaxpr])]
    hidden = eqn.params.get("_prim")
    # JAX's own, such as that of `jnp.searchsorted`, exchange nothing.
    if not programs and hidden is not None and not type(hidden).__module__.startswith("jax."):
        raise ValueError(
            "a primitive must show its program, so that collectives in it are seen, got "
            f"{name_of(eqn)}: write it by jax.custom_vjp or jax.checkpoint."
        )
    return programs


def all_equations(eqns: Sequence[Any]) -> Iterator[Any]:
    """Equations, and all equations inside them."""
    for eqn in eqns:
        yield eqn
        for jaxpr in programs_in(eqn):
            yield from all_equations(jaxpr.eqns)


def is_collective_over(axis_name: str, eqn: Any) -> bool:
    """Whether an equation exchanges anything over an axis, or asks for its index there."""
    names = [eqn.params.get(param) for param in AXIS_PARAMS]
    return any(axis_name in (name if isinstance(name, tuple | list) else (name,)) for name in names)
