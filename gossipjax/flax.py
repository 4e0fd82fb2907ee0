"""gossipjax in programs of flax: a `TrainState` that passes the step to the gossip.

This module needs flax; the rest of gossipjax does not. With NNX you do not need this module,
because `nnx.Optimizer.update(model, grads, step=step)` passes the step on.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.training.train_state
import optax

__all__ = ["TrainState"]


class TrainState(flax.training.train_state.TrainState):
    """flax's `TrainState`, whose `apply_gradients` takes the number of the step.

    flax's own `apply_gradients` calls `tx.update` without a step. The gossip then counts its
    updates, the nodes agree on the count by a small all-reduce, and one program contains all
    rounds. With `step`, each program contains one round, and its exchange can start early.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> nodes = gx.Nodes(2)
    >>> tx = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.ring(2)))
    >>> state = gx.flax.TrainState.create(apply_fn=jnp.dot, params={"w": jnp.zeros(3)}, tx=tx)
    >>> def train_step(state, x, step):
    ...     grads = jax.grad(lambda params: state.apply_fn(params["w"], x).sum())(state.params)
    ...     return state.apply_gradients(grads=grads, step=step)
    >>> program = nodes.spmd(train_step, static_argnums=2)
    >>> state = nodes.replicate(state)
    >>> for step in range(2):
    ...     batch = jnp.ones((2, 3))
    ...     state = program(state, batch, gx.canonical_step(state.opt_state, step))
    >>> state.step.tolist()
    [2, 2]
    """

    def apply_gradients(self, *, grads: Any, step: Any = None, **kwargs: Any) -> Any:
        """Calls flax's `apply_gradients` with `tx.update(..., step=step)`.

        Args:
          grads: the gradients of this node.
          step: the number of the step: an integer, best taken from `gx.canonical_step`, or a traced
            scalar that is the same on all nodes. With None, the gossip counts its updates.
          **kwargs: fields to replace.
        """
        # flax's method calls `tx.update` without a step: for this call, put the step into `tx`.
        update = functools.partial(optax.with_extra_args_support(self.tx).update, step=step)
        with_step = self.replace(tx=optax.GradientTransformation(self.tx.init, update))
        new = super(TrainState, with_step).apply_gradients(grads=grads, **kwargs)
        return new.replace(tx=self.tx)
