"""Functions of the parts of a model that is sharded inside a node."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax

from gossipjax.sharding._specs import Specs

# Of what is traced inside `gx.sharded`, whole or in parts.
_specs_here: ContextVar[Any] = ContextVar("specs", default=None)


class ShardedState(NamedTuple):
    """State of `gx.sharded`.

    Attributes:
      inner: the state of the transform. Messages in flight in it are trees like the parameters.
      specs: static: how the parameters are sharded inside a node.
    """

    inner: Any
    specs: Any


def shard_specs(opt_state: Any) -> Specs | None:
    """The specs in the state of a chain; None if nothing in it is sharded."""
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_sharded)
    return next((part.specs for part in leaves if _is_sharded(part)), None)


def _is_sharded(part: Any) -> bool:
    return isinstance(part, ShardedState)


def inner_axes(axis_name: str) -> dict[str, int]:
    """The sizes of the axes inside a node that XLA partitions here; none outside of `gx.spmd`.

    These are the Auto axes where the nodes' axis is manual.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name not in mesh.manual_axes:
        return {}
    return {name: mesh.shape[name] for name in mesh.auto_axes}


def require_whole(name: str, axis_name: str) -> None:
    """Raises `ValueError` where a model is sharded inside a node and `gx.sharded` is missing."""
    axes = inner_axes(axis_name)
    if any(size > 1 for size in axes.values()):
        raise ValueError(
            f"{name} must stand in gx.sharded where a node has further axes, got the axes {axes}: "
            "as a message of the whole model it would gather what they shard. Write "
            f"gx.sharded(gx.{name}(...), specs), with a PartitionSpec for each parameter."
        )


def on_shards(
    fn: Callable[..., Any], specs: Specs, axis_name: str, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`fn` run by each device of a node on its own parts, where XLA partitions the inside.

    There all axes are manual. Elsewhere it runs on what it is given.
    """

    def run(*args: Any) -> Any:
        with use_specs(specs):
            return fn(*args)

    axes = inner_axes(axis_name)
    if not axes:
        return run
    return jax.shard_map(
        run, in_specs=in_specs, out_specs=out_specs, axis_names=set(axes), check_vma=False
    )


def constrain(tree: Any, specs: Specs | None, like: Any, axis_name: str) -> Any:
    """`tree`, sharded as `specs` say where XLA partitions the inside of a node.

    Without it XLA chooses how results are sharded, and may choose whole ones.
    """
    if specs is None or not inner_axes(axis_name):
        return tree
    return jax.lax.with_sharding_constraint(tree, specs.of(tree, like))


@contextlib.contextmanager
def use_specs(specs: Specs) -> Iterator[None]:
    """What is traced in this context finds the specs by `specs_here`."""
    token = _specs_here.set(specs)
    try:
        yield
    finally:
        _specs_here.reset(token)


def specs_here() -> Specs | None:
    """The specs of `gx.sharded` inside which a function is traced, on whole arrays or on parts."""
    return _specs_here.get()
