"""The options that all training programs share. The options of a task extend `TrainingOptions`."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import tyro

from experiments.data.sharding import Shuffle
from experiments.options import (
    Check,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OpenFraction,
    OptionalPath,
    OutputOptions,
    PositiveFloat,
    PositiveInt,
    Seed,
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

LrSchedule = Literal["constant", "cosine", "inverse_sqrt", "step"]
LR_SCHEDULE_HELP = (
    "constant; cosine, which falls to 0; inverse_sqrt (Vaswani et al.), which falls from "
    "--learning-rate after the warm-up as 1 / sqrt(update); step (Goyal et al.), which falls to a "
    "tenth after 1/3, 2/3 and 8/9 of the run."
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
    """Options of what nodes exchange, and when."""

    algorithm: Annotated[tuple[str, ...], tyro.conf.arg(help=ALGORITHM_HELP)] = ("sgp", "allreduce")
    topology: Annotated[str | None, tyro.conf.arg(help=TOPOLOGY_HELP)] = None
    switch_at: OpenFraction = 1 / 3
    """Fraction of the steps after which a topology FIRST/THEN switches."""
    local_steps: PositiveInt = 1
    """Steps from one exchange to the next. AllReduce exchanges at every step in any case."""
    momentum: Annotated[Momentum, tyro.conf.arg(help=MOMENTUM_HELP)] = "local"
    wire: Annotated[WireName, tyro.conf.arg(help=WIRE_HELP, aliases=["--wire-dtype"])] = "float32"
    staleness: Annotated[NonNegativeFloat, MAX_STALENESS] = 1.0
    """For adpsgd, the mean age in steps of the models at which nodes compute gradients (Poisson, at
    most 4)."""
    delays_of: OptionalPath = None
    """For adpsgd, take the delays of a run of asynchronous nodes, from its journals in
    OUT/nodes/RUN/journals/JOB, instead of random delays."""


class StepEpochs(NamedTuple):
    """The epochs at which the schedule `step` changes, by default as in Goyal et al."""

    warm_up: float = 5
    decays: Sequence[float] = (30, 60, 80)  # epochs at which the rate falls
    run: float = 90
    factor: float = 0.1  # factor of the rate at each fall

    def stretch(self, run: float) -> "StepEpochs":
        """Returns these epochs scaled to a run of another length."""
        scale = run / self.run
        decays = tuple(scale * epoch for epoch in self.decays)
        return StepEpochs(scale * self.warm_up, decays, run, self.factor)


@dataclasses.dataclass(frozen=True)
class OptimizationOptions:
    """Options of the local optimizer, its batches, and the length of a run."""

    batch_size_per_node: PositiveInt = 32
    """Examples per node and step."""
    accumulate: PositiveInt = 1
    """Number of batches per node and step, computed one after another, so that a larger batch fits
    into memory."""
    epochs: PositiveInt = 15
    """Number of passes over the training set that all nodes make together."""
    max_steps: PositiveInt | None = None
    """End each run after this step, if --epochs do not end before. The learning rate and
    --switch-at still follow --epochs."""
    max_hours: PositiveFloat | None = None
    """End each run after this many hours, at the next line of metrics.jsonl. Compilation and
    evaluation do not count. The learning rate still follows --epochs."""
    optimizer: Annotated[Optimizer, tyro.conf.arg(help=OPTIMIZER_HELP)] = "nesterov"
    learning_rate: PositiveFloat = 0.1
    """Learning rate. With --lr-schedule step it is the rate for 256 examples, and is scaled by the
    number of nodes; else it is not scaled."""
    lr_schedule: Annotated[LrSchedule, tyro.conf.arg(help=LR_SCHEDULE_HELP)] = "cosine"
    warmup_steps: NonNegativeInt = 0
    """First updates, in which the rate rises linearly up to --learning-rate."""
    warmup_epochs: NonNegativeInt | None = None
    """Number of epochs of the warm-up of --lr-schedule step, by default 1/18 of the run."""
    decay_epochs: tuple[PositiveInt, ...] | None = None
    """Epochs at which the rate of --lr-schedule step falls, by default at 1/3, 2/3 and 8/9 of the
    run."""
    decay_factor: OpenFraction = 0.1
    """Factor by which the rate of --lr-schedule step falls."""
    weight_decay: NonNegativeFloat = 1e-4
    """L2 for sgd and nesterov, decoupled for adam and muon."""
    adam_b1: Fraction = 0.9
    """Decay rate of Adam's mean of gradients."""
    adam_b2: Fraction = 0.999
    """Decay rate of Adam's mean of squared gradients."""
    muon_momentum: Fraction = 0.95
    """Momentum of Muon."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the square root of Adam's mean of squared gradients."""

    @property
    def step_epochs(self) -> StepEpochs:
        """The epochs at which the rate of `--lr-schedule step` changes."""
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
class TrainingOptions(OutputOptions, OptimizationOptions, OuterOptions, ExchangeOptions):
    """Options of a training program.

    Attributes:
      CHANGEABLE_ON_RESUME: the options that may change when a run is resumed.
      BATCH_OPTION: the name of `batch_size_per_node` on the command line.
    """

    CHANGEABLE_ON_RESUME: ClassVar[frozenset[str]] = frozenset(
        (
            *("nodes", "fsdp", "placement", "log_every", "checkpoint_every", "max_to_keep"),
            *("resume", "init_from", "out", "overwrite", "preset", "report_to"),
            *("evaluate_every", "evaluate_nodes", "sharpness", "max_steps", "max_hours"),
            *("data_dir", "tokenizer", "remat"),  # options of some tasks
        )
    )
    BATCH_OPTION: ClassVar[str] = "--batch-size-per-node"

    preset: str | None = None
    """Name of a published recipe, which sets the defaults of all other options.
    `python -m experiments.presets` lists the names."""
    nodes: PositiveInt = 8
    """Number of nodes. Each node has its own model and its part of the data."""
    seed: tuple[Seed, ...] = (0,)
    """Seed of the initial model, the division of the data and the batches. Each of several seeds
    makes a run."""
    shuffle: Shuffle = "local"
    """local: a node has the same part of the data in every epoch, each time in another order.
    global: all data are shuffled and divided over the nodes anew in every epoch, as by PyTorch's
    DistributedSampler with set_epoch."""
    batch_stats: BatchStatsPolicy = "local"
    """With local, nodes keep their own running statistics of BatchNorm. With mix, they gossip the
    statistics. With average, the statistics are averaged over the nodes for each evaluation."""
    placement: Placement = "auto"
    """mesh puts each node on a device (virtual devices on CPU), vmap puts all nodes on one device,
    and auto takes mesh if possible."""
    fsdp: PositiveInt = 1
    """Number of devices of a node, over which parameters, gradients, the optimizer's state and the
    batch are sharded. Each device exchanges its part of the model."""
    evaluate_every: PositiveInt = 1
    """Epochs between two evaluations of the average model; the end of a run is always evaluated."""
    log_every: PositiveInt = 10
    """Steps between two lines of metrics.jsonl. Each line costs one more gradient."""
    evaluate_nodes: bool = False
    """Evaluate the models of all nodes whenever the average model is evaluated, and not only after
    the last step. Each evaluation makes a pass over the test set for each node."""
    sharpness: bool = False
    """At the end of a run, measure the largest eigenvalue of the Hessian of the average model's
    loss on the first batch of all nodes."""
    report_to: ReportTo = "none"
    """With tensorboard, the lines of metrics.jsonl are also written to OUT/tensorboard, for
    TensorBoard."""
    checkpoint_every: PositiveInt | None = None
    """Steps between two checkpoints, which are written to --out. On SIGTERM the run also saves a
    checkpoint. After a restart by the launcher, a run resumes from its newest checkpoint."""
    max_to_keep: PositiveInt = 3
    """Number of checkpoints of a run that are kept."""
    resume: bool = False
    """Resume the program that was stopped in --out. --nodes may be another number."""
    init_from: OptionalPath = None
    """Start all runs from the newest checkpoint in this folder, which is OUT/checkpoints/RUN of a
    run with any algorithm, topology and number of nodes."""
    precision: Literal["float32", "mixed_bfloat16", "bfloat16"] = "float32"
    """mixed_bfloat16: computation in bfloat16, parameters in float32. bfloat16: parameters too."""
    remat: bool = False
    """Compute activations again in the backward pass instead of keeping them: a deep model needs
    less memory and more time."""

    def __post_init__(self) -> None:
        super().__post_init__()
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
    def settings(self) -> dict[str, Any]:
        """The options that a resumed run must have as before, as JSON values."""
        values = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return {name: x for name, x in values.items() if name not in self.CHANGEABLE_ON_RESUME}

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
        """Raises `ValueError` if data that are divided by class would be divided anew."""
        if dirichlet_alpha is not None and self.shuffle == "global":
            raise ValueError(
                "--dirichlet-alpha needs --shuffle local, as it gives each node its own part of "
                f"every class for the whole run, got {dirichlet_alpha} and global: leave one of "
                "them out."
            )

    @property
    def run_folders(self) -> list[Path]:
        """The folders of results from whose models this run may go on."""
        folders = [self.out] if self.out and not self.overwrite else []
        if self.init_from:
            folders.append(self.init_from.resolve().parents[1])  # of OUT/checkpoints/RUN
        return folders

    @property
    def examples_per_node(self) -> int:
        """Examples per step and node, in all batches of the step."""
        return self.batch_size_per_node * self.accumulate

    @property
    def global_batch_size(self) -> int:
        """Examples per step of all nodes together."""
        return self.nodes * self.examples_per_node
