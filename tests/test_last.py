"""What follows a gossip, and what stands before one that is the optimizer: refused or right.

Programs are traced here, not compiled.
"""

import re
from functools import partial
from typing import Any

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from modes import make_mesh

import gossipjax as gx

N = 4
RING = gx.topology.ring(N)
NODES = gx.Nodes(N)
PLACEMENTS = {"mesh": gx.Nodes(mesh=make_mesh(N)), "several per device": gx.Nodes(N, make_mesh(2))}
PARAMS = {"a": jnp.ones((N, 3)), "b": jnp.ones((N, 2))}
HALF = {"a": True, "b": False}
SPECS = {"a": P(), "b": P()}
PLACE = r"( \(tests/\w+\.py:\d+\))?"
SGD = optax.sgd(0.1)
RATE = optax.linear_schedule(0.1, 0.01, 10)
SGP = gx.sgp(gx.topology.one_peer_exponential(N))
DPSGD = gx.dpsgd(RING)
CHAIN = optax.chain(SGD, SGP)


def inject(make):
    return optax.inject_hyperparams(make)(learning_rate=0.1)


def is_even(step, **_):
    return step % 2 == 0


def without_step(tx):
    """Of a wrapper that says that it takes extra arguments, and refuses them."""
    return optax.GradientTransformation(
        tx.init, lambda u, state, params=None: tx.update(u, state, params)
    )


WRONG = {  # the chain, and the transform that is named
    "trace": (optax.chain(SGD, SGP, optax.trace(0.9)), "trace"),
    "ema": (optax.chain(SGD, SGP, optax.ema(0.9)), "ema"),
    "scale": (optax.chain(SGP, optax.scale(-0.1)), "scale"),
    "adam, flat": (optax.chain(SGP, optax.scale_by_adam(), optax.scale(-0.1)), "scale_by_adam"),
    "adam, nested": (
        optax.chain(SGP, optax.chain(optax.scale_by_adam(), optax.scale(-0.1))),
        "scale_by_adam",
    ),
    "adamw": (optax.chain(SGP, optax.adamw(0.1)), "scale_by_adam"),
    "sgd after tracking": (optax.chain(gx.gradient_tracking(RING), SGD), "scale"),
    "a rate": (optax.chain(SGP, optax.scale_by_learning_rate(0.1)), "scale"),
    "a rate by step": (optax.chain(SGP, optax.scale_by_learning_rate(RATE)), "scale_by_schedule"),
    "inject_hyperparams": (optax.chain(SGP, inject(optax.adam)), "scale_by_adam"),
    "named_chain": (optax.named_chain(("g", SGP), ("o", optax.adam(0.1))), "scale_by_adam"),
    "masked before adam": (optax.chain(optax.masked(SGP, HALF), optax.adam(0.1)), "scale_by_adam"),
    "apply_if_finite before adam": (
        optax.chain(gx.apply_if_finite(SGP), optax.adam(0.1)),
        "scale_by_adam",
    ),
    "in the middle": (
        optax.chain(optax.scale_by_adam(), SGP, optax.scale_by_learning_rate(0.1)),
        "scale",
    ),
    "decay": (optax.chain(SGD, SGP, optax.add_decayed_weights(0.1)), "add_decayed_weights"),
    "noise": (optax.chain(SGD, SGP, optax.add_noise(0.1, 0.5, 0)), "add_noise"),
    "clip": (optax.chain(SGD, SGP, optax.clip(0.1)), "clip"),
    "clip by norm": (
        optax.chain(SGD, SGP, optax.clip_by_global_norm(0.1)),
        "clip_by_global_norm",
    ),
    "apply_every": (optax.chain(SGD, SGP, optax.apply_every(2)), "apply_every"),
    "zero_nans": (optax.chain(SGD, SGP, optax.zero_nans()), "zero_nans"),
    "by a condition": (
        optax.chain(SGD, SGP, optax.conditionally_transform(optax.trace(0.9), is_even)),
        "trace",
    ),
    "inside outer": (gx.outer(optax.chain(DPSGD, SGD), SGD, 2), "scale"),
    "inside outer, every step": (gx.outer(optax.chain(DPSGD, SGD), SGD, 1), "scale"),
    "after outer": (optax.chain(gx.outer(SGD, SGD, 2), optax.trace(0.9)), "trace"),
    "inside sharded": (gx.sharded(optax.chain(SGP, optax.trace(0.9)), SPECS), "trace"),
    "after sharded": (optax.chain(gx.sharded(SGP, SPECS), optax.adam(0.1)), "scale_by_adam"),
    "inside MultiSteps": (
        optax.MultiSteps(optax.chain(SGP, optax.trace(0.9)), 2).gradient_transformation(),
        "trace",
    ),
    "after a projection": (
        optax.chain(CHAIN, optax.keep_params_nonnegative(), optax.trace(0.9)),
        "trace",
    ),
    "osgp": (optax.chain(gx.osgp(RING, 2), optax.trace(0.9)), "trace"),
}
SAM = optax.contrib.sam(CHAIN, optax.sgd(0.05), sync_period=2)
RIGHT = {
    "a chain": CHAIN,
    "an optimizer of more": optax.chain(optax.clip(1.0), optax.adamw(0.1), SGP),
    "named_chain": optax.named_chain(("o", optax.adam(0.1)), ("g", SGP)),
    "nothing after it": optax.chain(CHAIN, optax.identity(), optax.scale(1.0)),
    "nonnegative after it": optax.chain(CHAIN, optax.keep_params_nonnegative()),
    "MultiSteps around": optax.MultiSteps(CHAIN, 2).gradient_transformation(),
    "MultiSteps before": optax.chain(
        optax.MultiSteps(SGD, 2).gradient_transformation(), gx.sgp(RING.every(2, phase=1))
    ),
    "masked around": optax.masked(CHAIN, HALF),
    "masked in the chain": optax.chain(SGD, optax.masked(SGP, HALF)),
    "multi_transform around": optax.multi_transform({"x": CHAIN, "y": SGD}, {"a": "x", "b": "y"}),
    "inject_hyperparams around": inject(
        lambda learning_rate: optax.chain(optax.sgd(learning_rate), SGP)
    ),
    "apply_if_finite around": gx.apply_if_finite(CHAIN),
    "conditionally_mask around": optax.conditionally_mask(CHAIN, is_even),
    "conditionally_transform around": optax.conditionally_transform(CHAIN, is_even),
    "flatten around": optax.flatten(CHAIN),
    "sam around": without_step(SAM),
    "outer around": gx.outer(CHAIN, optax.sgd(0.7, momentum=0.9), 2),
    "outer around, every step": gx.outer(CHAIN, SGD, 1),
    "outer around no gossip": gx.outer(SGD, SGD, 1),
    "outer with delay": gx.outer(optax.chain(SGD, DPSGD), SGD, 3, delay=1),
    "sharded": optax.chain(SGD, gx.sharded(SGP, SPECS)),
    "sharded outer": gx.sharded(gx.outer(CHAIN, SGD, 1), SPECS),
    "schedule_free before": optax.chain(optax.contrib.schedule_free(SGD, 0.1), DPSGD),
    "allreduce": optax.chain(gx.allreduce(), SGD),
    "osgp": optax.chain(SGD, gx.osgp(RING, 2)),
    "tracking": optax.chain(SGD, gx.gradient_tracking(RING)),
    "the optimizer itself": gx.quasi_global_adam(RING, 0.1),
}


def gradients(params):
    return jax.tree.map(lambda x: x - 1, params), ()


def promote(function):
    """optax's optimizers promote types."""

    def call(*args):
        with jax.numpy_dtype_promotion("standard"):
            return function(*args)

    return call


def trace_loop(tx, params=None, nodes=NODES):
    """Traces a step of a loop of one's own."""
    tx = optax.with_extra_args_support(tx)

    def step(params, state):
        updates, state = tx.update(gradients(params)[0], state, params, step=0)
        return optax.apply_updates(params, updates), state

    trace(step, tx, params, nodes)


def trace_train_step(tx, params=None, nodes=NODES):
    def step(*args):
        return gx.TrainStep(gradients, tx, nodes=nodes)(1, *args)[:2]

    start = jax.eval_shape(promote(nodes.spmd(tx.init)), params or PARAMS)
    jax.eval_shape(promote(step), params or PARAMS, start)


def trace(step, tx, params=None, nodes=NODES):
    """Traces a per-node function of parameters and state."""
    state = jax.eval_shape(promote(nodes.spmd(tx.init)), params or PARAMS)
    return jax.eval_shape(promote(nodes.spmd(step)), params or PARAMS, state)


LOOPS = pytest.mark.parametrize("trace_chain", [trace_loop, trace_train_step])


def refusal(name):
    message = rf"gossip must be last in a chain, .* got `{name}`{PLACE} after it \(params\['\w'\]\)"
    return pytest.raises(ValueError, match=message)


@LOOPS
@pytest.mark.parametrize("name", WRONG)
def test_what_changes_the_updates_of_gossip_is_refused(name, trace_chain):
    tx, transform = WRONG[name]
    with refusal(transform):
        trace_chain(tx)


@LOOPS
@pytest.mark.parametrize("name", RIGHT)
def test_what_keeps_the_updates_of_gossip_is_right(name, trace_chain):
    trace_chain(RIGHT[name])


@LOOPS
@pytest.mark.parametrize("nodes", PLACEMENTS.values(), ids=PLACEMENTS)
def test_on_devices(nodes, trace_chain):
    for name in ("trace", "inside outer", "masked before adam"):
        tx, transform = WRONG[name]
        with refusal(transform):
            trace_chain(tx, nodes=nodes)
    for name in ("a chain", "MultiSteps around", "outer around", "apply_if_finite around"):
        trace_chain(RIGHT[name], nodes=nodes)


@LOOPS
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_of_narrow_parameters(dtype, trace_chain):
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    for name in ("a chain", "outer around, every step", "nonnegative after it"):
        trace_chain(RIGHT[name], params)
    with refusal("scale"):
        trace_chain(WRONG["inside outer, every step"][0], params)
