"""K steps in one program are K calls, for each kind of algorithm and wherever the nodes run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from modes import make_mesh

import gossipjax as gx

N = 4
K = 6  # more than a cycle of rounds and of delays, and two outer steps
ONE_PEER = gx.topology.one_peer_exponential(N)
RING = gx.topology.ring(N)
DELAYS = np.random.default_rng(0).integers(0, 3, (2, N))


MOMENTUM = optax.sgd(0.1, momentum=0.9)
CHAINS = {
    "sgp": optax.chain(MOMENTUM, gx.sgp(ONE_PEER)),
    "sgp, int8": optax.chain(MOMENTUM, gx.sgp(ONE_PEER, wire=gx.wire.int8(block=8))),
    "osgp": optax.chain(MOMENTUM, gx.osgp(ONE_PEER, overlap=2)),
    "adpsgd": optax.chain(MOMENTUM, gx.adpsgd(gx.topology.bipartite_exponential(N), DELAYS)),
    "allreduce": optax.chain(gx.allreduce(), MOMENTUM),
    "choco": optax.chain(MOMENTUM, gx.choco(RING, gx.wire.top_k(0.5), 0.4)),
    "outer": gx.outer(optax.chain(MOMENTUM, gx.sgp(RING)), optax.sgd(0.7), every=3),
}


def gradients(z, target):
    difference = z["w"] - target.astype(z["w"].dtype)
    return {"w": difference}, {"loss": jnp.sum(jnp.square(difference))}


def compare(name, nodes, dtype=jnp.float32, start=0):
    tx = CHAINS[name]
    targets = np.random.default_rng(0).normal(size=(K, N, 12)).astype(np.float32)
    init = {"w": jnp.zeros(12, dtype)}
    params, opt_state = nodes.init(tx, init)
    step_by_step = gx.TrainStep(gradients, tx, nodes=nodes)
    losses = []
    for step, target in enumerate(targets, start):
        params, opt_state, aux = step_by_step(step, params, opt_state, target)
        losses.append(aux["loss"])
    at_once = gx.TrainStep(gradients, tx, nodes=nodes)
    parts = []
    scanned = nodes.init(tx, init)
    for first, last in ((0, 3), (3, K)):  # two calls go on where the first one ends
        *scanned, aux = at_once.scan(start + first, *scanned, targets[first:last])
        parts.append(aux["loss"])
    assert jax.tree.structure(scanned) == jax.tree.structure([params, opt_state])
    expected = jax.tree.leaves((params, opt_state, jnp.stack(losses)))
    actual = jax.tree.leaves((scanned, jnp.concatenate(parts)))
    for a, b in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if jnp.issubdtype(a.dtype, jnp.floating):
            wide = a.astype(jnp.float32), b.astype(jnp.float32)
            np.testing.assert_allclose(*wide, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", CHAINS)
def test_steps_in_one_program_are_calls(name):
    compare(name, gx.Nodes(N))


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("osgp", gx.Nodes(mesh=make_mesh(N))), ("outer", gx.Nodes(N, mesh=make_mesh(2)))],
)
def test_so_they_are_on_a_mesh(name, nodes):
    """From another step than the first, and in narrow parameters."""
    compare(name, nodes, jnp.bfloat16, start=3)


def test_inputs_have_axes_of_steps_and_nodes():
    tx = CHAINS["sgp"]
    nodes = gx.Nodes(N)
    train_step = gx.TrainStep(gradients, tx, nodes=nodes)
    params, opt_state = nodes.init(tx, {"w": jnp.zeros(12)})
    for inputs in ((jnp.zeros((N, 12)),), (jnp.zeros((2, N, 12)), jnp.zeros((3, N))), ()):
        with pytest.raises(ValueError, match=r"inputs of scan must be \[K, N, \.\.\.\] with N = 4"):
            train_step.scan(0, params, opt_state, *inputs)
    mesh = jax.make_mesh((N, 2), ("nodes", "local"))
    train_step = gx.TrainStep(gradients, tx, nodes=gx.Nodes(mesh=mesh), local_argnums=1)
    with pytest.raises(ValueError, match="call train_step for each step"):
        train_step.scan(0, params, opt_state, jnp.zeros((2, N, 12)))
