"""The model whose train steps are compiled for chips that are not here, and their lowering."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gossipjax as gx


class MlpSpec(NamedTuple):
    """An MLP of `layers` matrices `[width, width]` and biases, on `batch` examples per node."""

    layers: int
    width: int
    batch: int

    @property
    def params(self) -> list[dict[str, jax.ShapeDtypeStruct]]:
        """Parameters of one node."""
        layer = {"w": (self.width, self.width), "b": (self.width,)}
        return [
            {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in layer.items()}
            for _ in range(self.layers)
        ]

    @property
    def examples(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Inputs and targets of one node."""
        shape = jax.ShapeDtypeStruct((self.batch, self.width), jnp.float32)
        return {"x": shape, "y": shape}

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.layers * self.width * (self.width + 1)


def compute_loss(params: Any, examples: Any) -> jax.Array:
    """Mean squared error of the MLP."""
    x = examples["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"][None])
    return jnp.mean((x - examples["y"]) ** 2)


def lower_step(
    tx: optax.GradientTransformationExtraArgs, mlp: MlpSpec, mesh: Mesh, step: int | None
) -> Any:
    """Lowers the train step for the round of the static step number `step`.

    Without a number the step is traced, and the program holds all rounds. The mesh has the axis
    `nodes`, and may have `local`, which splits a node's examples.
    """

    def train_step(params: Any, opt_state: Any, examples: Any, step: Any) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(compute_loss)(params, examples)
        updates, opt_state = tx.update(grads, opt_state, params, step=step)
        return optax.apply_updates(params, updates), opt_state, loss

    nodes = gx.Nodes(mesh=mesh)

    def stack(x: Any, spec: P) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct((nodes.size, *x.shape), x.dtype, sharding=sharding)

    program = nodes.spmd(
        train_step,
        static_argnums=() if step is None else 3,
        shared_argnums=3 if step is None else (),
        donate_argnums=(0, 1),
        local_argnums=2,
    )
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    arguments = (mlp.params, jax.eval_shape(tx.init, mlp.params), mlp.examples)
    specs = (P("nodes"), P("nodes"), P(*mesh.axis_names))
    stacked = (
        jax.tree.map(partial(stack, spec=spec), argument)
        for argument, spec in zip(arguments, specs, strict=True)
    )
    return program.lower(*stacked, number if step is None else step)
