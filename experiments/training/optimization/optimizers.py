"""The optimizers that programs know by name."""

from collections.abc import Callable
from typing import Any, Literal

import optax

Optimizer = Literal["sgd", "nesterov", "adam"]
OPTIMIZER_HELP = "The local optimizer: plain SGD, SGD with Nesterov momentum 0.9, or Adam."

DecayMask = Callable[[Any], Any]
"""Pytree of parameters -> the same tree of booleans, True where weight decay applies."""

MOMENTUM = 0.9


def make_optimizer(
    name: Optimizer,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_epsilon: float = 1e-8,
    decay_mask: DecayMask | None = None,
) -> optax.GradientTransformation:
    """Returns SGD, SGD with Nesterov momentum 0.9, or Adam, with weight decay.

    The decay is added to the gradient for SGD (L2), and decoupled for Adam (AdamW). It sees the
    parameters that the user holds: for SGP the de-biased ones.

    Args:
        name: the rule.
        learning_rate: a number, or a function of the number of updates before.
        weight_decay: its factor.
        adam_b1: decay of Adam's mean of gradients.
        adam_b2: decay of Adam's mean of squared gradients.
        adam_epsilon: added to the root of the latter.
        decay_mask: which parameters are decayed; None: all.
    """
    if name == "adam":
        return optax.adamw(
            learning_rate,
            adam_b1,
            adam_b2,
            adam_epsilon,
            weight_decay=weight_decay,
            mask=decay_mask,
        )
    momentum = MOMENTUM if name == "nesterov" else None
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        optax.sgd(learning_rate, momentum=momentum, nesterov=name == "nesterov"),
    )
