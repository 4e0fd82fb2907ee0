"""Per-node functions on node-stacked arrays: kinds of arguments, donation, and local devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from modes import make_mesh
from promotion import apply_updates, promoting

import gossipjax as gx

N = 4
LOCAL = 2
HIERARCHY = gx.Nodes(mesh=make_mesh(N, LOCAL))
PLACEMENTS = {
    "simulated": gx.Nodes(N),
    "mesh": gx.Nodes(mesh=make_mesh(N)),
    "two nodes per device": gx.Nodes(N, mesh=make_mesh(2)),
    "explicit mesh": gx.Nodes(mesh=jax.make_mesh((N,), ("nodes",), devices=jax.devices()[:N])),
    "hierarchy": HIERARCHY,
}
every_placement = pytest.mark.parametrize("nodes", PLACEMENTS.values(), ids=PLACEMENTS)


@every_placement
def test_strips_the_node_axis_and_puts_it_back(nodes):
    def scale(tree, factor, ones, shared):
        assert tree["a"].shape == (3,)
        assert tree["b"].shape == ()
        assert isinstance(factor, int)
        assert ones.shape == ()
        return {"out": tree["a"] * factor + shared, "index": jax.lax.axis_index("nodes")}

    program = gx.spmd(scale, nodes=nodes, static_argnums=1, shared_argnums=3)
    tree = {"a": jnp.arange(12.0).reshape(N, 3), "b": jnp.ones(N)}
    out = program(tree, 2, jnp.ones(N), jnp.float32(1.0))
    np.testing.assert_array_equal(out["out"], np.arange(12.0).reshape(N, 3) * 2 + 1)
    np.testing.assert_array_equal(out["index"], np.arange(N))


@pytest.mark.parametrize("name", ["simulated", "two nodes per device", "hierarchy"])
def test_donated_arguments_are_gone(name):
    nodes = PLACEMENTS[name]
    tx = optax.chain(promoting(optax.adam(1e-3)), gx.sgp(gx.topology.ring(N)))

    def update(params, state):
        updates, state = tx.update(params, state, params)
        return apply_updates(params, updates), state

    params = {"w": jnp.ones((N, 2)), "b": jnp.ones((N, 3), jnp.bfloat16)}
    state = gx.spmd(tx.init, nodes=nodes)(params)
    program = gx.spmd(update, nodes=nodes, donate_argnums=(0, 1))
    params, state = program(params, state)
    old = params["w"]
    program(params, state)
    assert old.is_deleted()


def make_hierarchical_step(check_vma, is_cast):
    """Returns init and one step: gradients averaged inside a server, models between servers."""
    schedule = gx.topology.one_peer_exponential(N)
    tx = optax.chain(
        gx.allreduce(axis_name="local"),
        optax.sgd(0.1, momentum=0.9),
        gx.sgp(schedule, local_axis_name="local"),
    )

    def loss(z, batch):
        return jnp.mean((batch @ z["a"] - z["b"]) ** 2)

    def step(z, state, batch):
        assert len(batch) == 8 // LOCAL  # of a node's batch, each device has a part
        at = jax.lax.pcast(z, "local", to="varying") if is_cast else z
        updates, state = tx.update(jax.grad(loss)(at, batch), state, z)
        return optax.apply_updates(z, updates), state

    program = HIERARCHY.spmd(step, local_argnums=2, check_vma=check_vma)
    return HIERARCHY.spmd(tx.init, check_vma=check_vma), program, schedule


@pytest.mark.parametrize(("check_vma", "is_cast"), [(False, False), (False, True), (True, True)])
def test_servers_of_several_devices_are_nodes(check_vma, is_cast):
    """The gradient's scale is that of the whole batch of a server, in both modes of shard_map."""
    init, program, schedule = make_hierarchical_step(check_vma, is_cast)
    rng = np.random.default_rng(0)
    start = rng.normal(size=(N, 4))
    batches = rng.normal(size=(6, N, 8, 3))

    def gradient(z, k):
        error = np.einsum("nbd,nd->nb", batches[k], z[:, :3]) - z[:, 3:]
        by_a = 2 * np.einsum("nb,nbd->nd", error, batches[k]) / 8
        return np.concatenate([by_a, -2 * error.mean(axis=1, keepdims=True)], axis=1)

    z = {"a": jnp.asarray(start[:, :3], jnp.float32), "b": jnp.asarray(start[:, 3], jnp.float32)}
    state = init(z)
    expected = oracle.train_sgp(schedule.matrices(), start, gradient, oracle.sgd(0.1, 0.9), 6)
    for k, (expected_z, _) in enumerate(expected):
        z, state = program(z, state, jnp.asarray(batches[k], jnp.float32))
        np.testing.assert_allclose(z["a"], expected_z[:, :3], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(z["b"], expected_z[:, 3], rtol=1e-4, atol=1e-5)
    for shard in z["a"].addressable_shards:  # the replicas inside a server have the same bits
        node = shard.index[0].start
        np.testing.assert_array_equal(shard.data[0], z["a"][node])


def test_gradients_that_autodiff_has_summed_are_refused():
    init, program, _ = make_hierarchical_step(check_vma=True, is_cast=False)
    z = {"a": jnp.ones((N, 3)), "b": jnp.ones(N)}
    with pytest.raises(ValueError, match=r"updates\['a'\] .*over 'local'.*to='varying'"):
        program(z, init(z), jnp.ones((N, 8, 3)))


def test_a_server_sends_its_model_once():
    """Each of L local devices exchanges 1/L of the buffer; naively each would send all of it."""
    size = 1000

    def mixed(x):
        return gx.mix(x, None, gx.topology.directed_ring(N), 0, local_axis_name="local")[0]

    lowered = HIERARCHY.spmd(mixed).lower(jnp.ones((N, size)))
    permutes = [line for line in lowered.as_text().splitlines() if "collective_permute" in line]
    assert len(permutes) == 1
    assert f"tensor<{size // LOCAL}xf32>" in permutes[0]


def test_replicas_that_were_not_averaged_are_refused():
    """Each local device would exchange its part of another model."""
    tx = gx.sgp(gx.topology.ring(N), local_axis_name="local")

    def step(z, state, batch):
        at = jax.lax.pcast(z, "local", to="varying")
        return tx.update(at * batch.mean(), state, z)

    z = jnp.ones((N, 3))
    state = HIERARCHY.spmd(tx.init, check_vma=True)(z)
    with pytest.raises(
        ValueError, match=r"all devices of 'local', got .*gx.allreduce\('local'\) first"
    ):
        HIERARCHY.spmd(step, check_vma=True, local_argnums=2)(z, state, jnp.ones((N, 4)))


@pytest.mark.parametrize("is_static", [True, False])
def test_local_steps_gather_nothing_over_the_local_axis(is_static):
    """An idle round must not collect the model either, and a traced one only in a branch."""
    schedule = gx.topology.one_peer_exponential(N).every(2)

    def mixed(x, step):
        return gx.mix(x, None, schedule, step, local_axis_name="local")[0]

    if is_static:
        program = HIERARCHY.spmd(mixed, static_argnums=1)
    else:
        program = HIERARCHY.spmd(mixed, shared_argnums=1)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(N, 5)), jnp.float32)
    for step in range(4):
        expected = schedule.round_at(step).matrix @ np.asarray(x)
        actual = program(x, step if is_static else jnp.int32(step))
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    if is_static:
        assert "all_gather" not in program.lower(x, 1).as_text()


def test_programs_of_a_cpu_mesh_run_one_after_another():
    """Two at once could wait for each other's threads in their collectives, and never end."""

    def compute_long(x):
        x = jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x), x)
        return jax.lax.pmean(x, "nodes")

    program = PLACEMENTS["mesh"].spmd(compute_long)
    x = jnp.ones((N, 100, 100))
    jax.block_until_ready(program(x))
    first, second = program(x), program(x)
    assert first.is_ready()
    assert not second.is_ready()
