"""A closed train step, with its optimizer inside, that becomes a train step of gossiping nodes."""

from __future__ import annotations

import dataclasses
import operator
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import Literal

from gossipjax.collectives import node_mean, upcast
from gossipjax.exchanges.chain import OPTIMIZERS, find_exchange, find_exchanging, find_parts
from gossipjax.exchanges.model import subtract
from gossipjax.exchanges.state import GossipState
from gossipjax.exchanges.transform import require_like
from gossipjax.meshes import on_auto_axes
from gossipjax.models import average_model, on_axis
from gossipjax.nodes import Nodes
from gossipjax.nodes.arguments import Argnums, argument_numbers, is_function, require_numbers
from gossipjax.nodes.stacked import is_raw_key
from gossipjax.processes import is_key
from gossipjax.serialization import written_by_flax
from gossipjax.sharding import shard_specs
from gossipjax.step.train_step import TrainStep
from gossipjax.train_state import TrainState


def decentralize(
    train_step: Callable[..., tuple[Any, Any]],
    tx: optax.GradientTransformation,
    nodes: int | Nodes | None = None,
    *,
    params: Callable[[Any], Any] = operator.attrgetter("params"),
    local_argnums: Argnums = (),
    **options: Any,
) -> DecentralizedStep:
    """Turns a train step that contains its optimizer into a train step of N nodes that gossip.

    Such a step, `train_step(state, batch) -> state, metrics`, is called closed. Your step stays as
    it is, and each node takes its own step. `tx` gets the change of the parameters as the update
    `u`, as if an optimizer before `tx` had made `u`:

        s' = train_step(s, batch);    u = params(s') - params(s)
        params(s) <- params(s) + tx(u),    all else of s <- all else of s'

    `tx` is any gossip, such as `gx.sgp(schedule)` (then adapt-then-combine). You can put
    `gx.weighted(...)` before the gossip, or use `gx.outer(optax.identity(), outer_tx, every)`.
    Nodes mix only `params`. Each node keeps its own momentum and moments, BatchNorm statistics and
    dropout keys. (`gx.contrib.mixed_momentum` mixes momentum too, but needs gradients.)

        step = gx.decentralize(train_step, gx.sgp(schedule), nodes)
        for batch in map(nodes.split, batches):
            state, metrics = step(state, batch)             # metrics: [N, ...]
        state = step.average(state)                         # of all nodes -> of one, to evaluate

    In NNX, `nnx.update((model, optimizer), step.average(state))` puts the average in your modules.

    The first call copies your state to all nodes; you can also call `step.init` before the loop.
    The result is a `gx.TrainState`: its `opt_state` is the state of `tx`, and its `rest` is your
    state without the parameters. `Checkpoints` saves this state, and can resume it with another
    number of nodes.

    Args:
      train_step: the step of one node, `train_step(state, *inputs, **inputs) -> (state, metrics)`,
        jitted or not. Bind arguments that are not arrays:
        `functools.partial(train_step, config=config)`. Remove a `lax.pmean` of the gradients over
        all devices, but keep a `lax.pmean` over the devices of one node.
      tx: the gossip, without an optimizer, because `tx` gets no gradients.
      nodes: where the nodes run.
      params: a function that picks the parameters to gossip out of the state, and computes nothing:
        `lambda state: state.params`, or for an NNX state
        `lambda state: nnx.filter_state(state, nnx.Param)`. If an EMA stands next to the model, pick
        from `state[0]`.
      local_argnums: arguments of `train_step` that are split over the devices of a node.
      **options: further arguments of `gx.TrainStep`; `extra_args` is given the metrics.

    Inputs are node-stacked: `nodes.split` splits a batch, `jax.random.split(key, N)` a key. The
    number of the node is folded into each `jax.random.key` of the state. If parameters are narrower
    than float32, what your step rounds away is lost. If your step skips an update, the parameters
    do not move, and the node still gossips. `reset_inner` of `gx.outer` does not reset the
    optimizer inside your step.

    Raises:
      ValueError: in `init`, if `tx` contains an optimizer or needs gradients, or `params` fails or
        does not pick leaves. At a step: if `train_step` does not return a pair with a state like
        its first argument, or an input is not node-stacked. What `gx.TrainStep` refuses raises
        this error, too.

    >>> import jax.numpy as jnp, gossipjax as gx
    >>> def train_step(state, target):
    ...     grads = state["z"] - target
    ...     momentum = 0.9 * state["momentum"] + grads
    ...     return {"z": state["z"] - 0.1 * momentum, "momentum": momentum}, grads**2
    >>> nodes = gx.Nodes(4)
    >>> gossip = gx.sgp(gx.topology.one_peer_exponential(4))
    >>> step = gx.decentralize(train_step, gossip, nodes, params=lambda state: state["z"])
    >>> state = step.init({"z": jnp.zeros(()), "momentum": jnp.zeros(())})
    >>> for _ in range(300):
    ...     state, losses = step(state, jnp.array([0.0, 1.0, 2.0, 5.0]))
    >>> state.step, bool(abs(step.average(state)["z"] - 2.0) < 1e-2)
    (300, True)
    """
    return DecentralizedStep(train_step, tx, nodes, params, local_argnums, options)


class DecentralizedStep:
    """Steps all nodes: what `gx.decentralize` returns. `train_step` is its `gx.TrainStep`."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        tx: optax.GradientTransformation,
        nodes: int | Nodes | None,
        params: Callable[[Any], Any],
        local_argnums: Argnums,
        options: dict[str, Any],
    ):
        extra_args = options.pop("extra_args", None)
        self.train_step = TrainStep(
            _updates_as_gradients(train_step),
            tx,
            nodes=nodes,
            # The step calls `gradients(params, rest, named, *inputs)`: two more before the inputs.
            local_argnums=[number + 2 for number in argument_numbers(local_argnums)],
            # `aux` is `(rest, metrics)`.
            extra_args=None if extra_args is None else lambda aux: extra_args(aux[1]),
            donated_inputs=(0,),  # `rest`, which comes back, new, in `aux`
            **options,
        )
        self.nodes = self.train_step.nodes
        self._tx = tx
        self._params = params
        # A weak reference to the first array of what `average` last returned, and the number of the
        # next step. If `init` gets that result, it goes on with this number.
        self._last_average: tuple[Any, int] = None, 0

    def init(self, state: Any, *, fold_in: bool | None = None) -> TrainState:
        """Makes the state of all nodes from the state `[...]` of one, or from a function.

        The first step gets the number `state.step` if your state has a `step`, else 0; a state that
        `average` has returned goes on with its number. A function runs on the devices, and each
        device makes its own part, as `gx.Nodes.init` says.

        Args:
          state: the state of one node.
          fold_in: whether the number of the node is folded into the keys of the state. You must say
            so if the state has a `jax.random.PRNGKey`, which is an array of two numbers; a
            `jax.random.key` is folded unless `fold_in` is False.

        Raises:
          ValueError: if the state may have a `PRNGKey` and `fold_in` is None; as in `decentralize`.
        """
        if is_function(state):
            shapes = jax.eval_shape(state)
            params, rest = self._take_out_params(shapes)
            structure = jax.tree.structure(params)

            def make_params() -> Any:
                return jax.tree.unflatten(structure, _split(state(), rest)[0])

            def make_rest() -> Any:
                return _split(state(), rest)[1]
        else:
            require_numbers(state, "state")
            params, rest = self._take_out_params(on_auto_axes(state))
            make_params = params  # trees need no function that makes them
            make_rest = rest
            if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(state)):
                _warn_of_copies(params, rest)
        _require_updates(jax.eval_shape(self._tx.init, params), rest)
        is_raw = _find_raw_keys(rest, fold_in)
        stacked, opt_state = self.nodes.init(self._tx, make_params)
        specs = shard_specs(opt_state) if self.nodes.inner_axes else None
        has_keys = any(is_raw) or any(map(is_key, jax.tree.leaves(rest)))
        rest = self.nodes.replicate(
            _convert_keys(make_rest, is_raw, jax.random.wrap_key_data),
            None if specs is None else specs.of(rest),
            fold_in=has_keys and fold_in is not False,
        )
        rest = _convert_keys(rest, is_raw, jax.random.key_data)
        # A state that `average` has returned: its own `step` may count something else.
        leaf_of_average, next_step = self._last_average
        leaves = jax.tree.leaves(state)
        if leaves and leaf_of_average is not None and leaf_of_average() is leaves[0]:
            return TrainState(next_step, stacked, opt_state, rest)
        count: Any = getattr(rest, "step", None)
        is_count = isinstance(count, jax.Array) and jnp.issubdtype(count.dtype, jnp.integer)
        is_count = is_count and count.shape == (self.nodes.size,)
        step = 0
        if is_count:
            _require_known(count)
            step = int(np.asarray(count.addressable_data(0))[0])
        return TrainState(step, stacked, opt_state, rest)

    def _take_out_params(self, state: Any) -> tuple[Any, Any]:
        """Returns the parameters that the user's `params` picks, and the rest of the state.

        The rest is the state with a `Parameter` in place of each parameter.
        """
        leaves, structure = jax.tree.flatten(state)
        # `params` is traced, so that its results tell which leaves it has picked, in any structure,
        # and even if the state has one array twice.
        try:
            jaxpr, shapes = jax.make_jaxpr(self._params, return_shape=True)(state)
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(
                f"params must find the parameters in the state, got {type(error).__name__}: "
                f"{str(error)[:200]} of a state {str(structure)[:300]}: say where they are, "
                "params=lambda state: ..., of NNX "
                "lambda state: nnx.filter_state(state, nnx.Param)."
            ) from error
        number_of = {var: number for number, var in enumerate(jaxpr.jaxpr.invars)}  # of the leaf
        results = jaxpr.jaxpr.outvars
        picked = [number_of[v] for v in results if not isinstance(v, Literal) and v in number_of]
        if not picked or len({*picked}) < len(results):  # a result is computed, or comes twice
            raise ValueError(
                "params must return leaves of the state as they are, each once, got "
                f"{str(jax.tree.structure(shapes))[:200]} of a state {str(structure)[:300]}: such "
                "as lambda state: state.params, of NNX nnx.filter_state(state, nnx.Param)."
            )
        params = jax.tree.unflatten(jax.tree.structure(shapes), [leaves[i] for i in picked])
        for i, number in enumerate(picked):
            leaves[number] = Parameter(i)
        return params, jax.tree.unflatten(structure, leaves)

    def __call__(self, state: Any, *inputs: Any, **named: Any) -> tuple[TrainState, Any]:
        """Returns the state after one step of all nodes, and their metrics, `[N, ...]`.

        An ordinary state of one node first goes through `init`. Accelerators donate `state`, as
        `gx.TrainStep` does.
        """
        if not isinstance(state, TrainState):  # at the first step of a loop
            state = self.init(state)
        size = self.nodes.size
        for leaf in jax.tree.leaves((inputs, named)):
            if getattr(leaf, "shape", ())[:1] != (size,):
                got = f"shape {list(leaf.shape)}" if hasattr(leaf, "shape") else f"{leaf!r:.80}"
                raise ValueError(
                    f"inputs of a decentralized step must be arrays [N, ...] with N = {size}, got "
                    f"{got}: batches by nodes.split, a key as jax.random.split(key, {size}); bind "
                    "what is no array, functools.partial(train_step, config=config)."
                )
        # The step is a number, except in a restored state, where it is an array.
        _require_known(state.step)
        step = int(state.step)
        params, opt_state, (rest, metrics) = self.train_step(
            step, state.params, state.opt_state, state.rest, named, *inputs
        )
        new = state._replace(step=step + 1, params=params, opt_state=opt_state, rest=rest)
        return new, metrics

    def average(self, state: Any) -> Any:
        """Returns one ordinary state, `[...]`, with the average model, to evaluate or to save.

        Other floating-point values, such as statistics and moments, are averaged too; counts and
        keys are taken from the first node. If you need only the parameters, call
        `gx.average_model`. An ordinary state of one node is returned unchanged.
        """
        if not isinstance(state, TrainState):
            return state

        def average(state: TrainState) -> Any:
            model = average_model(state.params, state.opt_state, nodes=self.nodes)
            program = on_axis(_average_floats, self.nodes.axis_name)
            rest = self.nodes.run(program, state.rest)
            return _merge(model, self.nodes.one(rest, require_equal=False))

        result = self.train_step.run(average, state)
        self._last_average = weakref.ref(jax.tree.leaves(result)[0]), int(state.step)
        return result

    def __repr__(self) -> str:
        return f"DecentralizedStep({self.train_step!r})"


@written_by_flax
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Parameter:
    """Marks where a leaf of the parameters was taken out of a state; `number` says which leaf."""

    number: int


def _is_parameter(part: Any) -> bool:
    return isinstance(part, Parameter)


def _merge(params: Any, rest: Any) -> Any:
    """Returns the user's state: `rest`, with a leaf of `params` in place of each `Parameter`."""
    leaves = jax.tree.leaves(params)

    def fill(part: Any) -> Any:
        return leaves[part.number] if _is_parameter(part) else part

    return jax.tree.map(fill, rest, is_leaf=_is_parameter)


def _split(state: Any, marked: Any) -> tuple[list[Any], Any]:
    """Splits a state into the leaves of its parameters, in their order, and the rest of it.

    `marked` is the rest of a state like it, whose `Parameter`s say where the parameters are.
    """
    marks, structure = jax.tree.flatten(marked, is_leaf=_is_parameter)
    pairs = list(zip(marks, jax.tree.leaves(state), strict=True))
    params = {mark.number: leaf for mark, leaf in pairs if _is_parameter(mark)}
    rest = [mark if _is_parameter(mark) else leaf for mark, leaf in pairs]
    return [params[i] for i in range(len(params))], jax.tree.unflatten(structure, rest)


def _updates_as_gradients(train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the `gradients` of `gx.TrainStep` from a closed step, which applies its own optimizer.

    `gradients` returns how the step moves the parameters. A gossip without an optimizer takes these
    updates instead of gradients. `aux` is the rest of the new state, and the metrics.
    """

    def gradients(params: Any, rest: Any, named: dict[str, Any], *inputs: Any) -> Any:
        state = _merge(params, rest)
        result = train_step(state, *inputs, **named)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                f"train_step must return a pair (state, metrics), got {type(result).__name__}: "
                "of a step that returns the state alone, lambda *args: (train_step(*args), None)."
            )
        new_state, metrics = result
        require_numbers(metrics, "metrics")
        name = "the state of (state, metrics), which train_step returns in this order,"
        require_like(state, new_state, name, dtypes=True, like="the state that it got")
        leaves, new_rest = _split(new_state, rest)
        new_params = jax.tree.unflatten(jax.tree.structure(params), leaves)
        # In float32 at least, so that narrow parameters are not rounded a second time.
        updates = subtract(upcast(new_params), upcast(params))
        return updates, (new_rest, metrics)

    return gradients


def _require_known(step: Any) -> None:
    """Raises `ValueError` if the number of a step is traced, as under a `vmap` over seeds."""
    if isinstance(step, Tracer):
        raise ValueError(
            "step of a TrainState must be a number, got a traced one: give a vmap over seeds the "
            "axes gx.TrainState(None, 0, 0, 0), in_axes and out_axes."
        )


def _warn_of_copies(params: Any, rest: Any) -> None:
    """Warns if the rest of the state has a copy of a parameter, maybe in another type.

    If the step starts from such a copy, as from a float32 master, gossip does not reach the copy.
    """
    # By shape: the parameters, each with its first row.
    rows: dict[Any, list[tuple[np.ndarray, Any]]] = {}
    for leaf in jax.tree.leaves(params):
        row = _first_row(leaf)
        if row.size and (row != row[0]).any():  # constants, as zeros, are equal without copying
            rows.setdefault(jnp.shape(leaf), []).append((row, leaf))
    for path, leaf in jax.tree_util.tree_leaves_with_path(rest, is_leaf=_is_parameter):
        if _is_parameter(leaf) or is_key(leaf) or jnp.shape(leaf) not in rows:
            continue
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            continue
        # Arrays may be large and on devices. So they are compared only if their first rows agree.
        first = _first_row(leaf)
        if not first.size:
            continue
        alike = [x for row, x in rows[leaf.shape] if (first.astype(row.dtype) == row).all()]
        if any((np.asarray(leaf).astype(x.dtype) == np.asarray(x)).all() for x in alike):
            warnings.warn(
                f"state{jax.tree_util.keystr(path)} is a copy of parameters. If your step starts "
                "from the copy, as from a float32 master or slow weights, gossip does not reach "
                "it: pick it by params=. An average that your step only keeps is right.",
                stacklevel=3,
            )
            return


def _first_row(leaf: Any) -> np.ndarray:
    """Returns the first row `[d]` along the last axis; empty if this process cannot read it.

    It is empty for scalars, too, as equal scalars need not be copies.
    """
    is_addressable = getattr(leaf, "is_fully_addressable", True)
    if not is_addressable or not jnp.ndim(leaf) or not jnp.size(leaf):
        return np.zeros(0)
    return np.asarray(leaf[(0,) * (jnp.ndim(leaf) - 1)])


def _find_raw_keys(rest: Any, fold_in: bool | None) -> list[bool]:
    """Says which leaves of the rest of a state are a `PRNGKey` into which the node is folded.

    Two numbers in uint32 can be a key or something else, so the user must say so by `fold_in`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(rest, is_leaf=_is_parameter)
    found = [not _is_parameter(leaf) and is_raw_key(leaf, leading=0) for _, leaf in leaves]
    if fold_in is None and any(found):
        path = jax.tree_util.keystr(leaves[found.index(True)][0])
        raise ValueError(
            "fold_in must be given where the state may have a jax.random.PRNGKey, got "
            f"state{path}, two numbers in uint32: state = step.init(state, fold_in=True) gives "
            "each node its own key, fold_in=False all nodes the same numbers."
        )
    return [is_raw and fold_in is True for is_raw in found]


def _convert_keys(tree: Any, is_raw: list[bool], convert: Callable[[Any], Any]) -> Any:
    """Converts those leaves of a tree for which `is_raw` is true.

    `tree` can also be a function that makes the tree; the result is then such a function.
    """
    if not any(is_raw):
        return tree
    if is_function(tree):
        return lambda: _convert_keys(tree(), is_raw, convert)
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_parameter)
    leaves = [convert(x) if raw else x for x, raw in zip(leaves, is_raw, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _require_updates(opt_state: Any, rest: Any) -> None:
    """Raises `ValueError` unless `tx` of `gx.decentralize` can do without gradients.

    The optimizer is inside of the user's step, so `tx` must have none. With `optax.MultiSteps` in
    that step, most updates are zeros. A gossip that moves its state or model even then is refused.
    """
    exchange = find_exchange(opt_state)
    # A transform around a chain, such as `outer`, has an optimizer of its own, which is allowed.
    chain = opt_state if exchange is None or exchange.inner is None else exchange.inner
    refused = find_parts(chain, optax.ApplyIfFiniteState, *OPTIMIZERS)
    refused += [part for part in find_exchanging(opt_state) if not part.mixes_models]
    gossips = find_parts(opt_state, GossipState)
    got = None
    if refused:
        got = type(refused[0]).__name__
    elif not gossips:
        got = "no gossip"
    elif any(gossip.plan.takes_gradients for gossip in gossips):
        got = "one that takes gradients"
    elif any(g.plan.moves_by_zeros for g in gossips) and find_parts(rest, optax.MultiStepsState):
        got = "a correction that moves at each step, and optax.MultiSteps inside train_step"
    if got is not None:
        raise ValueError(
            "tx of decentralize must exchange parameters and take updates, as the optimizer and "
            f"its gradients stay inside train_step, got {got}: give gx.sgp(schedule), or "
            "gx.outer(optax.identity(), outer_tx, every); gx.TrainStep has the gradients."
        )


def _average_floats(tree: Any, axis_name: str) -> Any:
    """Averages the floating-point leaves of a tree over the nodes, and keeps all other leaves."""

    def is_float(leaf: jax.Array) -> bool:
        return jnp.issubdtype(leaf.dtype, jnp.floating)

    means = node_mean([leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)], axis_name)
    return jax.tree.map(lambda leaf: means.pop(0) if is_float(leaf) else leaf, tree)
