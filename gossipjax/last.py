"""Whether the update that a gossip returned is what the parameters are moved by.

A gossip transform mixes models, so its update is not a direction: nothing may scale, sum or clip it
any more. The transform marks the parameters that it was given and the updates that it returns, by
names in the traced program, of which the compiled one has nothing. `require_applied` then follows
the updates: each must be added to its parameter as it is, be a result of the program, or be taken
by another transform, which says so by a mark.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal, jaxprs_in_params

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


# What the leaves of a tree are:
PARAMS = "gossipjax.params"  # the parameters that a gossip got
UPDATES = "gossipjax.updates"  # its updates of them
APPLIED = "gossipjax.applied"  # updates that a transform around it, such as gx.outer, has taken
GRADIENTS = "gossipjax.gradients"  # those of a loss
DESCENDED = "gossipjax.descended"  # what a gossip that is the optimizer takes for gradients

UPDATE = re.compile(r"<locals>\.\w*update")  # of a transform
LIBRARY = str(Path(__file__).parent)


def mark(tree: Any, kind: str) -> Any:
    """`tree`, whose leaves are named by what they are: `PARAMS`, `UPDATES`, ...

    `PARAMS` come before the `UPDATES` of them.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: checkpoint_name(leaf, f"{kind}:{jax.tree_util.keystr(path)}"), tree
    )


def takes_gradients(opt_state: Any) -> bool:
    """Whether a chain, by its state, holds a gossip that is the optimizer."""

    def takes(part: Any) -> bool:
        return getattr(getattr(part, "plan", None), "takes_gradients", False)

    return any(map(takes, jax.tree.leaves(opt_state, is_leaf=takes)))


def open_jaxpr(jaxpr: Any) -> Any:
    """The `Jaxpr` of a closed one, which JAX 0.12 has no more."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def mark_of(eqn: Any) -> tuple[str, str] | None:
    """The kind and the path of a mark."""
    if eqn.primitive.name != "name" or not eqn.params["name"].startswith("gossipjax."):
        return None
    kind, _, path = eqn.params["name"].partition(":")
    return kind, path


def find_marks(jaxpr: Any) -> Iterator[tuple[str, str]]:
    for eqn in jaxpr.eqns:
        marked = mark_of(eqn)
        if marked is not None:
            yield marked
        elif eqn.primitive.multiple_results:
            for inner in jaxprs_in_params(eqn.params):
                yield from find_marks(open_jaxpr(inner))


def has_marks(eqn: Any) -> bool:
    if not eqn.primitive.multiple_results:
        return mark_of(eqn) is not None
    return any(any(True for _ in find_marks(open_jaxpr(j))) for j in jaxprs_in_params(eqn.params))


def describe(eqns: Sequence[Any]) -> str:
    """The transform of optax that has made an equation, and the user's line.

    What JAX has kept of an earlier trace has no such frames: those of the calls around it have.
    """
    frames = [frame for eqn in eqns for frame in getattr(eqn.source_info.traceback, "frames", ())]
    names = [
        frame.function_name.split(".")[0]
        for frame in frames
        if "/optax/" in frame.file_name and UPDATE.search(frame.function_name)
    ]
    name = f"`{(names or [eqns[0].primitive.name])[0]}`"
    for frame in frames:
        file = frame.file_name
        if "-packages/" not in file and not file.startswith((LIBRARY, "<")):
            return f"{name} ({'/'.join(file.split('/')[-2:])}:{frame.line_num})"
    return name


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


class Leaf:
    """The update of one parameter, where a gossip returns it; `params` are what it is added to."""

    def __init__(self, path: str, params: set[Any]):
        self.path = path
        self.params = params


class Update(NamedTuple):
    """Marked updates as they are, or what is not one of them under a condition, plus `rest`.

    `rest` counts the values that were added; `condition` is that of a factor of 0 or 1.
    """

    leaves: frozenset[Leaf]
    rest: frozenset[tuple[Any, int]] = frozenset()
    condition: tuple[Any, bool] | None = None


class Changed(NamedTuple):
    """Computed from marked updates in another way."""

    leaves: frozenset[Leaf]


class New:
    """Computed from parameters to which their updates were added."""


class Gradient(NamedTuple):
    """A gradient, or a step along it; the first of `eqns` has negated it."""

    is_negative: bool = False
    eqns: Any = ()


Value = Update | Changed | New | Gradient | None  # None: independent of all marks


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
