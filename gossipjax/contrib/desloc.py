"""DES-LOC: the parameters and Adam's moments are averaged, each with a period of its own."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import optax

from gossipjax.algorithms import frame
from gossipjax.collectives import (
    StepLike,
    cast_like,
    cond,
    default_step,
    exact_average,
    mix,
    require_doubly_stochastic,
    upcast,
    vary,
)
from gossipjax.sharding import on_shards, specs_here
from gossipjax.topology.schedule import Schedule, require_int
from gossipjax.wire import Wire

MOMENTS = ("mu", "nu")  # fields of the states of optax


def desloc(
    inner: optax.GradientTransformation,
    every: int,
    mu_every: int,
    nu_every: int,
    average: Schedule | Literal["exact"] = "exact",
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """DES-LOC: Local Adam whose moments are averaged more rarely than its models. Goes *last*.

    It stands around the optimizer. With `x` the parameters, `m` and `v` the two moments of Adam,
    `g` the gradient of this node, at step `k`:

        if k mod mu_every = 0:  m <- avg(m)
        if k mod nu_every = 0:  v <- avg(v)
        u, m, v <- inner(g, x; m, v)
        if k mod every = 0:     x <- avg(x)
        x <- x + u

    All averages are taken before the update, as in the paper: the gradient and the weight decay are
    of the model before. Periods of K, 3 K and 6 K send half of what three averages every K steps
    do, since the moments change slowly: `m` by half in `ln 0.5 / ln b1` steps.

    `m` and `v` are the fields `mu` and `nu` of any states in `inner`: `optax.adam`, `adamw`,
    `nadam`, `lamb`, `contrib.muon` (whose momentum is a `mu`, too), inside `optax.masked`,
    `optax.partition` or a chain. What else it keeps stays local. `inner` works in float32 at least.
    The state is the pair of that of `inner` and a `GossipState`; a change of nodes averages both.

    Args:
      inner: the optimizer, or a chain with one, without gossip.
      every: steps from one average of the parameters to the next.
      mu_every, nu_every: those of the moments.
      average: "exact", over all nodes, or a doubly stochastic schedule: each of the three uses its
        next round at its next turn.
      axis_name, local_axis_name: as in `gx.sgp`, and `step=` of `update`.

    Raises:
      ValueError: if a period is not an integer >= 1, or `average` is neither; in `init`, if `inner`
        has no `mu` or no `nu`, or holds gossip; else as `gx.sgp`.

    References:
      After Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training
      Foundation Models", 2025, arXiv:2505.22549: the paper's text was not available. It clips each
      coordinate of the gradient, `optax.clip(rho)` before this. At `step - 1` this equals
      tsugi-mend 0.1.5, desync_optimizer.py, which averages after its step, to 2e-15 in 40 steps of
      recorded gradients, float64.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = gx.contrib.desloc(optax.adam(0.5), every=2, mu_every=1, nu_every=4)
    >>> def two_steps(x, g):
    ...     state = tx.init(x)
    ...     for step in range(2):
    ...         updates, state = tx.update(g, state, x, step=step)
    ...         x = x + updates
    ...     return x, state[0][0].mu
    >>> with jax.numpy_dtype_promotion("standard"):  # Adam raises a float to the power of its count
    ...     x, mu = jax.vmap(two_steps, axis_name="nodes")(jnp.zeros(2), jnp.array([1.0, 3.0]))
    >>> [round(float(m), 2) for m in mu]  # 0.1 g, their mean, and a tenth of the way to g again
    [0.28, 0.48]
    """
    name = "desloc"
    inner = frame.require_transform(inner, "inner of desloc")
    periods = [
        require_int(value, f"{field} of {name}", 1)
        for field, value in (("every", every), ("mu_every", mu_every), ("nu_every", nu_every))
    ]
    clocks = _make_clocks(average, periods)
    route = frame.make_route(name, axis_name, local_axis_name)
    plan = frame.ExchangePlan(
        clocks[0] if isinstance(clocks[0], Schedule) else None,
        wire=route,
        period=1 if isinstance(clocks[0], Schedule) else clocks[0],
        beside=tuple(clocks[1:]),
    )

    def combine(x: Any, updates: Any, state: frame.GossipState, step: StepLike) -> frame.Combined:
        return frame.Combined(frame.add(_average(x, clocks[0], step, route), updates), state)

    gossip = frame.gossip_transform(name, plan, partial(frame.init_state, plan=plan), combine)

    def init(params: optax.Params) -> optax.OptState:
        state = inner.init(frame.common_model(params, None))
        if jax.tree.leaves(params):  # none in the placeholder of optax.tree_map_params
            _require_moments(state)
        return state, gossip.init(params)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        step: StepLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        old, gossip_state = _require_pair(state, plan)
        z = frame.require_params(params, name)
        frame.require_like(z, updates, f"the updates of {name}")
        step = default_step(step, gossip_state.count, axis_name)
        for field, clock in zip(MOMENTS, clocks[1:], strict=True):
            moments = [getattr(part, field) for part in _find(old, field)]
            old = _replace(old, field, _average_whole(moments, z, clock, step, route))
        change, new = inner.update(upcast(updates), old, frame.widen(z), **extra_args)
        change, gossip_state = gossip.update(change, gossip_state, z, step=step)
        return change, (new, gossip_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _make_clocks(average: Any, periods: list[int]) -> list[Any]:
    """For each of what is averaged, the rounds by step, or the period of exact averages."""
    if isinstance(average, Schedule):
        require_doubly_stochastic(average, "desloc")
        return [average.every(period) for period in periods]
    if not isinstance(average, str) or average != "exact":
        raise ValueError(f"average of desloc must be 'exact' or a gx.Schedule, got {average!r}.")
    return periods


def _average(tree: Any, clock: Schedule | int, step: StepLike, wire: Wire) -> Any:
    """The tree, averaged if it is its turn at `step`; leaves keep their types."""
    if isinstance(clock, Schedule):
        return mix(tree, None, clock, step, **wire.arguments())[0]

    def average(tree: Any) -> Any:
        return vary(cast_like(exact_average(tree, wire, None), tree), wire.axis_name)

    return cond(step % clock == 0, average, lambda tree: tree, vary(tree, wire.axis_name))


def _average_whole(
    moments: list[Any], params: Any, clock: Schedule | int, step: StepLike, wire: Wire
) -> list[Any]:
    """`_average`, by the parts that the devices of a node have where it is inside `gx.sharded`."""
    specs = specs_here()
    if specs is None:
        return _average(moments, clock, step, wire)
    traced = [step] if isinstance(step, jax.Array) else []

    def average(moments: Any, traced: list[jax.Array]) -> Any:
        return _average(moments, clock, traced[0] if traced else step, wire)

    in_specs = specs.of((moments, traced), params)
    return on_shards(average, specs, wire.axis_name, in_specs, in_specs[0])(moments, traced)


def _find(state: Any, field: str) -> list[Any]:
    """The parts of an optimizer's state with this field, in their order."""
    leaves = jax.tree.leaves(state, is_leaf=_has_moments)
    return [part for part in leaves if _has_moments(part) and field in part._fields]


def _replace(state: Any, field: str, values: list[Any]) -> Any:
    """Returns the state with other values of this field of the parts that `_find` finds."""
    others = iter(values)

    def replace(part: Any) -> Any:
        if _has_moments(part) and field in part._fields:
            return part._replace(**{field: next(others)})
        return part

    return jax.tree.map(replace, state, is_leaf=_has_moments)


def _has_moments(part: Any) -> bool:
    return not set(MOMENTS).isdisjoint(getattr(part, "_fields", ()))


def _require_moments(state: Any) -> None:
    """Raises `ValueError` unless there are both moments, and no exchange, in an inner state."""
    kinds = frame.GossipState, frame.OuterState, frame.AccumulationState
    if frame.find_parts(state, *kinds):
        raise ValueError(
            "inner of desloc must hold no gossip, outer optimizer or gx.accumulate, got one: give "
            "it the optimizer alone."
        )
    missing = [field for field in MOMENTS if not _find(state, field)]
    if missing:
        raise ValueError(
            "inner of desloc must keep the moments mu and nu, as optax.adamw does, got one without "
            f"{' and '.join(missing)}: put gx.dpsgd(schedule.every(k)) behind others."
        )


def _require_pair(state: Any, plan: frame.ExchangePlan) -> tuple[Any, frame.GossipState]:
    """The states of the optimizer and the gossip; raises `ValueError` if they are others."""
    is_pair = type(state) is tuple and len(state) == 2
    if not is_pair or not isinstance(state[1], frame.GossipState):
        raise ValueError(
            "the state of desloc must be that of its inner and a GossipState, got "
            f"{type(state).__name__}: make it by tx.init(params) of the same chain."
        )
    frame.require_plan(plan, state[1].plan, "desloc")
    return state
