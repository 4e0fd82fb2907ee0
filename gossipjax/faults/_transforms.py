"""SGP and D-PSGD over links that lose, delay and disturb messages."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gossipjax.collectives import (
    StepLike,
    node_sum,
    require_doubly_stochastic,
    require_schedule,
)
from gossipjax.exchanges.chain import gossip_state
from gossipjax.exchanges.mask import gossiped
from gossipjax.exchanges.model import add, numerators, subtract, zeros_like_model
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import Extra, GossipState, PushSum, init_state, mass_in_flight
from gossipjax.exchanges.transform import Combined, gossip_transform
from gossipjax.faults._faults import Faults, require_faults
from gossipjax.faults._links import NEVER, Links, add_axes, is_active
from gossipjax.topology.schedule import Schedule
from gossipjax.wire import Wire

# Names in `GossipState.extra`: messages on their way, and the mass that was lost.
LINKS = "links"
LOST = "lost"


def sgp(
    schedule: Schedule,
    faults: Faults,
    *,
    running_sums: bool = True,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """SGP over links that lose, delay and disturb messages. Put it *last* in a chain.

    As in `gx.sgp`, `y = w z + u`. Node `j` then sends the share `P[i, j] (y, w)` to each active
    receiver `i` and keeps the rest. The sender does not know whether a message arrives:

    - With `running_sums=True` a message carries the sum of all shares that its link has sent so
      far, and the receiver adds what is new in the sum. So the next message that arrives brings the
      shares that were lost before. A message that a later message has overtaken brings nothing. No
      mass is ever lost.
    - With `running_sums=False` a lost share is gone, as in plain push-sum, and the nodes agree on a
      value that is not the average. `account` says how much was lost.

    `gx.faults.sgp` is a simulation, in which the sender stores the messages on their way. With L
    links per node (the peers of all rounds) and delays of up to D steps, `extra["links"]` in the
    state holds `L (D + 1)` models, and `in_flight` is their sum. Each step exchanges L models. If
    the step is traced, one program without branches serves all steps. A message to a node that is
    not active waits until the node is active.

    Noise is added to the numerators that arrive. No node knows it, so sums over the nodes change.

    Wrap the whole chain in `gx.faults.inactive`, so that inactive nodes make no updates.

    Args:
      schedule: any column-stochastic schedule. The `step` that `update` gets picks the round.
      faults: what goes wrong. The count in the state picks the row of the tables, not `step`.
      running_sums: whether later messages bring the shares that were lost.
      axis_name, local_axis_name: as in `gx.sgp`.

    Raises:
      ValueError: if the faults are for another number of nodes, and in the same cases as `gx.sgp`.

    References:
      Hadjicostis, Vaidya, Dominguez-Garcia, "Robust Distributed Average Consensus via Exchange of
      Running Sums", IEEE Transactions on Automatic Control 2016, arXiv:1109.6392; with gradients
      Spiridonoff, Olshevsky, Paschalidis, "Robust Asynchronous Stochastic Gradient-Push", JMLR
      2020, arXiv:1811.03982. After their recurrence; the papers' text was not available.

    >>> import jax, jax.numpy as jnp, numpy as np, gossipjax as gx
    >>> lost_at_first = np.arange(3)[:, None, None] > np.zeros((2, 2))  # [T, N, N]
    >>> faults = gx.faults.Faults(2, arrives=lost_at_first)
    >>> tx = gx.faults.sgp(gx.topology.ring(2), faults)
    >>> def two_steps(z):
    ...     state = tx.init(z)
    ...     for step in range(2):
    ...         updates, state = tx.update(jnp.zeros(()), state, z, step=step)
    ...         z = z + updates
    ...     return z * state.weight, gx.faults.account(z, state).held.weight
    >>> [v.tolist() for v in jax.vmap(two_steps, axis_name="nodes")(jnp.array([0.0, 4.0]))]
    [[3.0, 1.0], [2.0, 2.0]]
    """
    require_schedule(schedule, "gx.faults.sgp")
    require_faults(faults, schedule.size, "gx.faults.sgp")
    route = Wire(axis_name, local_axis_name)
    plan = ExchangePlan(schedule, wire=route)
    links = Links(schedule, faults, route)

    def init(params: optax.Params) -> GossipState:
        state = init_state(params, plan, push_sum=True)
        zeros = PushSum(jnp.zeros_like(state.weight), zeros_like_model(params))
        # The state does not hold running sums, which would grow without bound and lose digits in
        # float32. It holds their difference between the two ends of a link: what is on its way.
        shape = (links.count, links.capacity)
        queue = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(*shape, *x.shape)), zeros)
        on_the_way = {
            "due": links.no_message(state.weight),  # steps until each message arrives
            "queue": queue,  # the messages, at their sender
            "mailbox": jax.tree.map(jnp.zeros_like, zeros),  # what waits for an inactive receiver
        }
        extra = {LINKS: Extra(on_the_way, "restart")}
        if faults.noise or not running_sums:
            extra[LOST] = Extra(jax.tree.map(jnp.zeros_like, zeros), "restart")
        return state._replace(in_flight=zeros, extra=extra)

    def combine(x: Any, updates: Any, state: GossipState, step: StepLike) -> Combined:
        """Sends this node's shares, and adds what arrives; `x` are the numerators."""
        # `shares`, `new_due`, `messages` are `[L, ...]`; `queue`, `due` are `[L, D + 1, ...]`.
        on_the_way = state.kept(LINKS)
        mass = PushSum(state.weight, add(x, updates))
        shares = links.shares(step, state.count)
        new_due = links.due(shares, state.count)
        sent = jax.tree.map(
            lambda leaf: add_axes(shares.astype(leaf.dtype), leaf[None]) * leaf[None], mass
        )
        mass = jax.tree.map(lambda leaf, parts: leaf - parts.sum(axis=0), mass, sent)
        changes = {}
        if not running_sums:  # a lost share leaves the queue, and is counted as lost
            is_lost = (shares > 0) & (new_due == NEVER)
            lost_now = jax.tree.map(partial(_select, is_lost), sent)
            sent = subtract(sent, lost_now)
            changes[LOST] = add(state.kept(LOST), _sum_leading(lost_now, axes=1))
        queue = jax.tree.map(links.push, on_the_way["queue"], sent)
        due = links.push_due(on_the_way["due"], new_due)
        arrives = due == 0
        if running_sums:  # a message brings all earlier messages of its link
            arrives = jnp.cumsum(arrives, axis=1) > 0
        messages = jax.tree.map(lambda leaf: _select(arrives, leaf).sum(axis=1), queue)
        queue = jax.tree.map(partial(_select, ~arrives), queue)
        has_message = arrives.any(axis=1).astype(messages.weight.dtype)
        received = links.exchange((messages, has_message if faults.noise else None))
        mailbox = on_the_way["mailbox"]
        for link, (message, has_arrived) in enumerate(received):
            if faults.noise:
                noise = _draw_noise(faults, message.x, state.count, link, route)
                # A link on which nothing arrives has no noise either.
                noise = jax.tree.map(partial(_select, has_arrived > 0), noise)
                message = message._replace(x=add(message.x, noise))
                lost = changes.get(LOST, state.kept(LOST))
                changes[LOST] = lost._replace(x=subtract(lost.x, noise))
            mailbox = add(mailbox, message)
        # A node that is not active leaves its messages in the mailbox until it is active again.
        reads_mail = is_active(faults, state.count, route.axis_name)
        read = jax.tree.map(partial(_select, reads_mail), mailbox)
        mass = add(mass, read)
        mailbox = subtract(mailbox, read)
        on_the_way = {"due": due, "queue": queue, "mailbox": mailbox}
        in_flight = add(mailbox, _sum_leading(queue, axes=2))
        state = state._replace(weight=mass.weight, in_flight=in_flight)
        return Combined(mass.x, state.keep(links=on_the_way, **changes))

    return gossip_transform("gx.faults.sgp", plan, init, combine)


def dpsgd(
    schedule: Schedule,
    faults: Faults,
    *,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """D-PSGD, but nodes use their own model for one that does not arrive. Put it *last* in a chain.

    Let `y = x + u`, and let `m_j` be the model `y_j` that arrives at node `i`, late and with noise:

        x_i <- y_i + sum_j P[i, j] (m_j - y_i)    over the j whose message arrives at this step

    If several messages arrive on a link, the one that was sent last counts. Rows sum to 1 but
    columns do not, so the mean of the models drifts, by no more than the models differ. Without
    faults the result is that of `gx.dpsgd` with `order="adapt-then-combine"`. To keep the mean, let
    edges fail in both directions: `gx.dpsgd(gx.faults.apply(schedule, faults, keep="both"))`.

    `gx.faults.dpsgd` is a simulation. `extra["links"]` in the state holds the last `D + 1` models
    of each node, and each step exchanges one model per link.

    Args:
      schedule: a doubly stochastic schedule. With delays the schedule may have one round only,
        because the weights of messages from several rounds could sum to more than 1.
      faults, axis_name, local_axis_name: as in `gx.faults.sgp`.

    Raises:
      ValueError: in the same cases as `gx.faults.sgp`, and if there are delays and several rounds.

    >>> import jax, jax.numpy as jnp, numpy as np, gossipjax as gx
    >>> to_node_1 = np.array([[[True, False], [True, True]]])  # [T, N, N]
    >>> tx = gx.faults.dpsgd(gx.topology.ring(2), gx.faults.Faults(2, arrives=to_node_1))
    >>> def update(x):
    ...     return x + tx.update(jnp.zeros(()), tx.init(x), x, step=0)[0]
    >>> jax.vmap(update, axis_name="nodes")(jnp.array([0.0, 4.0])).tolist()
    [0.0, 2.0]
    """
    require_doubly_stochastic(schedule, "gx.faults.dpsgd")
    require_faults(faults, schedule.size, "gx.faults.dpsgd")
    if faults.max_delay and len(schedule.rounds) > 1:
        raise ValueError(
            "the schedule of gx.faults.dpsgd must have one round if messages are late, got "
            f"{len(schedule.rounds)} different ones and delays of up to {faults.max_delay} steps: "
            "take ring or exponential, or gx.faults.sgp."
        )
    route = Wire(axis_name, local_axis_name)
    plan = ExchangePlan(schedule, wire=route)
    links = Links(schedule, faults, route)

    def init(params: optax.Params) -> GossipState:
        state = init_state(params, plan)
        model = zeros_like_model(params)
        like = jnp.zeros_like(jax.tree.leaves(model)[0], shape=())
        history = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(links.capacity, *x.shape)), model)
        shares = jnp.zeros_like(like, shape=(links.count, links.capacity))
        # `history` holds the last D + 1 models that this node sent, and `shares` their weights.
        on_the_way = {"due": links.no_message(like), "shares": shares, "history": history}
        return state._replace(extra={LINKS: Extra(on_the_way, "restart")})

    def combine(x: Any, updates: Any, state: GossipState, step: StepLike) -> Combined:
        """Sends this node's newest model, and moves towards the models that arrive."""
        # `due` and `shares` are `[links, D + 1]`, `history` is `[D + 1, ...]`: the newest first.
        on_the_way = state.kept(LINKS)
        y = add(x, updates)
        new_shares = links.shares(step, state.count)
        due = links.push_due(on_the_way["due"], links.due(new_shares, state.count))
        shares = jnp.concatenate([new_shares[:, None], on_the_way["shares"][:, :-1]], axis=1)
        history = jax.tree.map(
            lambda old, new: jnp.concatenate([new[None], old[:-1]]), on_the_way["history"], y
        )
        arrives = due == 0
        # If several messages arrive on a link, the youngest counts. It is then removed, and so are
        # all older messages of the link, which may arrive later.
        is_done = jnp.cumsum(arrives, axis=1) > 0
        youngest = arrives.argmax(axis=1)
        messages = jax.tree.map(lambda leaf: leaf[youngest], history)
        sent_shares = jnp.take_along_axis(shares, youngest[:, None], axis=1)[:, 0]
        sent_shares = jnp.where(arrives.any(axis=1), sent_shares, jnp.zeros_like(sent_shares))
        receives = is_active(faults, state.count, route.axis_name)
        new = y
        for link, (message, share) in enumerate(links.exchange((messages, sent_shares))):
            if faults.noise:
                message = add(message, _draw_noise(faults, message, state.count, link, route))
            share = jnp.where(receives, share, jnp.zeros_like(share))
            # new + share (message - y)
            new = jax.tree.map(partial(_move_towards, share), new, message, y)
        on_the_way = {"due": jnp.where(is_done, NEVER, due), "shares": shares, "history": history}
        return Combined(new, state.keep(links=on_the_way))

    return gossip_transform("gx.faults.dpsgd", plan, init, combine)


class Account(NamedTuple):
    """Says where the mass of all nodes is: each part is a `PushSum` of numerators and weights.

        held + in_flight + lost = start + sum of the updates    (for the weights: N)

    Attributes:
      held: the mass that the nodes hold.
      in_flight: the mass in messages that are on their way or wait for a node that is not active.
      lost: the mass in messages that were lost, less the noise that was added.

    >>> part = PushSum(jnp.ones(()), jnp.ones(2))
    >>> sum(account.weight.item() for account in Account(part, part, part))
    3.0
    """

    held: PushSum
    in_flight: PushSum
    lost: PushSum


def account(
    params: optax.Params, opt_state: optax.OptState, *, axis_name: str | None = None
) -> Account:
    """Returns the mass of all nodes after any step of a chain with `gx.faults.sgp`, on every node.

    Args:
      params: the parameters that the user holds, `[...]` per node.
      opt_state: the state of `gx.faults.sgp`, or of a chain that contains it.
      axis_name: the mapped axis of the nodes, by default the one that `gx.faults.sgp` was given.

    Raises (when traced):
      ValueError: if the axis is missing, or the chain has no `gx.faults.sgp`.

    >>> import gossipjax as gx
    >>> tx = gx.faults.sgp(gx.topology.ring(4), gx.faults.Faults(4))
    >>> nodes = gx.Nodes(4)
    >>> params, state = nodes.init(tx, jnp.ones(2))
    >>> nodes.run(gx.faults.account, params, state).held.weight.tolist()
    [4.0, 4.0, 4.0, 4.0]
    """
    state = gossip_state(opt_state)
    if state is None or state.in_flight is None or LINKS not in (state.extra or {}):
        raise ValueError(
            "opt_state of gx.faults.account must be of a chain with gx.faults.sgp, got another: "
            "gx.diagnostics.total_mass takes any."
        )
    gossiped_params = gossiped(params, state)
    held = PushSum(state.weight, numerators(gossiped_params, state))
    zeros = jax.tree.map(jnp.zeros_like, held)
    lost = state.kept(LOST) if LOST in state.extra else zeros
    in_flight = mass_in_flight(gossiped_params, state)
    wire = Wire(state.wire.axis_name if axis_name is None else axis_name)
    return Account(*(node_sum(mass, wire) for mass in (held, in_flight, lost)))


def _sum_leading(tree: Any, axes: int) -> Any:
    """Sums every leaf of a tree over its first `axes` axes."""
    return jax.tree.map(lambda leaf: leaf.sum(axis=tuple(range(axes))), tree)


def _select(condition: jax.Array, leaf: jax.Array) -> jax.Array:
    """Returns the leaf where a condition on its first axes holds, else zeros, even for NaN."""
    return jnp.where(add_axes(condition, leaf), leaf, jnp.zeros_like(leaf))


def _move_towards(
    weight: jax.Array, new: jax.Array, message: jax.Array, own: jax.Array
) -> jax.Array:
    """Returns `new + weight (message - own)`; `new` if the weight is 0, even for a NaN message."""
    moved = new + weight.astype(new.dtype) * (message - own)
    return jnp.where(weight > 0, moved, new)


def _draw_noise(faults: Faults, like: Any, count: jax.Array, link: int, wire: Wire) -> Any:
    """Draws the normal noise of what arrives at this node on a link at update number `count`."""
    key = jax.random.key(faults.seed, impl="threefry2x32")
    for number in (count, jax.lax.axis_index(wire.axis_name), link):
        key = jax.random.fold_in(key, number)
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(key, len(leaves))
    noise = [
        jnp.asarray(faults.noise, leaf.dtype) * jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, noise)
