"""Node-stacked arrays on a mesh and on one device, donation, and nodes of several devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from jax.sharding import Mesh

import gossipjax as gx

N, LOCAL = 4, 2


def meshes():
    devices = np.array(jax.devices())
    return {
        "one device": {"nodes": N},
        "mesh": {"mesh": Mesh(devices[:N], ("nodes",))},
        "explicit mesh": {"mesh": jax.make_mesh((N,), ("nodes",), devices=jax.devices()[:N])},
        "hierarchy": {"mesh": Mesh(devices.reshape(N, LOCAL), ("nodes", "local"))},
    }


@pytest.mark.parametrize("where", meshes())
def test_strips_the_node_axis_and_puts_it_back(where):
    def fn(tree, factor, scale, shared):
        assert tree["a"].shape == (3,)
        assert tree["b"].shape == ()
        assert isinstance(factor, int)
        assert scale.shape == ()
        return {"out": tree["a"] * factor + shared, "index": jax.lax.axis_index("nodes")}

    program = gx.spmd(fn, **meshes()[where], static_argnums=1, shared_argnums=3)
    tree = {"a": jnp.arange(12.0).reshape(N, 3), "b": jnp.ones(N)}
    out = program(tree, 2, jnp.ones(N), jnp.float32(1.0))
    np.testing.assert_array_equal(out["out"], np.arange(12.0).reshape(N, 3) * 2 + 1)
    np.testing.assert_array_equal(out["index"], np.arange(N))


@pytest.mark.parametrize("where", meshes())
def test_typed_keys_are_arrays_too(where):
    keys = jax.random.split(jax.random.key(0), N)
    drawn = gx.spmd(lambda key: (jax.random.normal(key), key), **meshes()[where])(keys)[0]
    np.testing.assert_allclose(drawn, [jax.random.normal(key) for key in keys], rtol=1e-6)


def test_without_mesh_or_nodes_all_devices_are_nodes():
    index = gx.spmd(lambda x: jax.lax.axis_index("nodes"))(jnp.zeros(len(jax.devices())))
    np.testing.assert_array_equal(index, np.arange(len(jax.devices())))


def test_another_axis_name():
    total = gx.spmd(lambda x: jax.lax.psum(x, "servers"), nodes=3, axis_name="servers")
    np.testing.assert_array_equal(total(jnp.arange(3.0)), [3, 3, 3])


@pytest.mark.parametrize("where", meshes())
def test_donated_arguments_are_gone(where):
    tx = optax.chain(optax.adam(1e-3), gx.sgp(gx.topology.ring(N)))

    def update(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones((N, 2)), "b": jnp.ones((N, 3), jnp.bfloat16)}
    state = gx.spmd(tx.init, **meshes()[where])(params)
    program = gx.spmd(update, **meshes()[where], donate_argnums=(0, 1))
    params, state = program(params, state)
    old = params["w"]
    program(params, state)
    assert old.is_deleted()


def hierarchical(check_vma, explicit_cast):
    """Gradients averaged inside a server, models between servers: the first step, per node."""
    mesh = meshes()["hierarchy"]["mesh"]
    schedule = gx.topology.one_peer_exponential(N)
    tx = optax.chain(
        gx.allreduce("local"),
        optax.sgd(0.1, momentum=0.9),
        gx.sgp(schedule, local_axis_name="local"),
    )

    def loss(z, batch):
        return jnp.mean((batch @ z["a"] - z["b"]) ** 2)

    def step(z, state, batch):
        at = jax.lax.pcast(z, "local", to="varying") if explicit_cast else z
        updates, state = tx.update(jax.grad(loss)(at, batch), state, z)
        return optax.apply_updates(z, updates), state

    keywords = {"mesh": mesh, "check_vma": check_vma}
    program = gx.spmd(step, local_argnums=2, **keywords)
    return gx.spmd(tx.init, **keywords), program, schedule


@pytest.mark.parametrize(
    ("check_vma", "explicit_cast"), [(False, False), (False, True), (True, True)]
)
def test_servers_of_several_devices_are_nodes(check_vma, explicit_cast):
    """The gradient's scale is that of the whole batch of a server, in both modes of shard_map."""
    init, program, schedule = hierarchical(check_vma, explicit_cast)
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
    for k, (wanted, _) in enumerate(expected):
        z, state = program(z, state, jnp.asarray(batches[k], jnp.float32))
        np.testing.assert_allclose(z["a"], wanted[:, :3], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(z["b"], wanted[:, 3], rtol=1e-4, atol=1e-5)
    for shard in z["a"].addressable_shards:  # the replicas inside a server agree to the bit
        node = shard.index[0].start
        np.testing.assert_array_equal(shard.data[0], z["a"][node])


def test_gradients_that_autodiff_has_summed_are_refused():
    init, program, _ = hierarchical(check_vma=True, explicit_cast=False)
    z = {"a": jnp.ones((N, 3)), "b": jnp.ones(N)}
    with pytest.raises(
        ValueError, match=r"updates\['a'\] does not vary over 'local'.*to='varying'"
    ):
        program(z, init(z), jnp.ones((N, 8, 3)))


def test_a_server_sends_its_model_once():
    """Each of L local devices exchanges 1/L of the buffer; naively each would send all of it."""
    size = 1000
    mesh = meshes()["hierarchy"]["mesh"]

    def mixed(x):
        return gx.mix(x, None, gx.topology.directed_ring(N), 0, local_axis_name="local")[0]

    lowered = gx.spmd(mixed, mesh=mesh).lower(jnp.ones((N, size)))
    permutes = [line for line in lowered.as_text().splitlines() if "collective_permute" in line]
    assert len(permutes) == 1
    assert f"tensor<{size // LOCAL}xf32>" in permutes[0]


def test_one_replicated_gradient_among_varying_ones_is_refused_too():
    def update(z, batch):
        at = {"a": jax.lax.pcast(z["a"], "local", to="varying"), "b": z["b"]}
        grads = jax.grad(lambda z: jnp.mean(z["a"] * batch) + jnp.mean(z["b"] * batch))(at)
        return gx.allreduce("local").update(grads, optax.EmptyState())[0]

    program = gx.spmd(update, mesh=meshes()["hierarchy"]["mesh"], local_argnums=1, check_vma=True)
    with pytest.raises(ValueError, match=r"updates\['b'\] does not vary over 'local'"):
        program({"a": jnp.ones(N), "b": jnp.ones(N)}, jnp.ones((N, 4)))


def test_replicas_that_were_not_averaged_are_refused():
    """Each local device would exchange its part of another model."""
    tx = gx.sgp(gx.topology.ring(N), local_axis_name="local")

    def step(z, state, batch):
        at = jax.lax.pcast(z, "local", to="varying")
        return tx.update(at * batch.mean(), state, z)

    keywords = {"mesh": meshes()["hierarchy"]["mesh"], "check_vma": True}
    z = jnp.ones((N, 3))
    state = gx.spmd(tx.init, **keywords)(z)
    with pytest.raises(ValueError, match=r"varies over 'local'.*gx.allreduce\('local'\) first"):
        gx.spmd(step, **keywords, local_argnums=2)(z, state, jnp.ones((N, 4)))


@pytest.mark.parametrize("static", [True, False])
def test_local_steps_gather_nothing_over_the_local_axis(static):
    """A silent round must not collect the model either, and a traced one only in a branch."""
    schedule = gx.topology.one_peer_exponential(N).every(2)

    def mixed(x, step):
        return gx.mix(x, None, schedule, step, local_axis_name="local")[0]

    how: dict[str, Any] = {"static_argnums": 1} if static else {"shared_argnums": 1}
    program = gx.spmd(mixed, mesh=meshes()["hierarchy"]["mesh"], **how)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(N, 5)), jnp.float32)
    for step in range(4):
        number = step if static else jnp.int32(step)
        expected = schedule.round_at(step).matrix @ np.asarray(x)
        np.testing.assert_allclose(program(x, number), expected, rtol=1e-5, atol=1e-6)
    if static:
        assert "all_gather" not in program.lower(x, 1).as_text()


def test_the_hierarchy_under_nested_vmap():
    """The per-node function runs everywhere: devices of a node simulated as well."""
    ring = gx.topology.ring(N)

    def mixed(x):
        return gx.mix(x, None, ring, 0, local_axis_name="local")[0]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(N, 5)), jnp.float32)
    inner = jax.vmap(mixed, in_axes=None, axis_name="local", axis_size=LOCAL, out_axes=0)
    found = jax.vmap(inner, axis_name="nodes")(x)
    for device in range(LOCAL):
        np.testing.assert_allclose(found[:, device], ring.matrices()[0] @ x, rtol=1e-5, atol=1e-6)


class TestBadInput:
    def test_leaves_without_a_node_axis(self):
        program = gx.spmd(lambda x: x, nodes=4)
        with pytest.raises(ValueError, match=r"argument 0\['w'\] has shape \[3, 2\].*4 nodes"):
            program({"w": jnp.ones((3, 2))})
        with pytest.raises(ValueError, match=r"shape \[\];.*shared_argnums or static_argnums"):
            program(jnp.ones(()))

    def test_batches_that_do_not_divide(self):
        mesh = meshes()["hierarchy"]["mesh"]
        program = gx.spmd(lambda x: x, mesh=mesh, local_argnums=0)
        with pytest.raises(ValueError, match=r"\[4, 3\]; its second axis is split over 2 local"):
            program(jnp.ones((4, 3)))

    def test_meshes(self):
        mesh = meshes()["mesh"]["mesh"]
        with pytest.raises(ValueError, match="none named 'servers'"):
            gx.spmd(lambda x: x, mesh=mesh, axis_name="servers")
        with pytest.raises(ValueError, match="nodes=3, but the mesh has 4"):
            gx.spmd(lambda x: x, mesh=mesh, nodes=3)
        for nodes in (0, "4", 2.0, True):
            with pytest.raises(ValueError, match="nodes is a whole number of at least 1"):
                gx.spmd(lambda x: x, nodes=nodes)  # pyright: ignore[reportArgumentType]

    def test_argument_numbers(self):
        with pytest.raises(ValueError, match=r"counted from 0; given \[-1\]"):
            gx.spmd(lambda x: x, nodes=2, static_argnums=-1)
        with pytest.raises(ValueError, match=r"arguments \[1\] are both static and shared"):
            gx.spmd(lambda x, y: x, nodes=2, static_argnums=1, shared_argnums=(0, 1))
