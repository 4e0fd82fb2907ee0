"""Every core algorithm with every wire on the default device, against the dense float64 oracle.

Compiling takes the time, so one program runs an algorithm with all its wires, on parameters of two
types. Parameters, updates and what rounding leaves at a sender are those of all 12 steps.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import run_history
from algorithms.rows import ROWS, Row

import gossipjax as gx

N = 4
STEPS = 12
EVERY = 3  # steps of an outer optimizer
# Larger than the blocks of the integer wires, 256 values, and not a multiple of them.
SHAPES = {"float32": (17, 21), "bfloat16": (300,)}
SIZES = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
WIDE = slice(0, SIZES["float32"])  # in flat arrays, `[..., D]`
NARROW = slice(SIZES["float32"], sum(SIZES.values()))

# What a wire's rounding may do to a model, in root mean squares of the model.
NOISE = {None: 0.0, "bfloat16": 0.012, "float16": 0.0015, "int8": 0.06, "int4": 0.8}
WIRES = tuple(NOISE)
TOLERANCE = 1e-5  # of float32; there are no matrix products, so TF32 changes nothing
BFLOAT16 = 2.0**-8


def two_directed(rng):
    """One peer of each node, with shares of all sizes, so that weights leave 1."""
    kept = rng.uniform(0.3, 0.7, (2, N))
    sent = [np.roll(np.diag(1 - share), hop, axis=0) for hop, share in enumerate(kept, 1)]
    return np.stack([np.diag(share) + edges for share, edges in zip(kept, sent, strict=True)])


def two_symmetric(rng):
    """Two directed rings, of hops 1 and 2."""
    return np.stack([0.3 * np.eye(N) + 0.7 * np.roll(np.eye(N), hop, axis=0) for hop in (1, 2)])


def one_ring(rng):
    return oracle.static_ring(rng, N)


def keep_largest(difference, step, node):
    return oracle.largest(difference, round(0.3 * len(difference)))


def make_choco(codec, compress):
    return Row(
        lambda schedule, wire=codec: gx.choco(schedule, wire, 0.4),
        partial(oracle.choco, gamma=0.4, compress=compress),
        one_ring,
    )


def local_sgd(schedule, wire=None):
    """Every node keeps what the wire leaves out of its outer gradients."""
    feedback = {} if wire is None else {"error_feedback": 1.0, "wire": wire}
    return gx.outer(optax.identity(), optax.sgd(1.0), EVERY, **feedback)


def local_sgd_oracle(matrices, starts, updates):
    return [r[:3] for r in oracle.outer(matrices, starts, updates, oracle.sgd(1.0), EVERY)]


# Rows of the shared matrix, on graphs of few peers, which compile in less time.
CASES = {
    "sgp": ROWS["sgp"]._replace(matrices=two_directed),
    "osgp": ROWS["osgp 1"]._replace(matrices=two_directed),
    "osgp, two steps": ROWS["osgp 2"]._replace(matrices=one_ring),
    "gossip": ROWS["gossip"]._replace(matrices=two_directed),
    "gradient_tracking": ROWS["gradient_tracking"]._replace(matrices=two_directed),
    **{
        name: ROWS[name]._replace(matrices=two_symmetric)
        for name in ("allreduce", "dpsgd", "adpsgd", "d1d_psgd", "easgd", "quasi_global")
    },
    "choco": make_choco(gx.wire.float32(), lambda difference, step, node: difference),
    "choco, top_k": make_choco(gx.wire.top_k(0.3), keep_largest),
    "outer": Row(local_sgd, local_sgd_oracle, two_symmetric),
}
EXACT_ONLY = ("easgd", "choco, top_k")
IS_CPU = jax.default_backend() == "cpu"  # whose tests are elsewhere: here one row shows it runs


def unflatten(flat, dtype=None):
    """`[..., D]` -> a tree of two types, or of one."""
    return {
        name: jnp.asarray(flat[..., part].reshape(*flat.shape[:-1], *SHAPES[name]), dtype or name)
        for name, part in (("float32", WIDE), ("bfloat16", NARROW))
    }


def flatten(tree, leading):
    leaves = [np.asarray(tree[name], np.float64) for name in SHAPES]
    return np.concatenate([x.reshape(*x.shape[:leading], -1) for x in leaves], axis=-1)


def root_mean_square(x):
    return np.sqrt(np.mean(np.square(x)))


@pytest.mark.parametrize(
    ("name", "style"), [("sgp", "static"), *((name, "traced") for name in CASES if not IS_CPU)]
)
def test_equals_the_oracle_and_keeps_the_mass(name, style):
    row = CASES[name]
    wires = (None,) if name in EXACT_ONLY else WIRES
    rng = np.random.default_rng(0)
    schedule = gx.topology.from_matrices(row.matrices(rng))
    params = unflatten(rng.normal(size=(N, NARROW.stop)))
    starts = flatten(params, 1)
    flat_updates = rng.normal(size=(STEPS, N, NARROW.stop)).astype(np.float32)
    updates = unflatten(flat_updates.swapaxes(0, 1), "float32")

    @jax.jit
    def run_all(params, updates):
        results = {}
        for wire in wires:
            options = {} if wire is None else {"wire": getattr(gx.wire, wire)()}
            tx = row.transform(schedule, **options)
            results[str(wire)] = run_history("vmap", tx, style, params, updates)[1:]
        return results

    results = run_all(params, updates)
    flat_updates = flat_updates.astype(np.float64)
    expected = list(row.oracle(schedule.matrices(), starts, flat_updates))
    totals = starts.sum(axis=0) + row.extra_mass(starts) + flat_updates.sum(axis=1).cumsum(axis=0)
    if not row.conserves_mass:
        totals = np.stack([x.sum(axis=0) for _, x, _ in expected])
    for wire in wires:
        history = History(name, wire, *results[str(wire)])
        for k in range(STEPS):
            z, x, w = expected[k]
            history.compare_models(k, z, x, w, expected[k - 1][0] if k else starts)
            history.compare_mass(k, totals[k])


class History:
    """The models of all steps, what waits in the state, and the mass."""

    def __init__(self, name, wire, params, states, mass, total_weight):
        gossip = gx.gossip_state(states)
        self.wire = wire
        self.has_state = gossip is not None
        self.models = flatten(params, 2)
        self.latest = self.models
        if gossip is not None:
            self.latest = self.models + flatten(gossip.residual, 2)
        self.weight = None if gossip is None else gossip.weight
        self.mass = flatten(mass, 2)[0]
        error = getattr(states, "error", None)
        if error is not None:
            error = error[0] if isinstance(error, tuple) else error  # of the only fragment
            sign = -1 if name == "outer" else 1  # of outer gradients, which are descended
            self.mass = self.mass + sign * flatten(error, 2).sum(axis=0)
        self.total_weight = total_weight

    def compare_models(self, k, z, x, w, before):
        where = f"wire {self.wire}, step {k}"
        model = x / w[:, None]
        noise = NOISE[self.wire] * root_mean_square(model)
        exact = slice(None) if self.has_state else WIDE  # what is not rounded anew at each step
        errors = np.abs(self.latest[:, k] - model)[:, exact]
        assert root_mean_square(errors) <= noise + TOLERANCE * root_mean_square(model), where
        if noise:
            assert root_mean_square(errors) > noise / 100 or k < EVERY, f"{where}: must be rounded"
        else:
            assert (errors <= TOLERANCE * (1 + np.abs(model[:, exact]))).all(), where
        # What the user holds: rounded to its type, and an older model under a delay.
        change = np.abs(z - before)
        rounding = np.full(NARROW.stop, TOLERANCE)
        rounding[NARROW] = 2 * BFLOAT16 * (1 if self.has_state else k + 1)
        bound = 5 * noise + rounding * (1 + np.abs(z) + change)
        assert (np.abs(self.models[:, k] - z) <= bound).all(), where
        if self.weight is not None:
            np.testing.assert_allclose(self.weight[:, k], w, rtol=TOLERANCE, err_msg=where)

    def compare_mass(self, k, total):
        where = f"wire {self.wire}, step {k}"
        atol = np.full(NARROW.stop, 3 * TOLERANCE)
        if not self.has_state:
            atol[NARROW] = N * STEPS * BFLOAT16
            if self.wire in ("bfloat16", "float16"):  # it averages rounded gradients, and says so
                atol += N * STEPS * NOISE[self.wire]
        errors = np.abs(self.mass[k] - total)
        assert (errors <= atol + TOLERANCE * np.abs(total)).all(), f"{where}: off by {errors.max()}"
        np.testing.assert_allclose(self.total_weight[:, k], N, rtol=1e-6, err_msg=where)
