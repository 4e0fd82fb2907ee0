"""The options of both jobs."""

import dataclasses
from typing import Annotated, Literal

from experiments.options import (
    Check,
    NonNegativeInt,
    OptionalPath,
    PositiveFloat,
    PositiveInt,
    Seed,
    check_fields,
)

LOG_EVERY = 5  # steps
NUM_EXAMPLES = 4000  # of the training set
BATCH_SIZE_PER_NODE = 32  # the default of the image program
MIN_CHECKPOINTS = 8
MAX_STALL = 120  # seconds; after 300 without output a run counts as hanging
MAX_PROCESSES = NUM_EXAMPLES // BATCH_SIZE_PER_NODE
MIN_ASYNCHRONOUS = 3  # processes: there must be others when one is gone

Processes = Annotated[
    PositiveInt,
    Check(
        f"at most {MAX_PROCESSES}, as a step takes {BATCH_SIZE_PER_NODE} of the {NUM_EXAMPLES} "
        "examples per process",
        lambda value: value <= MAX_PROCESSES,
    ),
]
StallSeconds = Annotated[
    PositiveInt, Check(f"at most {MAX_STALL}", lambda value: value <= MAX_STALL)
]


@dataclasses.dataclass(frozen=True)
class LockstepOptions:
    """Kills processes of a training job at random moments. The first argument `asynchronous` takes
    a job of asynchronous nodes instead, with other options."""

    kills: PositiveInt = 20
    """Number of kills, or stops: of each six, two while a checkpoint is written, one while the
    processes start, three during training."""
    fault: Literal["kill", "stop"] = "kill"
    """kill: SIGKILL. stop: SIGSTOP, so that the process stays, and the launcher finds that it is
    stuck."""
    stall: StallSeconds = 20
    """Seconds without an advance after which the launcher takes a process for stuck; for stops."""
    processes: Processes = 4
    """Number of processes, a node each."""
    epochs: PositiveInt = 16
    """Passes over the training set: 4,000 digits, 32 per node and step."""
    checkpoint_every: PositiveInt = 10
    """Steps between checkpoints, a multiple of 5."""
    runs: PositiveInt = 3
    """Uninterrupted runs with other seeds, in addition to one with the same seed."""
    seed: Seed = 0
    """Seed of the random moments and processes; the seed of the run itself is 0."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace the results of another run in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.checkpoint_every % LOG_EVERY:
            raise ValueError(
                f"--checkpoint-every must be a multiple of {LOG_EVERY}, got "
                f"{self.checkpoint_every}."
            )
        if self.steps < MIN_CHECKPOINTS * self.checkpoint_every:
            raise ValueError(
                f"a run must have {MIN_CHECKPOINTS} checkpoints or more, got {self.steps} steps "
                f"with one every {self.checkpoint_every}: give more --epochs."
            )

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return max(1, round(self.epochs * NUM_EXAMPLES / (BATCH_SIZE_PER_NODE * self.processes)))


@dataclasses.dataclass(frozen=True)
class AsynchronousOptions:
    """Kills and stops asynchronous nodes at random moments."""

    kills: NonNegativeInt = 20
    """Number of kills."""
    stops: NonNegativeInt = 1
    """Number of stops, in another job."""
    stop_seconds: PositiveFloat = 30.0
    """Seconds of a stop."""
    processes: Annotated[
        Processes, Check(f"at least {MIN_ASYNCHRONOUS}", lambda value: value >= MIN_ASYNCHRONOUS)
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
