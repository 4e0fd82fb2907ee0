"""Compiles train steps of simulated nodes for one H100, which need not be present.

Writes the optimized text of each to a folder: `python gpu_programs.py FOLDER`.
"""

import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding

import gossipjax as gx
from experiments.speed.compiled.targets import Target, make_devices

N = 8
WIRES = ("bfloat16", "float16", "int8", "int4")


class SmallCnn(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.Conv(8, (3, 3))(images))
        x = nn.relu(nn.Conv(16, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def lower(fn, *trees):
    """Lowers `fn` of one node for N of them on the chip; `trees` are the shapes of one node."""
    (device,) = make_devices(Target("1 H100", "gpu", 1, "1x1x1"))
    sharding = SingleDeviceSharding(device)

    def stack(x):
        return jax.ShapeDtypeStruct((N, *x.shape), x.dtype, sharding=sharding)

    return gx.spmd(fn, nodes=N).lower(*jax.tree.map(stack, trees))


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


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    make_devices(Target("1 H100", "gpu", 1, "1x1x1"))  # before JAX's first use
    programs = {wire: lower_sgp(wire) for wire in WIRES} | {"cnn": lower_cnn()}
    programs["40 leaves"] = lower_leaves(gx.topology.one_peer_exponential(N), is_traced=False)
    programs["random peers"] = lower_leaves(gx.topology.random_peer(N, 16, seed=0), is_traced=True)
    for name, lowered in programs.items():
        (folder / f"{name}.txt").write_text(lowered.compile().as_text())
