"""Every core algorithm with every wire on the default device, against the dense float64 oracle.

Compiling takes the time, so one program runs an algorithm with all its wires, on parameters of two
types. Parameters, updates and what rounding leaves at a sender are those of all 12 steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import run_history
from algorithms.rows import ROWS

import gossipjax as gx

N = 4
STEPS = 12
EVERY = 3  # steps of an outer optimizer
# Larger than the blocks of the integer wires, 256 values, and not a multiple of them.
SHAPES = {"float32": (17, 21), "bfloat16": (300,)}
SIZES = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
WIDE = slice(0, SIZES["float32"])  # in flat arrays, `[..., D]`
NARROW = slice(SIZES["float32"], sum(SIZES.values()))

DENSE = (None, "bfloat16", "float16", "int8", "int4")
# What a wire's rounding may do to a model, in root mean squares of the model.
NOISE = {None: 0.0, "top_k": 0.0, "bfloat16": 0.012, "float16": 0.0015, "int8": 0.06, "int4": 0.8}
TOLERANCE = 1e-5  # of float32; there are no matrix products, so TF32 changes nothing
BFLOAT16 = 2.0**-8


def make_codec(wire):
    if wire == "top_k":
        return gx.wire.top_k(0.3)
    return None if wire is None else getattr(gx.wire, wire)()


class Case(NamedTuple):
    """An algorithm, as the library and as the oracle have it.

    Attributes:
      make: `(schedule, codec or None) -> tx`.
      oracle: `(matrices, starts, updates, wire) -> (z, x, w)` of every step.
      matrices: `rng -> [T, N, N]`.
      wires: what it can send.
      extra_mass: `starts -> [D]`, what the mass counts at the start beside the models.
      sign_of_error: with which sign what a wire has left out counts as mass.
      is_mass_of_oracle: whether the mass is that of the oracle's `x`, and not all updates.
    """

    make: Callable[[gx.Schedule, Any], Any]
    oracle: Callable[..., Any]
    matrices: Callable[[np.random.Generator], np.ndarray]
    wires: tuple[str | None, ...] = DENSE
    extra_mass: Callable[[np.ndarray], Any] = lambda starts: 0.0
    sign_of_error: int = 1
    is_mass_of_oracle: bool = False


def take_row(name, matrices, **fields):
    """An algorithm of the shared matrix, with `wire=`."""
    row = ROWS[name]

    def make(schedule, codec):
        return row.transform(schedule, **({} if codec is None else {"wire": codec}))

    return Case(
        make,
        lambda P, z, u, wire: row.oracle(P, z, u),
        matrices,
        extra_mass=row.extra_mass,
        is_mass_of_oracle=not row.conserves_mass,
        **fields,
    )


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


def keep_largest(difference):
    return oracle.largest(difference, round(0.3 * len(difference)))


def allreduce_oracle(matrices, x, updates, wire):
    """Of sparse messages, every node keeps what they leave out for the next one."""
    if wire != "top_k":
        yield from oracle.allreduce(matrices, x, updates)
        return
    error = 0.0
    for u in updates:
        sent = np.stack([keep_largest(row) for row in error + u])
        error = error + u - sent
        x = x + sent.mean(axis=0, keepdims=True)
        yield x, x, np.ones(len(x))


def choco_oracle(matrices, x, updates, wire):
    def compress(difference, step, node):
        return keep_largest(difference) if wire == "top_k" else difference

    return oracle.choco(matrices, x, updates, 0.4, compress)


def local_sgd(schedule, codec):
    """Every node keeps what the wire leaves out of its outer gradients."""
    feedback = {} if codec is None else {"error_feedback": 1.0, "wire": codec}
    return gx.outer(optax.identity(), optax.sgd(1.0), EVERY, **feedback)


def outer_sgp(schedule, codec):
    average = gx.sgp(schedule, wire=codec)
    return gx.outer(optax.identity(), optax.sgd(0.7, momentum=0.9), EVERY, average=average)


def outer_sgp_oracle(matrices, z, updates, wire):
    optimizer = oracle.sgd(0.7, 0.9)
    results = oracle.push_sum_outer(matrices, z, updates, optimizer, EVERY, is_tracked=False)
    return [(r["y"], r["w"][:, None] * r["y"], r["w"]) for r in results]


CASES = {
    "allreduce": take_row("allreduce", two_symmetric, wires=(*DENSE, "top_k"))._replace(
        oracle=allreduce_oracle
    ),
    "sgp": take_row("sgp", two_directed),
    "osgp": take_row("osgp 1", two_directed),
    "osgp, two steps": take_row("osgp 2", one_ring),
    "dpsgd": take_row("dpsgd", two_symmetric),
    "adpsgd": take_row("adpsgd", two_symmetric),
    "d1d_psgd": take_row("d1d_psgd", two_symmetric),
    "easgd": take_row("easgd", two_symmetric, wires=(None,)),
    "gossip": take_row("gossip", two_directed),
    "gradient_tracking": take_row("gradient_tracking", two_directed),
    "quasi_global": take_row("quasi_global", two_symmetric),
    "choco": Case(
        lambda schedule, codec: gx.choco(schedule, codec or gx.wire.float32(), 0.4),
        choco_oracle,
        one_ring,
        (*DENSE, "top_k"),
    ),
    "outer, exact": Case(
        local_sgd,
        lambda P, z, u, wire: [r[:3] for r in oracle.outer(P, z, u, oracle.sgd(1.0), EVERY)],
        two_symmetric,
        sign_of_error=-1,
    ),
    "outer, sgp": Case(outer_sgp, outer_sgp_oracle, two_directed, is_mass_of_oracle=True),
}


def unflatten(flat):
    """`[..., D]` -> a tree of two types."""
    return {
        name: jnp.asarray(flat[..., part].reshape(*flat.shape[:-1], *SHAPES[name]), name)
        for name, part in (("float32", WIDE), ("bfloat16", NARROW))
    }


def flatten(tree, leading):
    leaves = [np.asarray(tree[name], np.float64) for name in SHAPES]
    return np.concatenate([x.reshape(*x.shape[:leading], -1) for x in leaves], axis=-1)


def root_mean_square(x):
    return np.sqrt(np.mean(np.square(x)))


SECOND_LANE = ("osgp, two steps", "adpsgd", "gossip", "outer, exact", "outer, sgp")


def list_cases():
    """On a device of its own the lane runs them all; beside the other tests, these first."""
    first = [(name, "traced") for name in CASES if name not in SECOND_LANE] + [("sgp", "static")]
    return [
        pytest.param(name, style, marks=[] if (name, style) in first else [pytest.mark.lab])
        for name in CASES
        for style in ("static", "traced")
    ]


@pytest.mark.parametrize(("name", "style"), list_cases())
def test_equals_the_oracle_and_keeps_the_mass(name, style):
    case = CASES[name]
    rng = np.random.default_rng(0)
    schedule = gx.topology.from_matrices(case.matrices(rng))
    params = unflatten(rng.normal(size=(N, NARROW.stop)))
    starts = flatten(params, 1)
    flat_updates = rng.normal(size=(STEPS, N, NARROW.stop)).astype(np.float32)
    updates = {
        name: jnp.asarray(flat_updates[..., part].swapaxes(0, 1).reshape(N, STEPS, *SHAPES[name]))
        for name, part in (("float32", WIDE), ("bfloat16", NARROW))
    }

    @jax.jit
    def run_all(params, updates):
        results = {}
        for wire in case.wires:
            tx = case.make(schedule, make_codec(wire))
            results[str(wire)] = run_history("vmap", tx, style, params, updates)[1:]
        return results

    results = run_all(params, updates)
    flat_updates = flat_updates.astype(np.float64)
    totals = starts.sum(axis=0) + case.extra_mass(starts) + flat_updates.sum(axis=1).cumsum(axis=0)
    for wire in case.wires:
        expected = list(case.oracle(schedule.matrices(), starts, flat_updates, wire))
        if case.is_mass_of_oracle:
            totals = np.stack([x.sum(axis=0) for _, x, _ in expected])
        history = History(case, wire, *results[str(wire)])
        for k in range(STEPS):
            z, x, w = expected[k]
            history.compare_models(k, starts, z, x, w, expected[max(0, k - 1)][0])
            history.compare_mass(k, totals[k])


class History:
    """The models of all steps, what waits in the state, and the mass."""

    def __init__(self, case, wire, params, states, mass, total_weight):
        gossip = gx.gossip_state(states)
        self.case, self.wire = case, wire
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
            self.mass = self.mass + case.sign_of_error * flatten(error, 2).sum(axis=0)
        self.total_weight = total_weight

    def compare_models(self, k, starts, z, x, w, before):
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
        change = np.abs(z - (before if k else starts))
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
