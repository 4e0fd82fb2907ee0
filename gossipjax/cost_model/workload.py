"""Workloads: what a node does in one step. NumPy only."""

import dataclasses

from gossipjax.cost_model._require import require_quantity


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a node does in one step without any exchange.

    Attributes:
      parameters: of the model.
      compute_seconds: of a step: forward, backward and update.
      examples: that a node uses in a step.
      bytes_per_parameter: of the model in memory; messages have their own width.

    Raises:
      ValueError: if a quantity is not a number above 0.

    >>> Workload(parameters=25.6e6, compute_seconds=0.228).model_bytes
    102400000.0
    """

    parameters: float = 25.6e6
    compute_seconds: float = 0.228
    examples: float = 256
    bytes_per_parameter: float = 4.0

    def __post_init__(self) -> None:
        require_quantity(self.parameters, "parameters of Workload", "parameters")
        require_quantity(
            self.compute_seconds, "compute_seconds of Workload", "seconds", is_zero_allowed=True
        )
        require_quantity(self.examples, "examples of Workload", "examples")
        require_quantity(self.bytes_per_parameter, "bytes_per_parameter of Workload", "bytes")

    @property
    def model_bytes(self) -> float:
        """Bytes of the model."""
        return self.parameters * self.bytes_per_parameter
