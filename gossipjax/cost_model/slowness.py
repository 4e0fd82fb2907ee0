"""Slowness: by what factor a node's computation is longer at a step. NumPy only."""

import dataclasses
import math
import re
from typing import Literal

import numpy as np

from gossipjax.cost_model._require import require_choice, require_number_of_nodes, require_quantity
from gossipjax.topology.schedule import require_int

KINDS = ("none", "constant", "random", "lognormal")
RANDOM_FACTORS = (1.0, 2.0, 4.0)  # equally likely
LOGNORMAL_SIGMA = 0.5  # of the logarithm of the factor, whose mean is 0
CONSTANT = re.compile(r"(\d+(?:\.\d+)?)x")
MAX_FACTOR = 1e6  # in a name
MAX_STEPS = 2**24
MAX_DEVIATIONS = 10.0  # of the logarithm, in numerical integrals
INTEGRATION_POINTS = 4001


@dataclasses.dataclass(frozen=True)
class Slowness:
    """Factors of the computation's time, for every step of every node.

    Attributes:
      kind: "none": 1. "constant": `factor` at node 0, 1 at the others. "random": 1, 2 or 4, equally
        likely, for each step of each node. "lognormal": `exp(0.5 g)` with g standard normal, for
        each step of each node.
      factor: of a constant slowness.

    >>> Slowness("constant", 4.0).draw(nodes=3, steps=2)
    array([[4., 1., 1.],
           [4., 1., 1.]])
    """

    kind: Literal["none", "constant", "random", "lognormal"] = "none"
    factor: float = 1.0

    def __post_init__(self) -> None:
        require_choice(self.kind, "kind of Slowness", KINDS)
        require_quantity(self.factor, "factor of Slowness", "times")
        if self.kind != "constant" and self.factor != 1:
            raise ValueError(
                f"factor of Slowness must be left out for {self.kind}, got {self.factor!r}: give "
                f'Slowness("constant", {self.factor!r}), or drop it.'
            )

    def draw(self, nodes: int, steps: int, seed: int = 0) -> np.ndarray:
        """Factors `[T, N]`, of every node at each of its T steps."""
        nodes = require_number_of_nodes(nodes)
        steps = require_int(steps, "steps", 1, MAX_STEPS // nodes)
        rng = np.random.default_rng(require_int(seed, "seed", 0))
        factors = np.ones((steps, nodes))
        if self.kind == "constant":
            factors[:, 0] = self.factor
        elif self.kind == "random":
            factors = rng.choice(RANDOM_FACTORS, size=factors.shape)
        elif self.kind == "lognormal":
            factors = rng.lognormal(sigma=LOGNORMAL_SIGMA, size=factors.shape)
        return factors

    def expect_slowest(self, nodes: int) -> float:
        """The expected factor of the slowest of N nodes: what a step in lockstep takes.

        Random: `4 - 2 (2/3)^N - (1/3)^N`. Lognormal: the integral of
        `N phi(g) Phi(g)^(N - 1) exp(0.5 g)`, by the trapezoidal rule.

        >>> round(Slowness("random").expect_slowest(4), 4)
        3.5926
        """
        nodes = require_number_of_nodes(nodes)
        if self.kind == "constant":
            return self.factor if nodes == 1 else max(1.0, self.factor)
        if self.kind == "random":
            return 4 - 2 * (2 / 3) ** nodes - (1 / 3) ** nodes
        if self.kind == "lognormal":
            g = np.linspace(-MAX_DEVIATIONS, MAX_DEVIATIONS, INTEGRATION_POINTS)
            density = np.exp(-(g**2) / 2) / math.sqrt(2 * math.pi)
            below = np.array([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in g])
            slowest = nodes * density * below ** (nodes - 1) * np.exp(LOGNORMAL_SIGMA * g)
            return float(np.trapezoid(slowest, g))
        return 1.0

    def expect_pace(self, nodes: int) -> float:
        """The expected pace of asynchronous nodes, over that without slowness.

        `mean_i 1 / E f_i`; for one constant slow node `(N - 1 + 1/f) / N`.

        >>> Slowness("constant", 4.0).expect_pace(8)
        0.90625
        """
        nodes = require_number_of_nodes(nodes)
        if self.kind == "constant":
            return (nodes - 1 + 1 / self.factor) / nodes
        if self.kind == "random":
            return len(RANDOM_FACTORS) / sum(RANDOM_FACTORS)
        return math.exp(-(LOGNORMAL_SIGMA**2) / 2) if self.kind == "lognormal" else 1.0


def parse_slowness(name: str, what: str = "slowness") -> Slowness:
    """Slowness by the name that `experiments.speed stragglers` has for it.

    Args:
      name: none, random, lognormal, or a factor for node 0, above 0 and at most a million.
      what: names it in the error, as "--slowness".

    >>> parse_slowness("4x"), parse_slowness("random").kind
    (Slowness(kind='constant', factor=4.0), 'random')
    """
    match = CONSTANT.fullmatch(name) if isinstance(name, str) else None
    if match and 0 < float(match[1]) <= MAX_FACTOR:
        return Slowness("constant", float(match[1]))
    if name in ("none", "random", "lognormal"):
        return Slowness(name)
    raise ValueError(
        f"{what} must be none, random, lognormal, or a factor for node 0 of at most "
        f"{MAX_FACTOR:g}, as 4x, got {name!r}."
    )
