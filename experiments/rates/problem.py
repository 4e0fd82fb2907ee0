"""A smooth problem that is not convex, with a known optimum, and other data on each node.

Every coordinate `j` of the local objective of node `i` is a loss of Cauchy around a point of one of
two kinds `k`,

    f_i(x) = sum_j c_k log(1 + (x_j - b_k)^2),    k = k(i, j),

with `b = (4/5, -1/4)`. The coefficients are `c_k = PULL (1 + b_k^2) / (2 |b_k|) = (0.48, 1)`, so
that the two kinds pull with the same force at 0, to the two sides. For each coordinate half of the
nodes, drawn at random, are of each kind. So the mean `f` of the `f_i` is the same for each even
number of nodes, and its optimum is 0. Beyond a distance of about 1 the curvature is negative.

Gradients have normal noise of standard deviation `NOISE` in every coordinate.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

COORDINATES = 8
CENTERS = np.array([0.8, -0.25])  # b
PULL = 8 / 17  # of each kind at 0; the coefficient of the second is then 1
COEFFICIENTS = PULL * (1 + CENTERS**2) / (2 * abs(CENTERS))  # c
START = 2.0  # of every coordinate, where the curvature is negative
NOISE = 1.5
SMOOTHNESS = float(2 * COEFFICIENTS.max())  # L, of every f_i: the curvature of log(1 + x^2) is <= 2
VARIANCE = COORDINATES * NOISE**2  # sigma^2
HETEROGENEITY = COORDINATES * PULL**2  # zeta^2 at the optimum


def draw_kinds(nodes: int, seeds: int) -> np.ndarray:
    """Draws the kinds of all nodes, half of them 0 and half 1: int `[N, S, COORDINATES]`.

    >>> draw_kinds(4, 3).sum(axis=0).tolist() == [[2] * COORDINATES] * 3
    True
    """
    kinds = np.repeat([[0], [1]], nodes // 2, axis=0) * np.ones(COORDINATES, int)
    drawn = [np.random.default_rng([seed, nodes]).permuted(kinds, axis=0) for seed in range(seeds)]
    return np.stack(drawn, axis=1)


def local_gradient(x: jax.Array, centers: jax.Array, coefficients: jax.Array) -> jax.Array:
    """The gradient of `sum_j c log(1 + (x_j - b)^2)`, of the shape of `x`."""
    distance = x - centers
    return 2 * coefficients * distance / (1 + distance**2)


def gradient(x: jax.Array) -> jax.Array:
    """The gradient of `f`, of the shape of `x`.

    >>> bool(abs(gradient(jnp.zeros(COORDINATES))).max() < 1e-7)
    True
    """
    kinds = zip(CENTERS.tolist(), COEFFICIENTS.tolist(), strict=True)
    parts = [local_gradient(x, jnp.float32(b), jnp.float32(c)) for b, c in kinds]
    return (parts[0] + parts[1]) / 2


def objective(x: np.ndarray) -> np.ndarray:
    """Returns `f`, summed over the last axis, in float64: `[..., COORDINATES] -> [...]`."""
    parts = COEFFICIENTS * np.log1p((np.asarray(x)[..., None] - CENTERS) ** 2)
    return parts.mean(axis=-1).sum(axis=-1)


def bound_of_theorem(nodes: int, steps: int) -> float:
    """Returns the bound of SGP-19, theorem 1, on the mean squared gradient of K steps.

        12 (f(x(0)) - f* + L sigma^2 / 2) / sqrt(n K)

    >>> bound_of_theorem(4, 100) == 2 * bound_of_theorem(16, 100)
    True
    """
    start = objective(np.full(COORDINATES, START)) - objective(np.zeros(COORDINATES))
    return 12 * (float(start) + SMOOTHNESS * VARIANCE / 2) / math.sqrt(nodes * steps)


def sufficient_steps(nodes: int) -> float:
    """Returns the first term of the condition on K of SGP-19, eq. 3, with C = 1 and q = 0.

        3600 n L^4 C^4 / (1 - q)^4

    The two constants depend on the graph; q is at least 0.

    >>> sufficient_steps(4)
    230400.0
    """
    return 3600 * nodes * SMOOTHNESS**4
