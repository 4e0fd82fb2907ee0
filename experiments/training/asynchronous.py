"""The training loop of an asynchronous node.

Each node saves by itself, after every `--checkpoint-every` of its own steps and on SIGTERM. With
`--resume`, each node that has saved starts from its own model with weight 1. So the average model
is then the plain mean of models that were saved at different times.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx
from experiments.results import Record
from experiments.training.asynchronous_results import (
    NodeLog,
    Show,
    make_record,
    merge_lines,
    write_node,
)
from experiments.training.forms import FORMS
from experiments.training.outer import OuterOptions
from experiments.training.plan import TrainingPlan, make_folder_name
from experiments.training.task import Task, Variables
from experiments.training.trainer import NonFiniteError
from gossipjax.launch import NodeInfo

PATIENCE = 5.0  # seconds of silence after which a node is declared dead
MEETING_SECONDS = 60.0  # how long a node waits for others before its first step


class AsynchronousMethod(NamedTuple):
    """A row of `ASYNCHRONOUS`, which builds an algorithm from a seed and an outer optimizer."""

    build: Callable[[int, OuterOptions | None], gx.asynchronous.Algorithm]
    topology: str  # the graph of its messages, as tables name it


def build_outer(seed: int, outer: OuterOptions | None) -> gx.asynchronous.Algorithm:
    """Makes the asynchronous outer optimizer, which supports only some of these options."""
    shared = ("outer_every", "outer_rate", "outer_momentum", "outer_nesterov")
    plain = outer and OuterOptions(**{name: vars(outer)[name] for name in shared})
    if outer is None or plain != outer:
        raise ValueError(
            "--algorithm async-outer must come with --outer-every, --outer-rate and "
            f"--outer-momentum, and no other option of an outer optimizer, got {outer}."
        )
    momentum = outer.outer_momentum or 0.0
    if momentum and not outer.outer_nesterov:
        raise ValueError("the momentum of async-outer is Nesterov's: add --outer-nesterov.")
    return gx.asynchronous.outer(
        outer.outer_every or 1, learning_rate=outer.outer_rate, momentum=momentum, seed=seed
    )


ASYNCHRONOUS = {
    "async-sgp": AsynchronousMethod(lambda seed, _: gx.asynchronous.sgp(seed=seed), "exponential"),
    "async-sgp@rate": AsynchronousMethod(
        lambda seed, _: gx.asynchronous.sgp(graph="rate", seed=seed), "rate"
    ),
    "async-adpsgd": AsynchronousMethod(
        lambda seed, _: gx.asynchronous.adpsgd(seed=seed), "complete"
    ),
    "async-adpsgd@bipartite": AsynchronousMethod(
        lambda seed, _: gx.asynchronous.adpsgd(graph="bipartite", seed=seed), "bipartite"
    ),
    "async-outer": AsynchronousMethod(build_outer, "random"),
}


def is_asynchronous(names: Sequence[str]) -> bool:
    """Whether all algorithms are asynchronous; raises `ValueError` if only some are."""
    given = [name for name in names if name.startswith("async-")]
    if not given:
        return False
    if len(given) < len(names):
        raise ValueError(
            "--algorithm must be of one kind, got "
            f"{' '.join(names)}: those that begin with async- run under `python -m "
            "gossipjax.launch --asynchronous`, others do not. Run the program twice."
        )
    for name in given:
        if name not in ASYNCHRONOUS:
            raise ValueError(f"--algorithm must be one of {', '.join(ASYNCHRONOUS)}, got {name}.")
    return True


@dataclasses.dataclass(frozen=True)
class OneNode(gx.Nodes):
    """The node of this process among all nodes of its job, in the form that tasks need."""

    place: int = 0

    @property
    def local(self) -> list[int]:
        """The nodes of this process."""
        return [self.place]


class NodeRun(NamedTuple):
    """One algorithm with one seed."""

    title: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the run in the files."""
        return f"{self.title}, {ASYNCHRONOUS[self.title].topology}, seed {self.seed}"

    def folder(self, results: Path) -> Path:
        """The folder for the files of the nodes, inside the folder of the results."""
        return results / "nodes" / make_folder_name(self.name)


class NodeJob(NamedTuple):
    """The settings that all runs of a job share."""

    info: NodeInfo  # the place of this node
    task: Task
    plan: TrainingPlan
    folder: Path  # folder of the results
    environment: Record  # what `summary.json` says about the job


def train_node(job: NodeJob, run: NodeRun, joins: bool, show: Show) -> Record | None:
    """Trains this node until all nodes together have made the steps of the run.

    With `joins` other nodes train already, and this node asks one of them for half of its mass.
    `show` gets the progress of the run and a text. Returns the entry of the run in `summary.json`
    if this node has the lowest place at the end.
    """
    info = job.info
    plan = job.plan
    options = plan.options
    variables = job.task.init(run.seed)
    folder = run.folder(job.folder)
    tx = make_transform(plan, variables)
    gradients = make_gradients(job.task)
    saves = folder / "checkpoints"
    node = gx.asynchronous.join(
        tx,
        variables,
        algorithm=ASYNCHRONOUS[run.title].build(run.seed, options.outer),
        job=f"{info.job} {run.name}",
        is_founder=None if joins or options.resume else True,  # to compare, all begin at once
        patience=PATIENCE,
        wire=FORMS[options.wire].wire,
        journal=folder / "journals" / (info.job or "job") / f"{info.place}.jsonl",
        folder=saves if options.checkpoint_every or saves.exists() else None,
        every=options.checkpoint_every or plan.steps * info.num_nodes,
    )
    with node:
        node.wait_for_mass(MEETING_SECONDS)
        rows = job.task.batches(
            OneNode(info.num_nodes, place=info.place),
            options.batch_size_per_node,
            run.seed,
            node.steps,
        )
        batches = gx.prefetch(jax.tree.map(lambda row: jnp.asarray(row[0]), b) for b in rows)
        batch = next(batches)
        node.warm_up(gradients, batch)
        if not joins:
            node.wait_for_members(info.num_nodes, MEETING_SECONDS)
        log = NodeLog(folder / f"{info.place}.jsonl", node, plan, info.num_nodes, show)
        while node.total_steps < plan.steps * info.num_nodes:
            rate = plan.learning_rate_at(min(plan.steps - 1, node.total_steps // info.num_nodes))
            node.opt_state = optax.tree_utils.tree_set(
                node.opt_state, learning_rate=jnp.asarray(rate, jnp.float32)
            )
            try:
                log.add(node.step(gradients, batch))
            except FloatingPointError as error:
                raise NonFiniteError(f"{error} The option is --learning-rate.") from error
            batch = next(batches)
        log.finish()
        average = node.average()
        write_node(folder / f"{info.place}.json", node, log)
        models = node.final_models
    if info.place != min(models):
        return None
    merge_lines(folder, job.folder / "metrics.jsonl", run.name, plan, info.num_nodes)
    topology = ASYNCHRONOUS[run.title].topology
    return make_record(job.task, plan, folder, run, topology, average, models)


def make_gradients(task: Task) -> Callable[[Variables, Any], tuple[Variables, jax.Array]]:
    """Returns `(variables, batch) -> (grads, loss)`.

    Nodes also gossip running statistics. The gradient of the statistics, at a rate of 1, is the
    difference between the old and the new statistics.
    """

    def gradients(variables: Variables, batch: Any) -> tuple[Variables, jax.Array]:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            return task.loss({**variables, "params": params}, batch)

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        changes: Variables = {"params": grads}
        if "batch_stats" in variables:
            old = variables["batch_stats"]
            changes["batch_stats"] = jax.tree.map(lambda a, b: a - b, old, stats)
        return changes, value

    return gradients


def make_transform(plan: TrainingPlan, variables: Variables) -> optax.GradientTransformation:
    """Makes the local optimizer, whose rate is set at each step by the steps of all nodes."""
    optimizer = optax.inject_hyperparams(plan.make_optimizer)(
        learning_rate=plan.learning_rate_at(0)
    )
    if "batch_stats" not in variables:
        return optax.masked(optimizer, dict.fromkeys(variables, True))
    return optax.partition(
        {"params": optimizer, "batch_stats": optax.scale(-1.0)}, {name: name for name in variables}
    )
