"""Follows the updates of a gossip through a traced program, to what becomes of them."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, NoReturn

from gossipjax.last._marks import (
    APPLIED,
    DESCENDED,
    GRADIENTS,
    PARAMS,
    UPDATES,
    describe,
    find_marks,
    has_marks,
    mark_of,
    open_jaxpr,
)
from gossipjax.last._scope import (
    TRANSPARENT,
    Scope,
    find_condition,
    is_negative,
    is_under,
    is_value,
    name_parts,
    name_terms,
)
from gossipjax.last._values import Changed, Gradient, Leaf, New, Update, Value

# These keep the sign of a gradient, but for negative factors.
SIGNED = TRANSPARENT | frozenset(
    "add add_any sub mul div neg max min clamp sign tanh psum reduce_sum".split()  # noqa: SIM905
)


def require_applied(closed: Any) -> None:
    """Raises `ValueError` if a traced program does anything else with the updates of a gossip.

    The same for gradients that arrive negated at a gossip that is the optimizer.

    Args:
      closed: a `ClosedJaxpr`, such as `jax.jit(f).trace(*args).jaxpr`.
    """
    jaxpr = open_jaxpr(closed)
    kinds = {kind for kind, _ in find_marks(jaxpr)}
    if UPDATES not in kinds:
        return
    follower = _Follower(follows_gradients=DESCENDED in kinds)
    for value in follower.run(Scope(jaxpr, {})):
        follower.note_result(value)
    if not follower.applied and not follower.changed:
        return  # the state alone is used
    for leaf in follower.updates:
        if leaf not in follower.applied:
            _refuse(leaf, follower.changed.get(leaf))


class _Follower:
    """Follows marked values through a program."""

    def __init__(self, follows_gradients: bool):
        self.follows_gradients = follows_gradients
        self.params: dict[str, set[Any]] = collections.defaultdict(set)  # by their path
        self.updates: list[Leaf] = []
        self.applied: set[Leaf] = set()
        self.changed: dict[Leaf, list[Any]] = {}  # the first equation that does, and its calls
        self.calls: list[Any] = []  # the equations around this part of the program

    def run(self, scope: Scope) -> list[Value]:
        """The values of the results of a program, or of a part of it."""
        values = scope.values
        for eqn in scope.jaxpr.eqns:
            operands = [scope.read(atom) for atom in eqn.invars] if values else []
            if not any(operand is not None for operand in operands) and not has_marks(eqn):
                continue
            operands = operands or [None] * len(eqn.invars)
            results = self._follow(scope, eqn, operands)
            for variable, value in zip(eqn.outvars, results, strict=True):
                if value is not None:
                    values[variable] = value
        return [scope.read(atom) for atom in scope.jaxpr.outvars]

    def note_result(self, value: Value) -> None:
        """Notes updates that leave as they are."""
        if isinstance(value, Update) and not value.rest:
            self.applied |= value.leaves

    def _follow(self, scope: Scope, eqn: Any, operands: list[Value]) -> Sequence[Value]:
        name = eqn.primitive.name
        marked = mark_of(eqn)
        if marked is not None:
            return [self._follow_mark(scope, eqn, operands[0], *marked)]
        if name == "cond":
            branches = [self._call(scope, eqn, b, operands[1:], 1) for b in eqn.params["branches"]]
            cases = zip(*branches, strict=True)
            return [self._choose(eqn, operands[0], list(case)) for case in cases]
        if name == "select_n":
            return [self._choose(eqn, operands[0], operands[1:])]
        if name in ("scan", "while"):
            return self._loop(scope, eqn, operands)
        for key in ("jaxpr", "call_jaxpr"):
            jaxpr = open_jaxpr(eqn.params.get(key))
            if jaxpr is not None and _has_form_of(eqn, jaxpr):
                return self._call(scope, eqn, jaxpr, operands)
        if any(isinstance(operand, Gradient) for operand in operands):
            return [self._follow_gradient(scope, eqn, operands)] * len(eqn.outvars)
        is_by_one = len(eqn.outvars) == len(operands)
        if name in TRANSPARENT and (is_by_one or not any(operands[1:])):
            return operands if is_by_one else [operands[0]] * len(eqn.outvars)
        if name in ("add", "add_any", "sub"):
            return [self._add(scope, eqn, *operands)]
        if name == "mul" and None in operands:
            value = operands[0] or operands[1]
            factor = eqn.invars[1 if operands[0] else 0]
            condition = find_condition(scope, factor)
            if isinstance(value, Update) and (condition or is_value(factor, 1)):
                return [value._replace(condition=condition)]
        updates = [operand for operand in operands if isinstance(operand, Update)]
        if name == "concatenate" and updates and not any(u.rest for u in updates):
            return [Update(frozenset().union(*(u.leaves for u in updates)))]
        return [self._change(eqn, operands)] * len(eqn.outvars)

    def _follow_mark(self, scope: Scope, eqn: Any, value: Value, kind: str, path: str) -> Value:
        if kind == PARAMS:
            self.params[path] |= name_parts(scope, eqn.invars[0])
            return value
        if kind == GRADIENTS:
            return Gradient() if self.follows_gradients else value
        if kind == DESCENDED:
            if isinstance(value, Gradient) and value.is_negative:
                raise ValueError(
                    "gossip that is the optimizer must get gradients, got updates against them "
                    f"(params{path}), by {describe(value.eqns)} before it: leave the optimizer "
                    "before it out, and give the learning rate as its rate."
                )
            return None
        self.note_result(value)
        if kind == APPLIED:
            return New() if isinstance(value, Update) else value
        leaf = Leaf(path, self.params[path])
        self.updates.append(leaf)
        return Update(frozenset([leaf]))

    def _call(
        self, scope: Scope, eqn: Any, jaxpr: Any, operands: Sequence[Value], first: int = 0
    ) -> list[Value]:
        """The results of a program inside, whose arguments are the operands from `first` on."""
        jaxpr = open_jaxpr(jaxpr)
        atoms = ((scope, atom) for atom in eqn.invars[first:])
        arguments = dict(zip(jaxpr.invars, atoms, strict=True))
        inner, results = self._run_inside(eqn, jaxpr, arguments, operands)
        if eqn.primitive.name != "cond":
            results_inside = ((inner, atom) for atom in jaxpr.outvars)
            scope.calls |= zip(eqn.outvars, results_inside, strict=True)
        return results

    def _loop(self, scope: Scope, eqn: Any, operands: list[Value]) -> list[Value]:
        """The values after any number of iterations; what is carried may be of the one before."""
        is_scan = eqn.primitive.name == "scan"
        jaxpr = open_jaxpr(eqn.params["jaxpr" if is_scan else "body_jaxpr"])
        atoms = eqn.invars[0 if is_scan else eqn.params["cond_nconsts"] :]
        carried = sum(map(_has_same_rank, eqn.outvars, jaxpr.outvars))
        first = sum(map(_has_same_rank, atoms, jaxpr.invars)) - carried
        constants = {v: (scope, a) for v, a in zip(jaxpr.invars[:first], atoms, strict=False)}
        values = operands[len(operands) - len(atoms) :]
        while True:
            known = len(self.updates)
            _, results = self._run_inside(eqn, jaxpr, constants, values)
            carry = values[first : first + carried]
            new = [self._choose(eqn, None, pair) for pair in zip(carry, results, strict=False)]
            if [*map(type, new)] == [*map(type, carry)]:
                return [*new, *results[carried:]]
            values[first : first + carried] = new
            del self.updates[known:]  # those of another iteration

    def _run_inside(
        self, eqn: Any, jaxpr: Any, arguments: dict[Any, Any], operands: Sequence[Value]
    ) -> tuple[Scope, list[Value]]:
        inner = Scope(jaxpr, arguments)
        inner.values = {v: o for v, o in zip(jaxpr.invars, operands, strict=True) if o is not None}
        self.calls.append(eqn)
        results = self.run(inner)
        self.calls.pop()
        return inner, results

    def _choose(self, eqn: Any, condition: Value, cases: Sequence[Value]) -> Value:
        """What is one of the cases, by a condition."""
        dependent = [case for case in cases if case is not None]
        updates = [case for case in dependent if isinstance(case, Update)]
        if isinstance(condition, Update | Changed):
            return self._change(eqn, [condition, *cases])
        if any(isinstance(case, Changed) for case in dependent):
            return self._change(eqn, dependent)
        if updates:
            if len({update.rest for update in updates}) > 1:
                return self._change(eqn, updates)
            return Update(frozenset().union(*(u.leaves for u in updates)), updates[0].rest)
        if len({type(case) for case in dependent}) > 1:
            return New()
        if dependent and isinstance(dependent[0], Gradient):
            signs = {case.is_negative for case in dependent if isinstance(case, Gradient)}
            return dependent[0] if len(signs) == 1 else Gradient()
        return dependent[0] if dependent else None

    def _add(self, scope: Scope, eqn: Any, a: Value, b: Value) -> Value:
        """`a + b`, or `a - b`: of an update and its parameter, the new parameter."""
        sign = -1 if eqn.primitive.name == "sub" else 1
        value, other = (a, b) if isinstance(a, Update | Changed) else (b, a)
        if not isinstance(value, Update | Changed) or isinstance(other, Update | Changed):
            return self._change(eqn, [a, b])
        terms = name_terms(scope, eqn.invars[1 if value is a else 0])
        if isinstance(value, Changed):
            self._refuse_as_step(value, terms)
            return value
        if value.condition and sign > 0 and other is None:
            name, holds = value.condition
            if is_under(scope, eqn.invars[1 if value is a else 0], (name, not holds)):
                return value  # one of the two, by a condition
        if sign < 0 and value is b:
            return self._change(eqn, [value])
        rest = collections.Counter(dict(value.rest))
        rest.update({parts: sign * count for parts, count in terms.items()})
        left = frozenset((parts, count) for parts, count in rest.items() if count)
        parts, count = next(iter(left), (frozenset(), 0))
        if len(left) == count == 1 and all(parts & leaf.params for leaf in value.leaves):
            self.applied |= value.leaves
            return New()
        if len(terms) == 1:
            self._refuse_as_step(value, terms)
        if isinstance(other, New):
            return other
        self._change(eqn, [value])
        return Update(value.leaves, left)

    def _refuse_as_step(self, value: Update | Changed, terms: Any) -> None:
        """Raises `ValueError` if what is added to a value that is not its update are parameters."""
        for leaf in value.leaves:
            if leaf in self.changed and any(parts & leaf.params for parts in terms):
                _refuse(leaf, self.changed[leaf])

    def _change(self, eqn: Any, operands: Sequence[Value]) -> Value:
        """What an equation computes of updates that it does not keep."""
        leaves = [o.leaves for o in operands if isinstance(o, Update | Changed)]
        if not leaves:
            return New()
        for operand in operands:
            if isinstance(operand, Update):
                for leaf in operand.leaves:
                    self.changed.setdefault(leaf, [eqn, *reversed(self.calls)])
        largest = max(leaves, key=len)
        if all(others <= largest for others in leaves):
            return Changed(largest)
        return Changed(frozenset().union(*leaves))

    def _follow_gradient(self, scope: Scope, eqn: Any, operands: list[Value]) -> Value:
        """A step along a gradient, or against it; None where the sign is not known."""
        name = eqn.primitive.name
        gradients = [operand for operand in operands if isinstance(operand, Gradient)]
        number = operands.index(gradients[0])
        is_product = name in ("mul", "div")
        is_known = len({gradient.is_negative for gradient in gradients}) == 1
        if name == "integer_pow" and eqn.params["y"] == 1:  # as the moments of optax have it
            return gradients[0]
        if name not in SIGNED or not is_known or (is_product and len(gradients) > 1):
            return None
        if (name, number) == ("div", 1):
            return None
        is_flipped = name == "neg" or (name, number) == ("sub", 1)
        if is_product:
            is_flipped = is_negative(scope, eqn.invars[1 - number])
        if not is_flipped:
            return gradients[0]
        return Gradient(not gradients[0].is_negative, [eqn, *reversed(self.calls)])


def _has_form_of(eqn: Any, jaxpr: Any) -> bool:
    return (len(eqn.invars), len(eqn.outvars)) == (len(jaxpr.invars), len(jaxpr.outvars))


def _has_same_rank(a: Any, b: Any) -> bool:
    return a.aval.ndim == b.aval.ndim


def _refuse(leaf: Leaf, eqns: list[Any] | None) -> NoReturn:
    raise ValueError(
        "gossip must be last in a chain, and its updates be added to the parameters as they are, "
        f"got {describe(eqns) if eqns else 'updates of other parameters'} after it "
        f"(params{leaf.path}): optimizers go before, optax.chain(optimizer, gossip)."
    )
