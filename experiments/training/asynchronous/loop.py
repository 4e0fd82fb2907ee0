"""The training loop of one node that waits for nobody."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx
from experiments.data.prefetch import prefetch
from experiments.results import Record
from experiments.training.asynchronous.methods import ASYNCHRONOUS
from experiments.training.asynchronous.results import make_record, merge_lines, write_node
from experiments.training.asynchronous.saving import find_start, open_checkpoints, save
from experiments.training.plan import Plan
from experiments.training.task import Task, Variables
from experiments.training.trainer import NonFiniteError
from gossipjax.launch import NodeInfo

PATIENCE = 5.0  # seconds of silence after which a node is declared dead
MEETING_SECONDS = 60.0  # that a node waits for the others before its first step
Show = Callable[[float, str], None]


@dataclasses.dataclass(frozen=True)
class OneNode(gx.Nodes):
    """The node of this process among those of its job, for the data of a task.

    Attributes:
      place: its number.
    """

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
        """The folder of what its nodes write, in that of the results."""
        words = "".join(c if c.isalnum() or c in "_." else " " for c in self.name)
        return results / "nodes" / "-".join(words.split())


class Job(NamedTuple):
    """What all runs of a job have in common.

    Attributes:
      info: the place of this node.
      task, plan: what is trained, and how.
      folder: of the results.
      environment: what `summary.json` says of the job.
      saved: the folders' names of the runs that an earlier job has saved.
    """

    info: NodeInfo
    task: Task
    plan: Plan
    folder: Path
    environment: Record
    saved: frozenset[str]


def train_node(job: Job, run: NodeRun, joins: bool, show: Show) -> Record | None:
    """Trains this node until all nodes together have made the steps of the run.

    Args:
      job: the task, and where it runs.
      run: the algorithm and the seed.
      joins: whether the others go on already, and it asks one of them for half of what it holds.
      show: is told how far the run is, and a text.

    Returns:
      The entry of the run in `summary.json`, if this node is at the lowest place at the end.

    Raises:
      TimeoutError: if it joins, and no other node answers.
      NonFiniteError: if its loss is not finite.
    """
    info, plan = job.info, job.plan
    options = plan.options
    variables = job.task.init(run.seed)
    folder = run.folder(job.folder)
    tx = make_transform(plan, variables)
    checkpoints = open_checkpoints(folder, info.place, options)
    resumes = folder.name in job.saved
    start = find_start(checkpoints, variables, tx.init(variables), joins, resumes)
    rows = job.task.batches(
        OneNode(info.num_nodes, place=info.place),
        options.batch_size_per_node,
        run.seed,
        start.position,
    )
    batches = prefetch(jax.tree.map(lambda row: jnp.asarray(row[0]), batch) for batch in rows)
    gradients = make_gradients(job.task)
    node = gx.asynchronous.join(
        info.contacts,
        tx,
        start.variables,
        algorithm=ASYNCHRONOUS[run.title].build(run.seed),
        listen=info.listen,
        place=info.place,
        job=f"{info.job} {run.name}",
        is_founder=start.is_founder,
        patience=PATIENCE,
        wire_dtype=None if options.wire == "float32" else options.wire,
        secret=gx.launch.secret_from_env(),
        journal=folder / "journals" / (info.job or "job") / f"{info.place}.jsonl",
        opt_state=start.opt_state,
        steps=start.steps,
    )
    with node, checkpoints or contextlib.nullcontext():
        batch = next(batches)
        node.warm_up(gradients, batch)
        node.wait_for_mass(MEETING_SECONDS)
        if not joins:
            node.wait_for_members(info.num_nodes, MEETING_SECONDS)
        log = NodeLog(folder / f"{info.place}.jsonl", node, plan, info.num_nodes, show)
        while node.total_steps < plan.steps * info.num_nodes:
            rate = plan.learning_rate_at(min(plan.steps - 1, node.total_steps // info.num_nodes))
            node.opt_state = optax.tree_utils.tree_set(
                node.opt_state, learning_rate=jnp.asarray(rate, jnp.float32)
            )
            log.add(node.step(gradients, batch))
            if checkpoints is not None and options.checkpoint_every:
                step = start.position + node.statistics.steps
                save(checkpoints, node, step, options.checkpoint_every)
            batch = next(batches)
        log.finish()
        average = node.average()
        write_node(folder / f"{info.place}.json", node, log, start.position)
        models = node.final_models
    if info.place != min(models):
        return None
    merge_lines(folder, job.folder / "metrics.jsonl", run.name, plan, info.num_nodes)
    topology = ASYNCHRONOUS[run.title].topology
    return make_record(job.task, plan, folder, run, topology, average, models)


def make_gradients(task: Task) -> Callable[[Variables, Any], tuple[Variables, jax.Array]]:
    """Returns `(variables, batch) -> (grads, loss)`.

    Running statistics are a part of what nodes gossip: their gradient, at a rate of 1, is the
    difference between the old ones and the new.
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


def make_transform(plan: Plan, variables: Variables) -> optax.GradientTransformation:
    """The local optimizer, whose learning rate is set at each step: it counts all nodes' steps."""
    optimizer = optax.inject_hyperparams(plan.make_optimizer)(
        learning_rate=plan.learning_rate_at(0)
    )
    if "batch_stats" not in variables:
        return optax.masked(optimizer, dict.fromkeys(variables, True))
    return optax.partition(
        {"params": optimizer, "batch_stats": optax.scale(-1.0)}, {name: name for name in variables}
    )


class NodeLog:
    """The lines of one node: its losses, with the seconds since the run began.

    Args:
      path: the file, to which a node that was started again appends.
      node: the node.
      plan: the run.
      nodes: N.
      show: is told how far the run is, and a text.

    Attributes:
      began: when it was made, in seconds since 1970.
      seconds_per_step: of each interval between two lines.
    """

    def __init__(self, path: Path, node: Any, plan: Plan, nodes: int, show: Show):
        self.seconds_per_step: list[float] = []
        self._path = path
        self._node = node
        self._plan = plan
        self._nodes = nodes
        self._show = show
        self._losses: list[jax.Array] = []
        self.began = self._last = time.time()

    def add(self, loss: jax.Array) -> None:
        """Adds the loss of a step."""
        self._losses.append(loss)
        if len(self._losses) == self._plan.options.log_every:
            self.finish()

    def finish(self) -> None:
        """Writes the losses since the last line; raises `NonFiniteError` if one is not finite."""
        if not self._losses:
            return
        loss = float(np.mean(jax.device_get(self._losses)))
        if not np.isfinite(loss):
            raise NonFiniteError(
                f"the loss of node {self._node.place} must be finite, got {loss} after "
                f"{self._node.statistics.steps} steps: lower --learning-rate."
            )
        now = time.time()
        self.seconds_per_step.append((now - self._last) / len(self._losses))
        self._last = now
        self._losses = []
        step = min(self._node.total_steps / self._nodes, self._plan.steps)
        line = {"step": step, "time": now, "loss": loss, "members": self._node.members}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._show(step, f"loss {loss:.3g}, {len(self._node.members)} nodes")
