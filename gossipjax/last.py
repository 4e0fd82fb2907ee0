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
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
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
# These keep the sign of a gradient, but for negative factors.
SIGNED = TRANSPARENT | frozenset(
    "add add_any sub mul div neg max min clamp sign tanh psum reduce_sum".split()  # noqa: SIM905
)
# Results of others are new values, where nothing marked goes in.
FOLLOWED = TRANSPARENT | {"sub", "mul", "div", "neg", "concatenate", "select_n"}
BOOL = np.dtype(bool)
MAX_TERMS = 4  # of a sum that is followed

Parts = frozenset[Any]  # the values that stand one after another in a concatenation
Terms = dict[Parts, int]  # a sum, by what is added or subtracted
Condition = tuple[Parts, bool]  # a value, and whether it or its negation is meant


class Leaf:
    """The update of one parameter, where a gossip returns it; `params` are what it is added to."""

    def __init__(self, path: str, params: list[Terms]):
        self.path = path
        self.params = params


class Update(NamedTuple):
    """Marked updates as they are."""

    leaves: frozenset[Leaf]


class Changed(NamedTuple):
    """Computed from marked updates in another way."""

    leaves: frozenset[Leaf]


class New(NamedTuple):
    """Computed from parameters to which their updates were added."""


class Gradient(NamedTuple):
    """A gradient, or a step along it; the first of `eqns` has negated it."""

    is_negative: bool = False
    eqns: Any = ()


class Value(NamedTuple):
    """What is known of one variable.

    Attributes:
      terms: the values of which it is the sum; beside the updates, if it has them.
      tag: what it was computed from; None: from nothing that is marked.
      condition: that under which it is 1, where it is else 0.
      factors: the conditions of the factors of which it is the product.
      is_negative: whether it is a negative number, or the negative of another value.
    """

    terms: Terms
    tag: Update | Changed | New | Gradient | None = None
    condition: Condition | None = None
    factors: frozenset[Condition] = frozenset()
    is_negative: bool = False

    @property
    def leaves(self) -> frozenset[Leaf]:
        return self.tag.leaves if isinstance(self.tag, Update | Changed) else frozenset()


def _new_value(atom: Any, tag: Any = None) -> Value:
    """A value that is no other's sum, product or part."""
    parts = frozenset([object()])
    number = _number(atom)
    condition = (parts, True) if getattr(atom.aval, "dtype", None) == BOOL else None
    return Value({parts: 1}, tag, condition, is_negative=number is not None and bool(number < 0))


def _number(atom: Any) -> Any:
    """A number that is written in the program, or None."""
    is_number = isinstance(atom, Literal) and not getattr(atom.val, "shape", ())
    return atom.val if is_number else None


def _add_terms(a: Terms, b: Terms, sign: int) -> Terms:
    """`a + sign b`."""
    total = {parts: a.get(parts, 0) + sign * b.get(parts, 0) for parts in {**a, **b}}
    return {parts: count for parts, count in total.items() if count}


def _joined_parts(terms: Terms) -> Parts:
    """The parts of a value that is no sum."""
    return next(iter(terms)) if list(terms.values()) == [1] else frozenset()


def _are_params(terms: Terms, leaf: Leaf) -> bool:
    """Whether a value is, or has a part that is, what an update is added to."""
    parts = _joined_parts(terms)
    return any(terms == params or parts & _joined_parts(params) for params in leaf.params)


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
    for value in follower.run(jaxpr, [_new_value(variable) for variable in jaxpr.invars]):
        follower.note_result(value)
    if not follower.applied and not follower.changed:
        return  # the state alone is used
    for leaf in follower.updates:
        if leaf not in follower.applied:
            _refuse(leaf, follower.changed.get(leaf))


class _Follower:
    """Follows values through a program, from its arguments to its results."""

    def __init__(self, follows_gradients: bool):
        self.follows_gradients = follows_gradients
        self.params: dict[str, list[Terms]] = collections.defaultdict(list)  # by their path
        self.updates: list[Leaf] = []
        self.applied: set[Leaf] = set()
        self.changed: dict[Leaf, list[Any]] = {}  # the first equation that does, and its calls
        self.calls: list[Any] = []  # the equations around this part of the program

    def run(self, jaxpr: Any, arguments: Sequence[Value]) -> list[Value]:
        """The values of the results of a program, or of a part of it."""
        values = dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, Literal):
                return _new_value(atom)
            if atom not in values:  # a constant
                values[atom] = _new_value(atom)
            return values[atom]

        tagged = {variable for variable, value in values.items() if value.tag is not None}
        for eqn in jaxpr.eqns:
            is_followed = eqn.primitive.name in FOLLOWED or eqn.primitive.multiple_results
            if not is_followed and (not tagged or tagged.isdisjoint(_variables(eqn))):
                continue
            results = self._follow(eqn, [read(atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
            tagged.update(v for v in eqn.outvars if values[v].tag is not None)
        return [read(atom) for atom in jaxpr.outvars]

    def _run_inside(self, eqn: Any, jaxpr: Any, arguments: Sequence[Value]) -> list[Value]:
        self.calls.append(eqn)
        results = self.run(open_jaxpr(jaxpr), arguments)
        self.calls.pop()
        return results

    def note_result(self, value: Value) -> None:
        """Notes updates that leave as they are."""
        if isinstance(value.tag, Update) and not value.terms:
            self.applied |= value.leaves

    def _follow(self, eqn: Any, operands: list[Value]) -> list[Value]:
        """The results of one equation."""
        name = eqn.primitive.name
        tags = [operand.tag for operand in operands]
        is_by_one = len(eqn.outvars) == len(operands)
        marked = mark_of(eqn)
        if marked is not None:
            return [self._follow_mark(eqn, operands[0], *marked)]
        if name == "cond":
            branches = [self._run_inside(eqn, b, operands[1:]) for b in eqn.params["branches"]]
            cases = zip(eqn.outvars, zip(*branches, strict=True), strict=True)
            return [self._choose(eqn, variable, operands[0], case) for variable, case in cases]
        if name == "select_n":
            return [self._choose(eqn, eqn.outvars[0], operands[0], operands[1:])]
        if name in ("scan", "while"):
            return self._loop(eqn, operands)
        for key in ("jaxpr", "call_jaxpr"):
            jaxpr = open_jaxpr(eqn.params.get(key))
            shape = len(eqn.invars), len(eqn.outvars)
            if jaxpr is not None and (len(jaxpr.invars), len(jaxpr.outvars)) == shape:
                return self._run_inside(eqn, jaxpr, operands)
        if any(isinstance(tag, Gradient) for tag in tags):
            tag = self._follow_gradient(eqn, operands)
            return [_new_value(variable, tag) for variable in eqn.outvars]
        if name in TRANSPARENT and (is_by_one or not any(tag is not None for tag in tags[1:])):
            return operands if is_by_one else [operands[0]] * len(eqn.outvars)
        if name in ("add", "add_any", "sub"):
            return [self._add(eqn, *operands)]
        if name in ("mul", "div"):
            return [self._multiply(eqn, *operands)]
        if name == "concatenate":
            return [self._concatenate(eqn, operands)]
        is_negative = name == "neg" and not operands[0].is_negative
        return [
            self._change(eqn, variable, operands)._replace(is_negative=is_negative)
            for variable in eqn.outvars
        ]

    def _follow_mark(self, eqn: Any, value: Value, kind: str, path: str) -> Value:
        if kind == PARAMS:
            if value.terms not in self.params[path]:
                self.params[path].append(value.terms)
            return value
        if kind == GRADIENTS:
            return value._replace(tag=Gradient()) if self.follows_gradients else value
        if kind == DESCENDED:
            if isinstance(value.tag, Gradient) and value.tag.is_negative:
                raise ValueError(
                    "gossip that is the optimizer must get gradients, got updates against them "
                    f"(params{path}), by {describe(value.tag.eqns)} before it: leave the optimizer "
                    "before it out, and give the learning rate as its rate."
                )
            return _new_value(eqn.outvars[0])
        self.note_result(value)
        if kind == APPLIED:
            is_update = isinstance(value.tag, Update)
            return _new_value(eqn.outvars[0], New()) if is_update else value
        leaf = Leaf(path, self.params[path])
        self.updates.append(leaf)
        return Value({}, Update(frozenset([leaf])))

    def _loop(self, eqn: Any, operands: list[Value]) -> list[Value]:
        """The values after any number of iterations; what is carried may be of the one before."""
        is_scan = eqn.primitive.name == "scan"
        jaxpr = open_jaxpr(eqn.params["jaxpr" if is_scan else "body_jaxpr"])
        skipped = 0 if is_scan else eqn.params["cond_nconsts"]
        atoms = eqn.invars[skipped:]
        carried = sum(map(_has_same_rank, eqn.outvars, jaxpr.outvars))
        first = sum(map(_has_same_rank, atoms, jaxpr.invars)) - carried
        values = operands[skipped:]
        # What is carried or sliced is another value in each iteration.
        for i, variable in enumerate(jaxpr.invars[first:], first):
            if not isinstance(values[i].tag, Update):
                values[i] = _new_value(variable, values[i].tag)
        while True:
            known = len(self.updates)
            results = self._run_inside(eqn, jaxpr, values)
            carry = values[first : first + carried]
            cases = zip(eqn.outvars, zip(carry, results, strict=False), strict=False)
            new = [self._choose(eqn, variable, None, case) for variable, case in cases]
            if [type(value.tag) for value in new] == [type(value.tag) for value in carry]:
                return [*new, *results[carried:]]
            values[first : first + carried] = new
            del self.updates[known:]  # those of another iteration

    def _choose(
        self, eqn: Any, variable: Any, condition: Value | None, cases: Sequence[Value]
    ) -> Value:
        """What is one of the cases, by a condition."""
        tags = [case.tag for case in cases if case.tag is not None]
        updates = [case for case in cases if isinstance(case.tag, Update)]
        if condition is not None and condition.leaves:
            return self._change(eqn, variable, [condition, *cases])
        if any(isinstance(tag, Changed) for tag in tags):
            return self._change(eqn, variable, cases)
        if updates:
            if any(update.terms != updates[0].terms for update in updates):
                return self._change(eqn, variable, updates)
            leaves = frozenset().union(*(update.leaves for update in updates))
            return updates[0]._replace(tag=Update(leaves))
        tag = tags[0] if tags else None
        if len(set(map(type, tags))) > 1:
            tag = New()
        elif isinstance(tag, Gradient) and len({getattr(t, "is_negative", None) for t in tags}) > 1:
            tag = Gradient()
        if all(case.terms == cases[0].terms for case in cases):  # such as a batched cond
            return cases[0]._replace(tag=tag)
        return _new_value(variable, tag)

    def _add(self, eqn: Any, a: Value, b: Value) -> Value:
        """`a + b`, or `a - b`: of an update and its parameter, the new parameter."""
        variable = eqn.outvars[0]
        sign = -1 if eqn.primitive.name == "sub" else 1
        value, other = (a, b) if a.leaves else (b, a)
        if not value.leaves:
            return self._add_unmarked(eqn, a, b, sign)
        if other.leaves:
            return self._change(eqn, variable, [a, b])
        if isinstance(value.tag, Changed):
            self._refuse_as_step(value, other)
            return value
        opposite = {(name, not holds) for name, holds in value.factors}
        if sign > 0 and opposite & other.factors:
            return value  # one of the two, by a condition
        if sign < 0 and value is b:
            return self._change(eqn, variable, [value])
        rest = _add_terms(value.terms, other.terms, sign)
        if all(_are_params(rest, leaf) for leaf in value.leaves):
            self.applied |= value.leaves
            return _new_value(variable, New())
        if len(other.terms) == 1:
            self._refuse_as_step(value, other)
        if isinstance(other.tag, New):
            return _new_value(variable, New())
        self._change(eqn, variable, [value])
        return Value(rest, value.tag)

    def _add_unmarked(self, eqn: Any, a: Value, b: Value, sign: int) -> Value:
        """A difference is followed, which `optax.contrib.sam` adds to an update."""
        result = self._change(eqn, eqn.outvars[0], [a, b])
        if sign > 0:
            return result
        if _number(eqn.invars[0]) == 1 and b.condition:
            name, holds = b.condition
            result = result._replace(condition=(name, not holds))
        terms = _add_terms(a.terms, b.terms, sign)
        return result._replace(terms=terms) if 0 < len(terms) <= MAX_TERMS else result

    def _multiply(self, eqn: Any, a: Value, b: Value) -> Value:
        """A product or quotient, or an update where a condition holds."""
        factors = frozenset(value.condition for value in (a, b) if value.condition)
        for value, other, atom in ((a, b, eqn.invars[1]), (b, a, eqn.invars[0])):
            is_kept = other.tag is None and (other.condition or _number(atom) == 1)
            if isinstance(value.tag, Update) and is_kept and eqn.primitive.name == "mul":
                return value._replace(factors=factors)
        result = self._change(eqn, eqn.outvars[0], [a, b])
        is_negative = eqn.invars[0] is not eqn.invars[1] and a.is_negative != b.is_negative
        return result._replace(factors=factors, is_negative=is_negative)

    def _concatenate(self, eqn: Any, operands: list[Value]) -> Value:
        updates = [operand for operand in operands if isinstance(operand.tag, Update)]
        if updates and not any(update.terms for update in updates):
            return Value({}, Update(frozenset().union(*(update.leaves for update in updates))))
        result = self._change(eqn, eqn.outvars[0], operands)
        parts = [_joined_parts(operand.terms) for operand in operands]
        return result._replace(terms={frozenset().union(*parts): 1}) if all(parts) else result

    def _refuse_as_step(self, value: Value, other: Value) -> None:
        """Raises `ValueError` if what is added to a value that is not its update are parameters."""
        for leaf in value.leaves:
            terms = [other.terms, *({parts: 1} for parts in other.terms)]
            if leaf in self.changed and any(_are_params(term, leaf) for term in terms):
                _refuse(leaf, self.changed[leaf])

    def _change(self, eqn: Any, variable: Any, operands: Sequence[Value]) -> Value:
        """What an equation computes of values that it does not keep."""
        if all(operand.tag is None for operand in operands):
            return _new_value(variable)
        leaves = [operand.leaves for operand in operands if operand.leaves]
        if not leaves:
            return _new_value(variable, New())
        for operand in operands:
            if isinstance(operand.tag, Update):
                for leaf in operand.leaves:
                    self.changed.setdefault(leaf, [eqn, *reversed(self.calls)])
        largest = max(leaves, key=len)  # the same set of all leaves stays one object
        if not all(others <= largest for others in leaves):
            largest = largest.union(*leaves)
        return _new_value(variable, Changed(largest))

    def _follow_gradient(self, eqn: Any, operands: list[Value]) -> Gradient | None:
        """A step along a gradient, or against it; None where the sign is not known."""
        name = eqn.primitive.name
        tags = [operand.tag for operand in operands]
        gradients = [tag for tag in tags if isinstance(tag, Gradient)]
        number = tags.index(gradients[0])
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
            is_flipped = operands[1 - number].is_negative
        if not is_flipped:
            return gradients[0]
        return Gradient(not gradients[0].is_negative, [eqn, *reversed(self.calls)])


def _variables(eqn: Any) -> list[Any]:
    return [atom for atom in eqn.invars if not isinstance(atom, Literal)]


def _has_same_rank(a: Any, b: Any) -> bool:
    return a.aval.ndim == b.aval.ndim


def _refuse(leaf: Leaf, eqns: list[Any] | None) -> NoReturn:
    raise ValueError(
        "gossip must be last in a chain, and its updates be added to the parameters as they are, "
        f"got {describe(eqns) if eqns else 'updates of other parameters'} after it "
        f"(params{leaf.path}): optimizers go before, optax.chain(optimizer, gossip)."
    )
