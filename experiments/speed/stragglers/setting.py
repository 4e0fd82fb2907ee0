"""What all runs of a measurement of slow nodes have in common."""

from typing import NamedTuple

from experiments.speed.stragglers.problem import BATCH_SIZE_PER_NODE


class Setting(NamedTuple):
    """What all runs of a measurement have in common.

    Attributes:
      nodes: N.
      steps: of each node, on average.
      compute_seconds: of a step of a node that is not slow.
      megabytes: 1e6 bytes of float32 parameters, at least.
      bits_per_second: of every link; None without limits.
    """

    nodes: int
    steps: int
    compute_seconds: float
    megabytes: float = 0.0
    bits_per_second: int | None = None

    @property
    def full_examples_per_second(self) -> float:
        """Of all nodes, if none is slow and only the computation takes time."""
        return self.nodes * BATCH_SIZE_PER_NODE / self.compute_seconds
