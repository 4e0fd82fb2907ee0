"""The options that all training programs share; those of a task extend `TrainingOptions`."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

import tyro

from experiments.data.sharding import Shuffle
from experiments.options import (
    Check,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OpenFraction,
    OptionalPath,
    PositiveFloat,
    PositiveInt,
    Seed,
    check_fields,
    option_name,
    require_different,
)
from experiments.results import ReportTo, import_tensorboard
from experiments.training.forms import WireName
from experiments.training.methods import (
    ALGORITHM_HELP,
    MAX_DELAY,
    MOMENTUM_HELP,
    TOPOLOGY_HELP,
    WIRE_HELP,
    Momentum,
)
from experiments.training.outer import OuterOptions

MAX_STALENESS = Check(f"at most {MAX_DELAY}, the longest delay", lambda value: value <= MAX_DELAY)


SHUFFLE_HELP = (
    "local: a node has the same part of the data in every epoch, each time in another order. "
    "global: all data are shuffled and divided over the nodes anew in every epoch, as by PyTorch's "
    "DistributedSampler with set_epoch."
)

LrSchedule = Literal["constant", "cosine", "inverse_sqrt", "step"]
LR_SCHEDULE_HELP = (
    "constant; cosine, down to 0; inverse_sqrt of the update (Vaswani et al.), down from "
    "--learning-rate at the end of the warm-up; step (Goyal et al.): warm-up, then 10x down at "
    "1/3, 2/3 and 8/9 of the run."
)

Optimizer = Literal["sgd", "nesterov", "adam", "muon"]
OPTIMIZER_HELP = (
    "The local optimizer: plain SGD, SGD with Nesterov momentum 0.9, Adam, or Muon, which is Adam "
    "for embeddings, the last layer, vectors and convolutions."
)

BatchStatsPolicy = Literal["local", "mix", "average"]
Placement = Literal["auto", "mesh", "vmap"]


@dataclasses.dataclass(frozen=True)
class ExchangeOptions:
    """What nodes exchange, and when."""

    algorithm: Annotated[tuple[str, ...], tyro.conf.arg(help=ALGORITHM_HELP)] = ("sgp", "allreduce")
    topology: Annotated[str | None, tyro.conf.arg(help=TOPOLOGY_HELP)] = None
    switch_at: OpenFraction = 1 / 3
    """The fraction of the steps after which a topology FIRST/THEN switches."""
    local_steps: PositiveInt = 1
    """Steps from one exchange to the next; AllReduce exchanges at every step."""
    momentum: Annotated[Momentum, tyro.conf.arg(help=MOMENTUM_HELP)] = "local"
    wire: Annotated[WireName, tyro.conf.arg(help=WIRE_HELP, aliases=["--wire-dtype"])] = "float32"
    staleness: Annotated[NonNegativeFloat, MAX_STALENESS] = 1.0
    """AD-PSGD: mean age, in steps, of the models at which gradients are taken (Poisson, at most 4).
    """
    delays_of: OptionalPath = None
    """AD-PSGD: the delays of a run of asynchronous nodes, from its journals in
    OUT/nodes/RUN/journals/JOB, instead of random ones."""


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


@dataclasses.dataclass(frozen=True)
class OptimizationOptions:
    """The local optimizer, its batches, and the length of a run."""

    batch_size_per_node: PositiveInt = 32
    """Examples per node and step."""
    accumulate: PositiveInt = 1
    """Batches of this size in a step, one after another: a larger batch in the same memory."""
    epochs: PositiveInt = 15
    """Passes over the training set, all nodes together."""
    max_steps: PositiveInt | None = None
    """End each run after this step, if that is before the end of --epochs, to which the learning
    rate and --switch-at refer all the same."""
    max_hours: PositiveFloat | None = None
    """End each run so many hours of training steps after its start, at a line of metrics.jsonl,
    as --max-steps; compilation and evaluation are not counted."""
    optimizer: Annotated[Optimizer, tyro.conf.arg(help=OPTIMIZER_HELP)] = "nesterov"
    learning_rate: PositiveFloat = 0.1
    """Not scaled by the number of nodes; with --lr-schedule step, the rate per 256 examples."""
    lr_schedule: Annotated[LrSchedule, tyro.conf.arg(help=LR_SCHEDULE_HELP)] = "cosine"
    warmup_steps: NonNegativeInt = 0
    """Updates in which the rate first rises linearly up to --learning-rate."""
    warmup_epochs: NonNegativeInt | None = None
    """Epochs of the warm-up of --lr-schedule step; if not given, 1/18 of the run."""
    decay_epochs: tuple[PositiveInt, ...] | None = None
    """Epochs at which the rate of --lr-schedule step falls; if not given, see there."""
    decay_factor: OpenFraction = 0.1
    """The factor by which the rate of --lr-schedule step falls."""
    weight_decay: NonNegativeFloat = 1e-4
    """L2 for sgd and nesterov, decoupled for adam and muon."""
    adam_b1: Fraction = 0.9
    """Decay of Adam's mean of gradients."""
    adam_b2: Fraction = 0.999
    """Decay of Adam's mean of squared gradients."""
    muon_momentum: Fraction = 0.95
    """Momentum of Muon."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the root of Adam's mean of squared gradients."""

    @property
    def step_epochs(self) -> StepEpochs:
        """Where the rate of `--lr-schedule step` changes."""
        epochs = StepEpochs(factor=self.decay_factor)
        if self.warmup_epochs is None and self.decay_epochs is None:
            return epochs
        epochs = epochs.stretch(self.epochs)
        if self.warmup_epochs is not None:
            epochs = epochs._replace(warm_up=self.warmup_epochs)
        if self.decay_epochs is not None:
            epochs = epochs._replace(decays=self.decay_epochs)
        return epochs

    def _require_schedule(self) -> None:
        """Raises `ValueError` if options of the learning rate contradict each other."""
        if self.warmup_steps and self.lr_schedule == "step":
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            is_default = self.warmup_steps == defaults["warmup_steps"]
            raise ValueError(
                "--warmup-steps must be 0 with --lr-schedule step, whose warm-up is "
                f"--warmup-epochs or a part of the run, got {self.warmup_steps}"
                f"{', the default here' if is_default else ''}: add --warmup-steps 0, or choose "
                "another schedule."
            )
        if self.lr_schedule == "inverse_sqrt" and not self.warmup_steps:
            raise ValueError(
                "--lr-schedule inverse_sqrt falls from the end of the warm-up, so that "
                "--warmup-steps must be >= 1, got 0: give it, as the 4000 of Vaswani et al."
            )
        for name in ("warmup_epochs", "decay_epochs"):
            if getattr(self, name) is not None and self.lr_schedule != "step":
                raise ValueError(
                    f"{option_name(name)} needs --lr-schedule step, got {self.lr_schedule}: leave "
                    "it out, or choose step."
                )
        warm_up, decays, run, _ = self.step_epochs
        ends = [*decays, run]
        if warm_up > ends[0] or any(end >= later for end, later in itertools.pairwise(ends)):
            raise ValueError(
                "--decay-epochs must rise, none before the end of the warm-up and all before that "
                f"of the run, got {' '.join(f'{epoch:g}' for epoch in decays)} for a warm-up of "
                f"{warm_up:g} of {run:g} epochs: change --decay-epochs, --warmup-epochs or "
                "--epochs."
            )


@dataclasses.dataclass(frozen=True)
class TrainingOptions(OptimizationOptions, OuterOptions, ExchangeOptions):
    """Options of a training program.

    Attributes:
      CHANGEABLE_ON_RESUME: the options that may differ from those of the run that is resumed.
      BATCH_OPTION: the name of `batch_size_per_node` on the command line.
    """

    CHANGEABLE_ON_RESUME: ClassVar[frozenset[str]] = frozenset(
        (
            *("nodes", "fsdp", "placement", "log_every", "checkpoint_every", "max_to_keep"),
            *("resume", "init_from", "out", "overwrite", "preset", "report_to"),
            *("evaluate_every", "evaluate_nodes", "max_steps", "max_hours"),
            *("data_dir", "tokenizer", "remat"),  # of tasks that have them
        )
    )
    BATCH_OPTION: ClassVar[str] = "--batch-size-per-node"

    preset: str | None = None
    """A published recipe, whose options become the defaults of all others here: `python -m
    experiments.presets` lists them."""
    nodes: PositiveInt = 8
    """Number of nodes; each has its model and its part of the data."""
    seed: tuple[Seed, ...] = (0,)
    """One or several, a run each: seed of the initial model, the division of the data, the batches.
    """
    shuffle: Annotated[Shuffle, tyro.conf.arg(help=SHUFFLE_HELP)] = "local"
    batch_stats: BatchStatsPolicy = "local"
    """Running statistics of BatchNorm: local to each node; mixed by gossip; or averaged over the
    nodes for each evaluation."""
    placement: Placement = "auto"
    """mesh: a device per node, virtual ones on CPU. vmap: one device. auto: mesh if possible."""
    fsdp: PositiveInt = 1
    """Devices of a node, over which parameters, gradients, the optimizer's state and the batch are
    sharded. Each exchanges its part of the model."""
    evaluate_every: PositiveInt = 1
    """Epochs between two evaluations of the average model; the end of a run is always evaluated."""
    log_every: PositiveInt = 10
    """Steps between two lines of metrics.jsonl; each line costs one more gradient."""
    evaluate_nodes: bool = False
    """Evaluate the model of every node at the end of each epoch, as the average model is, and not
    only after the last step: as many passes over the test set as there are nodes."""
    report_to: ReportTo = "none"
    """Where the lines of metrics.jsonl go as well: tensorboard, files in OUT/tensorboard."""
    checkpoint_every: PositiveInt | None = None
    """Steps between checkpoints, which are in --out; one more is saved on SIGTERM. After a restart
    by the launcher, a run resumes from the newest one."""
    max_to_keep: PositiveInt = 3
    """Number of checkpoints of a run that are kept."""
    resume: bool = False
    """Resume in --out where the program was stopped; --nodes may be another number."""
    init_from: OptionalPath = None
    """Start all runs from the newest checkpoint in this folder, OUT/checkpoints/RUN of a run with
    any algorithm, topology and number of nodes."""
    out: OptionalPath = None
    """Folder for the results; if not given, a new one in runs/."""
    overwrite: bool = False
    """Replace the results of another run in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.report_to == "tensorboard":
            import_tensorboard()
        require_different(self, "algorithm", "seed")
        self._require_outer()
        if self.momentum != "local" and self.optimizer != "nesterov":
            raise ValueError(
                f"--momentum {self.momentum} must come with --optimizer nesterov, got "
                f"{self.optimizer}: leave one of them out."
            )
        self._require_schedule()
        if self.fsdp > 1 and self.placement == "vmap":
            raise ValueError(
                f"--fsdp must be 1 with --placement vmap, which has one device for all nodes, got "
                f"{self.fsdp}: leave one of them out."
            )
        for name in ("checkpoint_every", "resume"):
            if getattr(self, name) and self.out is None:
                raise ValueError(
                    f"{option_name(name)} needs --out, the folder in which a run resumes, got none."
                )
        if self.resume and self.overwrite:
            raise ValueError(
                "--resume needs what --overwrite removes, got both: choose one of them."
            )
        removed = self.out.resolve() if self.out and self.overwrite else None
        if self.init_from and removed in self.init_from.resolve().parents:
            raise ValueError(
                f"--init-from must be elsewhere, got {self.init_from}, which is in the "
                "folder whose results --overwrite removes: choose another --out."
            )

    @property
    def outer(self) -> OuterOptions | None:
        """The outer optimizer; None without one."""
        if self.outer_every is None:
            return None
        given = {field.name: vars(self)[field.name] for field in dataclasses.fields(OuterOptions)}
        return OuterOptions(**given)

    def _require_outer(self) -> None:
        """Raises `ValueError` if an option of an outer optimizer is given without one."""
        for field in dataclasses.fields(OuterOptions):
            value = vars(self)[field.name]
            if self.outer is None and value != field.default:
                raise ValueError(
                    f"{option_name(field.name)} needs --outer-every, got {value} without it: give "
                    "both."
                )

    def _require_local_shuffle(self, dirichlet_alpha: float | None) -> None:
        """Raises `ValueError` if data that are divided by their classes are divided anew."""
        if dirichlet_alpha is not None and self.shuffle == "global":
            raise ValueError(
                "--dirichlet-alpha needs --shuffle local, as it gives each node its own part of "
                f"every class for the whole run, got {dirichlet_alpha} and global: leave one of "
                "them out."
            )

    @property
    def run_folders(self) -> list[Path]:
        """The folders of results whose models this run may go on with."""
        folders = [self.out] if self.out and not self.overwrite else []
        if self.init_from:
            folders.append(self.init_from.resolve().parents[1])  # of OUT/checkpoints/RUN
        return folders

    @property
    def examples_per_node(self) -> int:
        """Examples per step and node, those of all its parts."""
        return self.batch_size_per_node * self.accumulate

    @property
    def global_batch_size(self) -> int:
        """Examples per step, all nodes together."""
        return self.nodes * self.examples_per_node
