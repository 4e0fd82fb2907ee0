"""How much slower than it should be a node is at a step, and what that must cost at least."""

import re

import numpy as np

NONE = "none"
RANDOM = "random"
LOGNORMAL = "lognormal"
RANDOM_FACTORS = (1.0, 2.0, 4.0)  # equally likely
LOGNORMAL_SIGMA = 0.5  # of the logarithm of the factor, whose mean is 0
CONSTANT = re.compile(r"(\d+(?:\.\d+)?)x")
MAX_FACTOR = 1000.0


def parse_constant(name: str) -> float | None:
    """The factor of a constant slowness; None for the others.

    Raises:
      ValueError: if there is no slowness of this name.

    >>> parse_constant("4x"), parse_constant("random")
    (4.0, None)
    """
    if name in (NONE, RANDOM, LOGNORMAL):
        return None
    match = CONSTANT.fullmatch(name)
    factor = float(match[1]) if match else 0.0
    if not 1 < factor <= MAX_FACTOR:
        raise ValueError(
            f"--slowness must be {NONE}, {RANDOM}, {LOGNORMAL}, or a factor above 1 and at most "
            f"{MAX_FACTOR:g} for node 0, as 4x, got {name!r}."
        )
    return factor


def draw_factors(name: str, nodes: int, steps: int, seed: int = 0) -> np.ndarray:
    """Factors of the computation time, `[steps, N]`: of every node at each of its steps.

    - `none`: 1.
    - `4x`: 4 at node 0, at every step; 1 at the others. Likewise for other numbers.
    - `random`: 1, 2 or 4, equally likely, drawn for each step of each node.
    - `lognormal`: `exp(0.5 g)` with g standard normal, drawn for each step of each node: the median
      is 1, the mean 1.13, and 1 step in 100 takes 3.2 times as long.

    >>> draw_factors("4x", nodes=3, steps=2)
    array([[4., 1., 1.],
           [4., 1., 1.]])
    """
    factors = np.ones((steps, nodes))
    constant = parse_constant(name)
    rng = np.random.default_rng(seed)
    if constant is not None:
        factors[:, 0] = constant
    elif name == RANDOM:
        factors = rng.choice(RANDOM_FACTORS, size=factors.shape)
    elif name == LOGNORMAL:
        factors = rng.lognormal(sigma=LOGNORMAL_SIGMA, size=factors.shape)
    return factors


def compute_ideal_ratio(factors: np.ndarray, is_lockstep: bool) -> float:
    """Examples per second over those without slow nodes, if only the computation takes time.

    In lockstep a step takes as long as that of its slowest node, `T / sum_t max_i f[t, i]`. Where
    nobody waits, each node has its own pace, `mean_i T / sum_t f[t, i]`: with one node that is
    f times slower this is `(N - 1 + 1/f) / N`.

    Args:
      factors: `[T, N]`.
      is_lockstep: whether nodes wait for each other.

    >>> factors = draw_factors("4x", nodes=8, steps=5)
    >>> compute_ideal_ratio(factors, is_lockstep=True)
    0.25
    >>> compute_ideal_ratio(factors, is_lockstep=False)
    0.90625
    """
    if is_lockstep:
        return float(1 / factors.max(axis=1).mean())
    return float((1 / factors.mean(axis=0)).mean())
