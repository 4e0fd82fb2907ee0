"""What follows a gossip in a chain, and what stands before one that is the optimizer."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gossipjax as gx

N = 4
RING = gx.topology.ring(N)
PARAMS = {"a": jnp.ones(3), "b": jnp.ones(2)}
HALF = {"a": True, "b": False}
SPECS = {"a": P(), "b": P()}
SGD: Any = optax.sgd(0.1)
RATE = optax.linear_schedule(0.1, 0.01, 10)
SGP: Any = gx.sgp(gx.topology.one_peer_exponential(N))
DPSGD: Any = gx.dpsgd(RING)
CHAIN: Any = optax.chain(SGD, SGP)
NODES = gx.Nodes(N)


def inject(make):
    return optax.inject_hyperparams(make)(learning_rate=0.1)


def is_even(step, **_):
    return step % 2 == 0


WRONG: dict[str, Any] = {
    "trace": optax.chain(SGD, SGP, optax.trace(0.9)),
    "adamw": optax.chain(SGP, optax.adamw(0.1)),
    "nested": optax.chain(CHAIN, optax.ema(0.9)),
    "a rate by step": optax.chain(SGP, optax.scale_by_learning_rate(RATE)),
    "inject_hyperparams": optax.chain(SGP, inject(optax.adam)),
    "masked before adam": optax.chain(optax.masked(SGP, HALF), optax.adam(0.1)),
    "apply_if_finite before adam": optax.chain(gx.apply_if_finite(SGP), optax.adam(0.1)),
    "noise": optax.chain(SGD, SGP, optax.add_noise(0.1, 0.5, 0)),
    "by a condition": optax.chain(SGP, optax.conditionally_transform(optax.trace(0.9), is_even)),
    "inside outer": gx.outer(optax.chain(DPSGD, optax.sgd(0.1, 0.9)), SGD, 2),
    "after outer": optax.chain(gx.outer(SGD, SGD, 2), optax.trace(0.9)),
    "after sharded": optax.chain(gx.sharded(SGP, SPECS), optax.adam(0.1)),
}
RIGHT: dict[str, Any] = {
    "a chain": CHAIN,
    "named_chain": optax.named_chain(("o", optax.adam(0.1)), ("g", SGP)),
    "nothing after it": optax.chain(CHAIN, optax.identity(), optax.scale(1.0)),
    "nonnegative after it": optax.chain(CHAIN, optax.keep_params_nonnegative()),
    "masked around": optax.masked(CHAIN, HALF),
    "multi_transform around": optax.multi_transform({"x": CHAIN, "y": SGD}, {"a": "x", "b": "y"}),
    "apply_if_finite around": gx.apply_if_finite(CHAIN),
    "sam around": optax.contrib.sam(CHAIN, optax.sgd(0.05), sync_period=2),
    "outer around": gx.outer(CHAIN, optax.sgd(0.7, momentum=0.9), 2),
    "sharded": optax.chain(optax.adam(0.1), gx.sharded(SGP, SPECS)),
    "schedule_free before": optax.chain(optax.contrib.schedule_free(SGD, 0.1), DPSGD),
    "the optimizer itself": optax.chain(optax.clip(1.0), gx.quasi_global(RING, 0.1)),
}


def first_program(tx):
    return gx.canonical_step(tx.init(PARAMS), 0)


@pytest.mark.parametrize("name", WRONG)
def test_an_optimizer_after_the_gossip_is_refused(name):
    with pytest.raises(ValueError, match=r"gossip must be last in a chain, .* got \w+State"):
        first_program(WRONG[name])


@pytest.mark.parametrize("name", RIGHT)
def test_what_keeps_the_updates_is_right(name):
    assert first_program(RIGHT[name]) == 0


def test_momentum_before_a_gossip_that_is_the_optimizer():
    tx = optax.chain(optax.adam(0.1), gx.quasi_global(RING, 0.1))
    with pytest.raises(ValueError, match="must get gradients, got updates of one with momentum"):
        first_program(tx)


def test_the_first_step_refuses():
    tx = WRONG["trace"]
    step = gx.TrainStep(lambda params: (params, None), tx, nodes=NODES)
    with pytest.raises(ValueError, match="got TraceState after it: optimizers go before"):
        step(0, *NODES.init(tx, PARAMS))
