"""Seeds and rates in one program: a `vmap` around nodes equals a loop, wherever nodes run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from modes import make_mesh

import gossipjax as gx

N = 4
SEEDS = jnp.arange(3)
RATES = jnp.array([0.05, 0.1, 0.4])
STEPS = 5
SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0, momentum=0.9)
TX = optax.chain(SGD, gx.sgp(gx.topology.ring(N)))
TARGETS = jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, N, 3)), jnp.float32)


def make_model(seed):
    return {"w": jax.random.normal(jax.random.key(seed), (3,)), "b": jnp.zeros(())}


def gradients(params, target):
    return jax.grad(lambda p: jnp.sum((p["w"] + p["b"] - target) ** 2))(params), params["b"]


def with_rate(opt_state, rate):
    sgd, gossip = opt_state
    rates = sgd.hyperparams | {"learning_rate": jnp.full_like(sgd.count, rate, jnp.float32)}
    return sgd._replace(hyperparams=rates), gossip


@pytest.mark.parametrize(
    ("nodes", "by_function"),
    [
        (gx.Nodes(N), True),
        (gx.Nodes(mesh=make_mesh(N)), False),
        (gx.Nodes(N, mesh=make_mesh(2)), True),
    ],
    ids=["simulated", "mesh", "blocks"],
)
def test_a_vmap_over_seeds_and_rates_equals_a_loop(nodes, by_function):
    train_step = gx.TrainStep(gradients, TX, nodes=nodes)

    def run(seed, rate):
        model = (lambda: make_model(seed)) if by_function else make_model(seed)
        params, opt_state = nodes.init(TX, model)
        opt_state = with_rate(opt_state, rate)
        for step in range(2):
            params, opt_state, _ = train_step(step, params, opt_state, TARGETS[step])
        params, opt_state, aux = train_step.scan(2, params, opt_state, TARGETS[2:])
        distance = nodes.run(gx.diagnostics.consensus_distance, params)
        return gx.average_model(params, opt_state, nodes=nodes), params, aux, distance

    together = jax.vmap(run)(SEEDS, RATES)
    for i, one in enumerate(zip(SEEDS, RATES, strict=True)):
        same = jax.tree.map(lambda x, i=i: x[i], together)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), same, run(*one))


def test_a_closed_step_takes_seeds_by_its_axes_and_says_so():
    def closed(state, target):
        grads, aux = gradients(state["model"], target)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        model = jax.tree.map(lambda x, m: x - 0.1 * m, state["model"], momentum)
        return {"model": model, "momentum": momentum}, aux

    step = gx.decentralize(
        closed, gx.sgp(gx.topology.ring(N)), N, params=lambda state: state["model"]
    )
    axes = gx.TrainState(None, 0, 0, 0)  # pyright: ignore[reportArgumentType]

    def make(seed):
        model = make_model(seed)
        return step.init({"model": model, "momentum": jax.tree.map(jnp.zeros_like, model)})

    states = jax.vmap(make, out_axes=axes)(SEEDS)
    vmapped = jax.vmap(step, (axes, None), (axes, 0))
    alone = make(SEEDS[1])
    for k in range(STEPS):
        states, _ = vmapped(states, TARGETS[k])
        alone, _ = step(alone, TARGETS[k])
    same = jax.tree.map(lambda x: x[1], (states.params, states.rest))
    check = (alone.params, alone.rest)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), same, check)
    with pytest.raises(ValueError, match=r"gx\.TrainState\(None, 0, 0, 0\)"):
        jax.vmap(step, (0, None))(states._replace(step=SEEDS), TARGETS[0])


def test_one_train_step_serves_all_seeds_of_a_loop():
    traced = []

    def counted(params, target):
        traced.append(None)
        return gradients(params, target)

    nodes = gx.Nodes(N)
    train_step = gx.TrainStep(counted, TX, nodes=nodes)

    def run(train_step, seed):
        params, opt_state = nodes.init(TX, make_model(seed))
        opt_state = with_rate(opt_state, 0.1)
        for step in range(3):
            params, opt_state, _ = train_step(step, params, opt_state, TARGETS[step])
        params, _, _ = train_step.scan(3, params, opt_state, TARGETS[3:])
        return params

    run(train_step, 0)
    compiled = len(traced)
    for seed in (1, 0):
        again = run(train_step, seed)
        assert len(traced) == compiled
        alone = run(gx.TrainStep(gradients, TX, nodes=nodes), seed)
        jax.tree.map(np.testing.assert_array_equal, again, alone)
