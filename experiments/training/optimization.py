"""The local optimizer of a run: its rule and its learning rate."""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

LrSchedule = Literal["constant", "cosine", "inverse_sqrt", "step"]
LR_SCHEDULE_HELP = (
    "constant; cosine, down to 0; inverse_sqrt of the update (Vaswani et al.), down from "
    "--learning-rate at the end of the warm-up; step (Goyal et al.): warm-up, then 10x down at "
    "1/3, 2/3 and 8/9 of the run."
)

STEP_BATCH_SIZE = 256  # examples, of Goyal et al.


class StepEpochs(NamedTuple):
    """Where the schedule `step` changes, in epochs; by default as Goyal et al."""

    warm_up: float = 5
    decays: Sequence[float] = (30, 60, 80)  # where the rate falls
    run: float = 90
    factor: float = 0.1  # the rate after a fall, relative to that before

    def stretch(self, run: float) -> "StepEpochs":
        """Returns the same schedule for a run of another length."""
        scale = run / self.run
        decays = tuple(scale * epoch for epoch in self.decays)
        return StepEpochs(scale * self.warm_up, decays, run, self.factor)


STEP_EPOCHS = StepEpochs()


def make_lr_schedule(
    name: LrSchedule,
    learning_rate: float,
    steps: int,
    global_batch_size: int,
    warmup_steps: int = 0,
    step_epochs: StepEpochs = STEP_EPOCHS,
) -> optax.Schedule:
    """Returns the learning rate as a function of the step, which counts updates.

    With `warmup_steps` W > 0, all but `step` first rise linearly: `learning_rate * (step + 1) / W`
    at steps before W.

    - `constant`: `learning_rate`, not scaled by the number of nodes.
    - `cosine`: from `learning_rate` to 0 by half a cosine; not scaled either.
    - `inverse_sqrt` (Vaswani et al.): `learning_rate * sqrt(W / (step + 1))` from step W on. The
      paper's rate for a model of width d is `learning_rate = (d * W)**-0.5`: with d = 512 and
      W = 4,000 it is 7.0e-4.
    - `step`: the schedule of Goyal et al., stretched from 90 epochs to `steps`. `learning_rate` is
      that for 256 examples and is scaled linearly with `global_batch_size`, which counts all nodes.
      It warms up over the first 5 epochs, starting at `learning_rate` unless the scaled rate is
      lower, and falls by a factor of 10 at epochs 30, 60 and 80. `step_epochs` are others.

    >>> schedule = make_lr_schedule("step", 0.1, 900, 1024)
    >>> [round(float(schedule(10 * epoch)), 4) for epoch in (0, 5, 29, 30, 60, 80)]
    [0.1, 0.4, 0.4, 0.04, 0.004, 0.0004]
    >>> schedule = make_lr_schedule("inverse_sqrt", 0.1, 900, 1024, warmup_steps=4)
    >>> [round(float(schedule(step)), 4) for step in (0, 1, 3, 4, 15)]
    [0.025, 0.05, 0.1, 0.0894, 0.05]

    References:
        Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017,
        arXiv:1706.02677.
        Vaswani et al., "Attention Is All You Need", NIPS 2017, arXiv:1706.03762, section 5.3.
    """
    if name == "step":
        peak = learning_rate * global_batch_size / STEP_BATCH_SIZE
        return _make_step_schedule(min(learning_rate, peak), peak, steps, step_epochs)
    if name == "inverse_sqrt":
        rest = _make_inverse_sqrt(learning_rate, max(1, warmup_steps))
    elif name == "cosine":
        rest = optax.cosine_decay_schedule(learning_rate, max(1, steps - warmup_steps))
    else:
        rest = optax.constant_schedule(learning_rate)
    if not warmup_steps:
        return rest
    first = learning_rate / warmup_steps
    rise = optax.linear_schedule(first, learning_rate + first, warmup_steps)
    return optax.join_schedules([rise, rest], [warmup_steps])


def _make_inverse_sqrt(learning_rate: float, warmup_steps: int) -> optax.Schedule:
    def inverse_sqrt(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + warmup_steps  # `count` starts at its end
        return learning_rate * jnp.sqrt(warmup_steps / (step + 1.0))

    return inverse_sqrt


def _make_step_schedule(
    start: float, peak: float, steps: int, epochs: StepEpochs
) -> optax.Schedule:
    warm_up = max(1, round(steps * epochs.warm_up / epochs.run)) if epochs.warm_up else 0
    decays = {round(steps * epoch / epochs.run) - warm_up: epochs.factor for epoch in epochs.decays}
    rest = optax.piecewise_constant_schedule(peak, decays)
    if not warm_up:
        return rest
    return optax.join_schedules([optax.linear_schedule(start, peak, warm_up), rest], [warm_up])


Optimizer = Literal["sgd", "nesterov", "adam", "muon"]
OPTIMIZER_HELP = (
    "The local optimizer: plain SGD, SGD with Nesterov momentum 0.9, Adam, or Muon, which is Adam "
    "for embeddings, the last layer, vectors and convolutions."
)

DecayMask = Callable[[Any], Any]
"""Pytree of parameters -> the same tree of booleans, True where weight decay applies."""

MOMENTUM = 0.9
MUON_RMS = 0.2  # of a step of Muon at rate 1, as that of Adam is: one rate is right for both
BY_ADAM = re.compile("embed|head|logits|classifier", re.IGNORECASE)  # in the path of a matrix


def label_for_muon(params: Any) -> Any:
    """The tree of `params` with "muon" for each matrix that Muon steps, and "adam" for the others.

    >>> label_for_muon({"embedding": jnp.ones((2, 2)), "mlp": jnp.ones((2, 2))})
    {'embedding': 'adam', 'mlp': 'muon'}
    """

    def label(path: Any, leaf: Any) -> str:
        is_by_adam = jnp.ndim(leaf) != 2 or BY_ADAM.search(jax.tree_util.keystr(path))
        return "adam" if is_by_adam else "muon"

    return jax.tree_util.tree_map_with_path(label, params)


def make_optimizer(
    name: Optimizer,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float,
    adam_b1: float = 0.9,
    adam_b2: float = 0.999,
    adam_epsilon: float = 1e-8,
    decay_mask: DecayMask | None = None,
    muon_momentum: float = 0.95,
) -> optax.GradientTransformation:
    """Returns SGD, SGD with Nesterov momentum 0.9, Adam or Muon, with weight decay.

    The decay is added to the gradient for SGD (L2), and decoupled for Adam (AdamW) and Muon. It
    sees the parameters that the user holds: for SGP the de-biased ones. `decay_mask` None decays
    all. Muon's steps have the root mean square of Adam's, so that both have one rate (Liu et al.,
    2025, arXiv:2502.16982).
    """
    if name in ("adam", "muon"):
        betas = (adam_b1, adam_b2, adam_epsilon)
        adam = optax.adamw(learning_rate, *betas, weight_decay=weight_decay, mask=decay_mask)
        if name == "adam":
            return adam
        muon = optax.contrib.muon(
            learning_rate,
            beta=muon_momentum,
            weight_decay=weight_decay,
            weight_decay_mask=decay_mask,
            consistent_rms=MUON_RMS,
        )
        return optax.partition({"adam": adam, "muon": muon}, label_for_muon)
    momentum = MOMENTUM if name == "nesterov" else None
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        optax.sgd(learning_rate, momentum=momentum, nesterov=name == "nesterov"),
    )
