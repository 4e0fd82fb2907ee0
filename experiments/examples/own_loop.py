"""SGP in an optax loop of your own, and the one model that comes out of it.

    python -m experiments.examples.own_loop

Eight nodes, simulated on one device, fit a linear model; each sees other examples.
"""

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx

TRUE_W = jnp.array([1.0, -2.0, 3.0, 0.5])

nodes = gx.Nodes(8)  # gx.Nodes(mesh=mesh) on devices
tx = optax.chain(optax.adamw(0.1), gx.sgp(gx.topology.one_peer_exponential(nodes.size)))


def loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] - y) ** 2)


def train_step(params, opt_state, batch, step):
    """One node's update: nothing here knows how many nodes there are."""
    grads = jax.grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params, step=step)
    return optax.apply_updates(params, updates), opt_state


def draw_batch(step):
    """Examples of all nodes, `[N, B, ...]`."""
    x = jax.random.normal(jax.random.key(step), (nodes.size, 32, 4))
    return x, x @ TRUE_W


def main():
    """Trains, evaluates, and returns the average model."""
    program = nodes.spmd(train_step, static_argnums=3, donate_argnums=(0, 1))
    params, opt_state = nodes.init(tx, {"w": jnp.zeros(4)})  # [...] -> [N, ...]
    for step in range(200):
        batch = draw_batch(step)
        params, opt_state = program(params, opt_state, batch, gx.canonical_step(opt_state, step))

    model = gx.average_model(params, opt_state, nodes=nodes)  # [N, ...] -> [...]
    distance = nodes.run(gx.diagnostics.consensus_distance, params)  # one per node
    print(f"average model {model['w']}, largest consensus distance {distance.max():.1e}")
    return model


if __name__ == "__main__":
    main()
