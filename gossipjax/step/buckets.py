"""Gradients in several programs, whose averages travel during the rest of them (JAX on CPU)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import optax
from jax.core import eval_jaxpr
from jax.extend.core import DebugInfo, Jaxpr, Literal
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p

from gossipjax.collectives import node_mean
from gossipjax.exchanges.model import apply_updates
from gossipjax.nodes import Nodes
from gossipjax.nodes.equations import name_of, programs_in
from gossipjax.nodes.program import Program
from gossipjax.step.beside import Exchanger
from gossipjax.step.gradients import Gradients
from gossipjax.wire import Wire

BUCKET_BYTES = 2**20  # at least
MAX_BUCKETS = 8
NAMES = DebugInfo("jit", "gradients", None, None)  # of the parts, in errors and profiles


class UpdateInBuckets(Exchanger):
    """An update by averaged gradients, each of which travels while others are computed.

    The program of the gradients is cut: each of its parts ends with the gradients of some leaves, a
    bucket, which a thread averages during the next part. A model of less than two buckets, a
    program that makes all gradients at once, as a scan over layers does, and one with collectives
    or effects of its own run `fused`, the step as one program.
    """

    def __init__(
        self,
        gradients: Gradients,
        tx: optax.GradientTransformationExtraArgs,
        nodes: Nodes,
        extra_args: Callable[[Any], dict[str, Any]],
        wire: Wire,
        fused: Program,
    ):
        def average(bucket: list[jax.Array]) -> list[jax.Array]:
            return node_mean(bucket, wire.axis_name, wire.codec)

        def update(params: Any, opt_state: Any, means: Any, aux: Any) -> Any:
            updates, opt_state = tx.update(
                means, opt_state, params, step=0, received=means, **extra_args(aux)
            )
            return apply_updates(params, updates), opt_state

        super().__init__()
        self._gradients = gradients
        self._nodes = nodes
        self._fused = fused
        self._average = nodes.spmd(average)
        self._update = nodes.spmd(update)
        self._cuts: dict[Any, _Cut | None] = {}  # by what is known of the arguments

    def __call__(
        self, step: int, number: Any, params: Any, opt_state: Any, *inputs: Any
    ) -> tuple[optax.Params, optax.OptState, Any]:
        """One step; `number` is its number as the program takes it."""
        del step
        leaves, structure = jax.tree.flatten((params, *inputs))
        key = structure, tuple((jax.numpy.shape(x), jax.numpy.result_type(x)) for x in leaves)
        if key not in self._cuts:
            self._cuts[key] = cut_gradients(self._gradients, self._nodes, params, *inputs)
        cut = self._cuts[key]
        self.is_beside = cut is not None
        if cut is None:
            return self._fused(number, params, opt_state, *inputs)
        known = dict(zip(cut.arguments, leaves, strict=True))
        pending: list[Future[list[jax.Array]]] = []
        aux: list[jax.Array] = []
        for part in cut.parts:
            bucket, aux, rest = part.program([known[var] for var in part.reads])
            known.update(zip(part.writes, rest, strict=True))
            pending.append(self._submit(bucket))
        means: list[Any] = [None] * cut.grads.num_leaves
        for part, future in zip(cut.parts, pending, strict=True):
            for leaf, mean in zip(part.leaves, future.result(), strict=True):
                means[leaf] = mean
        grads = jax.tree.unflatten(cut.grads, means)
        others = jax.tree.unflatten(cut.aux, aux)
        return *self._update(params, opt_state, grads, others), others

    def _submit(self, bucket: list[jax.Array]) -> Future[list[jax.Array]]:
        run = self._average.prepare(bucket)

        def average() -> list[jax.Array]:
            # Dispatched only then, so that it waits for this bucket and not for those after it.
            jax.block_until_ready(bucket)
            return run()

        return self._executor.submit(average)


class _Part(NamedTuple):
    """A program that ends with a bucket; the last one also with what is not a gradient."""

    program: Program  # `(values of reads) -> (the bucket, aux of the last part, values of writes)`
    reads: list[Any]  # variables of the whole program
    writes: list[Any]  # those that later parts read
    leaves: list[int]  # of the gradients


class _Cut(NamedTuple):
    """The parts of a program of gradients, and the form of its arguments and results."""

    parts: list[_Part]
    arguments: list[Any]
    grads: Any
    aux: Any


def cut_gradients(gradients: Gradients, nodes: Nodes, *arguments: Any) -> _Cut | None:
    """Cuts gradients into programs that each end with a bucket; None if they have to stay whole."""
    traced: list[Any] = []

    def trace(*args: Any) -> Any:
        closed = jax.make_jaxpr(gradients)(*args)
        leaves = jax.tree.leaves(args)
        flat = jax.make_jaxpr(lambda *xs: _evaluate(closed.jaxpr, closed.consts, xs))(*leaves)
        results = gradients(*args)
        traced[:] = flat, *map(jax.tree.structure, results)
        return results

    if nodes.spmd(trace).has_collective(nodes.axis_name, *arguments):
        return None
    flat, grads, aux = traced
    jaxpr = flat.jaxpr
    buckets = _make_buckets(jaxpr, grads.num_leaves)
    if len(buckets) < 2 or jaxpr.effects:
        return None
    of_buckets = [[jaxpr.outvars[leaf] for leaf in bucket] for bucket in buckets]
    others: list[list[Any]] = [[] for _ in buckets]
    others[-1] = jaxpr.outvars[grads.num_leaves :]
    wanted = list(map(operator.add, of_buckets, others))
    steps = _split_equations(jaxpr.eqns, wanted)
    constants = dict(zip(jaxpr.constvars, flat.consts, strict=True))
    reads = [_find_reads(eqns, of, constants) for eqns, of in zip(steps, wanted, strict=True)]
    parts = []
    for k, eqns in enumerate(steps):
        made = {var for eqn in eqns for var in eqn.outvars}
        later = dict.fromkeys(var for of in reads[k + 1 :] for var in of)
        writes = [var for var in later if var in made]
        results = of_buckets[k], others[k], writes
        program = _make_program(nodes, eqns, constants, reads[k], results)
        parts.append(_Part(program, reads[k], writes, buckets[k]))
    return _Cut(parts, jaxpr.invars, grads, aux)


def _make_buckets(jaxpr: Any, leaves: int) -> list[list[int]]:
    """The leaves of each bucket, in the order in which their gradients are computed."""
    last: dict[Any, int] = {}  # the last equation that takes time, of those that a variable needs
    for i, eqn in enumerate(jaxpr.eqns):
        takes_time = eqn.primitive in (dot_general_p, conv_general_dilated_p) or programs_in(eqn)
        before = (last.get(var, -1) for var in eqn.invars if not isinstance(var, Literal))
        last.update(dict.fromkeys(eqn.outvars, i if takes_time else max(before, default=-1)))
    variables = jaxpr.outvars[:leaves]
    ready = [-1 if isinstance(var, Literal) else last.get(var, -1) for var in variables]
    sizes = [var.aval.size * var.aval.dtype.itemsize for var in variables]
    least = max(BUCKET_BYTES, sum(sizes) / MAX_BUCKETS)
    order = sorted(range(leaves), key=ready.__getitem__)
    buckets = [order[:1]]
    for leaf, next_leaf in itertools.pairwise(order):
        is_full = sum(sizes[i] for i in buckets[-1]) >= least
        if is_full and ready[next_leaf] > ready[leaf]:
            buckets.append([])
        buckets[-1].append(next_leaf)
    return buckets


def _split_equations(eqns: Sequence[Any], wanted: list[list[Any]]) -> list[list[Any]]:
    """The equations that each of these results needs, without those that earlier ones needed."""
    parts: list[list[Any]] = []
    done: set[int] = set()
    for results in wanted:
        needed = {var for var in results if not isinstance(var, Literal)}
        part = []
        for i in reversed(range(len(eqns))):
            if not needed.isdisjoint(eqns[i].outvars):
                needed.update(var for var in eqns[i].invars if not isinstance(var, Literal))
                if i not in done:
                    part.insert(0, eqns[i])
                    done.add(i)
        parts.append(part)
    return parts


def _find_reads(eqns: Iterable[Any], results: list[Any], constants: dict[Any, Any]) -> list[Any]:
    """The variables that equations and results read, and that these equations do not make."""
    made = {var for eqn in eqns for var in eqn.outvars} | constants.keys()
    used = [*(var for eqn in eqns for var in eqn.invars), *results]
    return list(
        dict.fromkeys(var for var in used if not isinstance(var, Literal) and var not in made)
    )


def _make_program(
    nodes: Nodes,
    eqns: list[Any],
    constants: dict[Any, Any],
    reads: list[Any],
    results: tuple[list[Any], ...],
) -> Program:
    leaves, structure = jax.tree.flatten(results)
    jaxpr = Jaxpr((), [*constants, *reads], leaves, eqns, debug_info=NAMES)

    def run(values: list[jax.Array]) -> Any:
        return jax.tree.unflatten(structure, eval_jaxpr(jaxpr, (), *constants.values(), *values))

    return nodes.spmd(run)


def _evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """The results of a program, whose jitted functions become equations of their own."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    for eqn in jaxpr.eqns:
        if name_of(eqn) in ("jit", "pjit"):
            inside = eqn.params["jaxpr"]
            values = [_read(var, known) for var in eqn.invars]
            results = _evaluate(inside.jaxpr, inside.consts, values)
        else:
            reads = _find_reads([eqn], [], {})
            alone = Jaxpr((), reads, eqn.outvars, [eqn], debug_info=NAMES)
            results = eval_jaxpr(alone, (), *map(known.get, reads))
        known.update(zip(eqn.outvars, results, strict=True))
    return [_read(var, known) for var in jaxpr.outvars]


def _read(var: Any, known: dict[Any, Any]) -> Any:
    return var.val if isinstance(var, Literal) else known[var]
