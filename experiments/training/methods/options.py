"""The options of a run that an algorithm may depend on, and the forms of messages by name."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import optax

import gossipjax as gx

Transform = optax.GradientTransformationExtraArgs

OuterAverage = Literal["exact", "none"]
Momentum = Literal["local", "mixed", "quasi-global", "outer"]
DenseName = Literal["float32", "bfloat16", "int8", "int4"]
WireName = Literal[DenseName, "top_k", "random_k"]

SPARSE_FRACTION = 0.1  # of the values, that sparse codecs send


class Form(NamedTuple):
    """A form of messages that programs know by name.

    Attributes:
      codec: None for full precision.
      gamma: of CHOCO with this codec.
    """

    codec: gx.wire.Codec | None
    gamma: float


FORMS: dict[WireName, Form] = {
    "float32": Form(None, 1.0),
    "bfloat16": Form(gx.wire.bfloat16(), 1.0),
    "int8": Form(gx.wire.int8(), 1.0),
    "int4": Form(gx.wire.int4(), 0.5),
    "top_k": Form(gx.wire.top_k(SPARSE_FRACTION), 0.2),
    "random_k": Form(gx.wire.random_k(SPARSE_FRACTION), 0.1),
}
DENSE: tuple[DenseName, ...] = get_args(DenseName)


@dataclasses.dataclass(frozen=True)
class OuterOptions:
    """An outer optimizer around the chain of a run: SGD at every `every`-th update.

    Attributes:
      every: updates from one outer step to the next.
      rate: its learning rate; 1 without momentum is the plain average.
      momentum: its momentum.
      nesterov: whether that is Nesterov's.
      average: over all nodes, or over none: each steps by itself.
      fragments: parts of the model, each averaged at its time.
      delay: updates between sending a fragment and using its average.
      mix: the weight of the local model where an average is used.
      reset: whether local momentum and moments are set to 0 at each outer step.
      wire: the form of the messages of the averages.

    Raises:
      ValueError: for an option that would do nothing.
    """

    every: int
    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    average: OuterAverage = "exact"
    fragments: int = 1
    delay: int = 0
    mix: float = 0.0
    reset: bool = False
    wire: DenseName = "float32"

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError(
                "--outer-nesterov must come with momentum, got --outer-momentum 0: give a larger "
                "one, or leave --outer-nesterov out."
            )
        if self.average == "none" and self.wire != "float32":
            raise ValueError(
                "--outer-wire must be float32 with --outer-average none, which sends nothing, got "
                f"{self.wire}: leave one of them out."
            )


class Sharding(NamedTuple):
    """A model that is sharded inside a node.

    Attributes:
      params: the shapes of its parameters.
      specs: how they are sharded, `PartitionSpec`s.
      devices: of a node.
    """

    params: Any
    specs: Any
    devices: int

    def shard(self, transform: Transform) -> Transform:
        """Returns the transform of the parts of such a model."""
        return gx.sharded(transform, self.specs)


@dataclasses.dataclass(frozen=True)
class MethodOptions:
    """The options of a run that an algorithm may depend on.

    Attributes:
      nodes: N.
      steps: of the run; a hybrid topology switches after the fraction `switch_at` of them.
      seed: of random topologies and delays.
      local_steps: updates from one exchange to the next.
      wire: the form of messages, a name of `FORMS`.
      staleness: the mean delay of AD-PSGD's gradients, in steps.
      delays_of: a folder of journals whose delays AD-PSGD has instead.
      switch_at: see `steps`.
      overlap: updates between sending a message and using it; part of the algorithm's name.
      accumulate: steps for one update.
      outer: an outer optimizer around the chain.
      momentum: what the momentum of SGD is of; see `MOMENTUM_HELP`.
      rate: the learning rate, where the algorithm takes the place of SGD.
      sharding: that of the model inside a node; None if each device of a node has all of it.
    """

    nodes: int
    steps: int = 1
    seed: int = 0
    local_steps: int = 1
    wire: WireName = "float32"
    staleness: float = 1.0
    delays_of: Path | None = None
    switch_at: float = 1 / 3
    overlap: int = 0
    accumulate: int = 1
    outer: OuterOptions | None = None
    momentum: Momentum = "local"
    rate: optax.ScalarOrSchedule = 0.1
    sharding: Sharding | None = None

    @property
    def codec(self) -> gx.wire.Codec | None:
        """The `wire` of a transform; None, the parameters' type, for float32."""
        return FORMS[self.wire].codec
