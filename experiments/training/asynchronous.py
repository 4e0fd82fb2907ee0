"""An asynchronous node: its loop, what it saves, and its results.

Each node saves by itself, every `--checkpoint-every` of its own steps and on SIGTERM: its model
`x / w`, its optimizer state, and the number of its steps, which is its position in the data. Its
weight, its outer momentum and the messages on their way are not kept. With `--resume` each node
starts at its own model with weight 1, so the average model is the plain mean of the saved ones,
which are as far apart in time as the saves are. A node that has saved nothing asks another for half
of its mass.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx
from experiments.results import AFTER_MIXING, BEFORE_MIXING, TEXT_FOLDER, Record
from experiments.training.evaluation import Evaluator
from experiments.training.forms import FORMS
from experiments.training.options import TrainingOptions
from experiments.training.outer import OuterOptions
from experiments.training.output import write_texts
from experiments.training.plan import TrainingPlan, make_folder_name
from experiments.training.task import Task, Variables
from experiments.training.trainer import NonFiniteError
from gossipjax.checkpoint import Checkpoints, TrainState
from gossipjax.launch import NodeInfo


class AsynchronousMethod(NamedTuple):
    """A row of `ASYNCHRONOUS`: how it is built from a seed and an outer optimizer."""

    build: Callable[[int, OuterOptions | None], gx.asynchronous.Algorithm]
    topology: str  # the graph of its messages, as tables name it


def build_outer(seed: int, outer: OuterOptions | None) -> gx.asynchronous.Algorithm:
    """Returns the asynchronous outer optimizer of these options; it has not all of them."""
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
    return gx.asynchronous.outer(outer.outer_every or 1, outer.outer_rate, momentum, seed=seed)


ASYNCHRONOUS = {
    "async-sgp": AsynchronousMethod(lambda seed, _: gx.asynchronous.sgp(seed=seed), "exponential"),
    "async-sgp@rate": AsynchronousMethod(lambda seed, _: gx.asynchronous.sgp("rate", seed), "rate"),
    "async-adpsgd": AsynchronousMethod(
        lambda seed, _: gx.asynchronous.adpsgd(seed=seed), "complete"
    ),
    "async-adpsgd@bipartite": AsynchronousMethod(
        lambda seed, _: gx.asynchronous.adpsgd("bipartite", seed), "bipartite"
    ),
    "async-outer": AsynchronousMethod(build_outer, "random"),
}


def is_asynchronous(names: Sequence[str]) -> bool:
    """Whether all algorithms are of asynchronous nodes; raises `ValueError` if only some are."""
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


STEPS_PER_LOOK = 8  # for SIGTERM, which may come between two saves


class NodeStart(NamedTuple):
    """Where a node starts."""

    variables: Variables
    opt_state: Any  # None is a new one
    position: int  # the batches that it had before
    steps: int  # its steps that the others do not count already
    is_founder: bool  # it brings a model, and asks nobody for one


def open_checkpoints(folder: Path, place: int, options: TrainingOptions) -> Checkpoints | None:
    """Returns the checkpoints of a node; None if it saves none and has none."""
    own = folder / "checkpoints" / str(place)
    if options.checkpoint_every:
        return Checkpoints(own, options.checkpoint_every, options.max_to_keep)
    return Checkpoints(own, read_only=True) if options.resume and own.exists() else None


def find_start(
    checkpoints: Checkpoints | None,
    variables: Variables,
    opt_state: Any,
    joins: bool,
    resumes: bool,
) -> NodeStart:
    """Returns where a node starts: at what it has saved, or at the model of the seed.

    A node that `joins` while the others go on has its optimizer state and its position back, and
    half of another's mass. `resumes` says whether any node has saved something of an earlier job.
    """
    start = NodeStart(variables, None, 0, 0, is_founder=not (joins or resumes))
    if checkpoints is None or not (joins or resumes):
        return start
    restored = checkpoints.restore((stack(variables), stack(opt_state), None))
    if restored is None:
        return start
    saved, saved_opt_state, _ = jax.tree.map(lambda x: x[0], restored.state)
    steps = 0 if joins else restored.step
    return NodeStart(saved, saved_opt_state, restored.step, steps, is_founder=not joins)


def stack(tree: Any) -> Any:
    """Gives arrays the axis of nodes, of which there is one here."""
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)


COLLECT_SECONDS = 10.0  # for the files of the other nodes


def write_node(path: Path, node: gx.asynchronous.Node, log: Any, position: int) -> None:
    """Writes what a node counted; `position` is the number of its steps in an earlier process."""
    counts = node.statistics._asdict()
    seconds = time.time() - log.began
    record = counts | {
        "steps": position + counts["steps"],
        "steps_per_second": counts["steps"] / seconds,
        "seconds_per_step": float(np.median(log.seconds_per_step or [0.0])),
    }
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(record))
    temporary.replace(path)


def read_lines(folder: Path) -> dict[int, list[Record]]:
    """Returns the lines of every node, by place; one that was cut off is left out."""
    lines: dict[int, list[Record]] = {}
    for path in sorted(folder.glob("[0-9]*.jsonl")):
        found = []
        for text in path.read_text().splitlines():
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError:
                continue
        lines[int(path.stem)] = found
    return lines


def merge_lines(folder: Path, metrics: Path, run: str, plan: TrainingPlan, nodes: int) -> None:
    """Adds lines of the run to `metrics.jsonl`: means of the nodes' lines, in order of time."""
    by_node = read_lines(folder)
    lines = sorted((line for lines in by_node.values() for line in lines), key=lambda x: x["time"])
    if not lines:
        return
    start = lines[0]["time"]
    per_epoch = plan.num_examples / (nodes * plan.options.batch_size_per_node)
    with metrics.open("a") as file:
        for part in np.array_split(np.array(lines, object), max(1, len(lines) // nodes)):
            last = part[-1]
            line = {
                "run": run,
                "step": int(last["step"]),
                "epoch": last["step"] / per_epoch,
                "seconds": last["time"] - start,
                "loss": float(np.mean([entry["loss"] for entry in part])),
                BEFORE_MIXING: None,
                AFTER_MIXING: None,
            }
            file.write(json.dumps(line) + "\n")


def make_record(
    task: Task,
    plan: TrainingPlan,
    folder: Path,
    run: Any,
    topology: str,
    average: Variables,
    models: dict[int, Variables],
) -> Record:
    """Returns the entry of a run in `summary.json`; `models` has that of each node at the end."""
    paths = [folder / f"{place}.json" for place in models]
    deadline = time.monotonic() + COLLECT_SECONDS
    while not all(path.exists() for path in paths) and time.monotonic() < deadline:
        time.sleep(0.1)
    counts = [json.loads(path.read_text()) for path in paths if path.exists()]
    by_node = read_lines(folder)
    batch = plan.options.batch_size_per_node
    one = gx.Nodes(1)
    evaluator = Evaluator(task, one)
    test = evaluator.evaluate_average(one.replicate(average))
    of_nodes = [evaluator.evaluate_nodes(one.replicate(model)) for model in models.values()]
    examined = evaluator.examine_average(one.replicate(average), is_last=True)
    write_texts(folder.parents[1] / TEXT_FOLDER / folder.name, examined.texts)
    changes = [
        jax.tree.leaves(jax.tree.map(np.subtract, model["params"], average["params"]))
        for model in models.values()
    ]
    distances = [np.sqrt(sum(float(np.square(a).sum()) for a in one)) for one in changes]
    journals = sorted(folder.glob("journals/*/*.jsonl"))
    return {
        "run": run.name,
        "algorithm": run.title,
        "topology": topology,
        "nodes": plan.options.nodes,
        "steps": plan.steps,
        "seed": run.seed,
        "seconds_per_step": float(np.mean([record["seconds_per_step"] for record in counts])),
        "examples_per_second": sum(record["steps_per_second"] for record in counts) * batch,
        **test,
        **examined.metrics,
        **{name: [values[name][0] for values in of_nodes] for name in of_nodes[0]},
        **examined.details,
        "consensus_distance": float(np.mean(distances)),
        "places_nodes": list(models),
        "steps_nodes": [record["steps"] for record in counts],
        "staleness_nodes": [record["staleness"] for record in counts],
        "gradient_delay": float(gx.asynchronous.measure_delays(journals).mean()),
        "messages_nodes": [record["sent"] for record in counts],
        "weight_nodes": [record["weight"] for record in counts],
        "bytes_nodes": [record["sent_bytes"] for record in counts],
        "final_loss": float(np.mean([lines[-1]["loss"] for lines in by_node.values() if lines])),
    }


PATIENCE = 5.0  # seconds of silence after which a node is declared dead
MEETING_SECONDS = 60.0  # that a node waits for the others before its first step
Show = Callable[[float, str], None]


@dataclasses.dataclass(frozen=True)
class OneNode(gx.Nodes):
    """The node of this process among those of its job, for the data of a task."""

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
        return results / "nodes" / make_folder_name(self.name)


class NodeJob(NamedTuple):
    """What all runs of a job have in common."""

    info: NodeInfo  # the place of this node
    task: Task
    plan: TrainingPlan
    folder: Path  # of the results
    environment: Record  # what `summary.json` says of the job
    saved: frozenset[str]  # the folders' names of the runs that an earlier job has saved


def train_node(job: NodeJob, run: NodeRun, joins: bool, show: Show) -> Record | None:
    """Trains this node until all nodes together have made the steps of the run.

    With `joins` the others go on already, and it asks one of them for half of what it holds. `show`
    is told how far the run is, and a text. Returns the entry of the run in `summary.json`, if this
    node is at the lowest place at the end.
    """
    info = job.info
    plan = job.plan
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
    batches = gx.prefetch(jax.tree.map(lambda row: jnp.asarray(row[0]), batch) for batch in rows)
    gradients = make_gradients(job.task)
    node = gx.asynchronous.join(
        info.contacts,
        tx,
        start.variables,
        algorithm=ASYNCHRONOUS[run.title].build(run.seed, options.outer),
        listen=info.listen,
        place=info.place,
        job=f"{info.job} {run.name}",
        is_founder=start.is_founder,
        patience=PATIENCE,
        wire=FORMS[options.wire].codec,
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
            try:
                log.add(node.step(gradients, batch))
            except FloatingPointError as error:
                raise NonFiniteError(f"{error} The option is --learning-rate.") from error
            if checkpoints is not None and options.checkpoint_every:
                step = start.position + node.statistics.steps
                # On a step to look at, SIGTERM raises `Preempted`, once the node is saved.
                if step % options.checkpoint_every == 0 or step % STEPS_PER_LOOK == 0:
                    state = TrainState(step, stack(node.params), stack(node.opt_state))
                    checkpoints.after(state)
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


def make_transform(plan: TrainingPlan, variables: Variables) -> optax.GradientTransformation:
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
    """The lines of one node: its losses, with the seconds since 1970.

    A node that was started again appends to the file. `show` is told how far the run is, and a
    text.
    """

    def __init__(self, path: Path, node: Any, plan: TrainingPlan, nodes: int, show: Show):
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
