"""The optimizers and learning-rate schedules that programs know by name."""

from collections.abc import Callable
from typing import Any, Literal

import optax

Optimizer = Literal["sgd", "nesterov", "adam"]
LrSchedule = Literal["constant", "cosine", "step"]

DecayMask = Callable[[Any], Any]
"""Pytree of parameters -> the same tree of booleans, True where weight decay applies."""

MOMENTUM = 0.9
# Of Goyal et al., in examples and in epochs.
STEP_BATCH_SIZE = 256
STEP_EPOCHS = 90
STEP_WARM_UP_EPOCHS = 5
STEP_DECAY_EPOCHS = (30, 60, 80)


def make_lr_schedule(
    name: LrSchedule, learning_rate: float, steps: int, global_batch_size: int
) -> optax.Schedule:
    """Returns the learning rate as a function of the step.

    - `constant`: `learning_rate`, not scaled by the number of nodes.
    - `cosine`: from `learning_rate` to 0 by half a cosine; not scaled either.
    - `step`: the schedule of Goyal et al., stretched from 90 epochs to `steps`. `learning_rate` is
      that for 256 examples and is scaled linearly with `global_batch_size`, which counts all nodes.
      It warms up over the first 5 epochs, starting at `learning_rate` unless the scaled rate is
      lower, and falls by a factor of 10 at epochs 30, 60 and 80.

    >>> schedule = make_lr_schedule("step", 0.1, 900, 1024)
    >>> [round(float(schedule(10 * epoch)), 4) for epoch in (0, 5, 29, 30, 60, 80)]
    [0.1, 0.4, 0.4, 0.04, 0.004, 0.0004]

    References:
        Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
        arXiv:1706.02677.
    """
    if name == "constant":
        return optax.constant_schedule(learning_rate)
    if name == "cosine":
        return optax.cosine_decay_schedule(learning_rate, steps)
    peak = learning_rate * global_batch_size / STEP_BATCH_SIZE
    warm_up = max(1, round(steps * STEP_WARM_UP_EPOCHS / STEP_EPOCHS))
    decays = {round(steps * epoch / STEP_EPOCHS) - warm_up: 0.1 for epoch in STEP_DECAY_EPOCHS}
    return optax.join_schedules(
        [
            optax.linear_schedule(min(learning_rate, peak), peak, warm_up),
            optax.piecewise_constant_schedule(peak, decays),
        ],
        [warm_up],
    )


def make_optimizer(
    name: Optimizer,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    decay_mask: DecayMask | None = None,
) -> optax.GradientTransformation:
    """Returns SGD, SGD with Nesterov momentum 0.9, or Adam, with weight decay.

    The decay is added to the gradient for SGD (L2), and decoupled for Adam (AdamW). It sees the
    parameters that the user holds: for SGP the de-biased ones. `decay_mask` says which of them are
    decayed; None is all.
    """
    if name == "adam":
        return optax.adamw(learning_rate, weight_decay=weight_decay, mask=decay_mask)
    momentum = MOMENTUM if name == "nesterov" else None
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        optax.sgd(learning_rate, momentum=momentum, nesterov=name == "nesterov"),
    )
