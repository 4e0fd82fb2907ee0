"""One matrix over all algorithms: each against the dense oracle, round by round, and its laws."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from modes import MODES, run

import gossipjax as gx
from gossipjax.state import find_state, land

SIZES = (1, 2, 3, 4, 8)
SHAPES = {"kernel": (3, 2), "bias": (5,)}
ALPHA, PERIOD = 0.2, 2  # of easgd


class Row(NamedTuple):
    """One algorithm of the matrix."""

    transform: Callable[[Any], optax.GradientTransformationExtraArgs]
    oracle: Callable
    matrices: Callable
    steps: int = 5  # more than a cycle of three rounds


def osgp(overlap, matrices, biased=False, **options):
    return Row(
        lambda s: gx.osgp(s, overlap, biased, **options),
        partial(oracle.osgp, overlap=overlap, biased=biased),
        matrices,
        3 * overlap + 2,  # the third message arrives
    )


def delays(n):
    return np.random.default_rng(7).integers(0, 4, (3, n))


ROWS = {
    "allreduce": Row(lambda s: gx.allreduce(), oracle.allreduce, oracle.doubly_stochastic),
    "dpsgd": Row(gx.dpsgd, oracle.dpsgd_combine_while_adapting, oracle.doubly_stochastic),
    "dpsgd, adapt-then-combine": Row(
        lambda s: gx.dpsgd(s, order="adapt-then-combine"),
        oracle.dpsgd_adapt_then_combine,
        oracle.doubly_stochastic,
    ),
    "sgp": Row(gx.sgp, oracle.sgp, oracle.column_stochastic),
    "sgp, doubly stochastic": Row(gx.sgp, oracle.sgp, oracle.doubly_stochastic),
    "osgp 0": Row(lambda s: gx.osgp(s, 0), oracle.sgp, oracle.random_peer),
    "osgp 1": osgp(1, oracle.column_stochastic),
    "osgp 2": osgp(2, partial(oracle.peers, count=2)),
    "osgp 3": osgp(3, partial(oracle.peers, count=1)),
    "osgp 1, doubly stochastic": osgp(1, oracle.doubly_stochastic),
    "osgp 1, biased": osgp(1, oracle.random_peer, biased=True),
    "adpsgd": Row(
        lambda s: gx.adpsgd(s, delays(s.size)),
        lambda P, x, u: oracle.adpsgd(P, x, u, delays(len(x))),
        oracle.doubly_stochastic,
        7,
    ),
    "d1d_psgd": Row(
        lambda s: gx.d1d_psgd(s.size),
        lambda P, x, u: oracle.adpsgd([np.full((len(x),) * 2, 1 / len(x))], x, u, [[1] * len(x)]),
        oracle.doubly_stochastic,
    ),
    "easgd": Row(
        lambda s: gx.easgd(ALPHA, PERIOD),
        lambda P, x, u: oracle.easgd(P, x, u, ALPHA, PERIOD),
        oracle.doubly_stochastic,
    ),
}
# The same code as another row, on other graphs or with other numbers: not in all modes and sizes.
VARIANTS = {"sgp, doubly stochastic", "osgp 0", "osgp 3", "osgp 1, doubly stochastic"}
# And shard_map is the same code with types and without: without, two sizes do.
FEW_SIZES = {"shard_map": (3, 8)}
CASES = [
    (name, mode, n)
    for name in ROWS
    for mode in MODES
    for n in FEW_SIZES.get(mode, SIZES)
    if name not in VARIANTS or mode == "vmap" or (mode == "shard_map_check_vma" and n == 3)
]
NARROW_CASES = [
    (name, mode, n)
    for name, mode, n in CASES
    if n == 3 or (n in (2, 8) and mode in ("vmap", "shard_map_check_vma"))
]
SCHEDULED = [name for name in ROWS if name not in ("allreduce", "d1d_psgd", "easgd")]
STATEFUL = [name for name in ROWS if name != "allreduce"]
# Each mode, size and type meets one style of step or more; the largest size meets them all.
STYLES = {
    "float32": {1: ["counted"], 2: ["static"], 3: ["traced"], 4: ["counted"]},
    "bfloat16": {2: ["static"], 3: ["counted"], 8: ["traced"]},
}
ALL_STYLES = ["static", "traced", "counted"]


def unflatten(flat, dtype=jnp.float32):
    """`[..., D]` -> the tree, with leading axes kept."""
    out, start = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        out[name] = jnp.asarray(
            flat[..., start : start + size].reshape(*flat.shape[:-1], *shape), dtype
        )
        start += size
    return out


def flatten(tree: Any, leading=1):
    leaves = [np.asarray(tree[name], np.float64) for name in SHAPES]
    return np.concatenate([x.reshape(*x.shape[:leading], -1) for x in leaves], axis=-1)


def problem(n, dtype, steps=5):
    """Starts that `dtype` holds exactly, `[N, D]`, and updates `[S, N, D]`, in float64."""
    rng = np.random.default_rng(n)
    d = sum(int(np.prod(shape)) for shape in SHAPES.values())
    starts = flatten(unflatten(rng.normal(size=(n, d)), dtype))
    return rng, starts, rng.normal(size=(steps, n, d)).astype(np.float32).astype(np.float64)


def one_step(tx, carry, u, step):
    """`(params, state)` after one update, and what the tests look at."""
    params, state = carry
    updates, state = tx.update(u, state, params, step=step, value=jnp.zeros(()))
    params = optax.apply_updates(params, updates)
    return (params, state), (params, state, *gx.diagnostics.total_mass(params, state))


def history(tx, style):
    """All steps of one node in one program: every entry with a leading axis of steps."""

    def unrolled(params, state, updates):
        carry, seen = (params, state), []
        for k in range(len(jax.tree.leaves(updates)[0])):
            carry, entry = one_step(tx, carry, jax.tree.map(lambda u, k=k: u[k], updates), k)
            seen.append(entry)
        return jax.tree.map(lambda *x: jnp.stack(x), *seen)

    def scanned(params, state, updates):
        steps = jnp.arange(len(jax.tree.leaves(updates)[0]))

        def body(carry, given):
            u, k = given
            return one_step(tx, carry, u, k if style == "traced" else None)

        return jax.lax.scan(body, (params, state), (updates, steps))[1]

    return unrolled if style == "static" else scanned


@pytest.mark.parametrize(("name", "mode", "n"), CASES)
def test_equals_the_oracle_round_by_round(name, mode, n):
    compare_with_the_oracle(name, mode, n, jnp.float32)


@pytest.mark.parametrize(("name", "mode", "n"), NARROW_CASES)
def test_equals_the_oracle_in_bfloat16(name, mode, n):
    compare_with_the_oracle(name, mode, n, jnp.bfloat16)


def compare_with_the_oracle(name, mode, n, dtype):
    row = ROWS[name]
    rng, starts, all_updates = problem(n, dtype, row.steps)
    schedule = gx.topology.from_matrices(row.matrices(rng, n))
    tx = row.transform(schedule)
    params = unflatten(starts, dtype)
    state = run(mode, tx.init, n)(params)
    updates = unflatten(all_updates.swapaxes(0, 1))  # [N, S, ...]
    tolerance = 1e-5 if dtype == jnp.float32 else 2.0**-8
    # AllReduce has no numerators, so narrow parameters are rounded anew at every step.
    drift = row.steps * tolerance if name == "allreduce" else tolerance
    center = starts.mean(axis=0) if name == "easgd" else 0
    moved = starts.sum(axis=0) + center + np.cumsum(all_updates.sum(axis=1), axis=0)  # [S, D]
    for style in STYLES[jnp.dtype(dtype).name].get(n, ALL_STYLES):
        seen, states, mass, total_weight = run(mode, history(tx, style), n)(params, state, updates)
        for new, old in ((seen, params), (states, state)):
            jax.tree.map(lambda a, b: None, new, old)  # raises if the structures differ
            for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
                assert (a.dtype, a.shape) == (b.dtype, (n, row.steps, *b.shape[1:]))
        found = find_state(states)
        for k, (z, x, w) in enumerate(row.oracle(schedule.matrices(), starts, all_updates)):
            where = f"{style}, step {k}"
            close = {"rtol": tolerance, "atol": drift, "err_msg": where}
            np.testing.assert_allclose(flatten(seen, 2)[:, k], z, **close)
            if found is not None and jax.tree.leaves(found.weight):
                np.testing.assert_allclose(found.weight[:, k], w, rtol=1e-5, err_msg=where)
            if found is not None and jax.tree.leaves(found.numerator):
                numerator = flatten(found.numerator, 2)[:, k]
                np.testing.assert_allclose(numerator, x, rtol=1e-5, atol=1e-5, err_msg=where)
            exact = 1e-4 if found is not None or dtype == jnp.float32 else drift
            for node in range(n):
                np.testing.assert_allclose(
                    flatten(mass, 2)[node, k], moved[k], rtol=1e-5, atol=n * exact, err_msg=where
                )
            np.testing.assert_allclose(total_weight[:, k], n, rtol=1e-6, err_msg=where)


@pytest.mark.parametrize("name", STATEFUL)
def test_narrow_parameters_keep_wide_numerators(name):
    state = ROWS[name].transform(gx.topology.ring(2)).init(jnp.ones(3, jnp.bfloat16))
    assert find_state(state).numerator.dtype == jnp.float32  # pyright: ignore


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "vmap") for name in ROWS if name not in VARIANTS]
    + [("sgp", "shard_map"), ("osgp 1", "shard_map")],  # op by op, it takes ten seconds
)
def test_jit_equals_eager(name, mode):
    n = 3
    rng, starts, updates = problem(n, jnp.float32)
    tx = ROWS[name].transform(gx.topology.from_matrices(ROWS[name].matrices(rng, n)))
    params = unflatten(starts)
    state = run(mode, tx.init, n)(params)

    def step(params, state, u):
        return one_step(tx, (params, state), u, 0)[1]

    jitted, eager = (
        run(mode, step, n, jit=jit)(params, state, unflatten(updates[0])) for jit in (True, False)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), jitted, eager)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in ROWS if name not in VARIANTS])
def test_init_and_a_scan_over_steps_inside_one_program(name, mode):
    """The state that `init` makes has the types that `update` returns, check_vma included."""
    n = 4
    rng, starts, updates = problem(n, jnp.bfloat16)
    schedule = gx.topology.from_matrices(ROWS[name].matrices(rng, n))
    tx = ROWS[name].transform(schedule)

    def whole(params, updates):
        carry = (params, tx.init(params))
        return jax.lax.scan(lambda c, u: (one_step(tx, c, u, None)[0], None), carry, updates)[0]

    params, _ = run(mode, whole, n)(
        unflatten(starts, jnp.bfloat16), unflatten(updates.swapaxes(0, 1))
    )
    *_, (z, _, _) = ROWS[name].oracle(schedule.matrices(), starts, updates)
    np.testing.assert_allclose(flatten(params), z, rtol=2.0**-8, atol=5 * 2.0**-8)


def train(tx, n, mode="shard_map", steps=6, equal_starts=True):
    """A quadratic per node, SGD with momentum; the parameters after every step, `[S, N, D]`."""
    rng = np.random.default_rng(0)
    targets = jnp.asarray(rng.normal(size=(n, 4)), jnp.float32)
    start = rng.normal(size=(1 if equal_starts else n, 4))
    z = jnp.asarray(np.broadcast_to(start, (n, 4)), jnp.float32)

    def step(z, state, target, k):
        updates, state = tx.update((z - target) * jnp.arange(1.0, 5.0), state, z, step=k)
        return optax.apply_updates(z, updates), state

    program = run(mode, step, n, shared=(3,))
    state = run(mode, tx.init, n)(z)
    history = []
    for k in range(steps):
        z, state = program(z, state, targets, jnp.int32(k))
        history.append(np.asarray(z))
    return np.stack(history)


def sgd(momentum=0.9):
    return optax.sgd(0.05, momentum=momentum)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["allreduce", "dpsgd", "sgp", "osgp 0", "osgp 2"])
def test_one_node_is_the_inner_optimizer(name, mode):
    gossip = ROWS[name].transform(gx.topology.complete(1))
    chain = (gossip, sgd()) if name == "allreduce" else (sgd(), gossip)
    np.testing.assert_allclose(train(optax.chain(*chain), 1, mode), train(sgd(), 1), rtol=1e-6)


@pytest.mark.parametrize("name", ["sgp", "dpsgd, adapt-then-combine"])
@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("mode", MODES)
def test_on_the_complete_graph_with_equal_starts_it_is_allreduce(name, mode, n):
    gossip = optax.chain(sgd(), ROWS[name].transform(gx.topology.complete(n)))
    exact = optax.chain(gx.allreduce(), sgd())
    np.testing.assert_allclose(train(gossip, n, mode), train(exact, n, mode), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("mode", MODES)
def test_on_a_static_symmetric_graph_sgp_is_dpsgd(mode, n):
    ring = gx.topology.ring(n)
    push, plain = (
        train(optax.chain(sgd(), gossip), n, mode, equal_starts=False)
        for gossip in (gx.sgp(ring), gx.dpsgd(ring, "adapt-then-combine"))
    )
    np.testing.assert_allclose(push, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda s: gx.osgp(s, overlap=0), gx.sgp),
        (lambda s: gx.adpsgd(s, delays=0), gx.dpsgd),
        (lambda s: gx.osgp(s, overlap=0, biased=True), lambda s: gx.dpsgd(s, "adapt-then-combine")),
    ],
    ids=["overlap 0 is sgp", "delay 0 is dpsgd", "overlap 0, biased"],
)
def test_nothing_late_is_the_prompt_algorithm(mode, one, other):
    schedule = gx.topology.bipartite_exponential(4)
    late, prompt = (
        train(optax.chain(sgd(), gossip(schedule)), 4, mode, equal_starts=False)
        for gossip in (one, other)
    )
    np.testing.assert_array_equal(late, prompt)


def test_the_two_orders_of_dpsgd_differ():
    ring = gx.topology.ring(4)
    one = train(optax.chain(sgd(), gx.dpsgd(ring)), 4, equal_starts=False)
    other = train(optax.chain(sgd(), gx.dpsgd(ring, "adapt-then-combine")), 4, equal_starts=False)
    assert np.abs(one - other).max() > 1e-2


@pytest.mark.parametrize("name", STATEFUL)
def test_state_holds_no_array_of_the_caller(name):
    """Both can be donated: `init` copies what it keeps."""
    tx = ROWS[name].transform(gx.topology.complete(1))
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3)}
    kept = jax.tree.leaves(tx.init(params))
    assert not any(x is leaf for x in kept for leaf in jax.tree.leaves(params))
    init = gx.spmd(tx.init, nodes=1)
    update = gx.spmd(lambda p, s: tx.update(p, s, p), nodes=1, donate_argnums=(0, 1))
    stacked = jax.tree.map(lambda x: x[None], params)
    jax.block_until_ready(update(stacked, init(stacked)))


class TestBadInput:
    def tx(self, name, n=4):
        return ROWS[name].transform(gx.topology.ring(n))

    @pytest.mark.parametrize("name", SCHEDULED)
    def test_axis_of_another_size(self, name):
        tx = self.tx(name)
        with pytest.raises(ValueError, match="has 3 nodes, the schedule 4"):
            gx.spmd(lambda p: tx.update(p, tx.init(p), p), nodes=3)(jnp.ones((3, 2)))

    @pytest.mark.parametrize("name", STATEFUL)
    def test_missing_axis(self, name):
        tx = self.tx(name)
        with pytest.raises(ValueError, match=r"no axis named 'nodes'.*shard_map, pmap or vmap"):
            tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), step=0)

    @pytest.mark.parametrize("name", STATEFUL)
    def test_missing_params(self, name):
        tx = self.tx(name)
        with pytest.raises(ValueError, match=r"needs them: tx.update"):
            gx.spmd(lambda p: tx.update(p, tx.init(p)), nodes=4)(jnp.ones((4, 2)))

    @pytest.mark.parametrize("name", STATEFUL)
    def test_leaves_that_are_not_floats(self, name):
        with pytest.raises(ValueError, match=r"params\['steps'\] is int32"):
            self.tx(name).init({"steps": jnp.ones(2, jnp.int32)})

    @pytest.mark.parametrize("name", STATEFUL)
    def test_a_state_of_another_transform(self, name):
        tx = self.tx(name)
        with pytest.raises(ValueError, match="was given the state of another: EmptyState"):
            gx.spmd(lambda p: tx.update(p, optax.EmptyState(), p), nodes=4)(jnp.ones((4, 2)))

    @pytest.mark.parametrize("name", [n for n in SCHEDULED if n != "adpsgd"])
    def test_no_schedule(self, name):
        with pytest.raises(ValueError, match=r"needs a gx.Schedule; given ndarray"):
            ROWS[name].transform(np.eye(3))


def test_dpsgd_refuses_what_is_not_doubly_stochastic():
    schedule = gx.topology.from_matrices([[0.5, 0.25], [0.5, 0.75]])
    with pytest.raises(ValueError, match=r"round 0, row 0 sums to 0.75. Use sgp"):
        gx.dpsgd(schedule)


def test_dpsgd_looks_at_every_round():
    schedule = gx.topology.from_matrices([[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.25], [0.5, 0.75]]])
    with pytest.raises(ValueError, match=r"round 1, row 0 sums to 0.75"):
        gx.dpsgd(schedule)


def test_dpsgd_refuses_an_unknown_order():
    with pytest.raises(ValueError, match="'adapt-then-combine'; given 'adapt'"):
        gx.dpsgd(gx.topology.ring(3), order="adapt")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mode", MODES)
def test_allreduce_sums_narrow_gradients_in_float32_and_returns_them_narrow(mode):
    """256 + 1 is 256 in bfloat16: summed there, seven nodes would not count."""
    gradients = {"a": jnp.asarray([256.0] + [1.0] * 7, jnp.bfloat16), "b": jnp.ones((8, 2))}
    tx = gx.allreduce()
    averaged = run(mode, lambda g: tx.update(g, tx.init(g))[0], 8)(gradients)
    assert averaged["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(averaged["a"], jnp.full(8, 263 / 8, jnp.bfloat16))
    np.testing.assert_array_equal(averaged["b"], np.ones((8, 2)))


def test_allreduce_of_nothing_is_nothing():
    tx, nothing = gx.allreduce(), cast(Any, {"a": None})
    program = gx.spmd(lambda x: tx.update(nothing, tx.init(x))[0], nodes=2)
    assert program(jnp.ones(2)) == {"a": None}


def test_allreduce_refuses_leaves_that_are_not_floats():
    with pytest.raises(ValueError, match=r"updates\['n'\] is int32"):
        gx.allreduce().update({"n": jnp.ones(2, jnp.int32)}, optax.EmptyState())


def test_narrow_parameters_land_on_the_rounded_value():
    """From -2^15 to just above the middle of two bfloat16 values: unrounded it would fall short."""
    z, new = jnp.asarray(-(2.0**15), jnp.bfloat16), jnp.float32(1 + 2**-8 + 2**-20)
    for difference in (land, jax.jit(land)):
        landed: Any = optax.apply_updates(z, difference(z, new))
        assert landed.dtype == jnp.bfloat16
        assert landed == jnp.asarray(1 + 2**-7, jnp.bfloat16) == new.astype(jnp.bfloat16)


def test_allreduce_without_an_axis():
    with pytest.raises(ValueError, match=r"no axis named 'local'.*axis_name='local'"):
        gx.allreduce("local").update(jnp.ones(2), optax.EmptyState())
