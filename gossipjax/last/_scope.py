"""Where the values of a traced program come from."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from jax.extend.core import Literal

# These return a value, or a part of it, as it is.
TRANSPARENT = frozenset(
    """name copy copy_p reshape broadcast_in_dim transpose squeeze expand_dims convert_element_type
    reduce_precision pvary pcast sharding_constraint optimization_barrier device_put slice
    dynamic_slice split mesh_cast reshard stop_gradient""".split()  # noqa: SIM905
)


NO_EQUATION: Any = SimpleNamespace(primitive=SimpleNamespace(name=""))  # of an argument


class Scope:
    """One run of a program or a part of it. Its variables with it are the names of values."""

    def __init__(self, jaxpr: Any, arguments: dict[Any, tuple[Scope, Any]]):
        self.jaxpr = jaxpr
        self.arguments = arguments  # where variables are those of a scope around this one
        self.calls: dict[Any, tuple[Scope, Any]] = {}  # where results are those of a scope inside
        self.values: dict[Any, Any] = {}  # what is followed, by variable

    def read(self, atom: Any) -> Any:
        return None if isinstance(atom, Literal) else self.values.get(atom)

    @functools.cached_property
    def equations(self) -> dict[Any, Any]:
        return {variable: eqn for eqn in self.jaxpr.eqns for variable in eqn.outvars}


def _find_root(scope: Scope, atom: Any) -> tuple[Scope, Any, Any]:
    """Where a value comes from as it is: scope, variable and equation."""
    while not isinstance(atom, Literal):
        if atom in scope.arguments or atom in scope.calls:
            scope, atom = scope.arguments.get(atom) or scope.calls[atom]
            continue
        eqn = scope.equations.get(atom, NO_EQUATION)
        name = eqn.primitive.name
        cases = eqn.invars[1:] if name == "select_n" else []
        if cases and len({_name_value(scope, case) for case in cases}) == 1:  # of a batched cond
            atom = cases[0]
        elif name in TRANSPARENT:
            is_by_one = len(eqn.outvars) == len(eqn.invars)
            atom = eqn.invars[eqn.outvars.index(atom) if is_by_one else 0]
        else:
            return scope, atom, eqn
    return scope, atom, NO_EQUATION


def _name_value(scope: Scope, atom: Any) -> Any:
    scope, atom, _ = _find_root(scope, atom)
    return id(atom) if isinstance(atom, Literal) else (scope, atom)


def name_parts(scope: Scope, atom: Any) -> frozenset[Any]:
    """The values that stand one after another in a value."""
    scope, atom, eqn = _find_root(scope, atom)
    if eqn.primitive.name == "concatenate":
        return frozenset().union(*(name_parts(scope, part) for part in eqn.invars))
    return frozenset([_name_value(scope, atom)])


def name_terms(scope: Scope, atom: Any) -> dict[frozenset[Any], int]:
    """The values of which a value is the sum; `optax.contrib.sam` adds a difference."""
    scope, atom, eqn = _find_root(scope, atom)
    if eqn.primitive.name != "sub":
        return {name_parts(scope, atom): 1}
    return {name_parts(scope, eqn.invars[0]): 1, name_parts(scope, eqn.invars[1]): -1}


def find_condition(scope: Scope, atom: Any) -> tuple[Any, bool] | None:
    """The condition under which a value is 1, or not 1, where it is else 0; None of others."""
    scope, atom, eqn = _find_root(scope, atom)
    if atom.aval.dtype == bool:
        return _name_value(scope, atom), True
    if eqn.primitive.name == "sub" and is_value(eqn.invars[0], 1):
        condition = find_condition(scope, eqn.invars[1])
        return condition and (condition[0], not condition[1])
    return None


def is_under(scope: Scope, atom: Any, condition: tuple[Any, bool]) -> bool:
    """Whether a value is a product with such a factor."""
    scope, _, eqn = _find_root(scope, atom)
    is_product = eqn.primitive.name == "mul"
    return is_product and any(find_condition(scope, a) == condition for a in eqn.invars)


def is_negative(scope: Scope, atom: Any) -> bool:
    """Whether a value is a negative number, or the negative of another one."""
    scope, atom, eqn = _find_root(scope, atom)
    if isinstance(atom, Literal):
        return not getattr(atom.val, "shape", ()) and bool(atom.val < 0)
    name = eqn.primitive.name
    if name in ("mul", "div"):
        a, b = eqn.invars
        return a is not b and is_negative(scope, a) != is_negative(scope, b)
    return name == "neg" and not is_negative(scope, eqn.invars[0])


def is_value(atom: Any, value: float) -> bool:
    is_scalar = isinstance(atom, Literal) and not getattr(atom.val, "shape", ())
    return is_scalar and bool(atom.val == value)
