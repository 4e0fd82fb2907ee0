"""A closed train step under `gx.decentralize` is the chain of its optimizer and the gossip."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from modes import make_mesh
from promotion import promoting

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints

N = 4
SCHEDULE = gx.topology.random_peer(N, 3, seed=0)  # weights that differ


GRID = make_mesh(N, 2, "fsdp")
SPECS = {"w": P("fsdp")}
PLACEMENTS = {
    "vmap": (gx.Nodes(N), lambda tx: tx),
    "mesh": (gx.Nodes(mesh=make_mesh(N)), lambda tx: tx),
    "several per device": (gx.Nodes(N, mesh=make_mesh(2)), lambda tx: tx),
    "fsdp": (gx.Nodes(mesh=GRID), lambda tx: gx.sharded(tx, SPECS)),
}
OPTIMIZERS = {
    "adamw": (promoting(optax.adamw(0.1, weight_decay=1e-2)), oracle.adamw(0.1, decay=1e-2)),
    "sgd": (optax.sgd(0.1, momentum=0.9), oracle.sgd(0.1, momentum=0.9)),
}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
TARGETS = np.random.default_rng(0).normal(size=(9, N, 6))


def gradients(params, target):
    return {"w": 0.1 * (params["w"] - target.astype(params["w"].dtype))}, jnp.sum(target)


def train_step(state, target):
    grads, metric = gradients(state.params, target)
    return state.apply_gradients(grads=grads), {"sum": metric}


def make_state(optimizer=OPTIMIZERS["adamw"][0]) -> Any:
    return TrainState.create(apply_fn=None, params={"w": jnp.ones(6)}, tx=optimizer)


def train(step, state: Any = None) -> Any:
    state = make_state() if state is None else state
    for target in TARGETS.astype(jnp.result_type(float)):
        state, _ = step(state, target)
    return state


@pytest.mark.parametrize(
    ("name", "place"), [*(("adamw", place) for place in PLACEMENTS), ("sgd", "fsdp")]
)
def test_sgp_of_a_closed_step_is_that_of_the_dense_oracle(name, place):
    nodes, around = PLACEMENTS[place]
    optimizer, dense = OPTIMIZERS[name]
    rows = oracle.train_sgp(
        SCHEDULE.matrices(), np.ones((N, 6)), lambda z, k: 0.1 * (z - TARGETS[k]), dense, 9
    )
    *_, (expected, weights) = rows
    with jax.enable_x64(True):
        step = gx.decentralize(
            jax.jit(train_step, donate_argnums=0), around(gx.sgp(SCHEDULE)), nodes
        )
        state = train(step, make_state(optimizer))
        np.testing.assert_allclose(state.params["w"], expected, rtol=0, atol=1e-12)
        average = step.average(state)
        mean = weights @ expected / N
        np.testing.assert_allclose(average.params["w"], mean, rtol=0, atol=1e-12)
    assert (state.step, int(average.step), type(average)) == (9, 9, TrainState)
    if place == "fsdp":  # what the optimizer keeps, too
        kept = jax.tree.leaves(state.rest.opt_state)[-1]
        assert {shard.data.shape for shard in kept.addressable_shards} == {(1, 3)}


@pytest.mark.parametrize(
    ("place", "dtype", "tolerance"),
    [
        ("vmap", jnp.bfloat16, 0.05),
        ("several per device", jnp.float32, 1e-6),
        ("fsdp", jnp.float32, 1e-6),
    ],
)
def test_an_outer_optimizer_goes_around_a_closed_step(place, dtype, tolerance):
    """Narrow models move by what the closed step has rounded already."""
    nodes, around = PLACEMENTS[place]
    params = {"w": jnp.ones(6, dtype)}
    with jax.numpy_dtype_promotion("standard"):  # of flax's apply_gradients
        tx = around(gx.outer(optax.identity(), NESTEROV, every=3))
        actual = train(
            gx.decentralize(train_step, tx, nodes), make_state().replace(params=params)
        ).params
        tx = around(gx.outer(OPTIMIZERS["adamw"][0], NESTEROV, every=3))
        chain = gx.TrainStep(gradients, tx, nodes=nodes)
        expected, opt_state = nodes.init(tx, params)
        for k, target in enumerate(TARGETS.astype(np.float32)):
            expected, opt_state, _ = chain(k, expected, opt_state, target)
    wide = (tree["w"].astype(jnp.float32) for tree in (actual, expected))
    np.testing.assert_allclose(*wide, atol=tolerance)


TAKEN = {
    "vmap": lambda schedule: gx.outer(gx.sgp(schedule), NESTEROV, every=3),
    "fsdp": gx.osgp,
}


@pytest.mark.parametrize("place", TAKEN)
def test_a_run_goes_on_from_its_checkpoint(place, tmp_path):
    """From any step, as the number of the round is in the state; and with other nodes."""
    is_sharded = place == "fsdp"

    def make_tx(saved):
        schedule = SCHEDULE if saved["nodes"] == N else gx.topology.directed_ring(saved["nodes"])
        return PLACEMENTS[place][1](TAKEN[place](schedule))

    def decentralize(size):
        nodes = gx.Nodes(mesh=make_mesh(size, 2, "fsdp")) if is_sharded else size
        return gx.decentralize(train_step, make_tx({"nodes": size}), nodes)

    def start(size):
        step = decentralize(size)
        return step, checkpoints.resume(step.init(make_state()), step.nodes, make_tx)

    state: Any = None
    whole = train(decentralize(N))
    for targets in np.split(TARGETS.astype(np.float32), [1, 5]):
        with Checkpoints(tmp_path, every=1) as checkpoints:
            step, state = start(N)
            for target in targets:
                state, _ = step(state, target)
                checkpoints.after(state)
    for pair in zip(*map(jax.tree.leaves, (state.arrays, whole.arrays)), strict=True):
        np.testing.assert_array_equal(*pair)
        assert pair[0].sharding == pair[1].sharding
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        step, state = start(2)
    assert "became 2:" in str(checkpoints.resize_report)
    for x in (state.params["w"], state.rest.opt_state[0].mu["w"]):
        assert x.addressable_shards[0].data.shape[1:] == (3 if is_sharded else 6,)
    state, _ = step(state, np.zeros((2, 6), np.float32))
    assert (state.step, state.rest.step.tolist()) == (10, [10, 10])
    state, _ = step(step.average(state), np.zeros((2, 6), np.float32))  # as a loop's own restores
    assert (state.step, state.rest.step.tolist()) == (11, [11, 11])


REFUSED = {
    "an optimizer before": optax.chain(NESTEROV, gx.sgp(SCHEDULE)),
    "an optimizer alone": optax.adamw(0.1),
    "an optimizer inside": gx.outer(optax.adam(0.1), NESTEROV, every=3),
    "gradients": gx.quasi_global(gx.topology.ring(N), 0.1),
    "gradients averaged": optax.chain(gx.allreduce(), gx.sgp(SCHEDULE)),
    "skipped steps": gx.apply_if_finite(gx.sgp(SCHEDULE)),
    "no gossip": optax.identity(),
}


@pytest.mark.parametrize("tx", REFUSED.values(), ids=REFUSED)
def test_what_is_no_gossip_of_updates_is_refused(tx):
    with pytest.raises(ValueError, match=r"tx of decentralize must .* give "):
        gx.decentralize(train_step, tx, N).init(make_state())


def test_what_a_closed_step_must_not_do_is_refused():
    gossip = gx.sgp(SCHEDULE)
    state = make_state()
    target = np.zeros((N, 6))
    with pytest.raises(ValueError, match=r"must be like the state .*, int32 \[\] at \.step"):
        gx.decentralize(lambda s, x: (s.replace(step=0.5), x), gossip, N)(state, target)
    step = gx.decentralize(train_step, gossip, N)
    with pytest.raises(ValueError, match=r"must be arrays \[N, \.\.\.\] with N = 4"):
        step(state, target[0])
    for params in (lambda s: s.params["w"] * 2, lambda s: ()):
        with pytest.raises(ValueError, match="params must return leaves of the state"):
            gx.decentralize(train_step, gossip, N, params=params).init(state)
    nnx_state = nnx.state(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"got AttributeError.*nnx\.filter_state\(state"):
        gx.decentralize(train_step, gossip, N).init(nnx_state)
    for params in (lambda s: s["params"], lambda s: s.params["model"]):
        with pytest.raises(ValueError, match=r"got (Type|Key)Error.*params=lambda state: \.\.\."):
            gx.decentralize(train_step, gossip, N, params=params).init(state)


def test_parameters_are_found_in_any_state():
    one = jnp.ones(3)
    module, optimizer = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), optax.sgd(0.1, momentum=0.9)
    nnx_state = nnx.state((module, nnx.Optimizer(module, optimizer, wrt=nnx.Param)))
    mlp = eqx.filter(eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0)), eqx.is_array)
    for state, params, count in (
        ({"params": {"a": one}, "average": one}, lambda s: s["params"], 1),  # one array, twice
        ({"z": one, "a": one, "count": 0}, lambda s: (s["z"], s["a"]), 2),
        (nnx_state, lambda s: nnx.filter_state(s, nnx.Param), 2),
        ((mlp, jnp.int32(0)), lambda s: eqx.filter(s[0], eqx.is_inexact_array), 4),
    ):

        def half(state, x, params=params):
            picked = {id(leaf) for leaf in jax.tree.leaves(params(state))}
            return jax.tree.map(lambda leaf: leaf / 2 if id(leaf) in picked else leaf, state), x

        step = gx.decentralize(half, gx.sgp(SCHEDULE), N, params=params)
        stacked, _ = step(state, jnp.zeros(N))
        assert len(jax.tree.leaves(stacked.params)) == count
        result = step.average(stacked)
        expected, _ = half(jax.tree.map(lambda x: x + 0, state), 0)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        for x, y in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


@pytest.mark.parametrize("is_function", [False, True])
def test_each_node_draws_by_its_own_key(is_function):
    """Keys that are numbers are folded in on demand."""

    def noise(state, x):
        return state, jax.random.normal(state["key"])

    step = gx.decentralize(noise, gx.sgp(SCHEDULE), N, params=lambda state: state["params"])

    def give(key):
        state = {"params": jnp.ones(2), "key": key}
        return (lambda: state) if is_function else state

    state, drawn = step(step.init(give(jax.random.key(0))), jnp.zeros(N))
    assert len({*drawn.tolist()}) == N
    assert step.average(state)["key"] == state.rest["key"][0]
    numbers = give(jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match=r"state\['key'\], two numbers .*fold_in=True"):
        step.init(numbers)
    for fold_in, count in ((True, N), (False, 1)):
        state, drawn = step(step.init(numbers, fold_in=fold_in), jnp.zeros(N))
        assert len({*drawn.tolist()}) == count
        assert state.rest["key"].dtype == jnp.uint32


def test_a_copy_of_the_parameters_is_named():
    """Gossip does not reach a float32 master copy; constants, counts and others may be equal."""
    params = jnp.arange(3.0) + 0.1
    step = gx.decentralize(train_step, gx.sgp(SCHEDULE), N, params=lambda state: state["p"])
    zeros = jnp.zeros(3)
    for copy in (params, params.astype(jnp.bfloat16)):
        state = {"p": params.astype(copy.dtype), "master": params, "moment": zeros, "n": 3}
        with pytest.warns(UserWarning, match=r"state\['master'\] is a copy of parameters"):
            step.init(state)
    step.init({"p": params, "other": params + 1, "moment": zeros, "n": 3})
    step.init({"p": zeros, "moment": zeros})


def test_a_closed_step_that_gathers_gradients_takes_no_tracking():
    tx = optax.MultiSteps(optax.sgd(0.1), 2)
    state = {"p": jnp.zeros(2), "opt": tx.init(jnp.zeros(2))}
    tracking = gx.gradient_tracking(SCHEDULE)
    step = gx.decentralize(train_step, tracking, N, params=lambda state: state["p"])
    with pytest.raises(ValueError, match=r"MultiSteps inside train_step"):
        step.init(state)


def test_a_sharding_constraint_inside_is_one_of_the_devices_of_a_node():
    nodes, around = PLACEMENTS["fsdp"]
    gossip = around(gx.sgp(gx.topology.ring(N)))
    expected = train(gx.decentralize(train_step, gossip, nodes)).params["w"]
    for spec in (P("fsdp"), NamedSharding(GRID, P("fsdp"))):

        def constrained(state, target, spec=spec):
            return train_step(state, jax.lax.with_sharding_constraint(target, spec))

        with jax.set_mesh(jax.make_mesh((N, 2), ("nodes", "fsdp"))):
            step = gx.decentralize(jax.jit(constrained), gossip, nodes)
            actual = train(step, step.init(make_state)).params["w"]
        np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-6)


@pytest.mark.parametrize("given", ["host", "whole", "explicit"])
def test_moments_beside_picked_parameters_are_made_in_parts(given, monkeypatch):
    """As a trainer has them: the state of a model, and beside it the state of its optimizer."""
    target = jnp.zeros((N, 6, 2))
    tx = gx.sharded(gx.sgp(SCHEDULE), {"model": SPECS})
    nodes = gx.Nodes(mesh=GRID)

    def pick(state):
        return {"model": state["model"]}

    def step_of_model(state, target):
        momentum = jax.tree.map(lambda m, w: m + w - target, state["momentum"], state["model"])
        model = jax.tree.map(lambda w, m: w - 0.1 * m, state["model"], momentum)
        return {"model": model, "momentum": momentum}, target

    def make():
        return {
            "model": {"w": jnp.arange(12.0).reshape(6, 2)},
            "momentum": {"w": jnp.zeros((6, 2))},
        }

    step = gx.decentralize(step_of_model, tx, nodes, params=pick)
    if given == "host":
        state = step.init(jax.tree.map(np.asarray, make()))
    else:  # arrays that another program has put on this mesh do not go through the host
        mesh = jax.make_mesh((N, 2), GRID.axis_names) if given == "explicit" else GRID
        placed = jax.device_put(make(), NamedSharding(mesh, P() if given == "whole" else P("fsdp")))
        monkeypatch.delattr("gossipjax.processes.put_sharded")
        state = step.init(placed)
    assert state.rest["momentum"]["w"].sharding.spec == P("nodes", "fsdp")
    assert state.rest["momentum"]["w"].sharding.mesh == nodes.mesh
    after, _ = step(state, target)
    for old, new in zip(jax.tree.leaves(state[1:4]), jax.tree.leaves(after[1:4]), strict=True):
        assert old.sharding.is_equivalent_to(new.sharding, old.ndim)  # no second program
    expected = np.broadcast_to(make()["model"]["w"], (N, 6, 2))
    np.testing.assert_array_equal(after.rest["momentum"]["w"], expected)
