"""An algorithm of your own in a few lines: you write its equations for one node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import optax

from gossipjax.collectives import (
    Received,
    StepLike,
    receive,
    require_schedule,
    upcast,
    vary_where_mapped,
)
from gossipjax.exchanges.model import debias, push_sum_weight, scale, zeros_like_model
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import Extra, GossipState, init_state, mix_once
from gossipjax.exchanges.transform import Combined, gossip_transform, require_choice, require_like
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Wire, WireLike, make_seed_key

Rule = Literal["average", "restart"]
Start = Callable[[Any], Any]  # makes a kept tree from the parameters


class Node:
    """Has what a node knows in one update, besides its model and the update from the chain.

    Attributes:
      kept: a dict of the values that the algorithm keeps, float32 at least.
      count: int32 scalar, the number of updates so far, for an `optax.Schedule`.
      step: the number of the step, as it was passed to `update`.
      weight: the push-sum weight `w` of `x` before the exchange; 1 without push-sum.
      index: int32 scalar, the number of this node.
      key: a `jax.random.key` of this node and update, made of the `seed` of `gx.gossip`.
      rate: the learning rate of this update, as `rate` of `gx.gossip` says.
      senders: int32 `[K]`, who sent the messages of the last `receive`.
    """

    def __init__(self, state: GossipState, step: StepLike, rate: Any = None, seed: int = 0):
        self.rate: Any = rate(state.count) if callable(rate) else rate
        self.kept = {name: part.value for name, part in (state.extra or {}).items()}
        self.count = state.count
        self.step = step
        self.weight = push_sum_weight(state)
        self._state = state  # with the weight after the last exchange
        self._seed = seed
        self._values_sent = 0

    @property
    def index(self) -> jax.Array:
        return jax.lax.axis_index(self._state.wire.axis_name)

    @property
    def key(self) -> jax.Array:
        """A key for random numbers, another one for each node and update."""
        key = jax.random.fold_in(make_seed_key(self._seed), self.count)
        return jax.random.fold_in(key, self.index)

    def mix(self, tree: Any, averages: Any = None) -> Any:
        """Exchanges any tree of floats by the round of this step; returns the mixed tree, `P tree`.

        `mix` keeps the sum of the tree over the nodes, so it averages numerators, such as `x`. Pass
        values in the units of the model, such as a momentum, as `averages`:
        `x, m = mix(x, averages=m)` gives `P x` and `P (w m) / (P w)`, in one message.
        """
        schedule: Any = self._state.plan.schedule
        if self._state.weight is None and not schedule.is_doubly_stochastic:
            raise ValueError(
                "node.mix of a schedule whose rows do not sum to 1 needs push-sum weights, got "
                "row_stochastic=True, which leaves them out: average what node.receive returns."
            )
        tree, averages = self._prepare_to_send((tree, averages))
        weight = self._state.weight
        sent = tree
        if averages is not None:  # they travel as numerators `w m`, and are divided by the new `w`
            sent = (tree, averages if weight is None else scale(averages, weight))
        mixed, new_weight = mix_once(sent, weight, self._state, self.step)
        self._state = self._state._replace(weight=new_weight)
        if averages is None:
            return mixed
        return mixed[0], debias(mixed[1], new_weight, self._state.wire.axis_name)

    def receive(self, tree: Any) -> tuple[Any, jax.Array]:
        """Sends a tree of floats; returns the message of each neighbour, `[K, ...]`, and weights.

        `K` is the largest number of slots of a round of the schedule; a slot has one sender for
        each node. The weights `[K]` are `P_ij` of the senders `j`, float32. In a slot in which
        nobody sends to this node, message and weight are 0. Each link carries one message, as in
        `mix`. With a doubly stochastic schedule, `node.mix(x)` is

            messages, weights = node.receive(x)
            (1 - weights.sum()) * x + jnp.tensordot(weights, messages, 1)

        You can put a median or a clipped mean in the place of the sum: the nodes' mean then moves.
        """
        state = self._state
        if state.weight is not None:
            raise ValueError(
                "node.receive needs a schedule whose rows sum to 1, got one with push-sum weights: "
                "a sum of messages would be biased. Take a doubly stochastic schedule, or say "
                "gx.gossip(row_stochastic=True) if your combine makes averages of its own."
            )
        sent = self._prepare_to_send(tree)
        key = state.wire.make_key(state.count)
        received: Received = receive(sent, state.plan.schedule, self.step, state.wire, key)
        self.senders = received.senders
        return received.messages, received.weights

    def _prepare_to_send(self, tree: Any) -> Any:
        """Counts the values of `tree`; returns it, behind a barrier if an exchange came before."""
        if self._values_sent:
            # The tree may depend on an earlier exchange, which XLA would, without a barrier,
            # compute anew for each peer.
            tree = jax.lax.optimization_barrier(tree)
        self._values_sent += sum(leaf.size for leaf in jax.tree.leaves(tree))
        return tree

    def finish(self, x: Any, result: Any) -> Combined:
        """Checks `result`, which `combine` has made of `x`; returns it with the new state."""
        state = self._state
        if not self._values_sent:
            raise ValueError(
                "combine of gossip must call node.mix or node.receive, got no call: it would "
                "exchange nothing. Without exchange, leave gx.gossip out of the chain."
            )
        models = state.plan.models
        models_sent = self._values_sent / max(1, sum(leaf.size for leaf in jax.tree.leaves(x)))
        if isinstance(models, int) and round(models_sent) != models:  # a fraction is not checked
            raise ValueError(
                f"models of gossip must be what combine sends by node.mix, {models_sent:.6g} trees "
                f"like the parameters, got {models}."
            )
        if self.kept:
            is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
            if not is_pair or result[1].keys() != self.kept.keys():
                raise ValueError(
                    f"combine of gossip must return x and a dict with {', '.join(self.kept)}, as "
                    f"keeps says, got {type(result).__name__}: return x, "
                    f"{{{', '.join(f'{name!r}: ...' for name in self.kept)}}}."
                )
            result, values = result
            for name, value in values.items():
                what = f"{name!r} that combine of gossip returns"
                require_like(self.kept[name], value, what, dtypes=True, like="what was kept")
            state = state.keep(**vary_where_mapped(values, state.wire.axis_name))
        require_like(x, result, "the numerators that combine of gossip returns", dtypes=True)
        return Combined(result, state)


def gossip(
    schedule: Schedule,
    combine: Callable[[Any, Any, Node], Any],
    *,
    keeps: Mapping[str, Rule | tuple[Rule, Start]] | None = None,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    wire: WireLike | None = None,
    takes_gradients: bool = False,
    models: float | None = None,
    rate: optax.ScalarOrSchedule | None = None,
    seed: int = 0,
    row_stochastic: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Makes an algorithm from its equations for one node. Put it *last* in a chain.

    `x` are the parameters, and `u` is the update from the chain. `x` and `u` are trees like the
    parameters, `[...]` per node and float32 at least:

        x <- combine(x, u, node)          node.mix(tree) = P tree: the exchange of this step
        x, kept <- combine(x, u, node)    with keeps: node.kept[name], 0 at the start

    Give one `node.mix` everything that a step exchanges at once, for example as a tuple: each peer
    then gets one message. Each further call of `node.mix` is another exchange by the same round, as
    in Chebyshev's acceleration. `node.receive` gives you the message of each neighbour by itself.
    If the schedule is not doubly stochastic, `x` is the numerator of push-sum, as in `gx.sgp`:
    `node.mix` mixes the weight `w` too, and your parameters are `z = x / w`.

    `combine` must add `u` itself: nobody else does. `u` points downhill, so `x + u` is the local
    step of the optimizer before the gossip. With `takes_gradients`, `u` is a gradient instead, and
    `combine` steps against it.

    You can use your algorithm wherever the library's own algorithms work: in `gx.TrainStep`,
    `gx.outer`, `gx.sharded` and checkpoints. The exchange runs in the step, after the gradients.

    `node` also has `count`, `step`, `weight`, `index`, `key`, `rate` and `senders`:
    `help(gossipjax.algorithms.gossip.Node)` says what they are.

    Args:
      schedule: any schedule. If your equations need a doubly stochastic schedule, check
        `schedule.is_doubly_stochastic`.
      combine: the equations. `optax.tree` contains sums and products of trees.
      keeps: a dict from names to rules. If a run goes on with another number of nodes, a kept tree
        is averaged (rule `"average"`) or starts again (rule `"restart"`). A kept tree starts as
        zeros like the parameters. To start from `start(params)`, give a pair `(rule, start)`:
        `("restart", lambda params: jnp.ones(()))`.
      takes_gradients: whether `combine` is the optimizer. Then `u` are gradients, and `combine`
        makes its own step, `x - rate u`.
      models: how many trees like the parameters a step sends to each neighbour, below 1 for a part;
        for the cost model.
      rate: `node.rate`, a number or an optax schedule of the updates before this one.
      seed: the seed of `node.key`.
      row_stochastic: whether `combine` makes averages of its own of what `node.receive` returns,
        over any schedule. The mean of the nodes then moves, and there are no push-sum weights.
      axis_name, local_axis_name, wire: as in `gx.sgp`; `update` takes the same `step=`.

    Raises:
      ValueError: if `keeps` has another rule. When traced, if `combine` never exchanges, returns
        another tree, or sends another whole number of `models`. Also if `gx.sgp` would raise it.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> def combine(x, u, node):  # D-PSGD
    ...     return optax.tree.add(node.mix(x), u)
    >>> tx = gx.gossip(gx.topology.ring(2), combine)
    >>> def update(x, u):
    ...     return x + tx.update(u, tx.init(x), x, step=0)[0]
    >>> jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 2.0]), jnp.array([0.5, 0.0])).tolist()
    [1.5, 1.0]
    """
    require_schedule(schedule, "gossip")
    rules: dict[str, tuple[Rule, Start]] = {
        name: rule if isinstance(rule, tuple) else (rule, zeros_like_model)
        for name, rule in (keeps or {}).items()
    }
    for name, (rule, _) in rules.items():
        require_choice(rule, f"keeps[{name!r}] of gossip", get_args(Rule))
    route = Wire.make(axis_name, local_axis_name, wire)
    plan = ExchangePlan(
        schedule,
        wire=route,
        models=models,
        takes_gradients=takes_gradients,
        moves_by_zeros=bool(rules),
    )
    push_sum = not (schedule.is_doubly_stochastic or row_stochastic)

    def init(params: Any) -> GossipState:
        """Makes the state, with the first values of all trees that `combine` keeps."""
        state = init_state(params, plan, push_sum=push_sum)
        if rules:
            kept = {
                name: Extra(vary_where_mapped(upcast(start(params)), axis_name), rule)
                for name, (rule, start) in rules.items()
            }
            state = state._replace(extra=kept)
        return state

    def combine_and_check(x: Any, updates: Any, state: GossipState, step: StepLike) -> Combined:
        """Runs the user's `combine` with a new `Node`, and checks what `combine` returns."""
        node = Node(state, step, rate, seed)
        return node.finish(x, combine(x, upcast(updates), node))

    return gossip_transform("gossip", plan, init, combine_and_check)
