"""Islands: models that are sharded inside a node, of all algorithms, equal to whole models."""

import re
from collections import Counter
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from algorithms.rows import NO_VARIANTS, ROWS
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from promotion import apply_updates

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState

SHAPES = {"kernel": (4, 6), "bias": (8,)}
FSDP = {"kernel": P("fsdp"), "bias": P("fsdp")}
BOTH = {"kernel": P("tensor", "fsdp"), "bias": P(("fsdp", "tensor"))}
COLLECTIVE = re.compile(r"(\S+) (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(")
STEPS = 4


def make_mesh(nodes, **axes):
    devices = np.array(jax.devices()[: nodes * int(np.prod([*axes.values()]))])
    return Mesh(devices.reshape(nodes, *axes.values()), ("nodes", *axes))


FSDP_MESH = make_mesh(4, fsdp=2)


def make_values(n, shapes, seed=0):
    """Models that differ from node to node, and updates: trees `[N, ...]` and `[S, N, ...]`."""
    rng = np.random.default_rng(seed)
    params = {name: rng.normal(size=(n, *s)).astype(np.float32) for name, s in shapes.items()}
    return params, {
        name: rng.normal(size=(STEPS, n, *s)).astype(np.float32) for name, s in shapes.items()
    }


def make_schedule(row, n):
    return gx.topology.from_matrices(row.matrices(np.random.default_rng(1), n))


def run_steps(nodes, tx, specs, params, updates):
    """The models, their mass and average, the distance and the state after all steps."""

    def run_all(params, *updates):
        state = tx.init(params)
        for step, u in enumerate(updates):
            changes, state = tx.update(u, state, params, step=step)
            params = apply_updates(params, changes)
        mass = gx.diagnostics.total_mass(params, state)
        average = gx.average_model(params, state)
        return (params, mass, average), gx.diagnostics.consensus_distance(params), state

    steps = [nodes.put(jax.tree.map(lambda x, k=k: x[k], updates), specs) for k in range(STEPS)]
    return nodes.run(run_all, nodes.put(params, specs), *steps)


def compile_step(nodes, tx, params, state):
    """The text of the program of the last step."""

    def take_step(params, state, u):
        u, state = tx.update(u, state, params, step=STEPS - 1)
        return apply_updates(params, u), state

    return nodes.spmd(take_step).lower(params, state, params).compile().as_text()


LIKE_ANOTHER = ("dpsgd, adapt-then-combine", "osgp 1", "osgp 1, biased", "d1d_psgd", "gossip")
LEFT_OUT = (*LIKE_ANOTHER, "allreduce, low_rank")  # which is refused
CASES = [
    (name, FSDP_MESH, FSDP)
    for name in NO_VARIANTS
    if name not in LEFT_OUT and not ROWS[name].chooses  # a part chooses among its own values
]
CASES.append(("osgp 2", make_mesh(2, fsdp=2, tensor=2), BOTH))


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "mesh", "specs"), CASES, ids=[f"{name}-{m.devices.shape}" for name, m, _ in CASES]
)
def test_parts_equal_whole_models(name, mesh, specs):
    """And the compiled update sends a message per type and slot, of a part, and gathers nothing."""
    row = ROWS[name]
    n = len(mesh.devices)
    schedule = make_schedule(row, n)
    tx = row.transform(schedule)
    params, updates = make_values(n, SHAPES)
    nodes = gx.Nodes(mesh=mesh)
    sharded = gx.sharded(tx, lambda _: specs)
    result, distance, state = run_steps(nodes, sharded, specs, params, updates)
    text = compile_step(nodes, sharded, result[0], state)
    assert all(
        leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("nodes", *specs[key])), leaf.ndim)
        for key, leaf in result[0].items()
    )
    expected, expected_distance, expected_state = run_steps(
        gx.Nodes(n), gx.sharded(tx, specs), None, params, updates
    )
    assert_close(result, expected, 2e-6)
    assert_close(state, expected_state, 2e-6)
    assert_close(distance, expected_distance, 1e-5)
    kinds = Counter(kind for _, kind in COLLECTIVE.findall(text))
    assert set(kinds) <= {"collective-permute", "all-reduce", "all-to-all"}
    gossip = gx.gossip_state(state)
    if row.has_schedule:
        assert gossip is not None
        overlap = gossip.overlap
        round_ = schedule.round_at((STEPS - 2) // overlap if overlap else STEPS - 1)
        assert round_.is_uniform or kinds["collective-permute"] == len(round_.slots)
    part = sum(int(np.prod(shape)) for shape in SHAPES.values()) // mesh.devices[0].size
    for shape, kind in COLLECTIVE.findall(text):
        if kind == "collective-permute":
            assert int(re.findall(r"\[(\d+)\]", shape)[0]) <= 2 * part + 1


FAULTS = gx.faults.Faults(
    4,
    arrives=gx.faults.independent_drops(4, 8, 0, 0.3),
    active=gx.faults.cyclic_activity(4, 2, 1),
    delays=gx.faults.uniform_delays(4, 8, 0, 2),
)
CHAINS = {
    "DiLoCo around osgp": gx.outer(
        optax.chain(optax.sgd(0.1), gx.osgp(gx.topology.one_peer_exponential(4), overlap=2)),
        optax.sgd(0.7, momentum=0.9, nesterov=True),
        every=2,
    ),
    "streaming": gx.outer(optax.sgd(0.1), optax.sgd(0.7), every=2, fragments=2, delay=1),
    "choco": optax.chain(optax.sgd(0.1), gx.choco(gx.topology.ring(4), gx.wire.float32(), 0.5)),
    "over neighbours": gx.outer(
        optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.directed_ring(4))),
        optax.sgd(0.7),
        every=2,
        average=gx.topology.random_pairs(4, 3, 0),
    ),
    "over a directed ring": gx.outer(
        optax.sgd(0.1),
        optax.sgd(0.7),
        every=2,
        average=gx.gradient_tracking(gx.topology.directed_ring(4), damped=True),
    ),
    "lost and late messages, inactive nodes": gx.faults.inactive(
        optax.chain(
            optax.sgd(0.1, momentum=0.9), gx.faults.sgp(gx.topology.directed_ring(4), FAULTS)
        ),
        FAULTS,
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name):
    params, updates = make_values(4, SHAPES)
    params = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), params)
    tx = gx.sharded(CHAINS[name], FSDP)
    nodes = gx.Nodes(mesh=FSDP_MESH)
    result, distance, state = run_steps(nodes, tx, FSDP, params, updates)
    expected, expected_distance, expected_state = run_steps(gx.Nodes(4), tx, None, params, updates)
    assert_close((result, state), (expected, expected_state), 2e-6)
    assert_close(distance, expected_distance, 1e-5)
    assert "all-gather" not in compile_step(nodes, tx, result[0], state)


def test_pieces_of_leaves_that_are_cut_over_the_devices_of_a_node_gather_nothing():
    shapes = {"blocks": (4, 8), "table": (512, 2)}
    specs = {"blocks": P(None, "fsdp"), "table": P("fsdp")}
    layers = gx.layer_fragments(5, {"blocks": 0, "table": None})
    params, updates = make_values(4, shapes)
    params = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), params)
    outer_tx = optax.sgd(0.7, momentum=0.9)
    tx = gx.sharded(gx.outer(optax.sgd(0.1), outer_tx, 5, fragments=layers, delay=1), specs)
    nodes = gx.Nodes(mesh=FSDP_MESH)
    result, _, state = run_steps(nodes, tx, specs, params, updates)
    expected, _, expected_state = run_steps(gx.Nodes(4), tx, None, params, updates)
    assert_close((result, state), (expected, expected_state), 2e-6)
    assert "all-gather" not in compile_step(nodes, tx, result[0], state)
    momentum = state.inner.outer[1][0].trace
    assert not any(x.sharding.is_fully_replicated for x in jax.tree.leaves(momentum))
    one = jax.tree.map(lambda x: x[0], params)
    states = nodes.init(tx, one)[1], nodes.replicate(lambda: tx.init(one))
    made, replicated = ([x.sharding for x in jax.tree.leaves(state)] for state in states)
    assert made == replicated
    coarse = {name: x[:, :6] for name, x in params.items()}
    with pytest.raises(ValueError, match=r"must split its parameter, .* evenly"):
        nodes.run(tx.init, nodes.put(coarse, specs))


OPTIMIZERS = {
    "clip_by_global_norm": optax.clip_by_global_norm(0.5),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9),
    "add_noise": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "cumsum": optax.stateless_with_tree_map(lambda u, _: jnp.cumsum(u, axis=0)),
    "accumulated": optax.MultiSteps(optax.lamb(0.1), 1).gradient_transformation(),
    "injected": optax.inject_hyperparams(optax.adamw)(0.1),
    "masked": optax.masked(optax.clip_by_global_norm(0.5), {"kernel": True, "bias": False}),
}


def test_optimizers_inside_sharded_see_whole_arrays():
    """Norms, factors, orders and random numbers of a part would be other ones, without a word."""
    gossip = gx.sgp(gx.topology.directed_ring(2))
    chains = {name: optax.chain(tx, gossip) for name, tx in OPTIMIZERS.items()}
    slow = optax.clip_by_global_norm(0.1)
    chains["outer, adafactor"] = gx.outer(OPTIMIZERS["adafactor"], slow, 1, reset_inner=True)
    params, updates = make_values(2, SHAPES)
    params = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), params)
    updates = jax.tree.map(lambda x: x[0], updates)

    def take_step(params, updates):
        results = {}
        state: Any
        for name, chain in chains.items():
            tx = gx.sharded(chain, FSDP)
            changes, state = tx.update(updates, tx.init(params), params, step=0)
            numbers = jax.tree.map(lambda x: x if x.dtype == jnp.float32 else None, state.inner)
            results[name] = apply_updates(params, changes), numbers
        return results

    nodes = gx.Nodes(mesh=make_mesh(2, fsdp=2))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        actual = nodes.run(take_step, nodes.put(params, FSDP), nodes.put(updates, FSDP))
        expected = gx.Nodes(2).run(take_step, params, updates)
    for name, values in expected.items():
        assert_close(actual[name], values, 5e-6)
        assert actual[name][0]["bias"].addressable_shards[0].data.shape == (1, 4)


def assert_close(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


@cache
def make_task():
    """Gradients of a small regression that XLA partitions inside a node, and its data."""
    rng = np.random.default_rng(3)
    batches = rng.normal(size=(6, 4, 8, 4)).astype(np.float32)

    def loss(params, x):
        prediction = jnp.tanh(x @ params["kernel"]).sum(axis=-1)
        return jnp.mean(jnp.square(prediction + params["bias"].mean() - x.sum(axis=-1)))

    def gradients(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return grads, value

    return gradients, batches


def start(mesh, tx):
    nodes = gx.Nodes(mesh=mesh) if mesh is not None else gx.Nodes(4)
    params, _ = make_values(1, SHAPES)
    model = jax.tree.map(lambda x: x[0], params)
    return nodes, nodes.init(tx, model)


def train(nodes, tx, params, state, steps):
    gradients, batches = make_task()
    train_step = gx.TrainStep(gradients, tx, nodes=nodes)
    loss = None
    for k in steps:
        batch = nodes.put(batches[k], P("fsdp"))
        params, state, loss = train_step(k, params, state, batch)
    return params, state, loss


def make_chain(specs, schedule=None, **options):
    schedule = schedule or gx.topology.one_peer_exponential(4)
    gossip = gx.sharded(gx.osgp(schedule, overlap=2, **options), specs)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9), optax.scale(-0.1), gossip)


OTHER_MESH = make_mesh(4, fsdp=1, tensor=2)
OTHER_SPECS = {"kernel": P("fsdp", "tensor"), "bias": P("tensor")}


def test_a_checkpoint_goes_on_inside_other_nodes(tmp_path):
    """Bit for bit on another mesh inside the nodes; with fewer nodes from the average model."""
    tx = make_chain(FSDP)
    nodes, start_state = start(FSDP_MESH, tx)
    params, state, _ = train(nodes, tx, *start_state, range(3))
    moments = state[1].trace["kernel"]
    assert moments.addressable_shards[0].data.size * 8 == moments.size
    average = nodes.run(gx.average_model, params, state)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, (params, state, None), {"nodes": 4})
        checkpoints.wait()
    resumed = resume(tmp_path, OTHER_MESH, OTHER_SPECS, 4)
    for a, b in zip(jax.tree.leaves((params, state)), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    assert resumed[0]["kernel"].sharding.spec == P("nodes", "fsdp", "tensor")
    fewer, _ = resume(tmp_path, make_mesh(2, fsdp=2, tensor=2), BOTH, 2)
    assert_close(fewer, jax.tree.map(lambda x: x[:2], average), 1e-6)
    assert fewer["kernel"].addressable_shards[0].data.shape == (1, 2, 3)


def resume(folder, mesh, specs, n) -> Any:
    def make_tx(saved):
        return make_chain(specs, gx.topology.one_peer_exponential(saved["nodes"]))

    nodes, (params, state) = start(mesh, make_tx({"nodes": n}))
    with Checkpoints(folder, read_only=True) as checkpoints:
        resumed = checkpoints.resume(TrainState(0, params, state), nodes, make_tx)
    return resumed.params, resumed.opt_state


def test_the_two_halves_of_an_update():
    """`gx.exchange` and `received=` together equal `tx.update`."""
    for gossip in (
        gx.osgp(gx.topology.one_peer_exponential(4), overlap=2),
        gx.sgp(gx.topology.directed_ring(4), order="combine-while-adapting"),
    ):
        tx = gx.sharded(gossip, FSDP)
        nodes, (params, state) = start(FSDP_MESH, tx)

        def whole(step, params, state, tx=tx):
            return tx.update(params, state, params, step=step)

        def halves(step, params, state, tx=tx):
            received = gx.exchange(state, step, params=params)
            return tx.update(params, state, params, step=step, received=received)

        for step in range(2):
            programs = [nodes.spmd(fn, static_argnums=0) for fn in (whole, halves)]
            (u, new), (u_halves, new_halves) = (run(step, params, state) for run in programs)
            assert_close((u_halves, new_halves), (u, new), 0)
            params, state = jax.tree.map(jnp.add, params, u), new


def test_a_shard_map_of_ones_own_over_all_axes():
    """There transforms are called with parts; the state's specs are those of `gx.state_specs`."""
    gossip = gx.osgp(gx.topology.one_peer_exponential(4), overlap=2)
    tx = gx.sharded(gossip, FSDP)
    params, updates = make_values(4, SHAPES)
    nodes = gx.Nodes(mesh=FSDP_MESH)
    (expected, _, _), distance, _ = run_steps(nodes, tx, FSDP, params, updates)
    like = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    specs = gx.state_specs(jax.eval_shape(tx.init, like), like, FSDP)

    def add_nodes(specs):
        return jax.tree.map(lambda spec: P("nodes", *spec), specs)

    def run_all(params, updates):
        model, u = jax.tree.map(lambda x: x[0], (params, updates))
        state = tx.init(model)
        for step in range(STEPS):
            now = jax.tree.map(lambda x, step=step: x[step], u)
            changes, state = tx.update(now, state, model, step=step)
            model = apply_updates(model, changes)
        distance = gx.diagnostics.consensus_distance(model, specs=FSDP)
        return jax.tree.map(lambda x: x[None], (model, state, distance))

    by_step = jax.tree.map(lambda spec: P("nodes", None, *spec), FSDP)
    run = jax.shard_map(
        run_all,
        mesh=FSDP_MESH,
        in_specs=(add_nodes(FSDP), by_step),
        out_specs=(add_nodes(FSDP), add_nodes(specs), P("nodes")),
        check_vma=False,
    )
    by_node = jax.tree.map(lambda x: x.swapaxes(0, 1), updates)
    model, _, actual_distance = jax.jit(run)(params, by_node)
    assert_close(model, expected, 1e-6)
    assert_close(actual_distance, distance, 1e-6)


def test_one_part_that_is_not_finite_is_rejected_by_all_devices():
    """Devices of a node that decided by their own parts would wait for each other."""
    params, updates = make_values(4, SHAPES)
    updates["bias"][1, 2, 5] = np.nan
    schedule = gx.topology.directed_ring(4)
    inside = gx.sharded(gx.apply_if_finite(gx.sgp(schedule)), FSDP)
    around = gx.apply_if_finite(gx.sharded(gx.sgp(schedule), FSDP))
    for tx in (inside, around):
        result, *_ = run_steps(gx.Nodes(mesh=FSDP_MESH), tx, FSDP, params, updates)
        expected, *_ = run_steps(gx.Nodes(4), tx, None, params, updates)
        assert_close(result, expected, 1e-6)
        assert np.isfinite(result[0]["bias"]).all()


def test_mixing_of_anything_that_is_sharded():
    params, _ = make_values(4, SHAPES)
    schedule = gx.topology.random_peer(4, 3, 0)
    nodes = gx.Nodes(mesh=FSDP_MESH)

    def mix(step, tree, specs=None):
        return gx.mix(tree, jnp.ones(()), schedule, step, specs=specs)

    expected = gx.spmd(mix, nodes=4, static_argnums=0)(1, params)
    mix_parts = partial(mix, specs=FSDP)
    programs = (nodes.spmd(mix_parts, static_argnums=0), nodes.spmd(mix_parts, shared_argnums=0))
    for program, step in zip(programs, (1, jnp.int32(1)), strict=True):
        stacked = nodes.put(params, FSDP)
        assert_close(program(step, stacked), expected, 1e-6)
        assert "all-gather" not in program.lower(step, stacked).compile().as_text()


def test_copies_of_a_sharded_model_inside_a_node():
    """Each device sends its share of its part; gradients are averaged over the copies."""
    mesh = make_mesh(2, local=2, fsdp=2)
    schedule = gx.topology.directed_ring(2)

    def make_tx(wrap, name):
        average = [] if name is None else [wrap(gx.allreduce(axis_name=name))]
        return optax.chain(*average, optax.sgd(0.1), wrap(gx.sgp(schedule, local_axis_name=name)))

    gradients, batches = make_task()
    results = []
    for nodes, wrap, name in (
        (gx.Nodes(mesh=mesh), lambda tx: gx.sharded(tx, FSDP), "local"),
        (gx.Nodes(2), lambda tx: tx, None),
    ):
        tx = make_tx(wrap, name)
        params, state = nodes.init(tx, {k: jnp.ones(shape) for k, shape in SHAPES.items()})
        train_step = gx.TrainStep(gradients, tx, nodes=nodes, local_argnums=1)
        for k in range(3):
            params, state, _ = train_step(k, params, state, batches[k][:2])
        results.append(params)
    copies, whole = results
    assert_close(copies, whole, 1e-6)
