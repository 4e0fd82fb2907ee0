"""The local optimizer of a run: its rule, its learning rate, the accumulation of gradients."""

from experiments.training.optimization.accumulation import accumulate_gradients
from experiments.training.optimization.learning_rates import (
    LrSchedule,
    StepEpochs,
    make_lr_schedule,
)
from experiments.training.optimization.optimizers import DecayMask, Optimizer, make_optimizer

__all__ = [
    "DecayMask",
    "LrSchedule",
    "Optimizer",
    "StepEpochs",
    "accumulate_gradients",
    "make_lr_schedule",
    "make_optimizer",
]
