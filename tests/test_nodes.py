"""`gx.Nodes`: where nodes run, the way into node-stacked arrays and the way back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from modes import make_mesh

import gossipjax as gx

N = 4
DEVICES = np.array(jax.devices())
MESH = make_mesh(N)
PLACEMENTS = {
    "simulated": gx.Nodes(N),
    "mesh": gx.Nodes(mesh=MESH),
    "two nodes per device": gx.Nodes(N, mesh=make_mesh(2)),
    "hierarchy": gx.Nodes(mesh=make_mesh(N, 2)),
}
every_placement = pytest.mark.parametrize("nodes", PLACEMENTS.values(), ids=PLACEMENTS)


class TestMade:
    def test_by_a_mesh_of_fewer_devices(self):
        mesh = make_mesh(2)
        nodes = gx.Nodes(N, mesh=mesh)
        assert (nodes.size, nodes.per_device, nodes.mesh) == (N, 2, mesh)
        assert not nodes.is_simulated
        assert nodes.local == [0, 1, 2, 3]
        assert [gx.Nodes(mesh=mesh).per_device, gx.Nodes(N).per_device] == [1, N]
        stacked = nodes.replicate(jnp.zeros(3))
        assert [shard.data.shape for shard in stacked.addressable_shards] == [(2, 3)] * 2
        assert nodes.spmd(node_mean)(stacked).sharding == stacked.sharding

    def test_by_neither(self):
        nodes = gx.Nodes()
        assert nodes.size == len(jax.devices())
        assert nodes == gx.Nodes(mesh=make_mesh(8))

    def test_by_other_axes(self):
        mesh = Mesh(DEVICES.reshape(2, 4), ("local", "servers"))
        nodes = gx.Nodes(mesh=mesh, axis_name="servers", local_axis_name="gpus")
        assert (nodes.size, nodes.local_devices) == (4, None)
        assert dataclasses.replace(nodes, local_axis_name="local").local_devices == 2
        index = nodes.run(lambda x: jax.lax.axis_index("servers"), jnp.zeros(4))
        np.testing.assert_array_equal(index, np.arange(4))


def node_mean(x):
    return jax.lax.pmean(x, "nodes")


def has_spec(array, nodes, spec):
    """Whether an array lies on the devices of `nodes` in this way; on one device, any does."""
    if nodes.mesh is None:
        return len(array.sharding.device_set) == 1
    return array.sharding == jax.sharding.NamedSharding(nodes.mesh, spec)


class TestRun:
    def test_traces_a_function_once(self):
        nodes = gx.Nodes(N)
        traced = []

        def count_traces(x):
            traced.append(x.shape)
            return node_mean(x)

        for _ in range(3):
            np.testing.assert_array_equal(nodes.run(count_traces, jnp.arange(4.0)), [1.5] * N)
        gx.Nodes(N).run(count_traces, jnp.zeros(N))  # equal nodes share it
        assert traced == [()]
        nodes.run(count_traces, jnp.zeros((N, 2)))
        assert traced == [(), (2,)]

    def test_shared_arguments_have_no_node_axis(self):
        nodes = PLACEMENTS["mesh"]

        def select(x, table, scale):
            return x * scale + table[jax.lax.axis_index("nodes")]

        table = np.arange(N, dtype=np.float32)
        out = nodes.run(select, jnp.ones(N), nodes.shared(table), jnp.full(N, 2.0))
        np.testing.assert_array_equal(out, table + 2)
        with pytest.raises(ValueError, match=r"argument 2 must be node-stacked.*got shape \[3\]"):
            nodes.run(select, jnp.ones(N), nodes.shared(table), jnp.ones(3))


def some_of_everything():
    return {
        "weights": np.arange(6.0).reshape(2, 3),  # float64, which JAX does not take
        "bias": jnp.ones(2, jnp.bfloat16),
        "count": np.int64(3),
        "rate": 0.5,
        "mask": np.array([True, False]),
        "key": jax.random.key(7),
        "none": None,
    }


def assert_equal_keys(actual, expected):
    np.testing.assert_array_equal(jax.random.key_data(actual), jax.random.key_data(expected))


class TestThereAndBack:
    @every_placement
    def test_replicate_and_one(self, nodes):
        tree = some_of_everything()
        stacked = nodes.replicate(tree)
        expected = jax.tree.map(jnp.asarray, tree)
        for leaf, given in zip(*map(jax.tree.leaves, (stacked, expected)), strict=True):
            assert (leaf.shape, leaf.dtype) == ((N, *given.shape), given.dtype)
            assert has_spec(leaf, nodes, P("nodes"))
        one = nodes.one(stacked)
        for leaf, given in zip(*map(jax.tree.leaves, (one, expected)), strict=True):
            assert (leaf.shape, leaf.dtype) == (given.shape, given.dtype)
            assert len(leaf.sharding.device_set) == 1  # an ordinary model
        assert_equal_keys(one.pop("key"), tree.pop("key"))
        jax.tree.map(np.testing.assert_array_equal, one, tree)

    @every_placement
    def test_put_and_to_host(self, nodes):
        keys = jax.random.split(jax.random.key(0), N)
        rows = {"x": np.arange(8.0, dtype=np.float32).reshape(N, 2), "flag": np.ones(N, bool)}
        stacked = nodes.put(rows | {"key": keys})
        for leaf in jax.tree.leaves(stacked):
            assert has_spec(leaf, nodes, P("nodes"))
        assert_equal_keys(stacked.pop("key"), keys)
        host = nodes.to_host(stacked)
        assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(host))
        jax.tree.map(np.testing.assert_array_equal, host, rows)
        assert nodes.to_host({"none": None}) == {"none": None}
        table = nodes.put_shared({"a": np.arange(3), "b": 2.0})
        for leaf in jax.tree.leaves(table):
            assert has_spec(leaf, nodes, P())
        assert (table["a"].tolist(), float(table["b"])) == ([0, 1, 2], 2.0)
        with pytest.raises(TypeError, match="key_data"):  # which NumPy does not know
            nodes.to_host(keys)

    @every_placement
    def test_one_refuses_rows_that_differ(self, nodes):
        rows = np.ones((N, 3), np.float32)
        rows[2, 1] = 1.5
        with pytest.raises(ValueError, match=r"rows of \['other'\] that differ by 33.3%: average"):
            nodes.one({"same": np.ones((N, 2), np.float32), "other": nodes.put(rows)})
        rows[2, 1] = 1 + 1e-6  # sums in another order
        assert nodes.one(nodes.put(rows)).tolist() == [1.0] * 3

    def test_one_compares_all_kinds_of_values(self):
        """NaN of any bits equals NaN at its place; a comparison with NaN is no verdict."""
        nodes = PLACEMENTS["mesh"]
        nan, inf = np.nan, np.inf
        other_nan = np.uint32(0xFFC00001).view(np.float32)
        keys = jax.random.split(jax.random.key(0), 2)
        differ = [
            (np.array([1, 2], np.float32), np.array([1, nan], np.float32)),
            (np.array([3e38, 0], np.float32), np.array([-3e38, 0], np.float32)),
            (np.array([complex(nan, 1)], np.complex64), np.array([complex(nan, 2)], np.complex64)),
            (np.array([2**24], np.int32), np.array([2**24 + 1], np.int32)),
            (np.array([True]), np.array([False])),
            (keys[0], keys[1]),
        ]
        equal = [
            (jnp.array([1, nan, inf, 0]), np.array([1, other_nan, inf, -0.0], np.float32)),
            (jnp.array([nan, 1], jnp.bfloat16), jnp.array([nan, 1], jnp.bfloat16)),
            (keys[0], keys[0]),
        ]

        def stack(usual, last):
            return jnp.stack([jnp.asarray(usual)] * (N - 1) + [jnp.asarray(last)])

        one = nodes.one([nodes.put(stack(*rows)) for rows in equal])
        assert_equal_keys(one.pop(), keys[0])
        for row, (expected, _) in zip(one, equal, strict=False):
            assert jnp.array_equal(row, expected, equal_nan=True)
        for rows in differ:
            with pytest.raises(ValueError, match=r"must be equal, got .* rows of .* that differ"):
                nodes.one(nodes.put(stack(*rows)))


@every_placement
def test_arrays_of_the_host_run_the_same_program(nodes):
    """The first step of a loop must not be another program than the later ones."""
    traced = []

    def count_traces(x):
        traced.append(x.shape)
        return x + 1

    program = nodes.spmd(count_traces)
    out = program(program(np.zeros((N, 2), np.float32)))
    np.testing.assert_array_equal(out, np.full((N, 2), 2.0))
    assert traced == [(2,)]


def test_states_are_made_inside_of_transformations():
    """Several seeds at once, in a jitted function, and for their shapes alone."""
    nodes = gx.Nodes(4)
    tx = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.ring(4)))

    def start(key):
        params, state = nodes.init(tx, jax.random.normal(key, (3,)))
        return params, gx.average_model(params, state, nodes=nodes)

    keys = jax.random.split(jax.random.key(0), 5)
    params, averages = jax.vmap(start)(keys)
    one, average = jax.jit(start)(keys[2])
    np.testing.assert_array_equal(params[2], one)
    np.testing.assert_allclose(averages[2], average, rtol=1e-6)
    assert jax.eval_shape(start, keys[0])[0].shape == (4, 3)


def test_an_average_is_bound_to_no_device():
    """The next thing that a user does: evaluation on all devices, under any mesh."""
    nodes = PLACEMENTS["mesh"]
    tx = gx.sgp(gx.topology.ring(4))
    params, state = nodes.init(tx, {"w": jnp.ones(3)})

    @jax.jit
    def evaluate(params, x):
        return (x @ params["w"]).mean()

    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,), devices=jax.devices()[:4])
        with jax.set_mesh(mesh):
            x = jax.device_put(jnp.ones((8, 3)), NamedSharding(mesh, P("data")))
            average = gx.average_model(params, state, nodes=nodes)
            assert float(evaluate(average, x)) == 3
    x = jax.device_put(jnp.ones((8, 3)), jax.devices()[3])
    assert float(evaluate(gx.average_model(params, state, nodes=nodes), x)) == 3


def test_the_axis_of_examples_may_be_another():
    batch = np.arange(24).reshape(3, 8)
    for x in (batch, jnp.asarray(batch)):
        parts = gx.Nodes(4).split({"x": x}, axis=1)["x"]
        np.testing.assert_array_equal(parts, np.stack(np.split(batch, 4, axis=1)))
    with pytest.raises(ValueError, match="an axis 1 of examples that the 3 nodes"):
        gx.Nodes(3).split(batch, axis=1)
