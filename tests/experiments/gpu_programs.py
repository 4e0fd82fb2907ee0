"""Compiles train steps of simulated nodes for one H100, which need not be present.

Writes to a folder the optimized text of each, and `memory.json`, the device's bytes that steps of
DiLoCo need: `python gpu_programs.py FOLDER`.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

import gossipjax as gx
from experiments.speed.compiled.targets import MlpSpec, Target, compute_loss, make_devices

N = 8
WIRES = ("bfloat16", "float16", "int8", "int4")


class SmallCnn(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(8, (3, 3))(images))
        x = nn.relu(nn.Conv(16, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def stack(*trees):
    """Shapes of N nodes on the chip, of those of one."""
    (device,) = make_devices(Target("1 H100", "gpu", 1, "1x1x1"))
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((N, *x.shape), x.dtype, sharding=sharding), trees
    )


def lower(fn, *trees):
    """Lowers `fn` of one node for N of them on the chip; `trees` are the shapes of one node."""
    return gx.spmd(fn, nodes=N).lower(*stack(*trees))


def lower_sgp(wire):
    tx = gx.sgp(gx.topology.one_peer_exponential(N), wire=getattr(gx.wire, wire)())
    params = {"a": jax.ShapeDtypeStruct((600, 70), jnp.float32)}

    def step(params, state, updates):
        updates, state = tx.update(updates, state, params, step=0)
        return optax.apply_updates(params, updates), state

    return lower(step, params, jax.eval_shape(tx.init, params), params)


def lower_leaves(schedule, is_traced):
    """The update of 40 leaves alone."""
    tx = gx.sgp(schedule)
    params = {f"leaf{i}": jax.ShapeDtypeStruct((10_000,), jnp.float32) for i in range(40)}
    count = jax.ShapeDtypeStruct((), jnp.int32)

    def step(params, state, updates, count):
        number = jax.lax.pmax(count, "nodes") if is_traced else 1
        updates, state = tx.update(updates, state, params, step=number)
        return optax.apply_updates(params, updates), state

    return lower(step, params, jax.eval_shape(tx.init, params), params, count)


def lower_cnn():
    model = SmallCnn()
    tx = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.one_peer_exponential(N)))
    images = jax.ShapeDtypeStruct((32, 28, 28, 1), jnp.float32)
    labels = jax.ShapeDtypeStruct((32,), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss(params, images, labels):
        logits: Any = model.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(params, state, images, labels):
        grads = jax.grad(loss)(params, images, labels)
        updates, state = tx.update(grads, state, params, step=0)
        return optax.apply_updates(params, updates), state

    return lower(step, params, jax.eval_shape(tx.init, params), images, labels)


def measure_memory(tx, step, is_scanned=False, **options):
    """The device's bytes that a train step of an MLP needs, whose layers are stacked or not."""
    mlp = MlpSpec(layers=6, width=512, batch=32)
    layers = jax.ShapeDtypeStruct((6, 512, 512), jnp.float32)

    def compute_scanned(params, examples):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), examples["x"], params["layers"])
        return jnp.mean((x - examples["y"]) ** 2)

    def gradients(params, examples):
        return jax.grad(compute_scanned if is_scanned else compute_loss)(params, examples), ()

    params = {"layers": layers} if is_scanned else mlp.params
    train_step = gx.TrainStep(gradients, tx, nodes=gx.Nodes(N), **options)
    trees = stack(params, jax.eval_shape(tx.init, params), mlp.examples)
    memory = train_step.lower(step, *trees).compile().memory_analysis()
    used = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return used + memory.output_size_in_bytes - memory.alias_size_in_bytes


def measure_diloco():
    """The memory of a step between outer steps, of one with a fragment of 6, and of AdamW alone."""
    adamw = optax.adamw(1e-3)
    make = partial(gx.outer, adamw, optax.sgd(0.7, momentum=0.9, nesterov=True), 60)
    tx = make(fragments=6)
    layers = gx.layer_fragments(6, {"layers": 0})
    return {
        "adamw": measure_memory(adamw, 0),
        "between": measure_memory(tx, 0, offload_outer=True),
        "outer step": measure_memory(tx, 9, offload_outer=True),
        "between, on the device": measure_memory(tx, 0),
        "scanned": {
            "adamw": measure_memory(adamw, 0, is_scanned=True),
            "outer step": measure_memory(make(fragments=layers), 9, True, offload_outer=True),
            "sent": measure_memory(make(fragments=layers, delay=5), 9, True, offload_outer=True),
            "used": measure_memory(make(fragments=layers, delay=5), 14, True, offload_outer=True),
        },
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make_devices(Target("1 H100", "gpu", 1, "1x1x1"))  # before JAX's first use
    programs = {wire: lower_sgp(wire) for wire in WIRES} | {"cnn": lower_cnn()}
    programs["40 leaves"] = lower_leaves(gx.topology.one_peer_exponential(N), is_traced=False)
    programs["random peers"] = lower_leaves(gx.topology.random_peer(N, 16, seed=0), is_traced=True)
    for name, lowered in programs.items():
        (folder / f"{name}.txt").write_text(lowered.compile().as_text())
    (folder / "memory.json").write_text(json.dumps(measure_diloco()))
