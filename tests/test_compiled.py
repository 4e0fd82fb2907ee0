"""The compiled programs: one message per peer and type, one program per round."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from modes import make_mesh
from promotion import apply_updates

import gossipjax as gx
from experiments.speed.compiled.hlo import count_traffic, parse_module

N = 8
NODES = gx.Nodes(mesh=make_mesh(N))
COLLECTIVE = re.compile(
    r" (collective-permute|all-reduce|all-gather|all-to-all|reduce-scatter|collective-broadcast)"
    r"(?:-start)?\("
)


def make_leaves(count):
    """A tree of many leaves, node-stacked."""
    shapes = [(3, 3, 4, 4), (4, 8), (16,), (1, 1, 4, 8)]
    return {f"layer{i}": np.full((N, *shapes[i % 4]), i / count, np.float32) for i in range(count)}


def make_train_step(tx):
    def train_step(params, state, grads, step):
        updates, state = tx.update(grads, state, params, step=step)
        return apply_updates(params, updates), state

    return gx.spmd(train_step, nodes=NODES, static_argnums=3, donate_argnums=(0, 1))


def find_collectives(program, *args):
    return COLLECTIVE.findall(program.lower(*args).compile().as_text())


def chain_with_sgd(gossip):
    return optax.chain(optax.sgd(0.1, momentum=0.9, nesterov=True), gossip)


def start(tx, leaves):
    params = make_leaves(leaves)
    return params, gx.spmd(tx.init, nodes=NODES)(params), make_leaves(leaves)


PERMUTE = "collective-permute"
MESSAGES = {
    "two peers": (gx.sgp(gx.topology.k_peer_exponential(N, 2)), [[PERMUTE] * 2]),
    "pairs": (gx.sgp(gx.topology.bipartite_exponential(N)), [[PERMUTE]]),
    "ring": (gx.sgp(gx.topology.ring(N)), [[PERMUTE] * 2]),
    "complete": (gx.sgp(gx.topology.complete(N)), [["all-reduce"]]),
    "easgd": (gx.easgd(0.1, every=3), [["all-reduce"], []]),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_one_message_per_peer(name):
    gossip, messages = MESSAGES[name]
    tx = chain_with_sgd(gossip)
    params = make_leaves(6) | {"half": np.ones((N, 3), jnp.bfloat16)}  # travels with the others
    state = gx.spmd(tx.init, nodes=NODES)(params)
    for step, expected in enumerate(messages):
        assert find_collectives(make_train_step(tx), params, state, params, step) == expected


def test_an_update_passes_over_memory_as_often_as_it_must():
    """8 times at the least, and on a CPU no more than 3 times as often.

    Before the exchange it reads parameters, gradients and momentum, and writes momentum and
    message; after it, it reads the message, of which it keeps a half, and what arrives, and
    writes parameters.
    """
    tx = chain_with_sgd(gx.sgp(gx.topology.one_peer_exponential(N)))
    params, state, grads = start(tx, leaves=40)
    lowered = make_train_step(tx).lower(params, state, grads, 1)
    text = lowered.compile({"xla_backend_optimization_level": 3}).as_text()
    assert COLLECTIVE.findall(text) == [PERMUTE]  # one message of 40 leaves
    module = parse_module(text)
    traffic = count_traffic(module)
    model = sum(leaf.nbytes for leaf in params.values()) / N
    assert traffic.pop("collective-permute") == pytest.approx(2 * model, rel=1e-2)
    assert 8 <= sum(traffic.values()) / model < 24


def test_allreduce_is_one_message_too():
    tx = optax.chain(gx.allreduce(), optax.sgd(0.1))
    params, state, grads = start(tx, leaves=6)
    # Before XLA combines messages: it must not have to.
    text = make_train_step(tx).lower(params, state, grads, 0).as_text()
    assert text.count("stablehlo.all_reduce") == 1


def test_small_leaves_are_encoded_together():
    """Integers with scales have no longer programs than bfloat16; one a leaf had three times it."""
    lines = {}
    for wire in (gx.wire.bfloat16(), gx.wire.int8(), gx.wire.int4(block=16)):
        tx = chain_with_sgd(gx.sgp(gx.topology.one_peer_exponential(N), wire=wire))
        params, state, grads = start(tx, leaves=60)
        lines[wire] = make_train_step(tx).lower(params, state, grads, 0).as_text().count("\n")
    bfloat16, *integers = lines.values()
    assert max(integers) <= 1.2 * bfloat16, lines


@pytest.mark.parametrize(("name", "wire"), [("sgp", jnp.bfloat16), ("dpsgd", None)])
def test_a_round_without_exchange_does_no_passes(name, wire):
    """A step reads the parameters and the updates and writes the update, as without gossip."""
    tx = getattr(gx, name)(gx.topology.one_peer_exponential(N).every(2), wire=wire)
    z = {"a": jnp.ones((N, 4000)), "b": jnp.ones((N, 40, 100))}
    state = gx.spmd(tx.init, nodes=NODES)(z)
    program = gx.spmd(lambda u, s, z: tx.update(u, s, z, step=1)[0], nodes=NODES)
    text = program.lower(z, state, z).compile({"xla_backend_optimization_level": 3}).as_text()
    assert not COLLECTIVE.findall(text)
    assert sum(count_traffic(parse_module(text)).values()) <= 1.01 * 3 * 4 * 8000


def test_a_static_step_needs_no_conditional_and_a_traced_one_has_one():
    schedule = gx.topology.one_peer_exponential(N)
    tx = gx.sgp(schedule)

    def update(params, state, step):
        return tx.update(params, state, params, step=step)

    params = make_leaves(6)
    state = gx.spmd(tx.init, nodes=NODES)(params)
    static = gx.spmd(update, nodes=NODES, static_argnums=2).lower(params, state, 1)
    traced = gx.spmd(update, nodes=NODES, shared_argnums=2).lower(params, state, jnp.int32(1))
    assert static.compile().as_text().count(" conditional(") == 0
    assert traced.compile().as_text().count(" conditional(") == 1
