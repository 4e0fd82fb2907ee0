"""Gossip of models that are sharded inside a node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gossipjax.exchanges.apply_if_finite import ApplyIfFiniteState
from gossipjax.exchanges.chain import find_exchanging
from gossipjax.exchanges.state import Exchanging
from gossipjax.exchanges.transform import require_state, require_transform
from gossipjax.sharding import ShardedState, Specs, axes_of, constrain, inner_axes, use_specs
from gossipjax.wire import FloatCodec


def sharded(
    tx: optax.GradientTransformation, specs: Any = None, *, axis_name: str = "nodes"
) -> optax.GradientTransformationExtraArgs:
    """Lets nodes gossip a model that is sharded inside a node: each device sends its own part.

    A node is a mesh of its own. Of a model of `B` bytes, each of the node's L devices sends one
    message of `B / L` bytes per round, to the same device of another node. No model is gathered.

        nodes = gx.Nodes(mesh=gx.launch.mesh(4, fsdp=2))
        specs = gx.fsdp_specs(params, nodes.mesh)
        tx = optax.chain(optax.adamw(3e-4), gx.sharded(gx.sgp(schedule), specs))
        params, opt_state = nodes.init(tx, params)          # [4, ...], in parts
        train_step = gx.TrainStep(gradients, tx, nodes=nodes)

    Put `gx.sharded` around the part that exchanges: the gossip at the end of a chain,
    `gx.allreduce` at its beginning, a whole chain or `gx.outer`. Only the exchanges run on the
    parts. Optimizers inside see whole arrays, which XLA partitions, as optimizers outside do.

    Under `gx.spmd` XLA partitions the inside of a node (`shard_map` is manual over the nodes
    alone). In a `shard_map` of your own over all axes, transforms get parts, and `tx` must be one
    gossip or `gx.allreduce`. Under `vmap`, and on a mesh without further axes, results equal those
    of `tx`. Make the state by `gx.Nodes.init`, which shards all of it; otherwise XLA may keep
    moments that start as zeros whole on each device.

    If a node has copies of a sharded model, as with `gx.launch.mesh(4, local=2, fsdp=2)`, average
    gradients by `gx.sharded(gx.allreduce(axis_name="local"), specs)`, and give the gossip
    `local_axis_name="local"`. If a parameter is whole on several devices of a node, each of these
    devices sends the parameter. If a parameter has several copies in a node, messages need full
    precision or bfloat16, because other codecs would round the copies differently.

    Args:
      tx: a transform of this library.
      specs: a tree like the parameters of `jax.sharding.PartitionSpec`s over the axes inside a node
        (`[...]`, without the node axis), or None for a whole parameter; `fsdp_specs` makes such a
        tree. A function of the parameters may return it, if the parameters are made later.
      axis_name: the mapped axis of the nodes, the same as for `tx`.

    You can restore a checkpoint of the state onto another mesh inside the nodes.

    Raises:
      ValueError: if an argument is of another kind. In `init` and `update`: if `specs` do not fit
        the parameters or the mesh, most of the model is whole on several devices, a codec would
        round copies differently, or `tx` contains more than one exchange in a `shard_map` over all
        axes.

    References:
      Rajbhandari et al., "ZeRO", SC 2020, arXiv:1910.02054; Assran et al., "Stochastic Gradient
      Push", ICML 2019, arXiv:1811.10792, section 6, for nodes of several devices.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> from jax.sharding import PartitionSpec as P
    >>> schedule = gx.topology.one_peer_exponential(2)
    >>> tx = optax.chain(optax.sgd(0.1), gx.sharded(gx.sgp(schedule), {"w": P("fsdp")}))
    >>> nodes = gx.Nodes(2)  # or of a mesh with the axes "nodes" and "fsdp"
    >>> params, state = nodes.init(tx, {"w": jnp.ones(4)})
    >>> gx.gossip_state(state).schedule.size
    2
    """
    tx = require_transform(tx, "tx of sharded")
    given = specs if specs is None or callable(specs) else Specs.make(specs)
    whole = _Sharded(tx, given, axis_name)
    return optax.GradientTransformationExtraArgs(whole.init, whole.update)


@dataclasses.dataclass(frozen=True)
class _Sharded:
    """Makes the `init` and `update` of `gx.sharded`."""

    tx: optax.GradientTransformationExtraArgs
    specs: Specs | Callable[[Any], Any] | None  # None: the annotations of the parameters say them
    axis_name: str

    def init(self, params: optax.Params) -> ShardedState:
        """Makes the state of `tx`, checks that it can exchange shards, and shards it."""
        given = Specs.make(self.specs(params)) if callable(self.specs) else self.specs
        specs = (given or Specs.of_annotations(params)).for_params(params)
        specs.require(params, inner_axes(self.axis_name))
        with use_specs(specs):
            state = self.tx.init(params)
        # An average of plain gradients has a state without leaves, and may use any axis.
        exchanges = [part for part in find_exchanging(state) if jax.tree.leaves(part)]
        for part in exchanges:
            if part.plan.wire.axis_name != self.axis_name:
                raise ValueError(
                    "axis_name of sharded must be the axis_name of tx, "
                    f"{part.plan.wire.axis_name!r}, got {self.axis_name!r}: give both "
                    "the axis of the nodes."
                )
        _require_same_copies(specs, params, exchanges)
        _require_no_optimizer(specs, state)
        return ShardedState(constrain(state, specs, self.axis_name), specs)

    def update(
        self,
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        """Calls `tx.update`; its exchanges find the specs by `specs_here`, and run on shards."""
        old, specs = require_state(state, ShardedState, "sharded")
        _require_no_optimizer(specs, old)
        specs.require(updates, inner_axes(self.axis_name))
        with use_specs(specs):
            results = self.tx.update(updates, old, params, **extra_args)
        updates, new = constrain(results, specs, self.axis_name)
        return updates, ShardedState(new, specs)


def _require_no_optimizer(specs: Specs, state: Any) -> None:
    """Raises `ValueError` if an optimizer inside would get parts instead of whole arrays.

    This happens in a `shard_map` that is manual inside the nodes as well.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    inside = state.inner_state if isinstance(state, ApplyIfFiniteState) else state
    is_one_exchange = isinstance(inside, Exchanging) and inside.inner is None
    if not set(specs.axes).isdisjoint(manual) and not is_one_exchange:
        raise ValueError(
            "gx.sharded must stand around one gossip or gx.allreduce alone in a shard_map over the "
            f"axes {manual}, where optimizers get parts for whole arrays, got the state of another "
            f"transform, {type(inside).__name__}: use gx.spmd, or shard_map(..., "
            "axis_names={'nodes'}), which leave the inside of a node to XLA."
        )


def _require_same_copies(specs: Specs, params: Any, exchanges: list[Any]) -> None:
    """Raises `ValueError` if a codec would round copies of a parameter in a node differently."""
    codec = next((c for part in exchanges if (c := part.plan.wire.codec) is not None), None)
    if codec is None:
        return
    axes = set(specs.axes)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        spec = specs.of_path(path)
        missing = axes - set(axes_of(spec))  # over these axes the parameter has copies
        dtype = jnp.promote_types(jnp.result_type(leaf), jnp.float32)
        values = jax.ShapeDtypeStruct((2,), dtype)
        # A plain type rounds each value by itself; other codecs scale by the values around it.
        rounds_copies_alike = isinstance(codec, FloatCodec) and not codec.is_scaled(values)
        if not missing or rounds_copies_alike:
            continue
        raise ValueError(
            f"wire must be None or bfloat16 where a parameter is whole on several devices of a "
            f"node, got {codec} and params{jax.tree_util.keystr(path)} of spec {spec}: its copies "
            f"would be rounded apart. Shard it over {', '.join(sorted(missing))} as well."
        )
