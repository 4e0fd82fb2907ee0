"""Simulates nodes that lie: what honest nodes hear of them is replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.collectives import select_for_node
from gossipjax.exchanges.transform import require_choice

Attack = Literal["sign flip", "alie", "inner product", "dissensus"]


@dataclasses.dataclass(frozen=True)
class Lying:
    """Wraps a robust rule: it gets lies instead of the messages of some nodes, the liars.

    The liars know all messages to each receiver `i`, and send each of them a different lie. Let
    `y_i` be the receiver's own value, `m` and `s` the mean and the standard deviation of each
    coordinate over `y_i` and the honest messages, and `e = strength`:

    - "sign flip": `-e y_l`, of the value that the liar `l` would have sent;
    - "alie" (a little is enough): `m - e s`;
    - "inner product": `-e m`;
    - "dissensus": `y_i - e sum_{j honest} P_ij (y_j - y_i) / sum_{l liars} P_il`, which for `e = 1`
      undoes the average and above pushes the receiver away from its neighbours.

    Give it wherever you would give a rule, for example to `gx.contrib.robust_gossip`. To attack the
    plain average, wrap `gx.contrib.ClippedGossip(radius=float("inf"))`.

    Args:
      rule: the rule, `rule(own, messages, weights, senders)`, that receivers use.
      liars: the numbers of the nodes that lie.
      attack: what they send.
      strength: `e`.

    Raises:
      ValueError: if there is no such attack, or the liars are no numbers.

    References:
      Baruch, Baruch, Goldberg, "A Little Is Enough", NeurIPS 2019, arXiv:1902.06156.
      Xie, Koyejo, Gupta, "Fall of Empires", UAI 2019, arXiv:1903.03936 (inner product).
      He, Karimireddy, Jaggi, "ClippedGossip", 2022, arXiv:2202.01545 (dissensus).

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> plain = gx.contrib.ClippedGossip(radius=float("inf"))
    >>> rule = gx.faults.Lying(plain, (1,), "dissensus", 2.0)
    >>> weights = jnp.full(2, 0.25)
    >>> rule(jnp.zeros(()), jnp.array([4.0, 4.0]), weights, jnp.array([0, 1])).item()
    -1.0
    """

    rule: Callable[[Any, Any, jax.Array, jax.Array], Any]
    liars: Sequence[int]
    attack: Attack
    strength: float = 1.0

    def __post_init__(self) -> None:
        require_choice(self.attack, "attack of Lying", get_args(Attack))
        is_list = isinstance(self.liars, Sequence)
        if not is_list or not all(isinstance(i, int | np.integer) for i in self.liars):
            raise ValueError(f"liars of Lying must be numbers of nodes, (3,), got {self.liars!r}.")
        object.__setattr__(self, "liars", tuple(map(int, self.liars)))

    def __call__(self, own: Any, messages: Any, weights: jax.Array, senders: jax.Array) -> Any:
        """Calls the rule of this receiver, with a lie in place of each message of a liar."""
        is_liar = jnp.isin(senders, np.asarray(self.liars, np.int32)) & (weights > 0)
        is_honest = ~is_liar & (weights > 0)
        honest_weights = jnp.where(is_honest, weights, 0)
        liar_weight = jnp.maximum(jnp.where(is_liar, weights, 0).sum(), 1e-6)  # never divide by 0

        def insert_lies(own: jax.Array, messages: jax.Array) -> jax.Array:
            """Puts lies in place of liars' messages `[K, ...]`; `own` is the receiver's leaf."""
            per_message = (-1, *[1] * (messages.ndim - 1))
            honest = is_honest.reshape(per_message)
            count = (1 + is_honest.sum()).astype(messages.dtype)  # of `y_i` and honest messages
            own = jnp.asarray(own)[None]
            known = jnp.concatenate([own, jnp.where(honest, messages, 0)])  # 0 for a lie
            mean = known.sum(axis=0, keepdims=True) / count
            squares = jnp.where(jnp.insert(honest, 0, True, axis=0), jnp.square(known - mean), 0)
            pull = honest_weights.reshape(per_message) * jnp.where(honest, messages - own, 0)
            lies = {
                "sign flip": -self.strength * messages,
                "alie": mean - self.strength * jnp.sqrt(squares.sum(axis=0)[None] / count),
                "inner product": -self.strength * mean,
                "dissensus": own - self.strength * (1 / liar_weight) * pull.sum(axis=0)[None],
            }
            return jnp.where(is_liar.reshape(per_message), lies[self.attack], messages)

        return self.rule(own, jax.tree.map(insert_lies, own, messages), weights, senders)


def shout(
    nodes: Sequence[int], factor: float, *, axis_name: str = "nodes"
) -> optax.GradientTransformation:
    """Simulates nodes whose updates are `factor` times too large. Put it *first* in a chain.

    A factor of -1 flips the sign of the gradients. `shout` works in front of any algorithm.

    >>> import jax, jax.numpy as jnp, gossipjax as gx
    >>> tx = gx.faults.shout([1], 1000.0)
    >>> update = jax.vmap(lambda u: tx.update(u, tx.init(u))[0], axis_name="nodes")
    >>> update(jnp.ones(3)).tolist()
    [1.0, 1000.0, 1.0]
    """

    def update(updates: Any, params: Any = None) -> Any:
        del params
        factors = np.ones(jax.lax.axis_size(axis_name))
        factors[list(nodes)] = factor
        return jax.tree.map(
            lambda u: u * select_for_node(factors, jnp.result_type(u), axis_name), updates
        )

    return optax.stateless(update)
