"""The methods of papers that the page "Your algorithm" shows, of `examples.methods`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import SHAPES, flatten, make_problem, take_step, unflatten
from modes import run

import gossipjax as gx
from experiments.examples import methods
from gossipjax.wire import make_seed_key

N = 4
STEPS = 7
LAZY = oracle.lazy_ring(N)
RING = gx.topology.from_matrices(LAZY)
COMPLETE = gx.topology.complete(N)
DOUBLY = gx.topology.from_matrices(oracle.doubly_stochastic(np.random.default_rng(1), N))
SOMETIMES = gx.topology.random_rounds(DOUBLY, 6, seed=1, probability=0.6)
PEERS = gx.topology.random_peer(N, 5, seed=0, graph="complete", peers=2)


@pytest.fixture(autouse=True)
def promotion():
    """A user's programs promote types and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def falling_rate(count):
    return 0.3 / (1 + 0.5 * count)


def add_momentum(updates, momentum):
    m = np.zeros_like(updates[0])
    return [m := momentum * m + u for u in updates]


def draw_noises(std, seed):
    """What each node draws at each step, `[S, N, D]`."""
    zeros = unflatten(np.zeros((11,)))

    def draw(step, node):
        key = jax.random.fold_in(jax.random.fold_in(make_seed_key(seed), step), node)
        return optax.tree.random_like(key, zeros)

    draws = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(jnp.arange(STEPS), jnp.arange(N))
    return std * flatten(draws, 2)


# Name -> what makes the transform, and its oracle, `(starts, updates)`. Where all
# nodes must begin with one model, the row says "one start".
ROWS = {
    "ProxSkip": (
        lambda: methods.proxskip(SOMETIMES, 0.3),
        lambda x, u: oracle.proxskip(
            [SOMETIMES.round_at(k).matrix for k in range(STEPS)], x, u, 0.3
        ),
    ),
    "LED": (
        lambda: methods.proxskip(RING.every(3, phase=2), 1 / 3),
        lambda x, u: oracle.proxskip([np.eye(N), np.eye(N), LAZY], x, u, 1 / 3),
    ),
    "K-GT": (
        lambda: methods.kgt(DOUBLY, 2),
        lambda x, u: oracle.kgt(DOUBLY.matrices(), x, u, 2),
    ),
    "SCAFFOLD as K-GT, one start": (
        lambda: methods.kgt(COMPLETE, 3),
        lambda x, u: oracle.scaffold(x, u, 3),
    ),
    "SCAFFOLD as ProxSkip, one start": (
        lambda: methods.proxskip(COMPLETE.every(3, phase=2), 1 / 3),
        lambda x, u: oracle.scaffold(x, u, 3),
    ),
    "momentum tracking": (
        lambda: optax.chain(optax.sgd(0.3, 0.8), gx.gradient_tracking(DOUBLY)),
        lambda x, u: oracle.gradient_tracking(DOUBLY.matrices(), x, add_momentum(-0.3 * u, 0.8)),
    ),
    "GUT, one start": (
        lambda: methods.gut(RING, 0.9),
        lambda x, u: oracle.gut(LAZY, x, u, 0.9),
    ),
    "GUT is D2": (lambda: methods.gut(RING, 1.0), partial(oracle.d2, LAZY)),
    "DecentLaM": (
        lambda: methods.decentlam(DOUBLY, falling_rate, 0.8),
        lambda x, u: oracle.decentlam(DOUBLY.matrices(), x, u, falling_rate, 0.8),
    ),
    "Muffliato": (
        lambda: methods.muffliato(RING, 3, 0.5, seed=2),
        lambda x, u: oracle.muffliato(LAZY, x, u, 3, draw_noises(0.5, 2)),
    ),
    "EL-Local": (
        lambda: methods.epidemic(PEERS),
        partial(oracle.epidemic, PEERS.matrices()),
    ),
    "DeMuon": (
        lambda: methods.demuon(DOUBLY, 0.3, 0.8),
        lambda x, u: oracle.demuon(DOUBLY.matrices(), x, u, 0.3, 0.8, SHAPES["kernel"]),
    ),
}


def follow(tx, move, params, inputs, steps=STEPS) -> Any:
    """One node: the models after each step, `[S, ...]`; `move(params, input) -> u`."""

    def body(carry, step):
        u = move(carry[0], jax.tree.map(lambda x: x[step], inputs))
        carry = take_step(tx, carry, u, step)
        return carry, carry[0]

    return jax.lax.scan(body, (params, tx.init(params)), jnp.arange(steps))[1]


CASES = [(name, "vmap") for name in ROWS]
CASES += [(name, "shard_map_check_vma") for name in ("ProxSkip", "K-GT", "DeMuon")]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_a_method_of_the_page_equals_the_oracle_round_by_round(name, mode):
    make, expect = ROWS[name]
    _, starts, updates = make_problem(N, jnp.float32, STEPS)
    if "one start" in name:
        starts = np.tile(starts[:1], (N, 1))
    history = partial(follow, make(), lambda params, u: u)
    models = run(mode, history, N)(unflatten(starts), unflatten(updates.swapaxes(0, 1)))
    expected = np.stack([z for z, *_ in expect(starts, updates)], 1)
    np.testing.assert_allclose(flatten(models, 2), expected, rtol=1e-5, atol=3e-5)


def test_kgt_knows_the_round_from_the_static_step_of_a_training_loop():
    _, starts, updates = make_problem(N, jnp.float32, STEPS)
    nodes = gx.Nodes(N)
    tx = methods.kgt(DOUBLY, 2)
    train_step = gx.TrainStep(lambda params, u: (u, ()), tx, nodes=nodes)
    _, state = nodes.init(tx, unflatten(starts[0]))
    params = unflatten(starts)
    for step, expected in enumerate(oracle.kgt(DOUBLY.matrices(), starts, updates, 2)):
        params, state, _ = train_step(step, params, state, unflatten(updates[step]))
        np.testing.assert_allclose(flatten(params), expected[0], rtol=1e-5, atol=3e-5)


def test_decaf_equals_the_oracle_in_the_products():
    """The factors are unique up to a turn, so gradients are those of a loss of the product."""
    rng = np.random.default_rng(0)
    b, a, target = (rng.normal(size=(N, *shape)) for shape in ((5, 2), (2, 3), (5, 3)))

    def move(b, a, target):
        error = b @ a - target
        return -0.1 * error @ a.swapaxes(-1, -2), -0.1 * b.swapaxes(-1, -2) @ error

    def move_tree(params, target):
        adapter = params["layer"]
        return {"layer": dict(zip("ba", move(adapter["b"], adapter["a"], target), strict=True))}

    def history(params, target):
        path = follow(methods.decaf(DOUBLY), move_tree, params, jnp.stack([target] * STEPS))
        return path["layer"]["b"] @ path["layer"]["a"]

    params = {"layer": {"b": jnp.float32(b), "a": jnp.float32(a)}}
    products = run("shard_map_check_vma", history, N)(params, jnp.float32(target))

    def step(b, a):
        return [x + u for x, u in zip((b, a), move(b, a, target), strict=True)]

    expected = np.stack([*oracle.decaf(DOUBLY.matrices(), b, a, step, STEPS)], 1)
    np.testing.assert_allclose(products, expected, rtol=1e-4, atol=1e-4)


def end(tx, slopes, targets, steps=1500):
    """The models of the nodes after many steps on `slope (x - target)^2 / 2`, `[N]`."""

    def move(x, data):
        slope, target = data
        return slope * (x - target)

    def history(slope, target):
        data = jnp.full(steps, slope), jnp.full(steps, target)
        return follow(tx, move, jnp.float32(0), data, steps)[-1]

    ends = jax.jit(jax.vmap(history, axis_name="nodes"))(jnp.float32(slopes), jnp.float32(targets))
    return np.asarray(ends, np.float64)


def error(*parts):
    """The distance to the optimum of the sum, a root mean square over nodes with uneven data."""
    rng = np.random.default_rng(0)
    slopes, targets = rng.uniform(0.5, 1.5, 8), 3 * rng.normal(size=8)
    optimum = (slopes * targets).sum() / slopes.sum()
    return np.sqrt(np.mean((end(optax.chain(*parts), slopes, targets) - optimum) ** 2))


def test_methods_do_on_uneven_data_what_their_papers_say():
    """Those that correct reach the optimum of all; local steps alone do not."""
    ring = gx.topology.ring(8)
    sgd = optax.sgd(0.05)
    assert error(sgd, methods.proxskip(ring.every(5, phase=4), 0.2)) < 2e-5
    assert error(sgd, methods.kgt(ring, 5)) < 2e-5
    plain = error(sgd, gx.dpsgd(ring))
    assert plain > 0.1
    assert error(methods.decentlam(ring, 0.05)) < plain
    assert 1e-3 < error(sgd, methods.gut(ring, 0.9)) < plain / 5  # a mu below 1 leaves a part


def test_what_gut_needs_of_the_eigenvalues():
    for eigenvalue, is_stable in ((-1 / 2.8 + 0.02, True), (-1 / 2.8 - 0.02, False)):
        W = np.array([[1 + eigenvalue, 1 - eigenvalue], [1 - eigenvalue, 1 + eigenvalue]]) / 2
        tx = optax.chain(optax.sgd(0.01), methods.gut(gx.topology.from_matrices(W), 0.9))
        assert (np.ptp(end(tx, np.ones(2), [0, 1], 300)) < 1) == is_stable
