"""A language model that is sharded inside each node; batches of Grain, gossip between nodes.

    python -m experiments.examples.grain_language_model
    python -m experiments.examples.grain_language_model diloco
    XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python -m experiments.examples.grain_language_model
    python -m gossipjax.launch --processes 2 --local-devices 4 -- \\
        python -m experiments.examples.grain_language_model

With several devices a node is two of them, over which the parameters are sharded as flax's
annotations say (FSDP); with one device, eight nodes are simulated. The text is the source of
Python's own library, byte by byte. Lines that the program has because of gossip end in `# gossip`.
"""

import functools
import sys
import sysconfig
from pathlib import Path
from typing import Any

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx  # gossip

LENGTH = 64
WIDTH = 64
HEADS = 4
LAYERS = 2
# The last axis of every matrix is sharded over the devices of a node.
INIT = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "fsdp"))
EMBED = nn.with_partitioning(nn.initializers.normal(0.02), (None, "fsdp"))
dense = functools.partial(nn.Dense, kernel_init=INIT, use_bias=False)


class Decoder(nn.Module):
    """A decoder of bytes: `[B, T]` -> logits `[B, T, 256]`."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(256, WIDTH, embedding_init=EMBED)(tokens)
        x += nn.Embed(LENGTH, WIDTH, embedding_init=EMBED)(jnp.arange(tokens.shape[1])[None])
        for _ in range(LAYERS):
            q, k, v = jnp.split(dense(3 * WIDTH)(nn.RMSNorm()(x)), 3, axis=-1)
            heads = [a.reshape(*a.shape[:2], HEADS, -1) for a in (q, k, v)]
            attended = jax.nn.dot_product_attention(*heads, is_causal=True)
            x += dense(WIDTH)(attended.reshape(x.shape))
            x += dense(WIDTH)(nn.gelu(dense(4 * WIDTH)(nn.RMSNorm()(x))))
        return dense(256)(nn.RMSNorm()(x))


def loss(params, tokens):
    """Nats per byte, and the same as a second result."""
    logits: Any = Decoder().apply({"params": params}, tokens[:, :-1])
    value = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return value, value


def read_windows():
    """Windows of the text, `[W, T + 1]`."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    return text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1).astype(np.int32)


def make_batches(windows, batch_size):
    """Grain's batches without end; on several processes of a share of the windows."""
    dataset = grain.MapDataset.source(windows)[jax.process_index() :: jax.process_count()]
    dataset = dataset.seed(0).shuffle().repeat()
    return iter(dataset.batch(batch_size // jax.process_count(), drop_remainder=True))


def make_tx(method, size):
    """The optimizer of a node, with the exchange that the method makes."""
    adam = optax.adamw(3e-3)
    if method == "diloco":
        outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
        return gx.sharded(gx.outer(adam, outer, every=10))  # gossip
    schedule = gx.topology.one_peer_exponential(size)  # gossip
    return optax.chain(adam, gx.sharded(gx.sgp(schedule)))  # gossip


def main(method="sgp", steps=150, batch_size=64):
    """Trains, and returns the nats per byte of the average model on text that it has not seen."""
    gx.launch.initialize()  # gossip
    devices = jax.device_count()
    simulated = devices < 4
    nodes = gx.Nodes(8) if simulated else gx.Nodes(mesh=gx.launch.mesh(devices // 2, fsdp=2))
    model = Decoder()
    test, train = np.split(read_windows(), [200])

    def init():
        return model.init(jax.random.key(0), train[:1, :-1])["params"]

    tx = make_tx(method, nodes.size)
    params, opt_state = nodes.init(tx, init)  # gossip: made in parts
    train_step = gx.TrainStep(jax.grad(loss, has_aux=True), tx, nodes=nodes)
    batches = map(nodes.split, make_batches(train, batch_size))
    losses = jnp.zeros(())
    for step, batch in zip(range(steps), gx.prefetch(batches), strict=False):
        params, opt_state, losses = train_step(step, params, opt_state, batch)

    average = gx.average_model(params, opt_state, nodes=nodes)  # gossip: still in parts
    reached = float(jax.jit(loss)(average, test)[0])
    losses = nodes.to_host(losses)
    if gx.processes.is_main_process():
        said = f"{losses.mean():.3f} nats per byte, test {reached:.3f}"
        print(f"{nodes.size} nodes, {method}: {said}")
    return reached


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "sgp")
