"""What follows a gossip, and what stands before one that is the optimizer: refused or right.

Programs are traced here, not compiled.
"""

from functools import partial
from typing import Any

import flax.training.train_state
import jax
import jax.numpy as jnp
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
SGD: Any = optax.sgd(0.1)
RATE = optax.linear_schedule(0.1, 0.01, 10)
SGP: Any = gx.sgp(gx.topology.one_peer_exponential(N))
DPSGD: Any = gx.dpsgd(RING)
CHAIN: Any = optax.chain(SGD, SGP)


def inject(make):
    return optax.inject_hyperparams(make)(learning_rate=0.1)


def is_even(step, **_):
    return step % 2 == 0


def without_step(tx):
    """Of a wrapper that says that it takes extra arguments, and refuses them."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return tx.update(updates, state, params)

    return optax.GradientTransformation(tx.init, update)


WRONG: dict[str, Any] = {  # the chain, and the transform that is named
    "trace": (optax.chain(SGD, SGP, optax.trace(0.9)), "trace"),
    "ema": (optax.chain(SGD, SGP, optax.ema(0.9)), "ema"),
    "scale": (optax.chain(SGP, optax.scale(-0.1)), "scale"),
    "adamw": (optax.chain(SGP, optax.adamw(0.1)), "scale_by_adam"),
    "sgd after tracking": (optax.chain(gx.gradient_tracking(RING), SGD), "scale"),
    "a rate by step": (optax.chain(SGP, optax.scale_by_learning_rate(RATE)), "scale_by_schedule"),
    "inject_hyperparams": (optax.chain(SGP, inject(optax.adam)), "scale_by_adam"),
    "named_chain": (optax.named_chain(("g", SGP), ("o", optax.adam(0.1))), "scale_by_adam"),
    "masked before adam": (optax.chain(optax.masked(SGP, HALF), optax.adam(0.1)), "scale_by_adam"),
    "apply_if_finite before adam": (
        optax.chain(gx.apply_if_finite(SGP), optax.adam(0.1)),
        "scale_by_adam",
    ),
    "decay": (optax.chain(SGD, SGP, optax.add_decayed_weights(0.1)), "add_decayed_weights"),
    "noise": (optax.chain(SGD, SGP, optax.add_noise(0.1, 0.5, 0)), "add_noise"),
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
    "inside accumulate": (gx.accumulate(optax.chain(SGP, optax.trace(0.9)), 2), "trace"),
    "osgp": (optax.chain(gx.osgp(RING, 2), optax.trace(0.9)), "trace"),
}
SAM = optax.contrib.sam(CHAIN, optax.sgd(0.05), sync_period=2)
RIGHT: dict[str, Any] = {
    "a chain": CHAIN,
    "named_chain": optax.named_chain(("o", optax.adam(0.1)), ("g", SGP)),
    "nothing after it": optax.chain(CHAIN, optax.identity(), optax.scale(1.0)),
    "nonnegative after it": optax.chain(CHAIN, optax.keep_params_nonnegative()),
    "accumulate around": gx.accumulate(CHAIN, 2),
    "MultiSteps before": optax.chain(
        optax.MultiSteps(SGD, 2).gradient_transformation(), gx.sgp(RING.every(2, phase=1))
    ),
    "masked around": optax.masked(CHAIN, HALF),
    "multi_transform around": optax.multi_transform({"x": CHAIN, "y": SGD}, {"a": "x", "b": "y"}),
    "inject_hyperparams around": inject(
        lambda learning_rate: optax.chain(optax.sgd(learning_rate), SGP)
    ),
    "apply_if_finite around": gx.apply_if_finite(CHAIN),
    "conditionally_mask around": optax.conditionally_mask(CHAIN, is_even),
    "flatten around": optax.flatten(CHAIN),
    "sam around": without_step(SAM),
    "outer around": gx.outer(CHAIN, optax.sgd(0.7, momentum=0.9), 2),
    "outer around, every step": gx.outer(CHAIN, SGD, 1),
    "outer with delay": gx.outer(optax.chain(SGD, DPSGD), SGD, 3, delay=1),
    "sharded": optax.chain(SGD, gx.sharded(SGP, SPECS)),
    "sharded outer": gx.sharded(gx.outer(CHAIN, SGD, 1), SPECS),
    "schedule_free before": optax.chain(optax.contrib.schedule_free(SGD, 0.1), DPSGD),
    "allreduce": optax.chain(gx.allreduce(), SGD),
    "osgp": optax.chain(SGD, gx.osgp(RING, 2)),
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
        updates, state = tx.update(gradients(params)[0], state, params, step=1)
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


IN_BOTH_LOOPS = (
    "trace",
    "decay",
    "inside outer",
    "inside accumulate",
    "a chain",
    "outer with delay",
)


def list_cases(chains):
    """Each chain in a train step, and some in a loop of one's own, which is checked alike."""
    cases = [(name, trace_train_step) for name in chains]
    return cases + [(name, trace_loop) for name in chains if name in IN_BOTH_LOOPS]


def refusal(name):
    message = rf"gossip must be last in a chain, .* got `{name}`{PLACE} after it \(params\['\w'\]\)"
    return pytest.raises(ValueError, match=message)


@pytest.mark.parametrize(("name", "trace_chain"), list_cases(WRONG))
def test_what_changes_the_updates_of_gossip_is_refused(name, trace_chain):
    tx, transform = WRONG[name]
    with refusal(transform):
        trace_chain(tx)


@pytest.mark.parametrize(("name", "trace_chain"), list_cases(RIGHT))
def test_what_keeps_the_updates_of_gossip_is_right(name, trace_chain):
    trace_chain(RIGHT[name])


@pytest.mark.parametrize("nodes", PLACEMENTS.values(), ids=PLACEMENTS)
def test_on_devices(nodes):
    for name in ("trace", "inside outer", "masked before adam"):
        tx, transform = WRONG[name]
        with refusal(transform):
            trace_train_step(tx, nodes=nodes)
    for name in ("a chain", "accumulate around", "outer around", "apply_if_finite around"):
        trace_train_step(RIGHT[name], nodes=nodes)


def test_of_narrow_parameters():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    for name in ("a chain", "outer around, every step", "nonnegative after it"):
        trace_train_step(RIGHT[name], params)
    with refusal("scale"):
        trace_train_step(WRONG["inside outer, every step"][0], params)


def sgp_then_adamw(params, state):
    """By hand, in a loop of one's own."""
    updates, new = SGP.update(gradients(params)[0], state, params, step=0)
    adamw = optax.adamw(0.1)
    updates, _ = adamw.update(updates, adamw.init(params), params)
    return optax.apply_updates(params, updates), new


def returned_changed(params, state):
    updates, new = SGP.update(gradients(params)[0], state, params, step=0)
    return jax.tree.map(lambda u: 0.5 * u, updates), new


def applied_with_decay(params, state):
    updates, new = SGP.update(gradients(params)[0], state, params, step=0)
    return jax.tree.map(lambda p, u: 0.9 * p + u, params, updates), new


def averaged_again(params, state):
    updates, new = SGP.update(gradients(params)[0], state, params, step=0)
    return optax.apply_updates(params, jax.lax.pmean(updates, "nodes")), new


def skipped_if_large(params, state):
    updates, new = SGP.update(gradients(params)[0], state, params, step=0)
    is_small = optax.tree.norm(updates) < 1
    return jax.tree.map(lambda p, u: p + jnp.where(is_small, u, 0), params, updates), new


def scanned_with_momentum(params, state):
    def body(carry, _):
        params, state, momentum = carry
        updates, state = SGP.update(gradients(params)[0], state, params, step=0)
        momentum = jax.tree.map(lambda m, u: 0.9 * m + u, momentum, updates)
        return (optax.apply_updates(params, momentum), state, momentum), None

    return jax.lax.scan(body, (params, state, params), length=3)[0]


def one_leaf_changed(params, state):
    updates, new = SGP.update(gradients(params)[0], state, params, step=0)
    return optax.apply_updates(params, updates | {"b": -updates["b"]}), new


def added_to_other_parameters(params, state):
    """The gossip mixed the parameters before the optimizer's step."""
    grads = gradients(params)[0]
    updates, new = SGP.update(grads, state, params, step=0)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return optax.apply_updates(moved, updates), new


OWN_WRONG = [
    added_to_other_parameters,
    sgp_then_adamw,
    returned_changed,
    applied_with_decay,
    averaged_again,
    skipped_if_large,
    scanned_with_momentum,
    one_leaf_changed,
]


@pytest.mark.parametrize("step", OWN_WRONG, ids=lambda step: step.__name__)
def test_a_loop_that_changes_the_updates_is_refused(step):
    with pytest.raises(ValueError, match=rf"gossip must be last in a chain, .* got `\w+`{PLACE}"):
        trace(step, SGP)


def norm_as_a_metric(params, state):
    updates, state = SGP.update(gradients(params)[0], state, params, step=0)
    metrics = optax.tree.norm(updates), optax.tree.norm(updates) / optax.tree.norm(params)
    return optax.apply_updates(params, updates), state, metrics


def returned(params, state):
    return SGP.update(gradients(params)[0], state, params, step=0)


def state_alone(params, state):
    return SGP.update(gradients(params)[0], state, params, step=0)[1]


def average_of_new_parameters(params, state):
    updates, new = SGP.update(gradients(params)[0], state, params, step=0)
    params = optax.apply_updates(params, updates)
    return params, new, jax.tree.map(lambda p: 0.9 + 0.1 * p, params)


def scanned(params, state):
    def body(carry, k):
        params, state = carry
        updates, state = SGP.update(gradients(params)[0], state, params, step=k)
        return (optax.apply_updates(params, updates), state), updates

    return jax.lax.scan(body, (params, state), jnp.arange(3))


def in_a_fori_loop(params, state):
    def body(k, carry):
        updates, state = SGP.update(gradients(carry[0])[0], carry[1], carry[0], step=k)
        return optax.apply_updates(carry[0], updates), state, updates

    return jax.lax.fori_loop(0, 3, body, (params, state, params))


def two_steps(params, state):
    return norm_as_a_metric(*norm_as_a_metric(params, state)[:2])


def in_functions_of_their_own(params, state):
    @jax.jit
    def update(params, state):
        return SGP.update(gradients(params)[0], state, params, step=0)

    @jax.checkpoint
    def apply(params, updates):
        return jax.tree.map(lambda p, u: jnp.add(p, u), params, updates)

    updates, state = update(params, state)
    return apply(params, updates), state


def as_vectors(params, state):
    updates, state = SGP.update(gradients(params)[0], state, params, step=0)
    flat, unravel = ravel_pytree(params)
    return unravel(flat + ravel_pytree(updates)[0]), state


def frozen_by_a_condition(params, state):
    updates, new = SGP.update(gradients(params)[0], state, params, step=0)
    is_on = new.count > 3
    return jax.tree.map(lambda p, u: p + u * is_on.astype(u.dtype), params, updates), new


def flax_train_state(params, state):
    del state
    create = flax.training.train_state.TrainState.create
    return create(apply_fn=gradients, params=params, tx=CHAIN).apply_gradients(grads=params)


def lookahead(params, state):
    """Of `optax.lookahead`, whose parameters are two."""
    del state
    tx = optax.lookahead(CHAIN, 2, 0.5)
    both = optax.LookaheadParams.init_synced(params)
    updates, state = tx.update(params, tx.init(both), both)
    return optax.apply_updates(both, updates), state


def schedule_free_by_hand(params, state):
    del state
    tx = RIGHT["schedule_free before"]
    updates, (free, gossip) = tx.update(params, tx.init(params), params, step=0)
    z, _ = gx.mix(free.z, None, RING, 0)
    return optax.apply_updates(params, updates), (free._replace(z=z), gossip)


def received_apart(params, state):
    del state
    state = DPSGD.init(params)
    received = gx.exchange(state, 0, params=params)
    updates, state = DPSGD.update(params, state, params, step=0, received=received)
    return optax.apply_updates(params, updates), state


def descends_before_the_gossip(params, state):
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients(params)[0])
    updates, new = SGP.update(jax.tree.map(jnp.zeros_like, params), state, params, step=0)
    return optax.apply_updates(params, updates), new


OWN_RIGHT = [
    descends_before_the_gossip,
    norm_as_a_metric,
    returned,
    state_alone,
    average_of_new_parameters,
    scanned,
    in_a_fori_loop,
    two_steps,
    in_functions_of_their_own,
    as_vectors,
    frozen_by_a_condition,
    flax_train_state,
    lookahead,
    schedule_free_by_hand,
    received_apart,
]


@pytest.mark.parametrize("step", OWN_RIGHT, ids=lambda step: step.__name__)
def test_a_loop_that_keeps_the_updates_is_right(step):
    trace(step, SGP)


def momentum_after(params, state):
    updates, new = SGP.update(gradients(params)[0], state, params, step=0)
    return jax.tree.map(lambda p, u: p + 0.5 * u, params, updates), new


def test_wherever_the_program_is_used():
    """By itself, lowered, prepared for a thread, inside a program of the user's, and in a scan."""
    state = NODES.spmd(SGP.init)(PARAMS)
    donating = partial(NODES.spmd, donate_argnums=(0, 1))
    for use in (
        lambda program: program(PARAMS, state),
        lambda program: program.lower(PARAMS, state),
        lambda program: program.prepare(PARAMS, state),
        lambda program: jax.jit(program)(PARAMS, state),
        lambda program: jax.lax.scan(lambda c, _: (program(*c), None), (PARAMS, state), length=2),
    ):
        for make in (NODES.spmd, donating):
            with refusal("mul"):
                use(make(momentum_after))


def test_the_place_is_a_line_of_the_user():
    line = momentum_after.__code__.co_firstlineno + 2
    with pytest.raises(ValueError, match=rf"got `mul` \(tests/test_last\.py:{line}\) after it"):
        trace(momentum_after, SGP)


@pytest.mark.parametrize("nodes", [NODES, PLACEMENTS["mesh"]], ids=["vmap", "mesh"])
def test_the_marks_are_in_no_program(nodes, monkeypatch):
    def lower():
        def step(params, state):
            return norm_as_a_metric(params, state)

        start = jax.eval_shape(nodes.spmd(SGP.init), PARAMS)
        return nodes.spmd(step).lower(PARAMS, start).as_text()

    marked = lower()
    monkeypatch.setattr("gossipjax.last.checkpoint_name", lambda x, name: x)
    assert lower() == marked


QUASI_GLOBAL = gx.quasi_global(RING, 0.1)
AGAINST = {
    "sgd": (optax.chain(SGD, QUASI_GLOBAL), "scale"),
    "sgd before its own adam": (optax.chain(SGD, gx.quasi_global_adam(RING, 0.1)), "scale"),
    "a rate by step": (optax.chain(optax.sgd(RATE), QUASI_GLOBAL), "scale_by_schedule"),
    "adam": (optax.chain(optax.adam(0.1), QUASI_GLOBAL), "scale"),
    "inject_hyperparams": (optax.chain(inject(optax.sgd), QUASI_GLOBAL), "scale"),
    "masked": (optax.chain(optax.masked(SGD, HALF), QUASI_GLOBAL), "scale"),
    "apply_if_finite around": (gx.apply_if_finite(optax.chain(SGD, QUASI_GLOBAL)), "scale"),
    "sharded": (optax.chain(SGD, gx.sharded(QUASI_GLOBAL, SPECS)), "scale"),
    "scale": (optax.chain(optax.scale(-1.0), QUASI_GLOBAL), "scale"),
}
ALONG = {
    "nothing": QUASI_GLOBAL,
    "clip": optax.chain(optax.clip(1.0), QUASI_GLOBAL),
    "decay": optax.chain(optax.add_decayed_weights(0.1), QUASI_GLOBAL),
    "centralize": optax.chain(optax.centralize(), QUASI_GLOBAL),
    "masked": optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), HALF), gx.quasi_global_adam(RING, 0.1)
    ),
    "rate of hyperparams": inject(lambda learning_rate: gx.quasi_global(RING, learning_rate)),
    "allreduce": optax.chain(gx.allreduce(), QUASI_GLOBAL),
    "an optimizer before another gossip": CHAIN,
}


def trace_start(tx):
    """Traces the start of a loop of one's own, without a step."""
    row = jax.tree.map(lambda x: x[0], PARAMS)
    jax.eval_shape(promote(lambda: NODES.init(tx, lambda: row)))


@pytest.mark.parametrize("trace_chain", [trace_start, trace_train_step])
@pytest.mark.parametrize("name", AGAINST)
def test_an_optimizer_before_one_is_refused(name, trace_chain):
    """Gradient ascent."""
    tx, transform = AGAINST[name]
    message = rf"gossip that is the optimizer must get gradients, .* by `{transform}`"
    if name == "adam" and trace_chain is trace_train_step:
        message = "got updates of one with momentum before it"
    with pytest.raises(ValueError, match=message):
        trace_chain(tx)


@pytest.mark.parametrize("name", ALONG)
def test_what_gradients_pass_on_their_way_is_right(name):
    trace_train_step(ALONG[name])


def test_a_chain_that_needs_more_arguments_can_be_started():
    trace_start(optax.chain(optax.contrib.reduce_on_plateau(), QUASI_GLOBAL))
