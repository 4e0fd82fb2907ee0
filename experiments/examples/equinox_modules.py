"""A training loop of equinox, now with gossip.

    python -m experiments.examples.equinox_modules
    python -m gossipjax.launch --processes 2 --local-devices 4 -- \\
        python -m experiments.examples.equinox_modules

Eight nodes train a perceptron on digits: simulated where there is one device, else one on each.
Lines that the loop has because of gossip end in `# gossip`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import gossipjax as gx  # gossip
from experiments.examples.digits import draw_batches, test_batch


def predict(model, images):
    return jax.vmap(model)(images.reshape(len(images), -1))


def loss_fn(params, static, batch):
    logits = predict(eqx.combine(params, static), batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def main(steps=200, batch_size=256):
    """Trains, and returns the accuracy of the average model."""
    gx.launch.initialize()  # gossip
    one_device = jax.device_count() == 1
    nodes = gx.Nodes(8) if one_device else gx.Nodes(mesh=gx.launch.mesh())  # gossip
    schedule = gx.topology.one_peer_exponential(nodes.size)  # gossip
    optim = optax.chain(optax.sgd(0.1, momentum=0.9), gx.sgp(schedule))  # gossip: gx.sgp
    model = eqx.nn.MLP(784, 10, 64, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def make_step(params, opt_state, batch, step):  # gossip: step
        loss, grads = jax.value_and_grad(loss_fn)(params, static, batch)
        updates, opt_state = optim.update(grads, opt_state, params, step=step)  # gossip: step
        return eqx.apply_updates(params, updates), opt_state, loss

    program = nodes.spmd(make_step, static_argnums=3)  # gossip: it was jax.jit(make_step)
    params, opt_state = nodes.init(optim, params)  # gossip: it was optim.init(params)
    batches = map(nodes.split, draw_batches(batch_size, steps))  # gossip: nodes.split
    loss = jnp.zeros(())
    for step, batch in enumerate(gx.prefetch(batches)):
        number = gx.canonical_step(opt_state, step)  # gossip
        params, opt_state, loss = program(params, opt_state, batch, number)

    params = gx.average_model(params, opt_state, nodes=nodes)  # gossip
    test = test_batch()
    logits = predict(eqx.combine(params, static), test["image"])
    accuracy = float((logits.argmax(-1) == test["label"]).mean())
    loss = nodes.to_host(loss).mean()  # gossip: of all nodes
    if gx.processes.is_main_process():
        print(f"{nodes.size} nodes, loss {loss:.3f}, accuracy {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
