"""The options of both jobs."""

import dataclasses
from typing import Annotated, Literal

from experiments.options import Check, OutputOptions, PositiveFloat, PositiveInt, Seed

LOG_EVERY = 5  # steps
NUM_EXAMPLES = 4000  # of the training set
BATCH_SIZE_PER_NODE = 32  # the default of the image program
MIN_CHECKPOINTS = 8
MIN_ASYNCHRONOUS = 3  # processes: there must be others when one is gone


@dataclasses.dataclass(frozen=True)
class Options(OutputOptions):
    """What both jobs have."""

    kills: PositiveInt = 20
    """Number of kills, or stops."""
    fault: Literal["kill", "stop"] = "kill"
    """kill: SIGKILL. stop: SIGSTOP, so that the process stays."""
    processes: PositiveInt = 4
    """Number of processes, a node each."""
    epochs: PositiveInt = 16
    """Passes over the training set: 4,000 digits, 32 per node and step."""
    runs: PositiveInt = 3
    """Undisturbed runs with other seeds."""
    seed: Seed = 0
    """Seed of the random moments and processes."""

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return max(1, round(self.epochs * NUM_EXAMPLES / (BATCH_SIZE_PER_NODE * self.processes)))


@dataclasses.dataclass(frozen=True)
class LockstepOptions(Options):
    """Kills processes of a training job at random moments: of each six kills, two while a
    checkpoint is written, one while the processes start, three during training. The first argument
    `asynchronous` takes a job of asynchronous nodes instead, with other options."""

    stall: PositiveInt = 20
    """Seconds without an advance after which the launcher takes a process for stuck; for stops."""
    checkpoint_every: Annotated[
        PositiveInt, Check(f"a multiple of {LOG_EVERY}", lambda value: value % LOG_EVERY == 0)
    ] = 10
    """Steps between checkpoints, a multiple of 5."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < MIN_CHECKPOINTS * self.checkpoint_every:
            raise ValueError(
                f"a run must have {MIN_CHECKPOINTS} checkpoints or more, got {self.steps} steps "
                f"with one every {self.checkpoint_every}: give more --epochs."
            )


@dataclasses.dataclass(frozen=True)
class AsynchronousOptions(Options):
    """Kills or stops asynchronous nodes at random moments."""

    stop_seconds: PositiveFloat = 30.0
    """Seconds of a stop."""
    processes: Annotated[
        PositiveInt, Check(f"at least {MIN_ASYNCHRONOUS}", lambda value: value >= MIN_ASYNCHRONOUS)
    ] = 4
    """Number of nodes, a process each."""
    algorithm: Literal["async-sgp", "async-adpsgd"] = "async-sgp"
    """The algorithm."""
    step_seconds: PositiveFloat = 0.05
    """Seconds that the gradients of a step take at least: they sleep, as if devices computed them
    that do not share these cores."""
    epochs: PositiveInt = 80
    """Passes over the training set: 4,000 digits, 32 per node and step."""
