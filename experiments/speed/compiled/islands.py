"""A model sharded inside its nodes, beside one that each device of a node has whole.

    python -m experiments.speed compiled islands
    python -m experiments.speed compiled islands --target tpu

Trains the language model by Adam and SGP in four forms, on the same tokens from the same start:

- one device: a node is one device, which has the model and all of the node's tokens;
- replicated: a node is `--fsdp` devices, each of which has the whole model (the axis `local`). They
  share the tokens, and the message of the node;
- FSDP: a node is as many devices, over which the parameters, the gradients and the moments of Adam
  are sharded (`gx.fsdp_specs`, `gx.sharded`). Each exchanges its part;
- FSDP, local: the same without SGP, to see what else the exchange asks for.

All devices of `--target here` are virtual ones on a CPU, which share its cores: seconds compare the
forms only. `--target tpu` and `gpu` compile for 8 chips that need not be present; nothing is timed.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

import gossipjax as gx
from experiments.models.decoder import DECODER_SIZES, Decoder
from experiments.options import PositiveInt
from experiments.results import Record
from experiments.speed import harness
from experiments.speed.compiled.hlo import (
    PERMUTE,
    Instruction,
    Module,
    count_operands,
    parse_module,
    read_groups,
    read_memory,
)
from experiments.speed.compiled.targets import choose_targets, make_devices
from experiments.speed.harness import scale, summarize_samples
from experiments.training import placement
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
MEGA = 1e6


@dataclasses.dataclass(frozen=True)
class Options(harness.CheckOptions):
    """Options of the models sharded inside nodes."""

    nodes: PositiveInt = 4
    """Number of nodes."""
    fsdp: PositiveInt = 2
    """Devices of a node."""
    model: Literal["nano", "mini", "gpt2-small"] = "nano"
    """Parameters without the embedding of the tokens: 0.8, 11, 85 million."""
    vocabulary_size: PositiveInt = 4096
    """Tokens of the vocabulary."""
    sequence_length: PositiveInt = 128
    """Tokens of a sequence."""
    batch_size_per_node: PositiveInt = 8
    """Sequences per node and step."""
    topology: str = "one_peer_exponential"
    """Whom nodes send to; random ones have four rounds."""
    steps: PositiveInt = 20
    """Steps of each form, timed in turns."""
    target: Literal["here", "tpu", "gpu"] = "here"
    """tpu, gpu: compile for 8 chips that need not be present; nothing is timed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fsdp < 2:
            raise ValueError(
                f"--fsdp must be an integer >= 2, the devices that share a model, got {self.fsdp}."
            )
        if self.batch_size_per_node % self.fsdp:
            raise ValueError(
                f"--batch-size-per-node must be a multiple of --fsdp, {self.fsdp}, whose devices "
                f"share it, got {self.batch_size_per_node}."
            )

    @property
    def decoder(self) -> Decoder:
        """The language model."""
        return Decoder(self.vocabulary_size, DECODER_SIZES[self.model])

    @property
    def schedule(self) -> gx.Schedule:
        """Whom nodes send to."""
        return make_schedule(self.topology, self.nodes, RANDOM_ROUNDS)

    def init(self) -> Any:
        """Returns the parameters at which all nodes start, `[...]`."""
        return self.decoder.init(jax.random.key(SEED), jnp.zeros((1, 1), jnp.int32))["params"]

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns the mean cross-entropy of tokens `[B, T + 1]` but the first."""
        logits: Any = self.decoder.apply({"params": params}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def draw_tokens(self) -> jax.Array:
        """Returns the batch of every step: random tokens, `[N, B, T + 1]`."""
        shape = (self.nodes, self.batch_size_per_node, self.sequence_length + 1)
        return jax.random.randint(jax.random.key(SEED), shape, 0, self.vocabulary_size)


def make_mesh(name: str, options: Options, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh of a form; one of a device per node takes the first N devices."""
    if name == ONE_DEVICE:
        return gx.launch.mesh(options.nodes, devices=devices[: options.nodes])
    if name == REPLICATED:
        return gx.launch.mesh(options.nodes, options.fsdp, devices=devices)
    return gx.launch.mesh(options.nodes, devices=devices, fsdp=options.fsdp)


def make_transform(name: str, options: Options, mesh: Mesh) -> Any:
    """Returns the transform of a form: Adam, and SGP after it unless the nodes exchange nothing."""
    adam = optax.adamw(LEARNING_RATE)
    if name == FSDP_LOCAL:
        # Not all optimizers know of steps, which the others are given.
        return optax.with_extra_args_support(adam)
    if name == FSDP:
        specs = gx.fsdp_specs(jax.eval_shape(options.init), mesh)
        return optax.chain(adam, gx.sharded(gx.sgp(options.schedule), specs))
    if name == REPLICATED:
        gossip = gx.sgp(options.schedule, local_axis_name="local")
        return optax.chain(gx.allreduce("local"), adam, gossip)
    return optax.chain(adam, gx.sgp(options.schedule))


def start(name: str, options: Options, mesh: Mesh) -> tuple[Any, Any, Any]:
    """Returns parameters, optimizer state and tokens of all nodes on the devices, `[N, ...]`."""
    nodes = gx.Nodes(mesh=mesh)
    tokens = options.draw_tokens()
    if nodes.local_devices is not None:
        put_tokens = jax.device_put(tokens, NamedSharding(mesh, P("nodes", "local")))
    else:
        put_tokens = make_put(nodes)(tokens)
    tx = make_transform(name, options, mesh)
    if name == FSDP_LOCAL:
        tx = gx.sharded(tx, gx.fsdp_specs(jax.eval_shape(options.init), mesh))
    params, opt_state = nodes.init(tx, options.init)
    return params, opt_state.inner if name == FSDP_LOCAL else opt_state, put_tokens


class Form(NamedTuple):
    """One of `FORMS`, compiled."""

    name: str
    nodes: gx.Nodes  # on the devices that are compiled for
    devices: int  # of a node
    state: tuple[Any, Any, Any]  # parameters, optimizer state, tokens; shapes where nothing runs
    rounds: list[jax.stages.Compiled]  # the step of each


def compile_form(name: str, options: Options, devices: Sequence[Any]) -> Form:
    """Starts a form here, and compiles its steps for `devices`."""
    state = start(name, options, make_mesh(name, options, jax.devices()))
    mesh = make_mesh(name, options, devices)
    steps = range(1 if name == FSDP_LOCAL else options.schedule.period)
    rounds = [compile_step(name, options, mesh, state, step) for step in steps]
    if options.target != "here":
        state = jax.eval_shape(lambda: state)
    return Form(name, gx.Nodes(mesh=mesh), mesh.size // options.nodes, state, rounds)


def compile_step(
    name: str, options: Options, mesh: Mesh, state: Any, step: int
) -> jax.stages.Compiled:
    """Compiles the step of a round, `(params, opt_state, tokens) -> (params, opt_state, loss)`.

    The new parameters and state take the memory of the old ones, and are sharded as these. The
    devices of the mesh need not be present; `state` is on any mesh of the same axes.
    """
    nodes = gx.Nodes(mesh=mesh)
    tx = make_transform(name, options, mesh)

    def compute_loss(params: Any, tokens: jax.Array) -> jax.Array:
        return options.loss(gather_where_used(params) if nodes.inner_axes else params, tokens)

    def train_step(params: Any, opt_state: Any, tokens: Any) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(compute_loss)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params, step=step)
        if nodes.local_devices is not None:
            loss = jax.lax.pmean(loss, nodes.local_axis_name)
        return optax.apply_updates(params, updates), opt_state, loss

    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec)
        ),
        state,
    )
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    program = jax.jit(
        nodes.spmd(train_step, local_argnums=2),
        donate_argnums=(0, 1),
        out_shardings=(*shardings[:2], NamedSharding(mesh, P("nodes"))),
    )
    return program.lower(*shapes).compile()


def read_traffic(rounds: Sequence[Module], devices_per_node: int) -> Record:
    """The collectives of compiled steps, of the rounds the most: between nodes and inside them.

    Devices are numbered node by node; `sent_bytes` is of the busiest of them.
    """
    messages = 0
    sent = 0
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for module in rounds:
        sent_by_device: Counter[int] = Counter()
        between = 0
        inside: Counter[str] = Counter()
        inside_bytes: Counter[str] = Counter()
        for it, body in module.list_collectives():
            assert it.collective is not None
            size = count_operands(it, body)
            if senders := find_senders(it, devices_per_node):
                between += 1
                sent_by_device.update(dict.fromkeys(senders, size))
            else:
                inside[it.collective] += 1
                inside_bytes[it.collective] += size
        messages = max(messages, between)
        sent = max(sent, *sent_by_device.values(), 0)
        counts |= inside  # the larger of each
        sizes |= inside_bytes
    return {
        "messages": messages,
        "sent_bytes": sent,
        "inside": {op: {"count": counts[op], "bytes": sizes[op]} for op in sorted(counts)},
    }


def find_senders(it: Instruction, devices_per_node: int) -> set[int]:
    """The devices that put something into a collective which another node takes out."""
    senders = set()
    for group in read_groups(it.attributes):
        if len({device // devices_per_node for device in group}) > 1:
            senders.update(group[:1] if it.collective == PERMUTE else group)
    return senders


def total_bytes(inside: Record) -> int:
    """Bytes that a device puts into collectives inside its node."""
    return sum(kind["bytes"] for kind in inside.values())


def count(form: Form) -> Record:
    """What the steps of a form send, and the memory that they need."""
    params = jax.tree.leaves(form.state[0])
    model_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in params) // form.nodes.size
    modules = [parse_module(compiled.as_text()) for compiled in form.rounds]
    plans = [read_memory(compiled) for compiled in form.rounds]
    return {
        "form": form.name,
        "nodes": form.nodes.size,
        "devices_per_node": form.devices,
        "model_bytes": model_bytes,
        "model_bytes_per_device": model_bytes / form.devices,
        **read_traffic(modules, form.devices),
        **{name: max(plan[name] for plan in plans) for name in plans[0]},
    }


def run_in_turns(forms: Sequence[Form], steps: int) -> list[Record]:
    """Trains all forms for some steps, which take turns; their seconds and their last losses."""
    states = [form.state[:2] for form in forms]
    seconds: list[list[float]] = [[] for _ in forms]
    losses = [0.0] * len(forms)
    for step in range(steps):
        for i, form in enumerate(forms):
            compiled = form.rounds[step % len(form.rounds)]
            started = time.perf_counter()
            *state, loss = jax.block_until_ready(compiled(*states[i], form.state[2]))
            seconds[i].append(time.perf_counter() - started)
            states[i] = tuple(state)
            losses[i] = float(np.mean(form.nodes.to_host(loss)))
    return [
        {**summarize_samples("seconds", samples), "loss": loss}
        for samples, loss in zip(seconds, losses, strict=True)
    ]


def compare(records: Sequence[Record]) -> list[Record]:
    """Adds what a form has beyond plain training, and how far its loss is from that of one device.

    The form without an exchange trains other models, so that its loss is not compared.
    """
    by_form = {record["form"]: record for record in records}
    compared = []
    for record in records:
        more: Record = {}
        if record["form"] == FSDP:
            plain = by_form[FSDP_LOCAL]["inside"]
            more["extra_bytes"] = total_bytes(record["inside"]) - total_bytes(plain)
        if "loss" in record and record["form"] != FSDP_LOCAL:
            more["loss_difference"] = record["loss"] - by_form[ONE_DEVICE]["loss"]
        compared.append(record | more)
    return compared


def make_table(runs: Sequence[Record]) -> Table:
    """The table of the list `runs` of `summary.json`."""
    columns: dict[str, harness.Cell] = {
        "form": "{form}",
        "nodes\nx L": "{nodes} x {devices_per_node}",
        "sent": scale("sent_bytes", MEGA, ".3f"),
        "model\n/ L": scale("model_bytes_per_device", MEGA, ".3f"),
        "mes-\nsages": "{messages}",
        "inside": lambda run: f"{sum(kind['count'] for kind in run['inside'].values())}",
        "beyond": scale("extra_bytes", MEGA, ".3f"),
        "memory": scale("memory_bytes", MEGA, ".1f"),
        "ms": scale("seconds", 1e-3, ".0f"),
        "loss": scale("loss", 1, ".5f"),
        "differ-\nence": scale("loss_difference", 1, ".1e"),
    }
    caption = (
        "sent: MB of a device and round to other nodes; inside: collectives inside a node, and "
        "their MB beyond those without an exchange; memory: MB of a device, by XLA's plan"
    )
    millions = runs[0]["model_bytes"] / 4 / MEGA
    title = f"A language model of {millions:.1f} million parameters"
    return harness.make_table(title, caption, columns, runs)


def choose_devices(options: Options) -> tuple[list[Any], str]:
    """Returns the devices to compile for, and words for them; JAX has N * L CPU devices then."""
    needed = options.nodes * options.fsdp
    placement.request_cpu_devices(needed)
    if options.target == "here":
        return jax.devices(), f"{needed} {jax.devices()[0].platform.upper()} devices"
    target = choose_targets((options.target,))[0]
    if target.nodes != needed:
        raise ValueError(
            f"--nodes * --fsdp must be {target.nodes} with --target {options.target}, got "
            f"{options.nodes} * {options.fsdp}."
        )
    return make_devices(target), f"compiled for {target.description}, nothing runs"


def make_plan(options: Options) -> harness.Plan:
    """Compiles the forms one by one, and then runs all of them in turns, if they are here."""
    devices, description = choose_devices(options)
    _ = options.schedule  # raises for an unknown topology
    for name in FORMS:  # devices that are missing are an error here
        make_mesh(name, options, devices)
    forms: list[Form] = []

    def compile_one(name: str) -> list[Record]:
        forms.append(compile_form(name, options, devices))
        return []

    def measure() -> list[Record]:
        steps = options.steps if options.target == "here" else 0
        timed = run_in_turns(forms, steps) if steps else [{}] * len(forms)
        counted = map(count, forms)
        return compare([a | b for a, b in zip(counted, timed, strict=True)])

    cases = [(f"compiling: {name}", partial(compile_one, name)) for name in FORMS]
    return harness.Plan(description, [*cases, (f"{options.steps} steps", measure)], make_table)


def measure_islands(options: Options) -> None:
    """Memory, messages, time and loss of a model sharded inside its nodes, and of a whole one."""
    harness.run_check("islands", options, partial(make_plan, options))
