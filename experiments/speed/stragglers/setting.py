"""What all runs of a measurement of slow nodes have in common."""

from typing import NamedTuple


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
