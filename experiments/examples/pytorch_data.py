"""Batches of torch's `DataLoader` for a `gx.TrainStep`.

    python -m experiments.examples.pytorch_data
    python -m gossipjax.launch --processes 2 --local-devices 4 -- \\
        python -m experiments.examples.pytorch_data

Eight nodes train a perceptron on digits: simulated where there is one device, else one on each.
The loader gives the examples of all nodes of its process; `nodes.split` divides them.
"""

import itertools

import jax
import jax.numpy as jnp
import optax
import torch.utils.data  # pyright: ignore[reportMissingImports]

import gossipjax as gx
from experiments import data


def loader(batch_size):
    """Batches of torch tensors, without end; on several processes of a share of the examples."""
    digits = data.load("mnist5k")
    images = torch.tensor(digits.train_images)
    labels = torch.tensor(digits.train_labels)
    processes = jax.process_count()
    rows = range(jax.process_index(), len(labels), processes)
    examples = torch.utils.data.Subset(torch.utils.data.TensorDataset(images, labels), rows)
    batches = torch.utils.data.DataLoader(
        examples,
        batch_size // processes,
        shuffle=True,
        drop_last=True,  # every node has as many examples as any other
        generator=torch.Generator().manual_seed(jax.process_index()),
    )
    return itertools.chain.from_iterable(itertools.repeat(batches))


def predict(params, images):
    hidden = jax.nn.relu(images.reshape(len(images), -1) @ params["first"])
    return hidden @ params["last"]


def loss(params, batch):
    images, labels = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels)
    return losses.mean(), losses.mean()


def main(steps=200, batch_size=256):
    """Trains, and returns the accuracy of the average model."""
    gx.launch.initialize()
    one_device = jax.device_count() == 1
    nodes = gx.Nodes(8) if one_device else gx.Nodes(mesh=gx.launch.mesh())
    tx = optax.chain(
        optax.sgd(0.05, momentum=0.9), gx.sgp(gx.topology.one_peer_exponential(nodes.size))
    )
    train_step = gx.TrainStep(jax.grad(loss, has_aux=True), tx, nodes=nodes)
    make = jax.nn.initializers.he_normal()
    keys = jax.random.split(jax.random.key(0))
    model = {"first": make(keys[0], (784, 64)), "last": make(keys[1], (64, 10))}
    params, opt_state = nodes.init(tx, model)
    batches = map(nodes.split, itertools.islice(loader(batch_size), steps))
    losses = jnp.zeros(())
    for step, batch in enumerate(gx.prefetch(batches)):
        params, opt_state, losses = train_step(step, params, opt_state, batch)

    model = gx.average_model(params, opt_state, nodes=nodes)
    digits = data.load("mnist5k")
    correct = predict(model, digits.test_images).argmax(-1) == digits.test_labels
    accuracy = float(correct.mean())
    losses = nodes.to_host(losses)
    if gx.processes.is_main_process():
        print(f"{nodes.size} nodes, loss {losses.mean():.3f}, accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
