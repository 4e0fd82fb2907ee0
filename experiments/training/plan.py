"""Makes the runs of an experiment, with their numbers of steps and learning rates."""

import dataclasses
import functools
import heapq
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.training.methods import (
    MOMENTUM,
    Method,
    MethodOptions,
    Sharding,
    find_algorithm,
    make_method,
    parse_name,
)
from experiments.training.options import LrSchedule, StepEpochs, TrainingOptions
from experiments.training.task import DecayMask

UPDATES = "the updates of a run, {}"

STEP_BATCH_SIZE = 256  # batch size of Goyal et al.
STEP_EPOCHS = StepEpochs()

MUON_RMS = 0.2  # of a step of Muon at rate 1, as of Adam: one rate is right for both
BY_ADAM = re.compile("embed|head|logits|classifier", re.IGNORECASE)  # in the path of a matrix


def require_at_most(
    option: str,
    value: int,
    limit: int,
    description: str,
    way_out: str = "lower it, or train for more --epochs.",
) -> None:
    """Raises `ValueError` if an option exceeds its limit, which replaces {} in `description`."""
    if value > limit:
        raise ValueError(
            f"{option} must be at most {description.format(limit)}, got {value}: {way_out}"
        )


def make_folder_name(run: str) -> str:
    """Returns the name of a run in characters that a folder name may have.

    >>> make_folder_name("sgp, ring, seed 0")
    'sgp-ring-seed-0'
    """
    words = "".join(c if c.isalnum() or c in "_." else " " for c in run)
    return "-".join(words.split())


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """One algorithm with one seed."""

    title: str  # as given, `ALGORITHM` or `ALGORITHM@TOPOLOGY`
    seed: int  # seed of the initial model, the division of the data and the batches
    method: Method

    @property
    def name(self) -> str:
        """The name of the run in the files."""
        return f"{self.method.algorithm}, {self.method.topology}, seed {self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """The arguments of `TrainingPlan.make_method`, in the metadata of each checkpoint."""
        sharding = self.method.sharding
        devices = 1 if sharding is None else sharding.devices
        return {"algorithm": self.title, "seed": self.seed, "fsdp": devices}

    @property
    def folder_name(self) -> str:
        """The name of the folder of its checkpoints."""
        return make_folder_name(self.name)


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """Derives steps, learning rate and methods of runs from the options and the size of the data.

    The number of nodes in the options is the number at the start of the run.
    """

    options: TrainingOptions
    num_examples: int
    decay_mask: DecayMask | None = None
    sharding: Sharding | None = None

    def __post_init__(self) -> None:
        options = self.options
        examples = options.epochs * self.num_examples
        batch = options.global_batch_size
        require_at_most(
            *("--nodes", options.nodes, self.num_examples),
            *("the number of training examples, {}", "every node needs one."),
        )
        require_at_most(
            *(options.BATCH_OPTION, options.batch_size_per_node, examples // options.nodes),
            f"{{}}, so that a step of {options.nodes} nodes takes no more than the {examples} "
            "examples of the run",
        )
        require_at_most(
            *("--accumulate", options.accumulate, examples // (batch // options.accumulate)),
            f"{{}}, so that a step takes no more than the {examples} examples of the run",
        )
        require_at_most("--warmup-steps", options.warmup_steps, self.steps, UPDATES)

    @functools.cached_property
    def steps(self) -> int:
        """The steps of each run if no budget ends it: whole periods of an outer optimizer.

        What nodes learn after the last outer step would be in no average.
        """
        examples = self.options.epochs * self.num_examples
        steps = max(1, round(examples / self.options.global_batch_size))
        every = self.options.outer_every or 1
        return steps - steps % every if steps > every else steps

    @property
    def last_step(self) -> int:
        """The step after which each run ends, unless its hours end earlier."""
        return min(self.steps, self.options.max_steps or self.steps)

    @functools.cached_property
    def learning_rate(self) -> optax.Schedule:
        """The learning rate as a function of the number of previous updates."""
        options = self.options
        return make_lr_schedule(
            options.lr_schedule,
            options.learning_rate,
            self.steps,
            options.global_batch_size,
            options.warmup_steps,
            options.step_epochs,
        )

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step."""
        return float(np.asarray(self.learning_rate(step)))

    def eval_steps(self, start: int = 0) -> Iterator[int]:
        """Returns the ends of epochs after `start` at which the average model is evaluated."""
        # Steps end where they end: an epoch is evaluated after the step that is nearest to its end.
        epochs_per_step = self.options.global_batch_size / self.num_examples
        every = self.options.evaluate_every
        first_epoch = max(1, math.floor(start * epochs_per_step / every)) * every
        epochs = range(first_epoch, self.options.epochs, every)
        ends = (round(epoch / epochs_per_step) for epoch in epochs)
        ends = itertools.takewhile(lambda end: end < self.last_step, ends)
        return unique(end for end in itertools.chain(ends, [self.last_step]) if end > start)

    def intervals(self, start: int) -> Iterator[range]:
        """Divides the steps from `start` on at lines of metrics, evaluations and checkpoints."""
        options = self.options
        ends = [self.eval_steps(start)]
        for every in (options.log_every, options.checkpoint_every):
            if every is not None:
                first = start - start % every + every
                ends.append(iter(range(first, self.last_step, every)))
        return split_at(unique(heapq.merge(*ends)), start)

    def make_method(self, algorithm: str, seed: int, nodes: int) -> Method:
        """Makes the method of a run with this algorithm and seed over this number of nodes."""
        options = self.options
        method_options = MethodOptions(
            nodes=nodes,
            steps=self.steps,
            seed=seed,
            rate=self.learning_rate,
            sharding=self.sharding,
            local_steps=options.local_steps,
            wire=options.wire,
            staleness=options.staleness,
            delays_of=options.delays_of,
            switch_at=options.switch_at,
            outer=options.outer,
            momentum=options.momentum,
        )
        if method_options.mixes_momentum:  # instead of SGD, and decay comes before
            optimizer = optax.add_decayed_weights(options.weight_decay, self.decay_mask)
        else:
            optimizer = self.make_optimizer(self.learning_rate)
        return make_method(algorithm, method_options, optimizer, options.topology)

    def make_optimizer(self, learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        """Makes SGD, SGD with Nesterov momentum 0.9, Adam or Muon, with weight decay.

        The decay is added to the gradient for SGD (L2), and decoupled for Adam (AdamW) and Muon.
        Muon's steps have the root mean square of Adam's steps, so that one learning rate suits both
        (Liu et al., 2025, arXiv:2502.16982).
        """
        options = self.options
        decay = options.weight_decay
        if options.optimizer in ("adam", "muon"):
            betas = (options.adam_b1, options.adam_b2, options.adam_epsilon)
            adam = optax.adamw(learning_rate, *betas, weight_decay=decay, mask=self.decay_mask)
            if options.optimizer == "adam":
                return adam
            muon = optax.contrib.muon(
                learning_rate,
                beta=options.muon_momentum,
                weight_decay=decay,
                weight_decay_mask=self.decay_mask,
                consistent_rms=MUON_RMS,
            )
            return optax.partition({"adam": adam, "muon": muon}, label_for_muon)
        is_nesterov = options.optimizer == "nesterov"
        momentum = MOMENTUM if is_nesterov else None
        return optax.chain(
            # First in the chain: it sees the parameters that the user holds, for SGP the de-biased.
            optax.add_decayed_weights(decay, mask=self.decay_mask),
            optax.sgd(learning_rate, momentum=momentum, nesterov=is_nesterov),
        )

    def make_runs(self, nodes: int) -> list[TrainingRun]:
        """Returns a run for each algorithm and seed."""
        options = self.options
        require_at_most("--local-steps", options.local_steps, self.steps, UPDATES)
        if options.outer is not None:
            require_at_most("--outer-every", options.outer.outer_every or 0, self.steps, UPDATES)
        runs = [
            TrainingRun(algorithm, seed, self.make_method(algorithm, seed, nodes))
            for algorithm, seed in itertools.product(options.algorithm, options.seed)
        ]
        for algorithm in options.algorithm:
            self._require_messages(algorithm)
        if len({run.name for run in runs}) < len(runs):
            raise ValueError(
                "--algorithm must be different algorithms or topologies, got the same twice: "
                f"{', '.join(options.algorithm)}."
            )
        return runs

    def _require_messages(self, algorithm: str) -> None:
        """Raises `ValueError` if an overlap is not valid, or no message arrives before the end."""
        row, overlap, _ = parse_name(algorithm)
        if find_algorithm(row).overlaps and not overlap:
            raise ValueError(
                f"--algorithm must overlap 1 step or more, as 1-osgp, got {algorithm}: without "
                "overlap it is sgp."
            )
        if overlap and overlap * self.options.local_steps >= self.steps:
            raise ValueError(
                f"--algorithm must overlap fewer steps than the {self.steps} updates of a run, "
                f"counted in --local-steps, got {algorithm} with {self.options.local_steps} of "
                "them: no message would arrive. Lower them, or train for more --epochs."
            )


def unique(numbers: Iterable[int]) -> Iterator[int]:
    """Returns each of the sorted numbers once.

    >>> list(unique([1, 2, 2, 3]))
    [1, 2, 3]
    """
    return (number for number, _ in itertools.groupby(numbers))


def split_at(ends: Iterable[int], start: int) -> Iterator[range]:
    """Returns the ranges between `start` and each of the sorted `ends`.

    >>> list(split_at([4, 5, 8], start=2))
    [range(2, 4), range(4, 5), range(5, 8)]
    """
    return itertools.starmap(range, itertools.pairwise(itertools.chain([start], ends)))


def make_lr_schedule(
    name: LrSchedule,
    learning_rate: float,
    steps: int,
    global_batch_size: int,
    warmup_steps: int = 0,
    step_epochs: StepEpochs = STEP_EPOCHS,
) -> optax.Schedule:
    """Returns the learning rate as a function of the step, which counts updates.

    With `warmup_steps` W > 0, all schedules but `step` rise linearly at steps before W:
    `learning_rate * (step + 1) / W`. Only `step` scales the rate by the size of the batch.

    - `constant`: `learning_rate`.
    - `cosine`: from `learning_rate` to 0 by half a cosine.
    - `inverse_sqrt` (Vaswani et al.): `learning_rate * sqrt(W / (step + 1))` from step W on. The
      paper has `learning_rate = (d * W)**-0.5` for a model of width d: with d = 512 and W = 4,000
      it is 7.0e-4.
    - `step`: the schedule of Goyal et al., stretched from 90 epochs to `steps`. The peak is
      `learning_rate * global_batch_size / 256`. The rate warms up to it over the first 5 epochs,
      from `learning_rate` or a lower peak, and falls by a factor of 10 at epochs 30, 60 and 80.
      `step_epochs` can change the epochs.

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


def label_for_muon(params: Any) -> Any:
    """Labels each matrix that Muon updates "muon", and all other parameters "adam".

    >>> label_for_muon({"embedding": jnp.ones((2, 2)), "mlp": jnp.ones((2, 2))})
    {'embedding': 'adam', 'mlp': 'muon'}
    """

    def label(path: Any, leaf: Any) -> str:
        is_by_adam = jnp.ndim(leaf) != 2 or BY_ADAM.search(jax.tree_util.keystr(path))
        return "adam" if is_by_adam else "muon"

    return jax.tree_util.tree_map_with_path(label, params)
