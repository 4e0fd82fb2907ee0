"""Shows which methods survive which fault, by their loss and by where their mass went.

    python -m experiments.survival

Eight simulated nodes fit a linear classifier of digits (mnist5k, in 7 x 7 values). The data are
uneven: half of each node's examples are of its own classes. Each step takes the gradient of all
examples of a node, in float64, so that runs differ by their faults alone. A cell is the loss over
all examples (mean over the models of living nodes), divided by the loss of the same method without
faults. A cell can also contain a word:

- `refused`: the method raises a `ValueError`, or cannot have this fault. `survival.md` says why.
- `diverges`: a model or its loss is not finite.
- `waits`: the result is the same as without faults, but comes later.
- `stops`: the run waits for ever. The loss is of the last model before.

The second table shows by how much `held + in flight + lost` of all nodes differs from
`start + updates`, relative to the largest value of a model. After a `+` it shows which part of the
push-sum weight was lost. For `dpsgd, own` it shows the drift of the mean. For gradient tracking
with inactive nodes, whose corrections also move the mean, it shows the sum of the corrections,
which must stay 0.

The program writes `metrics.jsonl`, `summary.json` (an object per cell, in `runs`) and `survival.md`
into `--out`.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import optax
import tyro
from rich.console import Console

import gossipjax as gx
from experiments import data, results
from experiments.markdown import format_table
from experiments.options import OutputOptions, PositiveInt, Seed, parse_arguments, require_different
from experiments.program import exit_on_error
from experiments.results import Record

NODES = 8
CLASSES = 10
TABLE = 99  # steps of the tables: a multiple of the period of the schedule of one peer
RATE = 0.2
EVERY = 10  # steps between the averages of DiLoCo
LATE = 3  # largest delay in steps
NOISE = 0.01
ONE_PEER = gx.topology.one_peer_exponential(NODES)
RING = gx.topology.ring(NODES)

Faults = gx.faults.Faults
Transform = optax.GradientTransformationExtraArgs
FAULTS: dict[str, Callable[[int, int], Faults]] = {
    "drops": lambda seed, steps: Faults(
        NODES, arrives=gx.faults.independent_drops(NODES, TABLE, seed, rate=0.1)
    ),
    "bursts": lambda seed, steps: Faults(
        NODES,
        arrives=gx.faults.gilbert_elliott(
            NODES, TABLE, seed, 0.5, bad_to_good=0.3, good_to_bad=0.1
        ),
    ),
    "markov": lambda seed, steps: Faults(
        NODES, active=gx.faults.markov_activity(NODES, TABLE, seed, wake=0.3, sleep=0.1)
    ),
    "cyclic": lambda seed, steps: Faults(NODES, active=gx.faults.cyclic_activity(NODES, 4, 1)),
    "poisson": lambda seed, steps: Faults(
        NODES, active=gx.faults.poisson_activity(NODES, TABLE, seed, mean=1.0)
    ),
    "death": lambda seed, steps: Faults(NODES, deaths={NODES - 1: steps // 2}),
    "delays": lambda seed, steps: Faults(
        NODES, delays=gx.faults.uniform_delays(NODES, TABLE, seed, LATE)
    ),
    "noise": lambda seed, steps: Faults(NODES, noise=NOISE, seed=seed),
}
"""Functions of `(seed, steps)` that make faults, by name. Messages are lost at rates of 10 and 12.5
%, and 75, 80 and 50 % of the nodes are active."""


class FaultyMethod(NamedTuple):
    """One method under one fault."""

    tx: Transform
    faults: Faults  # when which node makes an update
    word: str = ""  # the word of the cell, after the loss


def around(gossip: Any, faults: Faults, rate: float | None = RATE) -> FaultyMethod:
    """Makes a chain of SGD and gossip whose nodes do not compute while they are not active."""
    optimizer = optax.identity() if rate is None else optax.sgd(rate)
    return FaultyMethod(gx.faults.inactive(optax.chain(optimizer, gossip), faults), faults)


def wire_of(faults: Faults) -> gx.faults.NoiseCodec | None:
    """Returns the noise of the faults as a `wire`."""
    return gx.faults.noise(faults.noise, seed=faults.seed) if faults.noise else None


def weaken(schedule: gx.Schedule, faults: Faults, **options: Any) -> gx.Schedule:
    """Returns the schedule with all faults but the noise, which is left to the wire."""
    return gx.faults.apply(schedule, dataclasses.replace(faults, noise=0.0), **options)


def make_osgp(faults: Faults) -> FaultyMethod:
    overlap = 1 + faults.max_delay
    late = dataclasses.replace(faults, delays=0)
    schedule = weaken(ONE_PEER, late, overlap=overlap)
    word = f"all {overlap} late" if faults.max_delay else ""
    run = around(gx.osgp(schedule, overlap, wire=wire_of(faults)), late)
    return run._replace(word=word)


def mix(gossip: Any, faults: Faults, *more: Any, rate: float | None = RATE) -> FaultyMethod:
    """Makes a gossip over the undirected ring, whose edges fail in both directions."""
    ring = weaken(RING, faults, keep="both")
    return around(gossip(ring, *more, wire=wire_of(faults)), faults, rate)


def make_choco(faults: Faults) -> FaultyMethod:
    codec = wire_of(faults) or gx.faults.noise(0.0)
    return around(gx.choco(weaken(RING, faults, keep="both"), codec, strength=0.5), faults)


def make_relay(faults: Faults) -> FaultyMethod:
    if not np.all(faults.arrives) or faults.max_delay or faults.noise:
        raise ValueError("the messages of relay must all arrive in time and in full, got others.")
    return around(gx.contrib.relay(networkx.full_rary_tree(2, NODES)), faults)


def make_allreduce(faults: Faults, steps: int) -> FaultyMethod:
    """All nodes skip a step at which one is not active, because its gradient is missing."""
    all_active = np.array([[faults.active_at(k).all()] * NODES for k in range(steps)])
    together = Faults(NODES, active=all_active)
    chain = optax.chain(gx.allreduce(wire=wire_of(faults)), optax.sgd(RATE))
    word = "stops" if faults.deaths else "" if all_active.all() else "loses steps"
    return FaultyMethod(gx.faults.inactive(chain, together), together, word or _wait(faults))


def make_diloco(faults: Faults, steps: int) -> FaultyMethod:
    """An inactive node skips inner steps. Averages wait for it, and for a dead node for ever."""
    if faults.deaths:
        rows = np.arange(steps)[:, None] < np.full(NODES, steps // 2)
        faults = Faults(NODES, active=rows)
    inner = gx.faults.inactive(optax.sgd(RATE), faults)
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = gx.outer(inner, outer, EVERY, delay=faults.max_delay, wire=wire_of(faults))
    word = f"all {faults.max_delay} late" if faults.max_delay else _wait(faults)
    return FaultyMethod(tx, faults, word)


def _wait(faults: Faults) -> str:
    is_late = not np.all(faults.arrives) or faults.max_delay
    return "waits" if is_late else ""


METHODS: dict[str, Callable[..., FaultyMethod]] = {
    "sgp": lambda f: around(
        gx.sgp(ONE_PEER, wire=wire_of(f)) if f.noise else gx.faults.sgp(ONE_PEER, f), f
    ),
    "sgp, lossy": lambda f: around(gx.faults.sgp(ONE_PEER, f, running_sums=False), f),
    "osgp": make_osgp,
    "dpsgd": lambda f: mix(gx.dpsgd, f, "adapt-then-combine"),
    "dpsgd, own": lambda f: around(gx.faults.dpsgd(RING, f), f),
    "gradient-tracking": lambda f: around(
        gx.gradient_tracking(weaken(ONE_PEER, f), wire=wire_of(f)), f
    ),
    "choco": make_choco,
    "quasi-global": lambda f: mix(gx.quasi_global, f, RATE / 10, rate=None),
    "relay": make_relay,
    "allreduce": make_allreduce,
    "diloco": make_diloco,
}
NO_MASS = ("quasi-global", "relay", "diloco")  # their means move by more than the updates
OF_ALL = ("allreduce", "diloco")

if TYPE_CHECKING:
    Method = str
    FaultName = str
else:
    Method = tyro.extras.literal_type_from_choices(tuple(METHODS))
    FaultName = tyro.extras.literal_type_from_choices(tuple(FAULTS))


@dataclasses.dataclass(frozen=True)
class SurvivalOptions(OutputOptions):
    """Shows which methods survive which fault."""

    method: tuple[Method, ...] = tuple(METHODS)
    """One or several methods, which are the rows."""
    fault: tuple[FaultName, ...] = tuple(FAULTS)
    """One or several faults, which are the columns."""
    steps: PositiveInt = 300
    """Steps of each run. If a node dies, it dies after half of the steps."""
    seed: Seed = 0
    """Seed of the faults."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_different(self, "method", "fault")


def load_examples() -> tuple[np.ndarray, np.ndarray]:
    """Returns images `[N, B, 50]` and one-hot labels `[N, B, 10]`; half of them by class."""
    digits = data.load("mnist5k")
    images = np.asarray(digits.train_images, np.float64).reshape(-1, 7, 4, 7, 4).mean(axis=(2, 4))
    images = np.concatenate([images.reshape(-1, 49), np.ones((len(images), 1))], axis=1)
    labels = np.eye(CLASSES)[np.asarray(digits.train_labels)]
    order = np.arange(len(images))
    half = len(order) // 2
    by_class = half + np.argsort(labels[half:].argmax(axis=1), kind="stable")
    parts = (order[:half].reshape(NODES, -1), by_class.reshape(NODES, -1))
    rows = np.concatenate(parts, axis=1)
    return images[rows], labels[rows]


def loss(model: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of a linear classifier `[50, 10]`."""
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(images @ model), axis=-1))


class Outcome(NamedTuple):
    """The end of a run: models `[N, 50, 10]`, losses `[N]`, and sums over the nodes."""

    models: Any
    losses: Any
    updates: Any
    held: Any
    weights: Any
    lost: Any
    lost_weight: Any
    corrections: Any


def simulate(run: FaultyMethod, steps: int, images: np.ndarray, labels: np.ndarray) -> Outcome:
    """Runs all steps on all nodes, in float64."""
    active = np.array([run.faults.active_at(k) for k in range(steps)])

    def node(images: jax.Array, labels: jax.Array, all_images: jax.Array, all_labels: jax.Array):
        def body(carry: Any, k: jax.Array) -> tuple[Any, None]:
            z, state, total = carry
            gradient = jax.grad(loss)(z, images, labels)
            updates, state = run.tx.update(gradient, state, z, step=k)
            on = jnp.asarray(active)[k, jax.lax.axis_index("nodes")]
            return (z + updates, state, total - RATE * on * gradient), None

        z = jnp.zeros((images.shape[1], CLASSES))
        start = (z, run.tx.init(z), jnp.zeros_like(z))
        (z, state, total), _ = jax.lax.scan(body, start, jnp.arange(steps))
        gossip = gx.gossip_state(state)
        extra = {} if gossip is None else gossip.extra or {}
        lost = jnp.zeros_like(z)
        lost_weight = jnp.zeros(())
        if "links" in extra and gossip is not None and gossip.in_flight is not None:
            lost_weight, lost = gx.faults.account(z, state).lost
        held, weight = gx.diagnostics.total_mass(z, state, axis_name="nodes")
        correction = extra["correction"].value if "correction" in extra else jnp.zeros_like(z)
        everywhere = loss(z, all_images, all_labels)
        return Outcome(z, everywhere, total, held, weight, lost, lost_weight, correction)

    mapped = jax.vmap(node, in_axes=(0, 0, None, None), axis_name="nodes")
    flat = images.reshape(-1, images.shape[-1]), labels.reshape(-1, CLASSES)
    return jax.tree.map(np.asarray, jax.jit(mapped)(images, labels, *flat))


def measure(method: str, fault: str, options: SurvivalOptions, examples: Any) -> Record:
    """Returns the object of one cell; the fault "" means a run without faults."""
    faults = FAULTS[fault](options.seed, options.steps) if fault else Faults(NODES)
    record: Record = {"method": method, "fault": fault, "word": "", "loss": None, "mass": None}
    record |= {"lost_weight": None, "reason": ""}
    try:
        make = METHODS[method]
        run = make(faults, options.steps) if method in OF_ALL else make(faults)
        end = simulate(run, options.steps, *examples)
    except ValueError as error:
        return record | {"word": "refused", "reason": str(error)}
    living = faults.active_at(options.steps) | ~np.isin(np.arange(NODES), list(faults.deaths))
    if not np.isfinite(end.models).all() or not np.isfinite(end.losses).all():
        return record | {"word": "diverges"}
    record |= {"word": run.word, "loss": float(end.losses[living].mean())}
    if method in NO_MASS:
        return record
    off = end.held[0] + end.lost[0] - end.updates.sum(axis=0)
    if method == "gradient-tracking" and (faults.deaths or not np.all(faults.active)):
        off = end.corrections.sum(axis=0)
    if method == "allreduce":
        off = end.held[0] - end.updates.sum(axis=0)
    weight = float(end.weights[0] + end.lost_weight[0] - NODES)
    assert abs(weight) < 1e-9, (method, fault, weight)
    scale = abs(end.models).max() or 1.0  # no step was made
    mass = float(abs(off).max() / NODES / scale)
    return record | {"mass": mass, "lost_weight": float(end.lost_weight[0]) / NODES}


def format_loss(cell: Record, undisturbed: Record) -> str:
    """Formats a cell of the first table."""
    loss = cell["loss"] and f"{cell['loss'] / undisturbed['loss']:.2f}"
    return " ".join(filter(None, [loss, cell["word"]]))


def format_mass(cell: Record) -> str:
    """Formats a cell of the second table."""
    if cell["mass"] is None:
        return "-"
    lost = f" + {cell['lost_weight']:.0%}" if cell["lost_weight"] > 1e-9 else ""
    return f"{cell['mass']:.0e}{lost}"


def make_tables(runs: Sequence[Record], options: SurvivalOptions) -> dict[str, list[list[str]]]:
    """Returns the rows of both tables by title; the first row is the header."""
    cells = {(run["method"], run["fault"]): run for run in runs}
    losses = [["method", "loss", *options.fault]]
    masses = [["method", "none", *options.fault]]
    for method in options.method:
        plain = cells[method, ""]
        row = [cells[method, fault] for fault in options.fault]
        losses.append([method, f"{plain['loss']:.4f}", *(format_loss(c, plain) for c in row)])
        masses.append([method, format_mass(plain), *map(format_mass, row)])
    return {"Loss, as a multiple of that without faults": losses, "Mass that is missing": masses}


def write_report(
    runs: Sequence[Record], options: SurvivalOptions, out: Path, console: Console
) -> None:
    """Prints the tables, and writes them with the reasons of refusals to `survival.md`."""
    parts = []
    for title, (headers, *rows) in make_tables(runs, options).items():
        parts += [f"## {title}", format_table(headers, rows)]
    reasons = {f"- {run['method']}: {run['reason']}": None for run in runs if run["reason"]}
    if reasons:
        parts += ["## Refused", "\n".join(reasons)]
    (out / "survival.md").write_text("\n\n".join(parts) + "\n")
    console.print("\n\n".join(parts), soft_wrap=True, markup=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, runs all cells, and reports."""
    out = None
    with exit_on_error(lambda: out):
        options = parse_arguments(SurvivalOptions, "experiments.survival", arguments)
        out = results.create_run_dir("survival", options.out, options.overwrite)
        console = Console()
        examples = load_examples()
        pairs = [(m, fault) for m in options.method for fault in ("", *options.fault)]
        runs = []
        lines = out / "metrics.jsonl"
        with (
            lines.open("w") as file,
            results.make_progress_bar(console) as bar,
            jax.enable_x64(True),
        ):
            task = bar.add_task("survival", total=len(pairs), status="")
            for method, fault in pairs:
                bar.update(task, status=f"{method}, {fault or 'undisturbed'}")
                runs.append(measure(method, fault, options, examples))
                file.write(json.dumps(runs[-1], allow_nan=False) + "\n")
                file.flush()
                bar.advance(task)
        results.write_summary(out, dataclasses.asdict(options), {"numpy": np.__version__}, runs)
        write_report(runs, options, out, console)


if __name__ == "__main__":
    main()
