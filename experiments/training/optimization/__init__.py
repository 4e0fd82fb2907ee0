"""The local optimizer of a run: its rule and its learning rate."""

from experiments.training.optimization.learning_rates import (
    LR_SCHEDULE_HELP,
    LrSchedule,
    StepEpochs,
    make_lr_schedule,
)
from experiments.training.optimization.optimizers import (
    OPTIMIZER_HELP,
    DecayMask,
    Optimizer,
    make_optimizer,
)

__all__ = [
    "LR_SCHEDULE_HELP",
    "OPTIMIZER_HELP",
    "DecayMask",
    "LrSchedule",
    "Optimizer",
    "StepEpochs",
    "make_lr_schedule",
    "make_optimizer",
]
