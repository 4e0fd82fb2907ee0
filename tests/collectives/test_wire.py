"""Narrow wires: half the bytes, weights in full, and what is rounded off stays at its sender."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from jax.sharding import Mesh
from modes import MODES, mesh, run

import gossipjax as gx

N = 8
SCHEDULES = {
    "one peer": gx.topology.one_peer_exponential(N),
    "two peers": gx.topology.k_peer_exponential(N, 2),
    "pairs": gx.topology.bipartite_exponential(N),
    "complete": gx.topology.complete(N),
    "irregular": gx.topology.from_matrices(oracle.column_stochastic(np.random.default_rng(0), N)),
}
GOSSIP = {
    "sgp": gx.sgp,
    "osgp 1": lambda s, **options: gx.osgp(s, 1, **options),
    "osgp 2": lambda s, **options: gx.osgp(s, 2, **options),
    "dpsgd": gx.dpsgd,
    "adpsgd": gx.adpsgd,
    "d1d_psgd": lambda s, **options: gx.d1d_psgd(s.size, **options),
}
STEPS = 3


def histories(name, schedule, mode="vmap"):
    """z, weight and mass after every step, with wide and with narrow messages; and the updates."""
    rng = np.random.default_rng(0)
    z, updates = rng.normal(size=(N, 33)), rng.normal(size=(N, STEPS, 33))
    stacked = jnp.asarray(z, jnp.float32), jnp.asarray(updates, jnp.float32)
    out = []
    for wire_dtype in (None, jnp.bfloat16):
        tx = GOSSIP[name](schedule, wire_dtype=wire_dtype)

        def steps(z, updates, tx=tx):
            state, seen = tx.init(z), []
            for k in range(STEPS):
                moved, state = tx.update(updates[k], state, z, step=k)
                z = z + moved
                seen.append((z, state.weight, *gx.diagnostics.total_mass(z, state)))
            return jax.tree.map(lambda *x: jnp.stack(x), *seen)

        out.append(run(mode, steps, N)(*stacked))
    return out, z.sum(axis=0) + np.cumsum(updates.sum(axis=0), axis=0)


EVERYWHERE = [("sgp", "irregular"), ("osgp 2", "one peer")]
CASES = [(name, graph, mode) for name, graph in EVERYWHERE for mode in MODES]
CASES += [(name, "pairs", "vmap") for name in GOSSIP]
CASES += [(name, graph, "vmap") for name in ("sgp", "osgp 1") for graph in SCHEDULES]


@pytest.mark.parametrize(("name", "graph", "mode"), CASES)
def test_values_are_near_and_the_mass_is_exact(name, graph, mode):
    (wide, narrow), moved = histories(name, SCHEDULES[graph], mode)
    # bfloat16 has 8 digits: a value of 4 is rounded by 2^-7 at most, in each of three rounds.
    np.testing.assert_allclose(narrow[0], wide[0], atol=0.1)
    assert np.abs(narrow[0] - wide[0]).max() > 1e-4, "it must be narrow"
    for weights in zip(jax.tree.leaves(narrow[1]), jax.tree.leaves(wide[1]), strict=True):
        np.testing.assert_allclose(*weights, rtol=1e-6)  # they are not rounded
    np.testing.assert_allclose(narrow[2][0], moved, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(narrow[3], N, rtol=1e-6)


def test_what_is_rounded_off_stays_at_its_sender():
    """Round by round to the last digit, for pairs: x_i <- x_i - m_i + m_j with m = bf16(x / 2)."""
    schedule = SCHEDULES["pairs"]
    x = np.random.default_rng(0).normal(size=(N, 33)).astype(np.float32)
    mixed = gx.spmd(lambda x, k: gx.mix(x, None, schedule, k, wire_dtype="bfloat16")[0], nodes=N,
                    shared_argnums=1)  # fmt: skip
    for k in range(6):
        partner = (schedule.round_at(k).matrix - np.eye(N) / 2).argmax(axis=0)
        message = (x / 2).astype(jnp.bfloat16).astype(np.float32)
        expected = x - message + message[partner]
        x = np.asarray(mixed(x, jnp.int32(k)))
        np.testing.assert_allclose(x, expected, rtol=1e-6, atol=1e-7)


def test_no_mass_is_lost_in_a_thousand_rounds():
    schedule = gx.topology.random_peer(N, 20, seed=0)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(N, 50)) + 3, jnp.float32)

    def rounds(x, w):
        return jax.lax.fori_loop(
            0, 1000, lambda k, c: gx.mix(c[0], c[1], schedule, k, wire_dtype="bfloat16"), (x, w)
        )

    mixed, weights = jax.jit(jax.vmap(rounds, axis_name="nodes"))(x, jnp.ones(N))
    np.testing.assert_allclose(mixed.sum(axis=0), x.sum(axis=0), rtol=1e-5)
    assert abs(float(weights.sum()) - N) < 1e-5 * N
    # Models stay apart by about the rounding of a message, and no more.
    np.testing.assert_allclose(mixed / weights[:, None], np.tile(x.mean(axis=0), (N, 1)), atol=0.2)


@pytest.mark.parametrize(
    ("wire_dtype", "words"),
    [(None, "f32[600]"), (jnp.bfloat16, "u16[601]"), ("float16", "u16[601]"), ("f4", "f32[600]")],
)
@pytest.mark.parametrize("name", ["sgp", "osgp 1"])
def test_words_on_the_wire(name, wire_dtype, words):
    """One message of half the bytes: a weight of two words and 599 values of one.

    A message that was sent before has a word for the weight's place, too.
    """
    if name == "osgp 1":
        words = words.replace("601", "602")
    tx = GOSSIP[name](SCHEDULES["one peer"], wire_dtype=wire_dtype)
    z = jnp.ones((N, 599))
    state = gx.spmd(tx.init, mesh=mesh(N))(z)
    program = gx.spmd(lambda z, s: tx.update(z, s, z, step=0), mesh=mesh(N))
    text = program.lower(z, state).compile().as_text()
    sent = re.findall(r" = (\S+)\{0\} collective-permute\(", text)
    assert sent == [words]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "length"), [(1, 33), (3, 33), (8, 64), (8, 5)])
def test_allreduce_in_narrow_words(mode, n, length):
    """Rounded on the way to a float32 sum and on the way back; all nodes have the same."""
    g = np.random.default_rng(0).normal(size=(n, length)).astype(np.float32)

    def averaged(g, wire_dtype):
        tx = gx.allreduce(wire_dtype=wire_dtype)
        return tx.update(g, tx.init(g))[0]

    found = np.asarray(run(mode, lambda g: averaged(g, jnp.bfloat16), n)(g))
    assert (found == found[0]).all()
    mean = g.astype(jnp.bfloat16).astype(np.float64).mean(axis=0)
    rounded = mean.astype(np.float32).astype(jnp.bfloat16).astype(np.float64)
    exact = g.astype(np.float64).mean(axis=0)
    if n == 1 or length <= n:  # not worth it
        np.testing.assert_allclose(found[0], exact, rtol=1e-6, atol=1e-7)
    else:
        np.testing.assert_allclose(found[0], rounded, rtol=2**-7, atol=1e-6)
    np.testing.assert_allclose(found[0], exact, atol=0.02)
    np.testing.assert_array_equal(run(mode, lambda g: averaged(g, "float32"), n)(g),
                                  run(mode, lambda g: averaged(g, None), n)(g))  # fmt: skip


def test_words_of_a_narrow_allreduce():
    tx = optax.chain(gx.allreduce(wire_dtype=jnp.bfloat16), optax.sgd(1.0))
    g = {"a": jnp.ones((N, 599)), "b": jnp.ones((N, 41))}
    program = gx.spmd(lambda g: tx.update(g, tx.init(g))[0], mesh=mesh(N))
    text = program.lower(g).compile().as_text()
    found = set(re.findall(r" = (.*?)\{.*? (all-to-all|all-gather|all-reduce)\(", text))
    assert {kind for _, kind in found} == {"all-to-all", "all-gather"}
    assert {words for words, _ in found} <= {"u16[1,80]", "(u16[1,80]", "u16[640]"}


def test_too_large_for_the_type_is_clipped_and_kept():
    x = jnp.array([[0.0, 1e6], [0.0, 2.0]])
    ring = gx.topology.ring(2)
    mixed = gx.spmd(lambda x: gx.mix(x, None, ring, 0, wire_dtype="float16")[0], nodes=2)(x)
    np.testing.assert_allclose(mixed[:, 1], [1e6 - 65504 + 1, 65504 + 1])


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_stays_a_nan_and_travels_along_edges_only(mode):
    x = jnp.ones((N, 3)).at[2, 1].set(jnp.nan)
    one = SCHEDULES["one peer"]
    mixed = run(mode, lambda x: gx.mix(x, None, one, 0, wire_dtype="bfloat16")[0], N)(x)
    assert np.argwhere(np.isnan(np.asarray(mixed))).tolist() == [[2, 1], [3, 1]]


@pytest.mark.parametrize("check_vma", [False, True])
def test_servers_of_several_devices(check_vma):
    """Each device sends its share in narrow words; weights stay right."""
    schedule = gx.topology.from_matrices(oracle.column_stochastic(np.random.default_rng(0), 4))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 13)), jnp.float32)
    servers = Mesh(np.array(jax.devices()).reshape(4, 2), ("nodes", "local"))
    results = []
    for wire_dtype in (None, "bfloat16"):

        def mixed(x, w, wire_dtype=wire_dtype):
            return gx.mix(x, w, schedule, 0, "nodes", "local", wire_dtype)

        results.append(gx.spmd(mixed, mesh=servers, check_vma=check_vma)(x, jnp.ones(4)))
    P = schedule.matrices()[0]
    np.testing.assert_allclose(results[0][0], P @ x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results[1][0], P @ x, atol=0.05)
    np.testing.assert_allclose(results[1][0].sum(axis=0), x.sum(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(results[1][1], results[0][1])


def test_float64_travels_as_float32_words():
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5)))
        ring = gx.topology.ring(2)
        mixed, _ = gx.spmd(
            lambda x, w: gx.mix(x, w, ring, 0, wire_dtype="float32"), nodes=2
        )(x, jnp.ones(2))  # fmt: skip
        assert mixed.dtype == jnp.float64
        np.testing.assert_allclose(mixed.sum(axis=0), x.sum(axis=0), rtol=1e-14)
        np.testing.assert_allclose(mixed, np.tile(x.mean(axis=0), (2, 1)), atol=1e-6)


def test_narrow_rare_and_late_together():
    """bfloat16 words, every third step, in the background: it still trains."""
    schedule = gx.topology.one_peer_exponential(N).every(3)
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), gx.osgp(schedule, 2, wire_dtype="bfloat16"))
    rng = np.random.default_rng(0)
    targets = jnp.asarray(rng.normal(size=(N, 4)), jnp.float32)
    z = jnp.zeros((N, 4))
    state = gx.spmd(tx.init, nodes=N)(z)
    step = gx.spmd(lambda z, s, t, k: tx.update(z - t, s, z, step=k), nodes=N, shared_argnums=3)
    for k in range(400):
        moved, state = step(z, state, targets, jnp.int32(k))
        z = z + moved
    average = gx.spmd(gx.average_model, nodes=N)(z, state)
    np.testing.assert_allclose(average[0], targets.mean(axis=0), atol=0.05)


@pytest.mark.parametrize("wire_dtype", [jnp.int8, "bf16", jnp.float8_e4m3fn, complex])
@pytest.mark.parametrize("name", GOSSIP)
def test_other_types_are_refused_when_built(name, wire_dtype):
    with pytest.raises(ValueError, match="wire_dtype is a floating-point type of 16 bits or more"):
        GOSSIP[name](SCHEDULES["pairs"], wire_dtype=wire_dtype)
