"""The options of the program."""

import dataclasses
from typing import Annotated, Literal

from experiments.fault_injection.options import Processes
from experiments.options.checks import (
    Check,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    check_fields,
)
from experiments.options.paths import OptionalPath

MIN_PROCESSES = 3


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    kills: NonNegativeInt = 20
    """Number of kills."""
    stops: NonNegativeInt = 1
    """Number of stops, in a job of their own."""
    stop_seconds: PositiveFloat = 30.0
    """Seconds of a stop."""
    processes: Annotated[
        Processes, Check(f"at least {MIN_PROCESSES}", lambda value: value >= MIN_PROCESSES)
    ] = 4
    """Number of nodes, a process each."""
    algorithm: Literal["async-sgp", "async-adpsgd"] = "async-sgp"
    """The algorithm."""
    step_seconds: PositiveFloat = 0.05
    """Seconds that the gradients of a step take at least: they sleep, as if devices computed them
    that do not share these cores."""
    epochs: PositiveInt = 80
    """Passes over the training set: 4,000 digits, 32 per node and step."""
    runs: PositiveInt = 3
    """Undisturbed runs with other seeds."""
    seed: Seed = 0
    """Seed of the random moments and processes, and of the run itself."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace the results of another run in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.kills + self.stops:
            raise ValueError("--kills or --stops must be at least 1, got 0 of both.")
