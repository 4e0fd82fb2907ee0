"""What the compiled programs hold: one message per peer and type, one program per round."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from modes import mesh

import gossipjax as gx

N = 8
COLLECTIVE = re.compile(
    r" (collective-permute|all-reduce|all-gather|all-to-all|reduce-scatter|collective-broadcast)"
    r"(?:-start)?\("
)


def many_leaves(count=161):
    """A tree with the leaf count of a ResNet-50, node-stacked."""
    shapes = [(3, 3, 4, 4), (4, 8), (16,), (1, 1, 4, 8)]
    return {f"layer{i}": np.full((N, *shapes[i % 4]), i / count, "f4") for i in range(count)}


def train_step(tx):
    def step(params, state, grads, step):
        updates, state = tx.update(grads, state, params, step=step)
        return optax.apply_updates(params, updates), state

    return gx.spmd(step, mesh=mesh(N), static_argnums=3, donate_argnums=(0, 1))


def collectives(program, *args):
    return COLLECTIVE.findall(program.lower(*args).compile().as_text())


def sgd_and(gossip):
    return optax.chain(optax.sgd(0.1, momentum=0.9, nesterov=True), gossip)


def started(tx, leaves=161):
    params = many_leaves(leaves)
    return params, gx.spmd(tx.init, mesh=mesh(N))(params), many_leaves(leaves)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (gx.topology.one_peer_exponential(N), ["collective-permute"]),
        (gx.topology.k_peer_exponential(N, 2), ["collective-permute"] * 2),
        (gx.topology.bipartite_exponential(N), ["collective-permute"]),
        (gx.topology.ring(N), ["collective-permute"] * 2),
        (gx.topology.complete(N), ["all-reduce"]),
    ],
    ids=["one peer", "two peers", "pairs", "ring", "complete"],
)
def test_one_message_per_peer(schedule, expected):
    tx = sgd_and(gx.sgp(schedule))
    params, state, grads = started(tx, leaves=6)
    for step in range(schedule.period):
        assert collectives(train_step(tx), params, state, grads, step) == expected


def test_allreduce_is_one_message_too():
    tx = optax.chain(gx.allreduce(), optax.sgd(0.1))
    params, state, grads = started(tx, leaves=6)
    # Before XLA joins what it can: it must not have to.
    text = train_step(tx).lower(params, state, grads, 0).as_text()
    assert text.count("stablehlo.all_reduce") == 1


def test_narrow_parameters_travel_with_wide_ones():
    tx = sgd_and(gx.sgp(gx.topology.one_peer_exponential(N)))
    params = {"a": jnp.ones((N, 3), jnp.bfloat16), "b": jnp.ones((N, 3))}
    state = gx.spmd(tx.init, mesh=mesh(N))(params)
    assert collectives(train_step(tx), params, state, params, 0) == ["collective-permute"]


def test_a_loop_over_161_leaves_compiles_three_programs_with_one_message_each():
    schedule = gx.topology.one_peer_exponential(N)
    tx = sgd_and(gx.sgp(schedule))
    params, state, grads = started(tx)
    program = train_step(tx)
    assert collectives(program, params, state, grads, 1) == ["collective-permute"]
    with CompileCount() as compiled:
        for step in range(100):
            params, state = program(params, state, grads, schedule.canonical_step(step))
        jax.block_until_ready(params)
    assert compiled.programs == len(schedule.canonical_steps()) == 3


class CompileCount:
    """Counts the compilations that JAX's own monitoring reports."""

    def __enter__(self):
        self.programs = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        return self

    def _heard(self, event, duration_secs, **kwargs):
        self.programs += event == "/jax/core/compile/backend_compile_duration"

    def __exit__(self, *error):
        jax.monitoring.unregister_event_duration_listener(self._heard)


def test_a_static_step_needs_no_conditional_and_a_traced_one_has_one():
    schedule = gx.topology.one_peer_exponential(N)
    tx = gx.sgp(schedule)

    def update(params, state, step):
        return tx.update(params, state, params, step=step)

    params = many_leaves(6)
    state = gx.spmd(tx.init, mesh=mesh(N))(params)
    static = gx.spmd(update, mesh=mesh(N), static_argnums=2).lower(params, state, 1)
    traced = gx.spmd(update, mesh=mesh(N), shared_argnums=2).lower(params, state, jnp.int32(1))
    assert static.compile().as_text().count(" conditional(") == 0
    assert traced.compile().as_text().count(" conditional(") == 1


@pytest.mark.parametrize("every", [2, 4])
def test_multi_steps_exchange_once_per_emitted_update(every):
    schedule = gx.topology.one_peer_exponential(N)
    inner = optax.MultiSteps(optax.sgd(0.1), every).gradient_transformation()
    tx = optax.chain(inner, gx.sgp(schedule.every(every, phase=every - 1)))
    params = {"w": jnp.ones((N, 4))}
    state = gx.spmd(tx.init, mesh=mesh(N))(params)
    program = train_step(tx)
    found = [collectives(program, params, state, params, step) for step in range(2 * every)]
    silent, exchange = [[]] * (every - 1), [["collective-permute"]]
    assert found == (silent + exchange) * 2


def test_identity_rounds_move_nothing():
    for n in (1, N):
        schedule = gx.topology.one_peer_exponential(n).every(2)

        def mixed(x, schedule=schedule):
            return gx.mix(x, jnp.ones(()), schedule, 1)

        program = gx.spmd(mixed, mesh=mesh(n))
        assert collectives(program, jnp.asarray(np.ones((n, 3)))) == []
