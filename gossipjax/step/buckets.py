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

# The first bucket has at least these bytes: few, because nothing travels until it is full.
FIRST_BYTES = 2**20


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
        self._has_codec = wire.codec is not None
        self._fused = fused  # the whole step, for gradients that cannot be cut
        self._average = nodes.spmd(average)
        self._update = nodes.spmd(update, static_argnums=0)  # the step is static
        # By structure, shapes and types of arguments; None if the gradients cannot be cut.
        self._cuts: dict[Any, _Cut | None] = {}

    def __call__(
        self, step: int, number: Any, params: Any, opt_state: Any, *inputs: Any
    ) -> tuple[optax.Params, optax.OptState, Any]:
        """Takes a step; `number` is its canonical step, or an array, as `fused` takes it."""
        del step
        number, params, opt_state, *placed = self._fused.put(number, params, opt_state, *inputs)
        leaves, structure = jax.tree.flatten((params, *placed))
        key = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if key not in self._cuts:
            self._cuts[key] = self._cut_gradients(params, *placed)
        cut = self._cuts[key]
        self.is_on_thread = cut is not None
        if cut is None:
            return self._fused(number, params, opt_state, *placed)
        known = dict(zip(cut.arguments, leaves, strict=True))  # variable -> value
        pending: list[Future[list[jax.Array]]] = []  # the average of each bucket
        aux_leaves: list[jax.Array] = []  # results of the last part, after its gradients
        for bucket in cut.buckets:
            results, writes = bucket.program([known[var] for var in bucket.part.reads])
            bucket.part.note(known, results, writes)
            count = len(bucket.leaves)
            pending.append(self._start_average(results[:count]))
            aux_leaves = results[count:]
        means: list[Any] = [None] * sum(len(bucket.leaves) for bucket in cut.buckets)
        for bucket, future in zip(cut.buckets, pending, strict=True):
            for leaf, mean in zip(bucket.leaves, future.result(), strict=True):
                means[leaf] = mean
        grads, aux = jax.tree.unflatten(cut.structure, means + aux_leaves)
        # The averages are also given as what was received, so that the update does not average them
        # again. All steps average alike, so one program, of step 0, serves all.
        return *self._update(0, params, opt_state, grads, aux, grads), aux

    def _start_average(self, bucket: list[jax.Array]) -> Future[list[jax.Array]]:
        """Has the thread average gradients over the nodes as soon as they are computed."""
        run = self._average.prepare(bucket)

        def average() -> list[jax.Array]:
            # The program starts only now, so that it waits for this bucket and for none after it.
            jax.block_until_ready(bucket)
            return run()

        return self._executor.submit(average)

    def _cut_gradients(self, *arguments: Any) -> _Cut | None:
        """Cuts the program of the gradients into one for each bucket; None if it has to stay one.

        `arguments` are those of `gradients`, node-stacked, with the parameters first.
        """
        found: list[Traced] = []

        # The gradients are traced inside of the program of a node, which has the axis of the nodes.
        def trace_gradients(*args: Any) -> Any:
            found[:] = [trace(self._gradients, *args)]
            return self._gradients(*args)

        if self._nodes.spmd(trace_gradients).has_collective(self._nodes.axis_name, *arguments):
            return None
        (traced,) = found
        count = jax.tree.structure(arguments[0]).num_leaves
        # With a codec each bucket is several messages, one after another: a small one does not pay.
        first_bytes = self._bucket_bytes if self._has_codec else FIRST_BYTES
        leaves_of_buckets = make_buckets(traced, count, first_bytes, self._bucket_bytes)
        if len(leaves_of_buckets) < 2 or traced.has_effects:
            return None
        wanted = [[traced.results[leaf] for leaf in leaves] for leaves in leaves_of_buckets]
        wanted[-1] += traced.results[count:]  # aux
        buckets = [
            _Bucket(self._nodes.spmd(part.run), part, leaves)
            for part, leaves in zip(cut(traced, wanted), leaves_of_buckets, strict=True)
        ]
        return _Cut(buckets, traced.arguments, traced.structure)


class _Bucket(NamedTuple):
    """Gradients that are averaged together, and the part of the program that computes them."""

    program: Program  # runs `part` for all nodes
    part: Part  # its results are the gradients of `leaves`; those of the last part, also aux
    leaves: list[int]  # the numbers of these leaves of the parameters


class _Cut(NamedTuple):
    """The program of the gradients, cut into one program for each bucket."""

    buckets: list[_Bucket]
    arguments: list[Any]  # the variables of the leaves of params and inputs
    structure: Any  # of (gradients, aux)


def make_buckets(traced: Traced, count: int, first_bytes: int, later_bytes: int) -> list[list[int]]:
    """Groups `count` gradients into buckets, by their numbers, in the order of computation.

    The first bucket has `first_bytes` at least, each later one `later_bytes`. Gradients that come
    at the same time stay together: those after the same product or other slow equation.
    """
    # Variable -> the number of the last slow equation that it needs; -1 if it needs none.
    last_slow: dict[Any, int] = {}
    for i, eqn in enumerate(traced.eqns):
        is_slow = eqn.primitive in (dot_general_p, conv_general_dilated_p) or programs_in(eqn)
        before = (last_slow.get(var, -1) for var in variables(eqn.invars))
        last_slow.update(dict.fromkeys(eqn.outvars, i if is_slow else max(before, default=-1)))
    results = traced.results[:count]
    ready = [-1 if isinstance(x, Literal) else last_slow.get(x, -1) for x in results]
    sizes = [result.aval.size * jnp.dtype(result.aval.dtype).itemsize for result in results]
    order = sorted(range(count), key=ready.__getitem__)
    buckets = [order[:1]]
    for leaf, next_leaf in itertools.pairwise(order):
        least = later_bytes if len(buckets) > 1 else min(first_bytes, later_bytes)
        is_full = sum(sizes[i] for i in buckets[-1]) >= least
        if is_full and ready[next_leaf] > ready[leaf]:
            buckets.append([])
        buckets[-1].append(next_leaf)
    return buckets
