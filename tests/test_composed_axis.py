"""Several nodes on each device: N nodes on D devices equal a node per device."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import make_problem, take_step, unflatten
from algorithms.rows import ROWS
from modes import make_mesh
from promotion import apply_updates

import gossipjax as gx
from experiments.speed.compiled.hlo import parse_module

N = 6
SINGLE = gx.Nodes(mesh=make_mesh(N))
BLOCKS = gx.Nodes(N, mesh=make_mesh(2))
# Where a device has one weight, XLA divides a model by it as a product with its reciprocal, and
# fuses other operations. Without these passes the bits are the same, but compilation takes long.
EXACT = {"xla_disable_hlo_passes": "fusion,algsimp"}
CASES = [
    ("allreduce", 4, 2),
    ("sgp", 12, 4),
    ("choco, random_k", 6, 2),
    ("osgp 2", 8, 4),
    ("adpsgd", 4, 1),
    ("easgd", 8, 2),
]


def make_schedule(row, n, number):
    """Two rounds that sum over no more than a node's peers, others for each `number`."""
    rng = np.random.default_rng(n)
    if row.matrices is not oracle.doubly_stochastic:
        return gx.topology.from_matrices(row.matrices(rng, n)[-2:])
    identity = np.eye(n)
    permutations = [identity[rng.permutation(n)] for _ in range(2)]
    matrices = [(identity + permutations[0]) / 2, (2 * identity + sum(permutations)) / 4]
    return gx.topology.from_matrices([matrices[number % 2], oracle.lazy_ring(n)])


def run_both(name, n, devices, options=None):
    """Three steps on `devices`, and a node per device: `(params, state), distances` of each."""
    row = ROWS[name]
    _, starts, updates = make_problem(n, jnp.float32, 3)
    tx = row.transform(make_schedule(row, n, len(name)))
    params = unflatten(starts)
    updates = unflatten(updates.swapaxes(0, 1))

    def history(params, updates):
        """All steps, by a number that the state counts, so that a switch selects the round."""

        def body(carry, u):
            carry = take_step(tx, carry, u, None)
            return carry, (carry, gx.diagnostics.consensus_distance(carry[0]))

        return jax.lax.scan(body, (params, tx.init(params)), updates)[1]

    # The conftest has 8 devices: beyond, `vmap` stands for a node per device, which equals it.
    places = (
        gx.Nodes(n, mesh=make_mesh(devices)),
        gx.Nodes(n, mesh=make_mesh(n) if n <= 8 else None),
    )
    return [
        nodes.spmd(history).lower(params, updates).compile(options)(params, updates)
        for nodes in places
    ]


@pytest.mark.parametrize(("name", "n", "devices"), CASES)
def test_equals_a_node_per_device(name, n, devices):
    results, expected = run_both(name, n, devices)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6)


def test_equals_a_node_per_device_to_the_bit():
    results, expected = (states for states, _ in run_both("sgp", N, 2, EXACT))
    jax.tree.map(np.testing.assert_array_equal, results, expected)


SHIFT = [(i, (i + 2) % N) for i in range(N)]
SWAP = [(i, 5 - i) for i in range(N)]


def each_collective(x, step):
    """`x` is `[6, 6, 2]`; every collective, and every form of control flow around one."""
    index = jax.lax.axis_index("nodes")
    total = jax.lax.psum(x, "nodes")
    shifted = jax.lax.ppermute(x, "nodes", SHIFT)

    def apply(y):
        return jax.lax.ppermute(y, "nodes", SWAP) * 2

    def body(carry, x):
        count, y = carry
        return (count + 1, apply(y) + jax.lax.pmax(y, "nodes")), jax.lax.pmin(x, "nodes")

    return {
        "index": index,
        "size": jax.lax.axis_size("nodes"),
        "two sums": jax.lax.psum((x, shifted), "nodes"),
        "integers": jax.lax.psum(index.astype(jnp.int8), "nodes"),
        "of a constant": jax.lax.psum(step, "nodes") + jax.lax.ppermute(step, "nodes", SHIFT),
        "mean": jax.lax.pmean(total, "nodes"),
        "gathered": jax.lax.all_gather(x, "nodes"),
        "joined": jax.lax.all_gather(x, "nodes", axis=1, tiled=True),
        "joined, empty": jax.lax.all_gather(x[..., :0], "nodes", axis=1, tiled=True),
        "exchanged and joined": jax.lax.all_to_all(x, "nodes", 1, 2, tiled=True),
        "exchanged, empty": jax.lax.all_to_all(x[..., :0], "nodes", 0, 1, tiled=True),
        "exchanged sum": jax.lax.all_to_all(total, "nodes", 0, 0),
        "scattered in parts": jax.lax.psum_scatter(x, "nodes", scatter_dimension=1, tiled=True),
        "mean of rows": jax.vmap(
            lambda row: row - jax.lax.pmean(row, ("nodes", "rows")), axis_name="rows"
        )(x),
        "largest of rows": jax.vmap(
            lambda row: jax.lax.pmax(row, ("rows", "nodes")), axis_name="rows"
        )(x),
        "gradient of gathered": jax.grad(lambda y: (jax.lax.all_gather(y, "nodes") ** 3).sum())(x),
        "on this platform": jax.lax.platform_dependent(x, tpu=jnp.sin, default=apply),
        "cond": jax.lax.cond(step > 0, apply, lambda y: y, x),
        "switch": jax.lax.switch(index % 3, [apply, lambda y: y, jnp.sin], x),
        "scan": jax.lax.scan(body, (0, x), x[:4], reverse=True),
        "while": jax.lax.while_loop(lambda c: c[0] < 3, lambda c: body(c, x)[0], (0, x)),
        "gradient": jax.grad(lambda y: (jax.checkpoint(apply)(jnp.sin(y)) ** 2).sum())(x),
    }


def test_every_collective_and_control_flow():
    x = np.random.default_rng(0).normal(size=(N, 6, 6, 2)).astype(np.float32)
    step = jnp.float32(2.0)
    results, expected = (
        gx.spmd(each_collective, nodes=nodes, shared_argnums=1)(x, step)
        for nodes in (BLOCKS, gx.Nodes(N))
    )
    # Under vmap, JAX makes another shape of what all nodes share.
    expected["exchanged sum"] = np.stack([[row] * N for row in x.sum(axis=0)])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), results, expected)
    types = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (results, expected)]
    assert types[0] == types[1]


def test_a_switch_on_a_step_that_all_share_stays_one():
    """Under a condition that differs between nodes, `vmap` runs every branch."""
    tx = gx.sgp(gx.topology.random_peer(N, 8, 0))

    def update(z, step):
        return tx.update(z, tx.init(z), z, step=step)[0]

    program = gx.spmd(update, nodes=BLOCKS, shared_argnums=1)
    text = program.lower(jnp.zeros((N, 5)), jnp.int32(0)).compile().as_text()
    assert len(re.findall(r" conditional\(", text)) == 1


def test_groups_and_partial_permutations():
    """`vmap` has neither, a device per node does."""
    groups = [[0, 4, 2], [5, 1, 3]]

    def exchange(x):
        return (
            jax.lax.psum(x, "nodes", axis_index_groups=groups),
            jax.lax.pmax(x, "nodes", axis_index_groups=groups),
            jax.lax.all_gather(x, "nodes", axis_index_groups=groups),
            jax.lax.ppermute(x, "nodes", [(0, 1), (1, 5), (4, 0)]),
        )

    x = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
    results, expected = (gx.spmd(exchange, nodes=nodes)(x) for nodes in (BLOCKS, SINGLE))
    jax.tree.map(np.testing.assert_array_equal, results, expected)


@jax.custom_jvp
def rounded_mean(x, key):
    return jnp.round(jax.lax.pmean(x, "nodes")), key


@rounded_mean.defjvp
def _(primals, tangents):
    tangent = jax.lax.pmean(3 * tangents[0], "nodes")
    return rounded_mean(*primals), (tangent, np.zeros((), jax.dtypes.float0))


@jax.custom_vjp
def sum_of_gradients(x, count):
    return x * count


def sum_backwards(count, cotangent):
    return jax.lax.psum(cotangent * 5, "nodes"), None


sum_of_gradients.defvjp(lambda x, count: (x * count, count), sum_backwards)


RULES = {
    "custom_jvp": lambda x: rounded_mean(x, jax.random.key(0))[0] * x,
    "custom_vjp": lambda x: jax.jit(sum_of_gradients)(x, 2) * x,
    "in a scan": lambda x: jax.lax.scan(lambda c, _: (sum_of_gradients(c, 3), None), x, None, 2)[0],
    "checkpoint": lambda x: (
        jax.checkpoint(lambda x: jax.lax.ppermute(jnp.sin(x), "nodes", SHIFT))(x) * x
    ),
}


def test_derivatives_by_a_rule():
    """Inside a function and through its program: rules have collectives that are not traced yet."""
    x = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)

    def square(y):
        return (y**2).sum()

    def differentiate_inside(x):
        return {name: jax.grad(lambda x, f=f: square(f(x)))(x) for name, f in RULES.items()}

    def differentiate(nodes):
        program = gx.spmd(lambda x: [fn(x) for fn in RULES.values()], nodes=nodes)
        gradient = jax.grad(lambda x: sum(k * square(y) for k, y in enumerate(program(x), 1)))
        return gradient(jnp.asarray(x)), gx.spmd(differentiate_inside, nodes=nodes)(x)

    compare = partial(np.testing.assert_allclose, rtol=1e-5)
    jax.tree.map(compare, differentiate(BLOCKS), differentiate(SINGLE))


@pytest.mark.parametrize(
    ("schedule", "max_permutes"),
    [
        (gx.topology.directed_ring(16), 1),
        (gx.topology.ring(16), 2),
        (gx.topology.exponential(16), 4),
        (gx.topology.random_peer(16, 20, 0), 16),
    ],
    ids=["shift", "ring", "exponential", "random"],
)
def test_a_device_sends_rows_and_gathers_nothing(schedule, max_permutes):
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), gx.sgp(schedule))

    def step(params, state, target):
        updates, state = tx.update(params - target, state, params, step=0)
        return apply_updates(params, updates), state

    nodes = gx.Nodes(16, mesh=make_mesh(4))
    params, state = nodes.init(tx, jnp.zeros(1000))
    text = nodes.spmd(step).lower(params, state, params).compile().as_text()
    collectives = [it for it in parse_module(text).instruction_order.values() if it.collective]
    assert {it.collective for it in collectives} == {"collective-permute"}
    slots = len(schedule.round_at(0).slots)
    assert 1 <= len(collectives) <= min(max_permutes, 4 * slots)
    sent = sum(it.bytes for it in collectives)
    crossing = sum(
        (slot.receivers // 4 != np.arange(16) // 4).sum() for slot in schedule.round_at(0).slots
    )
    assert sent <= 4 * 1001 * crossing  # all devices together would send this
    if max_permutes == 1:
        assert sent == 4 * 1001


def test_a_collective_that_is_not_there_is_refused():
    solve = jax.jit(
        lambda b: jax.lax.custom_linear_solve(
            lambda x: 2 * x + jax.lax.pmean(x, "nodes"), b, lambda _, b: b / 3, symmetric=True
        )
    )
    program = gx.spmd(solve, nodes=BLOCKS)
    with pytest.raises(ValueError, match=r"must be among lax.axis_index.* or use a node per d"):
        program(jnp.ones((N, 2)))
