"""The step of a training loop: one compiled program per round, overlapped with the exchange."""

from gossipjax.train_step._gradients import accumulate_gradients
from gossipjax.train_step._train_step import MAX_PROGRAMS, TrainStep

__all__ = ["MAX_PROGRAMS", "TrainStep", "accumulate_gradients"]
