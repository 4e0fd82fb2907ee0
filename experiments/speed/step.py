"""An update of the model, by the local optimizer alone and with gossip, beside a plain copy.

    python -m experiments.speed step

The model is as large as a ResNet-50 and in as many pieces: 161 arrays, 25.6 million float32.
Nothing but the update is timed: the gradients are there. All nodes are on this machine, so a
message is a copy in its memory.

An update by SGD with Nesterov momentum and SGP reads parameters, gradients, momentum, the share
that a node keeps and what it receives, and writes parameters, momentum and what it sends: at least
8 passes over memory, and 5 without gossip. `passes` are those of the compiled program, counted
fusion by fusion (see `experiments.hlo`); those of the wire are apart. `ratio` is the time over that
of the least passes at the speed of a plain copy. There are two such speeds: of a copy into new
memory, which is what JAX does unless an argument is donated, and into memory that is there. On a
CPU the operating system hands out new memory page by page, which takes longer than the copy. To
have glibc keep what it once had, as the launcher does for its processes:

    MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776

`--target gpu` compiles for H100s that are not here (see `experiments.speed_schedule`) and counts
the passes only. `summary.json` has the rows in `runs`.
"""

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import gossipjax as gx
from experiments import hlo, results, training
from experiments.methods import Setting, method
from experiments.schedule_targets import chosen, devices
from gossipjax.spmd import donated_argnums

STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # of a ResNet-50: blocks and width
ALONE = "optimizer alone"
LEAST = {ALONE: 5, "sgp": 8, "1-osgp": 8}
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the update's measurement."""

    nodes: int = 4
    """Number of nodes, all on this machine."""
    updates: int = 15
    """Updates of each kind, of which the median is taken."""
    where: training.Where = "auto"
    """mesh: a device per node, virtual ones on a CPU. vmap: one device. auto: mesh if possible."""
    target: Literal["here", "gpu"] = "here"
    """gpu: compile for 8 H100 that are not here, and count passes; nothing is timed."""
    out: Path | None = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        if self.nodes < 2:
            raise ValueError(f"--nodes is at least 2, so that there is a wire; not {self.nodes}.")
        if self.updates < 1:
            raise ValueError(f"--updates is at least 1, not {self.updates}.")


def resnet50() -> dict[str, tuple[int, ...]]:
    """The shapes of a ResNet-50's parameters: convolutions, scales and biases, classifier.

    >>> import math
    >>> len(resnet50()), sum(map(math.prod, resnet50().values()))
    (161, 25557032)
    """
    convolutions, channels = [(7, 7, 3, 64)], 64
    for blocks, width in STAGES:
        for block in range(blocks):
            convolutions += [(1, 1, channels, width), (3, 3, width, width)]
            convolutions.append((1, 1, width, 4 * width))
            if block == 0:
                convolutions.append((1, 1, channels, 4 * width))
            channels = 4 * width
    normalizations = [(shape[-1],) for shape in convolutions for _ in ("scale", "bias")]
    shapes = [*convolutions, *normalizations, (channels, 1000), (1000,)]
    return {f"{number:03d}": shape for number, shape in enumerate(shapes)}


def transforms(nodes: int) -> dict[str, tuple[Any, int]]:
    """By name: the optimizer alone and with gossip, and a static step that has a message."""
    inner = optax.with_extra_args_support(optax.sgd(0.1, momentum=0.9, nesterov=True))
    found: dict[str, tuple[Any, int]] = {ALONE: (inner, 0)}
    for name in LEAST:
        if name != ALONE:
            how = method(name, Setting(nodes), inner)
            found[name] = how.transform, how.schedule.canonical_step(how.lookback, how.lookback)
    return found


def program(tx: Any, where: dict[str, Any], donated: tuple[int, ...]) -> Any:
    """`(params, state, grads, static step) -> (params, state)`, node-stacked."""

    def update(params: Any, state: Any, grads: Any, step: int) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params, step=step)
        return optax.apply_updates(params, updates), state

    return gx.spmd(update, **where, static_argnums=3, donate_argnums=donated)


def passes(lowered: jax.stages.Lowered, model_bytes: float) -> dict[str, float]:
    """Passes over memory of a compiled update, by kind of instruction; those of one model's size.

    Raises:
      ValueError: where the compiler does not show its program.
    """
    text = lowered.compile().as_text()
    if text is None:
        raise ValueError("this backend does not show the compiled program.")
    counted = hlo.traffic(hlo.parse(text))
    return {kind: bytes / model_bytes for kind, bytes in counted.items()}


def row(name: str, where: str, counted: dict[str, float]) -> Record:
    """What is counted of a compiled update: the beginning of an object in `runs`."""
    wire = sum(n for kind, n in counted.items() if kind in hlo.COLLECTIVES)
    return {
        "update": name,
        "where": where,
        "least_passes": LEAST[name],
        "passes": sum(counted.values()) - wire,
        "passes_of_the_wire": wire,
        "passes_by_kind": {kind: n for kind, n in counted.items() if n >= 0.005},
    }


def count(shapes: dict[str, tuple[int, ...]], mesh: Mesh, where: str) -> list[Record]:
    """Compiles every update for the devices of `mesh`, which need not be here."""
    sharding = NamedSharding(mesh, PartitionSpec("nodes"))

    def stacked(tree: Any) -> Any:
        def stack(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=sharding)

        return jax.tree.map(stack, tree)

    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    model_bytes = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    records = []
    for name, (tx, step) in transforms(mesh.size).items():
        state = jax.eval_shape(tx.init, params)
        arguments = (stacked(params), stacked(state), stacked(params), step)
        lowered = program(tx, {"mesh": mesh}, (0, 1)).lower(*arguments)
        records.append(row(name, where, passes(lowered, model_bytes)))
    return records


def measure(
    shapes: dict[str, tuple[int, ...]],
    nodes: int,
    updates: int,
    placement: training.Placement,
    tell: Callable[[str], None] = lambda word: None,
) -> list[Record]:
    """Times every update and both copies, taking turns: the objects in `runs`."""
    values = nodes * sum(int(np.prod(shape)) for shape in shapes.values())
    # On a simulating device the whole stack is one model's, N times as large.
    model_bytes = 4 * values / (nodes if "mesh" in placement.keywords else 1)

    def parameters() -> Any:
        return {name: jnp.zeros((nodes, *shape)) for name, shape in shapes.items()}

    on_mesh = gx.spmd(lambda tree: jax.tree.map(jnp.copy, tree), **placement.keywords)
    grads = on_mesh(parameters())
    source = on_mesh(jnp.ones((nodes, values // nodes)))
    into_new = gx.spmd(jnp.copy, **placement.keywords)
    overwrite = gx.spmd(
        lambda target, source: target.at[:].set(source), **placement.keywords, donate_argnums=0
    )
    target = jax.block_until_ready(overwrite(into_new(source), source))
    rows, running = [], {}
    for name, (tx, step) in transforms(nodes).items():
        tell(f"compiling: {name}")
        update = program(tx, placement.keywords, donated_argnums(0, 1))  # as gx.TrainStep
        params = on_mesh(parameters())
        state = gx.spmd(tx.init, **placement.keywords)(params)
        rows.append(
            row(
                name,
                placement.words,
                passes(update.lower(params, state, grads, step), model_bytes),
            )
        )
        running[name] = (update, *jax.block_until_ready(update(params, state, grads, step)), step)
    seconds: dict[str, list[float]] = {name: [] for name in ("new", "there", *running)}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = jax.block_until_ready(call())
        seconds[name].append(time.perf_counter() - began)
        return result

    for turn in range(updates):
        tell(f"update {turn + 1} of {updates}")
        timed("new", lambda: into_new(source))
        target = timed("there", lambda t=target: overwrite(t, source))
        for name, (update, params, state, step) in running.items():
            call = lambda u=update, p=params, s=state, k=step: u(p, s, grads, k)  # noqa: E731
            running[name] = (update, *timed(name, call), step)
    copies = {kind: 2 * 4 * values / np.array(seconds[kind]) for kind in ("new", "there")}
    for found in rows:
        taken = np.array(seconds[found["update"]])
        least = found["least_passes"] * 4 * values
        found |= {
            "seconds": float(np.median(taken)),
            "seconds_10": float(np.quantile(taken, 0.1)),
            "seconds_90": float(np.quantile(taken, 0.9)),
            "bytes_per_second": float(np.median(least / taken)),
        }
        for kind, bandwidth in copies.items():
            found[f"copy_bytes_per_second_{kind}"] = float(np.median(bandwidth))
            # In the same turn, so that noise hits both.
            found[f"ratio_{kind}"] = float(np.median(taken * bandwidth / least))
    return rows


def table(runs: list[Record]) -> Table:
    """The list `runs` of `summary.json`."""
    timed = "seconds" in runs[0]
    caption = "wire: passes of the exchange itself"
    if timed:
        new, there = (runs[0][f"copy_bytes_per_second_{kind}"] / 1e9 for kind in ("new", "there"))
        caption += (
            "; ratio: to the least passes at the speed of a plain copy into new memory "
            f"({new:.1f} GB/s), and into memory that is there ({there:.1f} GB/s)"
        )
    result = Table(
        title="An update of 25.6 million parameters in 161 arrays", caption=caption, box=SIMPLE_HEAD
    )
    result.add_column("update", no_wrap=True)
    headers = ("passes", "least", "wire", "ms", "10-90 %", "ratio", "(there)")
    for header in headers if timed else headers[:3]:
        result.add_column(header, justify="right", no_wrap=True)
    for run in runs:
        cells = [run["update"], f"{run['passes']:.1f}", f"{run['least_passes']}"]
        cells.append(f"{run['passes_of_the_wire']:.1f}")
        if timed:
            cells += [
                f"{1e3 * run['seconds']:.0f}",
                f"{1e3 * run['seconds_10']:.0f}-{1e3 * run['seconds_90']:.0f}",
                f"{run['ratio_new']:.2f}",
                f"{run['ratio_there']:.2f}",
            ]
        result.add_row(*cells)
    return result


def step(options: Options) -> None:
    """An update of the model, alone and with gossip, beside a plain copy of the same size."""
    if options.target == "here" and options.where != "vmap":
        training.request_cpu_devices(options.nodes)
    try:
        targets = chosen(("gpu",)) if options.target == "gpu" else []
        placement = None if targets else training.place(options.where, options.nodes)
        out = results.claim_folder("speed-step", options.out, options.overwrite)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    console, runs, words = Console(), [], ""
    with results.progress_bar(console) as bar:
        task = bar.add_task("step", total=None, status="")
        if placement is None:
            for target in targets:
                words = f"compiled for {target.words}, nothing runs"
                bar.update(task, status=words)
                runs += count(resnet50(), Mesh(np.array(devices(target)), ("nodes",)), target.words)
        else:
            words = f"{options.nodes} nodes, {placement.words}"
            runs += measure(
                resnet50(),
                options.nodes,
                options.updates,
                placement,
                lambda word: bar.update(task, status=word),
            )
        bar.update(task, total=1, completed=1, status=words)
    results.write_summary(out, dataclasses.asdict(options), {"placement": words}, runs)
    console.print(table(runs))
    console.print(f"{words}. Results: {out}", soft_wrap=True)
