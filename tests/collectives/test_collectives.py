"""Messages: one per type, fillers that carry zeros, steps that are the same on all nodes."""

import inspect
import re

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import oracle
import pytest
from modes import MODES, make_mesh, run

import gossipjax as gx
from gossipjax.collectives import agree_on
from gossipjax.collectives._averages import ring_mean

IRREGULAR = gx.topology.from_matrices(
    # In round 0, node 0 sends to all, node 2 to node 3, and no other node sends: many fillers.
    [
        [[0.25, 0, 0, 0], [0.25, 1, 0, 0], [0.25, 0, 0.5, 0], [0.25, 0, 0.5, 1]],
        [[0.5, 0, 0, 0.5], [0.5, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0.5]],
        [[0.5, 0.5, 0.2, 0], [0, 0.5, 0, 0], [0.5, 0, 0.8, 0], [0, 0, 0, 1]],
    ]
)


@pytest.mark.parametrize("mode", MODES)
def test_mix_applies_the_matrix_to_numerators_and_weight(mode):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 3)).astype(np.float32), rng.random(4).astype(np.float32)
    matrices = IRREGULAR.matrices()

    def mix_each(x, w):
        return [gx.mix({"x": x}, w, IRREGULAR, step) for step in range(len(matrices))]

    for P, (mixed, weight) in zip(matrices, run(mode, mix_each, 4)(x, w), strict=True):
        np.testing.assert_allclose(mixed["x"], P @ x, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(weight, P @ w, rtol=1e-6)


@pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
def test_a_nan_travels_along_edges_only(mode):
    """A filler must not carry it: 0 * NaN is NaN. Node 2 sends one message, and fillers."""
    program = run(mode, lambda x, w: gx.mix(x, w, IRREGULAR, 0), 4)
    for node, edges in enumerate(IRREGULAR.matrices()[0].T > 0):
        for value in (jnp.nan, jnp.inf):
            mixed, weight = program(jnp.ones(4).at[node].set(value), jnp.ones(4))
            np.testing.assert_array_equal(~np.isfinite(mixed), edges)
            assert np.isfinite(weight).all()


@pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
def test_only_messages_travel_where_a_permutation_may_be_partial(mode, monkeypatch):
    """Not fillers, nor what a node would send to itself: in a switch and in a nested jit, too."""
    path = nx.path_graph(3)
    chain = gx.topology.from_graph(path, weights="metropolis")
    choco = gx.choco(chain, gx.wire.top_k(0.5), 0.4)
    update = jax.jit(lambda tx, x: tx.update(x, tx.init(x), x, step=0)[0], static_argnums=0)
    functions = {
        "static": lambda x: gx.mix(x, None, IRREGULAR, 0)[0],
        "traced": lambda x: gx.mix(x, None, IRREGULAR, jnp.int32(2))[0],
        "narrow": lambda x: gx.mix(x, None, IRREGULAR, 1, wire=gx.wire.bfloat16())[0],
        "choco": lambda x: update(choco, x),
    }
    matrices = IRREGULAR.matrices()
    graphs = {"static": matrices[0], "traced": matrices.any(0), "narrow": matrices[1]}
    for name, function in functions.items():
        graph = graphs.get(name, chain.matrices()[0])
        n = len(graph)
        x = jnp.asarray(np.random.default_rng(0).normal(size=(n, 6)), jnp.float32)
        sent = []
        with monkeypatch.context() as patch:
            patch.setattr(jax.lax, "ppermute", record(jax.lax.ppermute, "perm", sent))
            mixed = run(mode, function, n)(x)
        if (mode, name) == ("vmap", "traced"):
            assert not sent  # the senders are data
            continue
        edges = {(j, i) for i, j in zip(*np.nonzero(graph), strict=True) if i != j}
        permuted = {tuple(pair) for pairs in sent for pair in pairs}
        assert edges <= permuted
        assert (permuted == edges) == (mode != "vmap"), name
        if mode != "vmap":
            expected = run("vmap", function, n)(x)
            np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-6)


def record(collective, name, given):
    """The collective, which also notes this argument of its calls."""
    signature = inspect.signature(collective)

    def call(*args, **keywords):
        given.append(signature.bind(*args, **keywords).arguments.get(name))
        return collective(*args, **keywords)

    return call


def test_an_empty_leaf_before_more_than_one_message():
    large = jnp.repeat(jnp.arange(1.0, 5.0)[:, None], 2**20 + 1, axis=1)
    tree = {"empty": jnp.zeros((4, 0)), "large": large}
    mixed, _ = run("shard_map", lambda x: gx.mix(x, None, gx.topology.ring(4), 0), 4)(tree)
    assert mixed["empty"].shape == (4, 0)
    np.testing.assert_allclose(mixed["large"][:, -1], [7 / 3, 2, 3, 8 / 3], rtol=1e-6)


@pytest.mark.parametrize("mode", ["vmap", "shard_map_check_vma"])
def test_types_and_shapes_are_kept(mode):
    tree = {
        "scalar": jnp.arange(4.0),
        "bfloat16": jnp.arange(8.0).reshape(4, 2).astype(jnp.bfloat16),
        "float16": jnp.ones((4, 2), jnp.float16),
        "empty": jnp.zeros((4, 0)),
    }
    mixed, weight = run(mode, lambda x: gx.mix(x, None, gx.topology.ring(4), 0), 4)(tree)
    assert weight is None
    assert jax.tree.map(lambda x: (x.shape, x.dtype), mixed) == jax.tree.map(
        lambda x: (x.shape, x.dtype), tree
    )
    np.testing.assert_allclose(mixed["scalar"], [4 / 3, 1, 2, 5 / 3], rtol=1e-6)
    np.testing.assert_allclose(
        mixed["bfloat16"].astype(np.float32)[:, 0], [8 / 3, 2, 4, 10 / 3], rtol=2**-8
    )


@pytest.mark.parametrize(
    ("mode", "graph", "wire"),
    [
        *((mode, "pairs", None) for mode in MODES[:3]),
        ("shard_map", "pairs", jnp.bfloat16),
        ("shard_map", "two peers", jnp.bfloat16),
        ("shard_map", "one pair is missing", None),
    ],
)
def test_pairs_may_exchange_as_groups(mode, graph, wire, monkeypatch):
    """As on a CPU over several processes; under vmap and check_vma it stays a permutation."""
    idle = np.eye(8)
    idle[:2, :2] = 0.5
    schedule = {
        "pairs": gx.topology.bipartite_exponential(8),
        "two peers": gx.topology.k_peer_exponential(8, 2),  # hops 4 and 1: the first is a pairing
        "one pair is missing": gx.topology.from_matrices([idle, gx.topology.ring(8).matrices()[0]]),
    }[graph]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 5)), jnp.float32)
    groups = []

    def steps(x):
        weight = jnp.ones(())
        for k in range(4):
            x, weight = gx.mix(x, weight, schedule, k, wire=wire)
        return x, weight

    expected = run(mode, steps, 8)(x)
    monkeypatch.setattr("gossipjax.collectives._exchange.pairs_add_up", lambda: True)
    monkeypatch.setattr(jax.lax, "psum", record(jax.lax.psum, "axis_index_groups", groups))
    by_groups = run(mode, steps, 8)(x)
    for actual, by_permutation in zip(by_groups, expected, strict=True):
        np.testing.assert_allclose(actual, by_permutation, rtol=1e-5, atol=1e-5)
    groups = [pairs for pairs in groups if pairs is not None]
    if mode == "shard_map":
        assert bool(groups) == (graph != "one pair is missing")
        assert all(len(pair) == 2 for pairs in groups for pair in pairs)


@pytest.mark.parametrize(
    ("mode", "nodes"), [("vmap", 3), ("shard_map", 4), ("shard_map_check_vma", 3)]
)
def test_narrow_averages_may_exchange_by_hops(mode, nodes, monkeypatch):
    """As on a CPU over several processes: the same values as those of an all-to-all."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(nodes, 33)), jnp.float32)
    complete = gx.topology.complete(nodes)
    tx = gx.allreduce(wire="bfloat16")

    def averages(x):
        mixed, weight = gx.mix(x, 1 + x[0] ** 2, complete, 0, wire="bfloat16")
        return tx.update(x, tx.init(x))[0], mixed, weight

    expected = run(mode, averages, nodes)(x)
    monkeypatch.setattr("gossipjax.collectives._averages.pairs_add_up", lambda: True)
    for actual, by_all_to_all in zip(run(mode, averages, nodes)(x), expected, strict=True):
        np.testing.assert_allclose(actual, by_all_to_all, rtol=1e-6, atol=1e-6)


def test_float64_is_mixed_in_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))
        tx = gx.sgp(IRREGULAR)
        state = run("shard_map", tx.init, 4)(x)
        assert state.weight.dtype == jnp.float64
        expected = oracle.sgp(IRREGULAR.matrices(), np.asarray(x), np.zeros((6, 4, 3)))
        update = run("shard_map", lambda x, s: tx.update(jnp.zeros_like(x), s, x), 4)
        for z, _, w in expected:
            updates, state = update(x, state)
            x = x + updates
            np.testing.assert_allclose(x, z, rtol=1e-13)
            np.testing.assert_allclose(state.weight, w, rtol=1e-13)


@pytest.mark.parametrize("kept", [0.3, 1e-4, 1e-8])
def test_a_self_weight_may_be_small(kept):
    """x less the sent part would cancel to noise, and z with it."""
    schedule = gx.topology.from_matrices([[[kept, 0], [1 - kept, 1]], [[0.5, 0.5], [0.5, 0.5]]])
    tx = gx.sgp(schedule)

    def update(z):
        return z + tx.update(jnp.zeros(()), tx.init(z), z, step=0)[0]

    (z, _, _), *_ = oracle.sgp(
        schedule.matrices(), np.array([[1.2345], [0.5]]), np.zeros((1, 2, 1))
    )
    actual = gx.spmd(update, nodes=2)(jnp.array([1.2345, 0.5]))
    np.testing.assert_allclose(actual, z[:, 0], rtol=2e-5)


def test_the_weight_is_float32_at_least():
    schedule = gx.topology.from_matrices([[0.5, 0.25], [0.5, 0.75]])
    for weight in (1, np.float16(1), jnp.ones((), jnp.bfloat16)):
        mixed = gx.spmd(lambda x, w=weight: gx.mix(x, w, schedule, 0)[1], nodes=2)(jnp.ones(2))
        assert mixed.dtype == jnp.float32
        np.testing.assert_array_equal(mixed, [0.75, 1.25])


def test_shares_of_one_third_lose_no_mass():
    """The remainder of a division by three stays at the sender; without it 2e-8 of all is gone."""
    schedule = gx.topology.k_peer_exponential(8, 3)
    x = np.random.default_rng(0).random((8, 10_000), np.float32)
    mixed = np.asarray(gx.Nodes(8).run(lambda x: gx.mix(x, None, schedule, 0)[0], x))
    assert abs(mixed.sum(dtype=np.float64) / x.sum(dtype=np.float64) - 1) < 8e-9  # 4e-9 is rounding


def test_the_traced_step_is_one_program_without_branches_under_vmap():
    """XLA fuses nothing across those of a switch."""
    schedule = gx.topology.one_peer_exponential(8)
    tx = gx.sgp(schedule)

    x = jnp.ones((8, 2))
    update = jax.jit(jax.vmap(lambda u, s, x: tx.update(u, s, x)[0], axis_name="nodes"))
    program = update.lower(x, jax.vmap(tx.init)(x), x).compile()
    assert " conditional(" not in str(program.as_text())


@pytest.mark.parametrize("codec", [None, gx.wire.int8(block=8)], ids=str)
def test_rounds_of_many_peers_are_one_loop_where_nodes_are_simulated(codec):
    """A star of 40 nodes has 39 slots; a program of as many parts would compile for a minute."""
    star = gx.topology.star(40)
    matrix = star.matrices()[0]
    x = np.random.default_rng(0).normal(size=(40, 9)).astype(np.float32)

    def mix(x, w):
        return gx.mix(x, w, star, 0, wire=codec, key=jax.random.key(0))

    program = jax.jit(jax.vmap(mix, axis_name="nodes")).lower(x, jnp.ones(40)).compile()
    assert str(program.as_text()).count(" gather(") < 20
    mixed, weights = program(x, jnp.ones(40))
    tolerance = 1e-6 if codec is None else 0.1
    np.testing.assert_allclose(mixed, matrix @ x, atol=tolerance)
    np.testing.assert_allclose(np.sum(mixed, axis=0), x.sum(axis=0), atol=1e-5)
    np.testing.assert_allclose(weights, matrix.sum(axis=1), rtol=1e-5)
    mixed, _ = program(np.where(np.arange(40)[:, None] == 7, np.nan, x), jnp.ones(40))
    np.testing.assert_array_equal(np.isnan(mixed).all(axis=1), matrix[:, 7] > 0)


def test_large_leaves_are_messages_of_their_own(monkeypatch):
    """Of the devices of one process on CPU, which need no copy of them."""
    monkeypatch.setattr("gossipjax.collectives._exchange.MAX_BUCKET", 4 * 100)
    sizes = [3, 200, 40, 50, 1, 120, 30]
    tree = {f"{i}": jnp.ones((8, size)) * i for i, size in enumerate(sizes)}
    schedule = gx.topology.one_peer_exponential(8)

    def mix(x, w):
        return gx.mix(x, w, schedule, 0)

    program = gx.spmd(mix, nodes=gx.Nodes(mesh=make_mesh(8)))
    text = program.lower(tree, jnp.ones(8)).compile().as_text()
    found = re.findall(r"f32\[(\d+)\]\S* collective-permute", text)
    assert sorted(map(int, found)) == [30, 1 + 3 + 40 + 50 + 1, 120, 200]
    mixed, weights = program(tree, jnp.ones(8))
    for name, leaf in tree.items():
        np.testing.assert_array_equal(mixed[name], leaf)
    np.testing.assert_array_equal(weights, 1)


def test_a_step_that_differs_between_nodes_is_refused():
    """Where types show it: nodes in different rounds would lose mass, or wait for ever."""
    schedule = gx.topology.one_peer_exponential(4)
    program = run("shard_map_check_vma", lambda x, k: gx.mix(x, None, schedule, k)[0], 4)
    with pytest.raises(ValueError, match="same on all nodes, got one that varies over 'nodes'"):
        program(jnp.ones(4), jnp.arange(4))


@pytest.mark.parametrize("mode", ["vmap", "shard_map"])
def test_leaves_that_are_sharded_over_an_explicit_axis_are_refused(mode):
    """Over an Auto axis they are exchanged."""
    x = np.arange(48, dtype=np.float32).reshape(2, 4, 6)

    def mixed(x):
        return gx.mix({"w": x}, None, gx.topology.ring(2), 0)[0]["w"]

    def mixed_by(axis_type):
        mesh = jax.make_mesh((2, 2), ("nodes", "model"), axis_types=(axis_type,) * 2)
        spec = jax.sharding.PartitionSpec("nodes", None, "model")
        nodes = jax.sharding.PartitionSpec("nodes")
        apply = {
            "vmap": jax.vmap(mixed, axis_name="nodes", spmd_axis_name="nodes"),
            "shard_map": jax.shard_map(
                lambda x: mixed(x[0])[None],
                mesh=mesh,
                in_specs=nodes,
                out_specs=nodes,
                axis_names={"nodes"},
            ),
        }[mode]
        with jax.set_mesh(mesh):
            return jax.jit(apply)(jax.device_put(x, jax.NamedSharding(mesh, spec)))

    np.testing.assert_allclose(
        mixed_by(jax.sharding.AxisType.Auto), np.broadcast_to(x.mean(axis=0), x.shape)
    )
    with pytest.raises(ValueError, match=r"over an Explicit axis, got leaf.*\['w'\].*4,6@model"):
        mixed_by(jax.sharding.AxisType.Explicit)


@pytest.mark.parametrize(
    ("mode", "n", "length"),
    [
        ("vmap", 1, 3),
        ("vmap", 2, 5),
        ("shard_map_check_vma", 3, 2),
        ("shard_map", 8, 33),
    ],
)
def test_a_mean_along_a_ring(mode, n, length):
    """The one of averages beside other computation on TPUs: the mean, of the same bits."""
    x = np.random.default_rng(n).normal(size=(n, length)).astype(np.float32)
    means = np.asarray(run(mode, lambda x: ring_mean(x, "nodes"), n)(jnp.asarray(x)))
    np.testing.assert_array_equal(means, np.tile(means[:1], (n, 1)))
    np.testing.assert_allclose(means[0], x.mean(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["vmap", "shard_map", "shard_map_check_vma"])
def test_what_all_nodes_have_alike_does_not_travel(mode):
    """One bit of one value on one node is seen, and then all get the mean."""
    x = np.tile(np.array([0.1, 3.0, -0.0], np.float32), (4, 1))
    y = np.full((4, 2, 2), 0.1, np.float64).astype(jnp.bfloat16)
    agree = run(mode, lambda tree: agree_on(tree, "nodes"), 4)
    alike = agree({"x": x, "y": y})
    np.testing.assert_array_equal(np.asarray(alike["x"]).view(np.uint32), x.view(np.uint32))
    np.testing.assert_array_equal(alike["y"], y.astype(np.float32))
    other = x.copy()
    other[2, 1] = np.nextafter(np.float32(3.0), np.float32(4.0))
    mean = np.asarray(agree({"x": other, "y": y})["x"])
    assert (mean == mean[0]).all()
    np.testing.assert_allclose(mean[0], other.astype(np.float64).mean(axis=0), rtol=1e-7)
    other[2, 1] = np.inf
    assert np.isinf(np.asarray(agree({"x": other, "y": y})["x"])[:, 1]).all()


def test_the_start_of_an_outer_optimizer_sends_two_numbers_for_each_leaf():
    tx = gx.outer(optax.sgd(0.1), optax.sgd(0.7), every=4)
    nodes = gx.Nodes(mesh=make_mesh(4))
    text = nodes.spmd(tx.init).lower({"w": jnp.ones((4, 1000))}).as_text()
    before, branches = text.split("stablehlo.case", 1)
    assert before.count("stablehlo.all_reduce") == 2
    assert "tensor<1000xf32>" in branches
