"""Gradients in several programs, whose averages travel during the rest of them (JAX on CPU)."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal
from jax.extend.core.primitives import conv_general_dilated_p, dot_general_p

from gossipjax.collectives import node_mean
from gossipjax.nodes import Nodes
from gossipjax.nodes.cutting import Part, Traced, cut, trace, variables
from gossipjax.nodes.equations import programs_in
from gossipjax.nodes.program import Program
from gossipjax.step.beside import Exchanger
from gossipjax.step.gradients import Gradients, UpdateOfNode
from gossipjax.wire import Wire

FIRST_BYTES = 2**20  # of the first bucket, at least: the wire is idle until it is full


class UpdateInBuckets(Exchanger):
    """An update by averaged gradients, each of which travels while others are computed.

    The program of the gradients is cut: each of its parts ends with the gradients of some leaves, a
    bucket, which a thread averages during the next part. A program that makes all gradients at
    once, as a scan over layers does, and one with collectives or effects of its own run `fused`,
    the step as one program.
    """

    def __init__(
        self,
        gradients: Gradients,
        update: UpdateOfNode,
        nodes: Nodes,
        wire: Wire,
        bucket_bytes: int,
        fused: Program,
    ):
        def average(bucket: list[jax.Array]) -> list[jax.Array]:
            return node_mean(bucket, wire.axis_name, wire.codec)

        super().__init__()
        self._gradients = gradients
        self._nodes = nodes
        self._bucket_bytes = bucket_bytes
        self._is_exact = wire.codec is None
        self._fused = fused
        self._average = nodes.spmd(average)
        self._update = nodes.spmd(update, static_argnums=0)
        self._cuts: dict[Any, _Cut | None] = {}  # by what is known of the arguments

    def __call__(
        self, step: int, number: Any, params: Any, opt_state: Any, *inputs: Any
    ) -> tuple[optax.Params, optax.OptState, Any]:
        """One step; `number` is its number as the program takes it."""
        del step
        number, params, opt_state, *placed = self._fused.put(number, params, opt_state, *inputs)
        leaves, structure = jax.tree.flatten((params, *placed))
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._cuts:
            self._cuts[key] = self._cut(params, *placed)
        cut = self._cuts[key]
        self.is_beside = cut is not None
        if cut is None:
            return self._fused(number, params, opt_state, *placed)
        known = dict(zip(cut.arguments, leaves, strict=True))
        pending: list[Future[list[jax.Array]]] = []
        rest: list[jax.Array] = []
        for bucket in cut.buckets:
            results, writes = bucket.program([known[var] for var in bucket.part.reads])
            bucket.part.note(known, results, writes)
            count = len(bucket.leaves)
            pending.append(self._submit(results[:count]))
            rest = results[count:]
        means: list[Any] = [None] * sum(len(bucket.leaves) for bucket in cut.buckets)
        for bucket, future in zip(cut.buckets, pending, strict=True):
            for leaf, mean in zip(bucket.leaves, future.result(), strict=True):
                means[leaf] = mean
        grads, aux = jax.tree.unflatten(cut.structure, means + rest)
        return *self._update(0, params, opt_state, grads, aux, grads), aux

    def _submit(self, bucket: list[jax.Array]) -> Future[list[jax.Array]]:
        run = self._average.prepare(bucket)

        def average() -> list[jax.Array]:
            # Dispatched only then, so that it waits for this bucket and not for those after it.
            jax.block_until_ready(bucket)
            return run()

        return self._executor.submit(average)

    def _cut(self, *arguments: Any) -> _Cut | None:
        """Cuts the gradients into programs; None if they have to stay one."""
        found: list[Traced] = []

        def run(*args: Any) -> Any:
            found[:] = [trace(self._gradients, *args)]
            return self._gradients(*args)

        if self._nodes.spmd(run).has_collective(self._nodes.axis_name, *arguments):
            return None
        (traced,) = found
        count = jax.tree.structure(arguments[0]).num_leaves
        # A narrower wire needs several messages for each bucket, one after another.
        first = FIRST_BYTES if self._is_exact else self._bucket_bytes
        leaves_of_buckets = make_buckets(traced, count, first, self._bucket_bytes)
        if len(leaves_of_buckets) < 2 or traced.has_effects:
            return None
        wanted = [[traced.results[leaf] for leaf in leaves] for leaves in leaves_of_buckets]
        wanted[-1] += traced.results[count:]
        buckets = [
            _Bucket(self._nodes.spmd(part.run), part, leaves)
            for part, leaves in zip(cut(traced, wanted), leaves_of_buckets, strict=True)
        ]
        return _Cut(buckets, traced.arguments, traced.structure)


class _Bucket(NamedTuple):
    program: Program  # of the part
    part: Part  # whose results are gradients, in the last one also aux
    leaves: list[int]  # whose gradients they are


class _Cut(NamedTuple):
    buckets: list[_Bucket]
    arguments: list[Any]  # variables
    structure: Any  # of gradients and aux


def make_buckets(traced: Traced, count: int, first: int, later: int) -> list[list[int]]:
    """The leaves of each bucket, of `count` in all, in the order in which they are computed.

    The first bucket has so many bytes at least, and each later one.
    """
    last: dict[Any, int] = {}  # the last equation that takes time, of those that a variable needs
    for i, eqn in enumerate(traced.eqns):
        takes_time = eqn.primitive in (dot_general_p, conv_general_dilated_p) or programs_in(eqn)
        before = (last.get(var, -1) for var in variables(eqn.invars))
        last.update(dict.fromkeys(eqn.outvars, i if takes_time else max(before, default=-1)))
    results = traced.results[:count]
    ready = [-1 if isinstance(result, Literal) else last.get(result, -1) for result in results]
    sizes = [result.aval.size * jnp.dtype(result.aval.dtype).itemsize for result in results]
    order = sorted(range(count), key=ready.__getitem__)
    buckets = [order[:1]]
    for leaf, next_leaf in itertools.pairwise(order):
        least = later if len(buckets) > 1 else min(first, later)
        is_full = sum(sizes[i] for i in buckets[-1]) >= least
        if is_full and ready[next_leaf] > ready[leaf]:
            buckets.append([])
        buckets[-1].append(next_leaf)
    return buckets
