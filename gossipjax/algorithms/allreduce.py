"""AllReduce SGD, the exact baseline (papers call it AR-SGD, S-PSGD or C-PSGD)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gossipjax.collectives import (
    axis_size,
    cast_like,
    init_basis,
    mean_of_encoded,
    mean_of_low_rank,
    node_mean,
    require_floats,
    varies,
)
from gossipjax.exchanges.model import add, zeros_like_model
from gossipjax.exchanges.plan import ExchangePlan
from gossipjax.exchanges.state import Exchanging
from gossipjax.exchanges.transform import exchange_on_parts, require_plan, require_state
from gossipjax.serialization import register_with_flax
from gossipjax.sharding import require_whole
from gossipjax.wire import FloatCodec, Wire, WireLike


@Exchanging.register
class ErrorFeedback(NamedTuple):
    """State of `allreduce` for one node: only the plan, unless its codec leaves something out."""

    count: Any = None  # int32 scalar, the number of averages so far
    error: Any = None  # `e`, like the gradients: what the codec has left out so far
    plan: Any = ExchangePlan()  # static
    basis: Any = None  # `Q` of `gx.wire.low_rank` for each leaf, the same on all nodes

    inner = None
    mixes_models = False


def allreduce(
    *, axis_name: str = "nodes", wire: WireLike | None = None
) -> optax.GradientTransformationExtraArgs:
    """Averages the gradients over the axis: `g_i <- (1/N) sum_j g_j`. Put it *first* in a chain.

    If all nodes start with equal parameters, their parameters stay equal. You can also average only
    over the devices of a node: `allreduce(axis_name="local")` averages inside a server, while
    servers gossip models. The learning rate is not scaled by N.

    Args:
      axis_name: the mapped axis that is averaged over.
      wire: the form of messages: a narrower type, such as `jnp.bfloat16`, any codec, or
        `gx.wire.low_rank(rank)`, which is PowerSGD. With a type, each value is rounded once before
        the sum, which is float32 at least, and once after the sum. All nodes get the same values,
        so equal models stay equal. Derivatives equal the derivatives of the exact average. With an
        integer or sparse codec `C`, every node keeps in its state what the codec left out, and adds
        it to the next gradient (error feedback):

            e_i <- e_i + g_i;    q_i = C(e_i);    e_i <- e_i - q_i;    g_i <- (1/N) sum_j q_j

        Sparse messages are gathered by all nodes, which takes `N - 1` times their bytes. With
        `low_rank`, `q` is the average that all nodes use: `q = M^(e_1, ..., e_N)`. There is one `e`
        per node, so over the devices of one node you can only give a type.

    Raises:
      ValueError: if `wire` is neither a floating-point type of at least 16 bits nor a codec. When
        traced: if the axis is missing, a leaf is not floating-point, or the state has no error for
        a codec that needs one. Under a `shard_map` with `check_vma=True`: if a gradient does not
        vary over the axis, because its parameter is replicated and autodiff has already summed it.

    References:
      Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
      arXiv:1811.10792, section 2 (AR-SGD) and section 6 (servers of 8 GPUs).
      Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
      ICML 2019, arXiv:1901.09847.
      Vogels et al., "PowerSGD", NeurIPS 2019, arXiv:1905.13727.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = optax.chain(gx.allreduce(), optax.sgd(1.0))
    >>> def update(g):
    ...     return tx.update(g, tx.init(g))[0]
    >>> jax.vmap(update, axis_name="nodes")(jnp.array([1.0, 3.0])).tolist()
    [-2.0, -2.0]
    """
    route = Wire.make(axis_name, None, wire, takes_sparse=True, takes_low_rank=True)
    codec = route.codec
    plan = ExchangePlan(wire=route)
    low_rank = route.low_rank
    keeps_error = route.form is not None and not isinstance(codec, FloatCodec)

    def init(params: optax.Params) -> optax.OptState:
        """Makes the state: without a codec that leaves something out, it contains no arrays."""
        register_with_flax()
        if not keeps_error:
            return ErrorFeedback(plan=plan)
        require_floats(params, "params")
        state = ErrorFeedback(jnp.zeros((), jnp.int32), zeros_like_model(params), plan)
        if low_rank is None:
            return state
        # The shapes of the parameters say how many bytes both factors have.
        return state._replace(
            plan=dataclasses.replace(plan, factors=low_rank.find_sizes(params, params)),
            basis=init_basis(params, low_rank, axis_name),
        )

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        received: optax.Updates | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Averages the gradients `updates` over the nodes, with error feedback for some codecs."""
        del params, extra_args
        require_floats(updates, "updates")
        axis_size(axis_name)  # raises if there is no such axis
        require_whole("allreduce", axis_name)
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates):
            if not varies(leaf, axis_name):
                raise ValueError(
                    f"updates{jax.tree_util.keystr(path)} must vary over {axis_name!r}, got one "
                    "that does not: its parameter is replicated there, so autodiff has summed the "
                    f"gradient already. Take gradients at jax.lax.pcast(params, {axis_name!r}, "
                    "to='varying'), or use check_vma=False; if the loss was averaged over the "
                    "axis, drop allreduce."
                )
        old = require_state(state, ErrorFeedback, "allreduce")
        require_plan(plan, old.plan, "allreduce")
        if received is not None:  # another program has averaged the gradients in buckets
            return received, old
        if not keeps_error:
            return node_mean(updates, axis_name, codec), old
        # Error feedback: a node also sends what the codec left out of its earlier messages.
        message = add(old.error, updates)
        basis = None
        if low_rank is not None:
            mean, error, basis = mean_of_low_rank(message, old.basis, route)
        else:
            mean, error = mean_of_encoded(message, route, route.make_key(old.count))
        # An error that is not finite spoils one step; if it were kept, it would spoil all others.
        error = jax.tree.map(lambda e: jnp.where(jnp.isfinite(e), e, jnp.zeros_like(e)), error)
        count = optax.safe_increment(old.count)
        return cast_like(mean, updates), old._replace(count=count, error=error, basis=basis)

    return exchange_on_parts(init, update, axis_name)
