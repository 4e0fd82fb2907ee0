"""Chips to compile for, which need not be present, and the model whose train steps are compiled."""

import os
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gossipjax as gx

TargetKind = Literal["tpu", "gpu"]

GPU_DESCRIPTION = Path(__file__).parent / "h100.textproto"


class Target(NamedTuple):
    """Chips to compile for, one node each."""

    description: str
    kind: TargetKind
    nodes: int
    topology: str  # chips in a grid, or slices x hosts x GPUs of a host


TARGETS = (
    Target("8 TPU v5e", "tpu", 8, "v5e:2x4"),
    Target("64 TPU v5e", "tpu", 64, "v5e:8x8"),
    Target("8 H100", "gpu", 8, "1x8x1"),
)
COMPILERS: dict[TargetKind, tuple[str, ...]] = {
    "tpu": ("libtpu",),
    "gpu": (
        *("jax-cuda12-plugin", "jax-cuda12-pjrt"),
        *("nvidia-cuda-nvcc-cu12", "nvidia-nvshmem-cu12"),
    ),
}


def find_missing_packages(kind: TargetKind) -> list[str]:
    """Packages of this kind's compiler that are not installed."""
    installed = {distribution.metadata["Name"] for distribution in distributions()}
    return [package for package in COMPILERS[kind] if package not in installed]


def choose_targets(kinds: Sequence[TargetKind]) -> list[Target]:
    """Targets of these kinds; without any, of all kinds whose compiler is installed."""
    every_kind: tuple[TargetKind, ...] = get_args(TargetKind)
    wanted = kinds or [kind for kind in every_kind if not find_missing_packages(kind)]
    for kind in wanted or every_kind:
        if missing := find_missing_packages(kind):
            commands = [f"  {k}: pip install {_list_packages(k)}" for k in kinds or every_kind]
            raise ValueError(
                f"the compiler for {kind if kinds else 'any target'} must be installed, got no "
                f"{', '.join(missing)}. No accelerator is needed, but a separate environment for "
                "each kind:\n" + "\n".join(commands)
            )
    return [target for target in TARGETS if target.kind in wanted]


def _list_packages(kind: TargetKind) -> str:
    """Packages of a compiler as `pip install` takes them, of the installed JAX's version."""
    release = f"=={jax.__version__}"
    if kind == "tpu":
        return f'"jax[tpu]{release}"'
    return " ".join(p + release * p.startswith("jax-") for p in COMPILERS[kind])


def make_devices(target: Target) -> list[Any]:
    """The target's chips, which can only be compiled for. Call it before JAX's first use."""
    # JAX must not search for chips: neither in a cloud's metadata nor by asking a driver.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # two programs cannot claim an absent chip
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    jax.config.update("jax_platforms", "cpu,cuda" if target.kind == "gpu" else "cpu")
    # JAX has no other public name for this.
    from jax.experimental import topologies

    if target.kind == "tpu":
        return topologies.get_topology_desc(target.topology, "tpu").devices
    return topologies.get_topology_desc(
        platform="cuda", topology=target.topology, target_config=GPU_DESCRIPTION.read_text()
    ).devices


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


def stack_shapes(tree: Any, mesh: Mesh) -> Any:
    """Makes the shapes of all nodes, `[N, ...]`, sharded over the mesh, from one node's."""
    sharding = NamedSharding(mesh, P("nodes"))

    def stack(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=sharding)

    return jax.tree.map(stack, tree)


def lower_step(
    tx: optax.GradientTransformationExtraArgs, mlp: MlpSpec, mesh: Mesh, step: int
) -> Any:
    """Lowers the train step for the round of the static step number `step`."""

    def train_step(params: Any, opt_state: Any, examples: Any, step: int) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(compute_loss)(params, examples)
        updates, opt_state = tx.update(grads, opt_state, params, step=step)
        return optax.apply_updates(params, updates), opt_state, loss

    program = gx.Nodes(mesh=mesh).spmd(train_step, static_argnums=3, donate_argnums=(0, 1))
    return program.lower(
        stack_shapes(mlp.params, mesh),
        stack_shapes(jax.eval_shape(tx.init, mlp.params), mesh),
        stack_shapes(mlp.examples, mesh),
        step,
    )
