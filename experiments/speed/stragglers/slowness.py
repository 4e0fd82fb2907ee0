"""How much slower than it should be a node is at a step, and what that must cost at least."""

import numpy as np

from gossipjax.cost_model import parse_slowness

NONE = "none"
MAX_FACTOR = 1000.0


def parse_constant(name: str) -> float | None:
    """The factor of a constant slowness; None for the others.

    Raises:
      ValueError: if there is no slowness of this name.

    >>> parse_constant("4x"), parse_constant("random")
    (4.0, None)
    """
    try:
        slowness = parse_slowness(name)
    except ValueError:
        slowness = None
    if slowness is not None and slowness.kind != "constant":
        return None
    if slowness is None or not 1 < slowness.factor <= MAX_FACTOR:
        raise ValueError(
            "--slowness must be none, random, lognormal, or a factor above 1 and at most "
            f"{MAX_FACTOR:g} for node 0, as 4x, got {name!r}."
        )
    return slowness.factor


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
    return parse_slowness(name).draw(nodes, steps, seed)


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
