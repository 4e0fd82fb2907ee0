"""The forms in which a node of several devices can hold a language model, and their train steps."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gossipjax as gx
from experiments.models.decoder import DECODER_SIZES, Decoder
from experiments.training.methods import make_schedule
from experiments.training.placement import gather_where_used, make_put

ONE_DEVICE = "one device"
REPLICATED = "replicated"
FSDP = "FSDP"
FSDP_LOCAL = "FSDP, local"
FORMS = (ONE_DEVICE, REPLICATED, FSDP, FSDP_LOCAL)

LEARNING_RATE = 1e-3
RANDOM_ROUNDS = 4  # of a random topology: a program each
SEED = 0


class ModelSpec(NamedTuple):
    """A language model and its batches: the name of a size, V, T, and B of a node."""

    size: str
    vocabulary: int
    length: int
    batch: int

    @property
    def decoder(self) -> Decoder:
        """The model."""
        return Decoder(self.vocabulary, DECODER_SIZES[self.size])

    def init(self) -> Any:
        """Returns the parameters at which all nodes start, `[...]`."""
        return self.decoder.init(jax.random.key(SEED), jnp.zeros((1, 1), jnp.int32))["params"]

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns the mean cross-entropy of tokens `[B, T + 1]` but the first."""
        logits: Any = self.decoder.apply({"params": params}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def draw_tokens(self, nodes: int) -> jax.Array:
        """Returns the batch of every step: random tokens, `[N, B, T + 1]`."""
        shape = (nodes, self.batch, self.length + 1)
        return jax.random.randint(jax.random.key(SEED), shape, 0, self.vocabulary)


@dataclasses.dataclass(frozen=True)
class Form:
    """One of `FORMS`, on a mesh.

    Attributes:
      name: which one.
      mesh: its devices, which need not be present.
      tx: the whole chain.
      schedule: of the exchange; None without one.
    """

    name: str
    mesh: Mesh
    tx: optax.GradientTransformationExtraArgs
    schedule: gx.Schedule | None

    @property
    def nodes(self) -> gx.Nodes:
        """Where the nodes run."""
        return gx.Nodes(mesh=self.mesh)

    @property
    def devices(self) -> int:
        """L, the number of devices of a node."""
        return self.mesh.size // self.nodes.size

    @property
    def rounds(self) -> list[int]:
        """Static steps, one for each distinct round."""
        return list(range(1 if self.schedule is None else self.schedule.period))


def make_mesh(name: str, nodes: int, devices: int, available: Sequence[Any]) -> Mesh:
    """Returns the mesh of a form; one of a device per node takes the first N devices."""
    make = partial(gx.launch.mesh, nodes)
    if name == ONE_DEVICE:
        return make(devices=available[:nodes])
    if name == REPLICATED:
        return make(devices, devices=available)
    return make(devices=available, fsdp=devices)


def make_form(name: str, model: ModelSpec, topology: str, mesh: Mesh) -> Form:
    """Returns a form: Adam, and SGP after it unless the nodes exchange nothing."""
    schedule = make_schedule(topology, mesh.shape["nodes"], RANDOM_ROUNDS)
    adam = optax.adamw(LEARNING_RATE)
    if name == FSDP_LOCAL:
        # Not all optimizers know of steps, which the others are given.
        return Form(name, mesh, optax.with_extra_args_support(adam), None)
    if name == FSDP:
        specs = gx.fsdp_specs(jax.eval_shape(model.init), mesh)
        tx = optax.chain(adam, gx.sharded(gx.sgp(schedule), specs))
    elif name == REPLICATED:
        gossip = gx.sgp(schedule, local_axis_name="local")
        tx = optax.chain(gx.allreduce("local"), adam, gossip)
    else:
        tx = optax.chain(adam, gx.sgp(schedule))
    return Form(name, mesh, tx, schedule)


def start(form: Form, model: ModelSpec) -> tuple[Any, Any, Any]:
    """Returns parameters, optimizer state and tokens of all nodes on the devices, `[N, ...]`.

    Without an exchange the state is sharded as with one.
    """
    nodes = form.nodes
    tokens = model.draw_tokens(nodes.size)
    if nodes.local_devices is not None:
        put_tokens = jax.device_put(tokens, NamedSharding(form.mesh, P("nodes", "local")))
    else:
        put_tokens = make_put(nodes)(tokens)
    tx = form.tx
    if form.name == FSDP_LOCAL:
        shapes = jax.eval_shape(model.init)
        tx = gx.sharded(tx, gx.fsdp_specs(shapes, form.mesh))
    params, opt_state = nodes.init(tx, model.init)
    if form.name == FSDP_LOCAL:
        opt_state = opt_state.inner
    return params, opt_state, put_tokens


def make_step(form: Form, model: ModelSpec, step: int) -> Callable[..., Any]:
    """Returns `(params, opt_state, tokens) -> (params, opt_state, loss)` of a static step."""

    def compute_loss(params: Any, tokens: jax.Array) -> jax.Array:
        return model.loss(gather_where_used(params) if form.nodes.inner_axes else params, tokens)

    def train_step(params: Any, opt_state: Any, tokens: Any) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(compute_loss)(params, tokens)
        updates, opt_state = form.tx.update(grads, opt_state, params, step=step)
        if form.nodes.local_devices is not None:
            loss = jax.lax.pmean(loss, form.nodes.local_axis_name)
        return optax.apply_updates(params, updates), opt_state, loss

    return form.nodes.spmd(train_step, local_argnums=2)


def compile_step(form: Form, model: ModelSpec, state: Any, step: int) -> jax.stages.Compiled:
    """Compiles the step of a round for the devices of the form.

    The new parameters and state take the memory of the old ones, and are sharded as these.

    Args:
      form: the program and its devices, which need not be present.
      model: the language model.
      state: parameters, optimizer state and tokens on any mesh of the same axes, or their shapes.
      step: a static step.
    """
    mesh = form.mesh
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, x.sharding.spec), state)
    shapes = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        shardings,
    )
    program = jax.jit(
        make_step(form, model, step),
        donate_argnums=(0, 1),
        out_shardings=(*shardings[:2], NamedSharding(mesh, P("nodes"))),
    )
    return program.lower(*shapes).compile()
