"""One row per algorithm: all that the shared matrix, test_algorithms.py, knows of it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
from algorithms import published
from algorithms.problems import SHAPES

import gossipjax as gx

ALPHA = 0.2
PERIOD = 2
RATE = 0.3  # of algorithms that take the place of an optimizer


class Row(NamedTuple):
    """One algorithm of the matrix.

    Attributes:
      transform: `(schedule, **options) -> tx`; the options are those of the factory.
      oracle: `(matrices, starts, updates) -> (z, x, w)` of every step, as in oracle.py.
      matrices: `(rng, n) -> [T, N, N]`, the graphs on which both are compared.
      steps: number of steps to compare; more than a cycle of three rounds.
      has_state: whether its state is a `GossipState`.
      has_schedule: whether it exchanges by the rounds of the schedule.
      goes_first: whether it goes first in a chain.
      drifts_by_rounding: whether low-precision parameters are rounded anew at every step, because
        the state keeps no numerators.
      mass_drift: what float32 rounding may add to the sum of the models in 200 steps.
      conserves_mass: whether the sum of the models changes only by the updates that arrive.
      extra_mass: `starts -> [D]`, what the mass counts at the start beside the models.
      noise: what the rounding of messages may add to a model, beside the exact sums; it adds more
        than a thousandth of it.
      chooses: whether messages have some values only; which, depends on those in the same message.
      is_variant: whether it runs the code of another row, on other graphs or with other numbers.
    """

    transform: Callable[..., optax.GradientTransformationExtraArgs]
    oracle: Callable[..., Any]
    matrices: Callable[..., np.ndarray]
    steps: int = 5
    has_state: bool = True
    has_schedule: bool = True
    goes_first: bool = False
    drifts_by_rounding: bool = False
    conserves_mass: bool = True
    mass_drift: float = 2e-5
    extra_mass: Callable[[np.ndarray], Any] = lambda starts: 0.0
    noise: float = 0.0
    chooses: bool = False
    is_variant: bool = False

    def chain(self, inner, schedule) -> optax.GradientTransformationExtraArgs:
        """The transform and an optimizer, in their order."""
        parts = (self.transform(schedule), inner)
        return optax.chain(*(parts if self.goes_first else reversed(parts)))


def make_osgp_row(overlap, matrices, biased=False, **fields):
    return Row(
        lambda schedule, **options: gx.osgp(schedule, overlap, biased=biased, **options),
        partial(oracle.osgp, overlap=overlap, biased=biased),
        matrices,
        steps=3 * overlap + 2,  # the third message arrives
        **fields,
    )


def make_delays(n):
    return np.random.default_rng(7).integers(0, 4, (3, n))


def d1d_oracle(matrices, x, updates):
    n = len(x)
    return oracle.adpsgd([np.full((n, n), 1 / n)], x, updates, [[1] * n])


def draw_basis(seed, number, shape):
    key = jax.random.fold_in(jax.random.key(seed), number)
    return np.asarray(jax.random.normal(key, shape, jnp.float32), np.float64)


def falling_rate(count):
    return RATE / (1 + jnp.asarray(count, jnp.float32))


def falling_strength(count):
    return 0.9 / (1 + jnp.asarray(count, jnp.float32))


def make_choco_row(codec, compress, gamma=0.4, copies: Any = "updated", **fields):
    return Row(
        lambda schedule, **options: gx.choco(schedule, codec, gamma, copies=copies, **options),
        partial(oracle.choco, gamma=gamma, compress=compress, copies=copies),
        oracle.static_ring,
        mass_drift=1e-4,  # what rounding adds to the accumulated difference stays there
        chooses=codec.is_sparse,
        **fields,
    )


def take_largest(difference, step, node):
    return oracle.largest(difference, 3)


RANDOM_K = gx.wire.random_k(0.3, seed=5)


def draw_values(difference, step, node):
    """What the codec draws of a difference; which values these are depends on none of them."""
    key = gx.wire.Wire(codec=RANDOM_K).make_key(step)
    for number in (node, 0):  # the node, the type of the values
        key = gx.wire.fold_in(key, number)
    bias_size = int(np.prod(SHAPES["bias"]))  # it is the last here, and the first in a message
    message = jnp.asarray(np.roll(difference, bias_size), jnp.float32)
    with jax.enable_x64(False):
        drawn = RANDOM_K.decode(RANDOM_K.encode(message, key), message)
    return np.roll(np.asarray(drawn, np.float64), -bias_size)


ROWS = {
    "allreduce": Row(
        lambda schedule, **options: gx.allreduce(**options),
        oracle.allreduce,
        oracle.doubly_stochastic,
        has_state=False,
        has_schedule=False,
        goes_first=True,
        drifts_by_rounding=True,
    ),
    "dpsgd": Row(
        gx.dpsgd,
        oracle.dpsgd,
        oracle.doubly_stochastic,
    ),
    "dpsgd, adapt-then-combine": Row(
        partial(gx.dpsgd, order="adapt-then-combine"),
        partial(oracle.dpsgd, adapt_first=True),
        oracle.doubly_stochastic,
    ),
    "dpsgd, falling strength": Row(
        partial(gx.dpsgd, strength=falling_strength),
        partial(oracle.dpsgd, strength=lambda k: 0.9 / (1 + k)),
        oracle.doubly_stochastic,
        is_variant=True,
    ),
    "dpsgd, adapt-then-combine, falling strength": Row(
        partial(gx.dpsgd, order="adapt-then-combine", strength=falling_strength),
        partial(oracle.dpsgd, strength=lambda k: 0.9 / (1 + k), adapt_first=True),
        oracle.doubly_stochastic,
        is_variant=True,
    ),
    "sgp": Row(
        gx.sgp,
        oracle.sgp,
        oracle.column_stochastic,
    ),
    "sgp, int8": Row(
        partial(gx.sgp, wire=gx.wire.int8(block=8)),
        oracle.sgp,
        oracle.column_stochastic,
        noise=0.2,
        is_variant=True,
    ),
    "choco, top_k": make_choco_row(gx.wire.top_k(0.3), take_largest),
    "choco, previous copies": make_choco_row(
        gx.wire.top_k(0.3), take_largest, copies="previous", is_variant=True
    ),
    "choco, random_k": make_choco_row(RANDOM_K, draw_values, is_variant=True),
    "sgp, damped": Row(
        partial(gx.sgp, damped=True),
        partial(oracle.sgp, is_damped=True),
        oracle.column_stochastic,
        conserves_mass=False,  # some of it waits
        is_variant=True,
    ),
    "osgp 1": make_osgp_row(1, oracle.column_stochastic),
    "osgp 2": make_osgp_row(2, partial(oracle.peers, count=2)),
    "osgp 3": make_osgp_row(3, partial(oracle.peers, count=1), is_variant=True),
    "osgp 1, doubly stochastic": make_osgp_row(1, oracle.doubly_stochastic, is_variant=True),
    "osgp 1, biased": make_osgp_row(1, oracle.random_peer, biased=True),
    "adpsgd": Row(
        lambda schedule, **options: gx.adpsgd(schedule, make_delays(schedule.size), **options),
        lambda matrices, x, u: oracle.adpsgd(matrices, x, u, make_delays(len(x))),
        oracle.doubly_stochastic,
        steps=7,
    ),
    "d1d_psgd": Row(
        lambda schedule, **options: gx.d1d_psgd(schedule.size, **options),
        d1d_oracle,
        oracle.doubly_stochastic,
        has_schedule=False,
    ),
    "easgd": Row(
        lambda schedule, **options: gx.easgd(ALPHA, PERIOD, **options),
        partial(oracle.easgd, alpha=ALPHA, period=PERIOD),
        oracle.doubly_stochastic,
        has_schedule=False,
        extra_mass=lambda starts: starts.mean(axis=0),
    ),
    "gradient_tracking": Row(
        gx.gradient_tracking,
        oracle.gradient_tracking,
        oracle.column_stochastic,
    ),
    "gradient_tracking, doubly stochastic": Row(
        gx.gradient_tracking,
        oracle.gradient_tracking,
        oracle.doubly_stochastic,
        is_variant=True,
    ),
    "gossip": Row(  # an algorithm of one's own
        published.gradient_tracking,
        oracle.gradient_tracking,
        oracle.column_stochastic,
    ),
    "gradient_tracking, damped": Row(
        partial(gx.gradient_tracking, damped=True),
        partial(oracle.gradient_tracking, is_damped=True),
        oracle.column_stochastic,
        conserves_mass=False,
        is_variant=True,
    ),
    "quasi_global": Row(
        partial(gx.quasi_global, rate=RATE, momentum=0.8, mu=0.7),
        partial(oracle.quasi_global, rate=lambda k: RATE, momentum=0.8, mu=0.7),
        oracle.doubly_stochastic,
        conserves_mass=False,
    ),
    "quasi_global, Nesterov, falling rate": Row(
        partial(gx.quasi_global, rate=falling_rate, nesterov=True),
        partial(
            oracle.quasi_global, rate=lambda k: RATE / (1 + k), momentum=0.9, mu=0.9, nesterov=True
        ),
        oracle.doubly_stochastic,
        conserves_mass=False,
        is_variant=True,
    ),
}
ROWS["allreduce, low_rank"] = ROWS["allreduce"]._replace(
    transform=lambda schedule: gx.allreduce(wire=gx.wire.low_rank(1, seed=5)),
    oracle=partial(oracle.power_sgd, shape=SHAPES["kernel"], q=draw_basis(5, 1, (2, 1))),
    conserves_mass=False,  # the rest waits
)
# Of messages that are narrow, the sender keeps what rounding leaves over.
for name in ("dpsgd", "sgp", "osgp 2", "adpsgd"):
    row = ROWS[name]
    ROWS[f"{name}, bfloat16"] = row._replace(
        transform=partial(row.transform, wire="bfloat16"),
        noise=0.1,
        is_variant=True,
    )
NO_VARIANTS = [name for name, row in ROWS.items() if not row.is_variant]
WITH_STATE = [name for name in NO_VARIANTS if ROWS[name].has_state]
