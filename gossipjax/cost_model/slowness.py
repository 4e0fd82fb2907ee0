"""Says, or draws at random, by what factor a node's computation is longer at a step."""

import dataclasses
import re
from typing import Literal, get_args

import numpy as np

from gossipjax.exchanges.transform import require_choice

Kind = Literal["none", "constant", "random", "lognormal"]
RANDOM_FACTORS = (1.0, 2.0, 4.0)  # equally likely
LOGNORMAL_SIGMA = 0.5  # standard deviation of the logarithm of the factor
CONSTANT = re.compile(r"(\d+(?:\.\d+)?)x")


@dataclasses.dataclass(frozen=True)
class Slowness:
    """Says by what factor the computation of each node is longer at each step.

    Attributes:
      kind: with "none" all factors are 1. With "constant" node 0 has `factor` and all other nodes
        1. With "random" each step of each node draws 1, 2 or 4 with equal probability. With
        "lognormal" each step of each node draws `exp(0.5 g)` with g standard normal.
      factor: the factor of node 0 if `kind` is "constant".

    >>> Slowness("constant", 4.0).draw(nodes=3, steps=2)
    array([[4., 1., 1.],
           [4., 1., 1.]])
    """

    kind: Kind = "none"
    factor: float = 1.0

    def __post_init__(self) -> None:
        require_choice(self.kind, "kind of Slowness", get_args(Kind))
        if self.kind != "constant" and self.factor != 1:
            raise ValueError(
                f"factor of Slowness must be left out for {self.kind}, got {self.factor!r}: give "
                f'Slowness("constant", {self.factor!r}), or drop it.'
            )

    def draw(self, nodes: int, steps: int, seed: int = 0) -> np.ndarray:
        """Draws the factors `[T, N]` of N nodes at T steps."""
        rng = np.random.default_rng(seed)
        factors = np.ones((steps, nodes))
        if self.kind == "constant":
            factors[:, 0] = self.factor
        elif self.kind == "random":
            factors = rng.choice(RANDOM_FACTORS, size=factors.shape)
        elif self.kind == "lognormal":
            factors = rng.lognormal(sigma=LOGNORMAL_SIGMA, size=factors.shape)
        return factors


def parse_slowness(name: str, what: str = "slowness") -> Slowness:
    """Makes a `Slowness` from the name that `experiments.speed stragglers` uses.

    Args:
      name: "none", "random" or "lognormal", or a factor for node 0 above 0, as "4x".
      what: what the error calls the name, for example "--slowness".

    >>> parse_slowness("4x"), parse_slowness("random").kind
    (Slowness(kind='constant', factor=4.0), 'random')
    """
    match = CONSTANT.fullmatch(name)
    if match and float(match[1]) > 0:
        return Slowness("constant", float(match[1]))
    if name in ("none", "random", "lognormal"):
        return Slowness(name)
    raise ValueError(
        f"{what} must be none, random, lognormal, or a factor for node 0, as 4x, got {name!r}."
    )
