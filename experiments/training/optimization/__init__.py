"""The local optimizer of a run: its rule, its learning rate, the accumulation of gradients."""

from experiments.training.optimization.accumulation import accumulate_gradients
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
    "accumulate_gradients",
    "make_lr_schedule",
    "make_optimizer",
]
