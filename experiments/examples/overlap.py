"""Overlap SGP in a loop of your own: the exchange is issued first and used last.

    python -m experiments.examples.overlap

Nothing but the first line of `main` is about OSGP: with `gx.sgp(schedule)` there, and without the
line of `gx.exchange`, the program is SGP.
"""

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx


def loss(params, target):
    return jnp.sum((params - target) ** 2)


def main(steps=300):
    """Trains eight nodes towards eight targets; returns their models and the mean target."""
    tx = optax.chain(optax.sgd(0.01), gx.osgp(gx.topology.one_peer_exponential(8), overlap=2))
    nodes = gx.Nodes(8)

    def train_step(params, opt_state, target, step):
        received = gx.exchange(opt_state, step)  # needs nothing of this step
        grads = jax.grad(loss)(params, target)
        updates, opt_state = tx.update(grads, opt_state, params, step=step, received=received)
        return optax.apply_updates(params, updates), opt_state

    program = nodes.spmd(train_step, static_argnums=3)
    params, opt_state = nodes.init(tx, jnp.zeros(3))
    targets = jax.random.normal(jax.random.key(0), (8, 3))
    for step in range(steps):
        params, opt_state = program(params, opt_state, targets, gx.canonical_step(opt_state, step))

    _, weight = nodes.one(nodes.run(gx.diagnostics.total_mass, params, opt_state))
    print(f"models {params.mean(0)}, mean target {targets.mean(0)}, total weight {weight:.6f}")
    return params, targets.mean(0)


if __name__ == "__main__":
    main()
