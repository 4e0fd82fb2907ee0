"""Models that are sharded inside a node: which device has which part, and functions of the parts.

The mesh then has further axes inside the nodes, such as `gx.launch.mesh(4, fsdp=2)`: each node is a
mesh of its own. `gx.spmd` is manual over the axis of the nodes alone. Over the other axes, the
inner ones, XLA partitions the computation (GSPMD) as the arrays are sharded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from gossipjax.serialization import written_by_flax

Path = tuple[Any, ...]

WHOLE = PartitionSpec()
MAX_COPIES = 1.5  # how often the devices of a node may have a value, on average over the model


def is_spec(part: Any) -> bool:
    """Says whether `part` is a spec: a `PartitionSpec`, or None for a whole array."""
    return part is None or isinstance(part, PartitionSpec)


def _leaves_by_path(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[Path, Any]:
    """Returns the leaves of a tree by their paths; the paths leave out flax's boxes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {_without_box(path): leaf for path, leaf in leaves}


def _without_box(path: Path) -> Path:
    """Returns the path of a parameter without the last keys `value`, which lead into flax's box.

    Paths are compared without, because `nnx.Optimizer` puts other boxes around its state.
    """
    while path and getattr(path[-1], "name", None) == "value":
        path = path[:-1]
    return tuple(path)


def _shapes_of(tree: Any) -> dict[Path, tuple[int, ...]]:
    return {path: jnp.shape(leaf) for path, leaf in _leaves_by_path(tree).items()}


def is_box(part: Any) -> bool:
    """Says whether `part` is a boxed parameter: flax.linen's `Partitioned`, NNX's `Variable`."""
    return hasattr(part, "get_partition_spec") or hasattr(part, "get_metadata")


def spec_of_box(box: Any) -> PartitionSpec | None:
    """Returns the spec with which flax has annotated a parameter; None if it has none."""
    if hasattr(box, "get_partition_spec"):
        return box.get_partition_spec()
    names = box.get_metadata("out_sharding", None)
    return None if names is None else PartitionSpec(*names)


def _shorten(spec: PartitionSpec) -> PartitionSpec:
    """Leaves out None at the end of a spec, so that equal shardings have equal specs."""
    parts = list(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def axes_of(spec: PartitionSpec) -> list[str]:
    """Returns the axes over which an array of this spec is sharded."""
    parts = [part if isinstance(part, tuple) else (part,) for part in spec]
    return [axis for part in parts for axis in part if axis is not None]


@written_by_flax
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Specs:
    """How the parameters are sharded inside a node, by path: static data of a state."""

    by_path: tuple[tuple[Path, PartitionSpec], ...]  # each spec is over the inner axes
    # Of the parameters that the state was made for.
    shapes: tuple[tuple[Path, tuple[int, ...]], ...] = dataclasses.field(default=(), compare=False)

    @classmethod
    def make(cls, specs: Any) -> Specs:
        """Returns the `Specs` of a pytree of `PartitionSpec`s, or of None for a whole parameter."""
        leaves = _leaves_by_path(specs, is_spec)
        for path, spec in leaves.items():
            if not is_spec(spec):
                raise ValueError(
                    f"specs{jax.tree_util.keystr(path)} must be a jax.sharding.PartitionSpec "
                    "over the axes inside a node, or None for a parameter that each device has "
                    f"whole, got {spec!r}."
                )
        return cls(tuple((path, _shorten(spec or WHOLE)) for path, spec in leaves.items()))

    @classmethod
    def of_annotations(cls, params: Any) -> Specs:
        """Returns the `Specs` that flax's boxes around the parameters contain."""
        parts = jax.tree.leaves(params, is_leaf=is_box)
        if not any(map(is_box, parts)):
            raise ValueError(
                "specs must be given if the parameters are not annotated by flax, as "
                "nn.with_partitioning does, got none annotated: give a PartitionSpec for each, "
                "such as gx.fsdp_specs(params, mesh)."
            )

        def spec_of(part: Any) -> Any:  # one spec for each leaf inside a box
            spec = spec_of_box(part) if is_box(part) else None
            return jax.tree.map(lambda _: spec or PartitionSpec(), part)

        return cls.make(jax.tree.map(spec_of, params, is_leaf=is_box))

    def for_params(self, params: Any) -> Specs:
        """Returns these specs together with the shapes of their parameters."""
        return dataclasses.replace(self, shapes=tuple(_shapes_of(params).items()))

    @functools.cached_property
    def _spec_of(self) -> dict[Path, PartitionSpec]:
        return dict(self.by_path)

    def of_path(self, path: Path) -> PartitionSpec:
        """Returns the spec of one parameter."""
        return self._spec_of[_without_box(path)]

    @property
    def axes(self) -> list[str]:
        """The axes that the specs name."""
        return sorted({axis for _, spec in self.by_path for axis in axes_of(spec)})

    def of(
        self,
        tree: Any,
        like: Any = None,
        others: Any = WHOLE,
        sizes: Mapping[str, int] | None = None,
    ) -> Any:
        """Returns the specs of a pytree that contains trees like the parameters; see `state_specs`.

        `like` are the parameters, or None for those that the state was made for. Other arrays get
        the spec `others`; by default they are whole. With the `sizes` of the inner axes, pieces of
        parameters, as `layer_fragments` cuts them, are sharded like the parameters.
        """
        shapes = dict(self.shapes) if like is None else _shapes_of(like)
        # Leave out keys with which all paths begin: the paths in an optimizer's state lack them, if
        # `like` is a part of a larger tree.
        keys_by_depth = zip(*[path[:-1] for path in shapes], strict=False)
        common = itertools.takewhile(lambda keys: len(set(keys)) == 1, keys_by_depth)
        shared = len(list(common))
        shapes = {path[shared:]: (shape, path) for path, shape in shapes.items()}

        def spec_of(path: Path, leaf: Any) -> Any:
            """Returns the spec of the parameter that an array is like, or else `others`."""
            shape = jnp.shape(leaf)
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):  # a key, a count
                return others
            path = _without_box(path)
            for start in range(len(path) + 1):  # ever shorter ends of the path
                expected, param = shapes.get(path[start:], (None, None))
                if expected is None or param not in self._spec_of:
                    continue
                leading = len(shape) - len(expected)
                spec = self._spec_of[param]
                is_piece = not leading and sizes and _find_uneven(spec, shape, sizes) is None
                if is_piece or (leading >= 0 and shape[leading:] == expected):
                    return PartitionSpec(*[None] * leading, *spec)
            return others

        return jax.tree_util.tree_map_with_path(spec_of, tree)

    def require(self, params: Any, sizes: Mapping[str, int], may_repeat: bool = False) -> None:
        """Raises `ValueError` unless these specs fit parameters and inner axes of these sizes.

        Without a mesh `sizes` is empty, and only paths are checked. With `may_repeat`, several
        devices of a node may have, and send, the same values.
        """
        leaves = _leaves_by_path(params)
        if not leaves:
            return
        for path, leaf in leaves.items():
            name = f"specs{jax.tree_util.keystr(path)}"
            if path not in self._spec_of:
                raise ValueError(
                    "specs must have a PartitionSpec, or None, for every parameter, got none for "
                    f"params{jax.tree_util.keystr(path)}: make them of the parameters, by "
                    "jax.tree.map or gx.fsdp_specs, or give none, gx.sharded(tx), if flax "
                    "annotates the parameters."
                )
            _require_fits(name, self._spec_of[path], jnp.shape(leaf), sizes)
        if not may_repeat:
            self._require_parts(leaves, sizes)

    def _require_parts(self, leaves: Mapping[Path, Any], sizes: Mapping[str, int]) -> None:
        """Raises `ValueError` if a node would send values over `MAX_COPIES` times on average."""
        copies = {}  # devices of a node that have the same part of a parameter
        for path in leaves:
            axes = axes_of(self._spec_of[path])
            copies[path] = math.prod(size for axis, size in sizes.items() if axis not in axes)
        values = {path: math.prod(jnp.shape(leaf)) for path, leaf in leaves.items()}
        sent = sum(copies[path] * values[path] for path in leaves)
        if sent <= MAX_COPIES * sum(values.values()):
            return
        worst = max(leaves, key=lambda path: (copies[path] - 1) * values[path])
        raise ValueError(
            f"parameters must be sharded inside a node, whose axes are {dict(sizes)}, got "
            f"params{jax.tree_util.keystr(worst)} of shape {list(jnp.shape(leaves[worst]))} with "
            f"the spec {self._spec_of[worst]}: {copies[worst]} devices of a node would each send "
            "it. Shard it over all of these axes; a model that each device of a node has whole "
            "belongs on a mesh with the axis 'local', whose devices share a message."
        )


def _require_fits(
    name: str, spec: PartitionSpec, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> None:
    """Raises `ValueError` unless a spec names inner axes only, which divide the shape evenly."""
    if not sizes:
        return
    for axis in axes_of(spec):
        if axis not in sizes:
            raise ValueError(
                f"{name} must name axes inside a node, {sorted(sizes)}, got {spec}: name the axes "
                "of the mesh, as gx.launch.mesh(nodes, fsdp=2) does."
            )
    devices = _find_uneven(spec, shape, sizes)
    if devices is not None:
        raise ValueError(
            f"{name} must split its parameter, of shape {list(shape)}, evenly, got {spec} over "
            f"{devices} devices: shard another axis, or leave it whole by None."
        )


def _find_uneven(
    spec: PartitionSpec, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> int | None:
    """Returns how many devices an axis is sharded over unevenly; None if there is no such axis."""
    for size, part in zip(shape, spec, strict=False):
        devices = math.prod(sizes[axis] for axis in axes_of(PartitionSpec(part)))
        if size % devices:
            return devices
    return None


def state_specs(tree: Any, params: Any, specs: Any) -> Any:
    """Returns the specs of a tree that contains trees like the parameters, as optimizer states do.

    Use the result to place a state, or in a `shard_map` of your own. An array is sharded like the
    parameter whose path is the end of the array's path, if both have the same shape apart from
    leading axes. Other arrays are whole.

    Args:
      tree: the state of one node: arrays or `jax.ShapeDtypeStruct`s, of whole models.
      params: the parameters of one node, whole.
      specs: a tree like `params` of `jax.sharding.PartitionSpec`s, or None for a whole parameter.

    Returns:
      A tree like `tree` of `PartitionSpec`s.

    Raises:
      ValueError: if `specs` are not like the parameters.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> from jax.sharding import PartitionSpec as P
    >>> params = {"w": jnp.ones((2, 4))}
    >>> state = optax.sgd(0.1, momentum=0.9).init(params)
    >>> gx.state_specs(state, params, {"w": P(None, "fsdp")})[0].trace
    {'w': P(None, 'fsdp')}
    """
    layout = Specs.make(specs)
    layout.require(params, {})
    return layout.of(tree, params)


def fsdp_specs(params: Any, mesh: Mesh, *, axis_name: str = "fsdp") -> Any:
    """Makes specs that shard each parameter over one axis inside a node, as FSDP does.

    Each parameter is sharded over its largest axis that the number of devices divides; of equally
    large axes, over the first. A parameter stays whole if the number divides none of its axes.

    Args:
      params: the parameters of one node, `[...]`: arrays or `jax.ShapeDtypeStruct`s.
      mesh: the mesh of the nodes, which contains the axis.
      axis_name: the axis inside a node.

    Returns:
      A tree like `params` of `jax.sharding.PartitionSpec`s, for `gx.sharded`.

    Raises:
      ValueError: if the mesh has no such axis.

    References:
      Rajbhandari et al., "ZeRO", SC 2020, arXiv:1910.02054, stage 3.

    >>> import jax, jax.numpy as jnp, numpy as np, gossipjax as gx
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("nodes", "fsdp"))
    >>> gx.fsdp_specs({"w": jnp.zeros((4, 6)), "b": jnp.zeros(())}, mesh)
    {'b': P(), 'w': P(None, 'fsdp')}
    """
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f"mesh must have the axis {axis_name!r}, got {mesh.axis_names}: "
            f"gx.launch.mesh(nodes, {axis_name}=2) makes one."
        )
    devices = mesh.shape[axis_name]

    def spec(leaf: Any) -> PartitionSpec:
        """Shards a parameter over the largest of its axes that `devices` divides."""
        shape = jnp.shape(leaf)
        divided = [axis for axis, size in enumerate(shape) if size and size % devices == 0]
        if not divided:
            return PartitionSpec()
        largest = max(divided, key=lambda axis: shape[axis])
        return PartitionSpec(*[None] * largest, axis_name)

    return jax.tree.map(spec, params)


# The specs of the `gx.sharded` whose functions JAX is tracing. See `use_specs`.
_specs_in_use: ContextVar[Any] = ContextVar("specs", default=None)


class ShardedState(NamedTuple):
    """State of `gx.sharded`."""

    inner: Any  # the state of the transform
    specs: Any  # static: how the parameters are sharded inside a node


def shard_specs(opt_state: Any) -> Specs | None:
    """Returns the specs that `gx.sharded` has put into a state, maybe of a chain; else None."""
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_sharded)
    return next((part.specs for part in leaves if _is_sharded(part)), None)


def _is_sharded(part: Any) -> bool:
    return isinstance(part, ShardedState)


def inner_axes(axis_name: str) -> dict[str, int]:
    """Returns the sizes of the axes inside a node that XLA partitions in the function being traced.

    These axes are Auto, while the axis of the nodes is manual. Outside of `gx.spmd` there are none.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if axis_name not in mesh.manual_axes:
        return {}
    return {name: mesh.shape[name] for name in mesh.auto_axes}


def require_whole(name: str, axis_name: str) -> None:
    """Raises `ValueError` if a model is sharded inside a node and `gx.sharded` is missing."""
    axes = inner_axes(axis_name)
    if any(size > 1 for size in axes.values()):
        raise ValueError(
            f"{name} must be inside gx.sharded if a node has further axes, got the axes {axes}: "
            "by itself it would gather whole models, which these axes shard. Write "
            f"gx.sharded(gx.{name}(...), specs), with a PartitionSpec for each parameter."
        )


def on_shards(
    fn: Callable[..., Any], specs: Specs, axis_name: str, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Wraps `fn` so that each device of a node runs it on its parts, by an inner `shard_map`.

    Inside `fn` all axes are then manual, so it sends parts and never gathers a model. If a node has
    no inner axes here, `fn` runs unchanged. Integers, such as static steps, stay integers.
    """

    def call(*args: Any) -> Any:
        """Runs `fn` on this device's parts of the arrays among `args`."""
        # `shard_map` takes arrays only: `run` puts the integers back between them.
        array_argnums = [i for i, arg in enumerate(args) if not isinstance(arg, int | np.integer)]

        def run(*parts: Any) -> Any:
            part_of = dict(zip(array_argnums, parts, strict=True))
            with use_specs(specs):
                return fn(*(part_of.get(i, arg) for i, arg in enumerate(args)))

        axes = inner_axes(axis_name)
        if axes:
            run = jax.shard_map(
                run,
                in_specs=tuple(in_specs[i] for i in array_argnums),
                out_specs=out_specs,
                axis_names=set(axes),
                check_vma=False,
            )
        return run(*(args[i] for i in array_argnums))

    return call


def constrain(tree: Any, specs: Specs | None, axis_name: str, like: Any = None) -> Any:
    """Tells XLA to shard arrays that are like a parameter as the specs say.

    Otherwise XLA may put whole results on every device. Arrays that are like no parameter stay as
    they are, and so do all arrays if a node has no inner axes here. `like` is as in `Specs.of`.
    """
    if specs is None or not inner_axes(axis_name):
        return tree

    def constrain_leaf(leaf: Any, spec: PartitionSpec | None) -> Any:
        return leaf if spec is None else jax.lax.with_sharding_constraint(leaf, spec)

    return jax.tree.map(constrain_leaf, tree, specs.of(tree, like, others=None))


@contextlib.contextmanager
def use_specs(specs: Specs) -> Iterator[None]:
    """Lets `specs_here` return these specs to functions that JAX traces within this context."""
    token = _specs_in_use.set(specs)
    try:
        yield
    finally:
        _specs_in_use.reset(token)


def specs_here() -> Specs | None:
    """Returns the specs of the `gx.sharded` around the traced function; None outside of any."""
    return _specs_in_use.get()
