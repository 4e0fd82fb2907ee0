"""Time of one update of a model, with and without gossip, compared with that of a plain copy.

    python -m experiments.speed local step

Only the update is timed: the gradients are given. All nodes are on this machine, so a message is a
copy in its memory. The model has the size and the arrays of a ResNet-50: 25.6 million float32 in
161 arrays. `MIN_PASSES` derives the least passes over memory of every row. The lower bound is the
time of these passes at the speed of a plain copy: into a fresh buffer, which is what JAX does
unless an argument is donated, or in place, into a buffer that exists. On a CPU the operating system
hands out fresh memory page by page, which takes longer than the copy, unless
`gx.launch.MALLOC_ENVIRONMENT` is in the environment of the program: then glibc keeps the memory
that it had.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.table import Table

import gossipjax as gx
from experiments.options import Check, PositiveInt
from experiments.results import Record
from experiments.speed import harness
from experiments.speed.compiled import hlo
from experiments.training.methods import MethodOptions, make_method
from experiments.training.placement import (
    Placement,
    describe_nodes,
    place_nodes,
    request_cpu_devices,
)

COPIES = ("fresh_buffer", "in_place")
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # of a ResNet-50: blocks and width
OPTIMIZER_ONLY = "optimizer only"  # the update without an algorithm after it
# Lower bounds in passes over memory, one pass being the size of the model. A message is one buffer;
# the passes of its exchange, which reads what is sent and writes what arrives, count as wire.
MIN_PASSES = {
    # Reads parameters, gradients and momentum; writes parameters and momentum.
    OPTIMIZER_ONLY: 5,
    # Before the exchange: reads these three, writes momentum and message. After it: reads what it
    # keeps, for weights of 1/2 the same buffer as the message, and what arrives; writes parameters.
    "sgp": 5 + 3,
    # Before the exchange: reads parameters, writes the message. After it: reads parameters,
    # gradients, momentum and what arrives; writes parameters and momentum.
    "sgp-cwa": 2 + 6,
    # All at once, as the exchange is that of older messages: reads parameters, gradients, momentum
    # and what has arrived; writes parameters, momentum and the next message.
    "1-osgp": 4 + 3,
}
MIN_REPORTED_PASSES = 0.005  # opcodes with fewer are left out of `passes_by_opcode`

Shapes = dict[str, tuple[int, ...]]
"""The shapes of a model's arrays, by name."""


@dataclasses.dataclass(frozen=True)
class StepTimeOptions(harness.CheckOptions):
    """Options of the measurement of an update."""

    nodes: Annotated[
        int, Check("an integer >= 2, so that messages are sent", lambda value: value >= 2)
    ] = 4
    """Number of nodes, all on this machine."""
    updates: PositiveInt = 15
    """Timed updates of each kind, of which the median is reported."""
    placement: Placement = "auto"
    """mesh: a device per node, virtual ones on a CPU. vmap: one device. auto: mesh if possible."""


class Update(NamedTuple):
    """One of the updates that are compared."""

    name: str
    tx: optax.GradientTransformationExtraArgs
    step: int  # a static number at which messages are sent and received
    min_passes: int  # over memory


def make_resnet50_shapes() -> Shapes:
    """The shapes of a ResNet-50's parameters: convolutions, scales and biases, classifier.

    >>> shapes = make_resnet50_shapes()
    >>> len(shapes), count_values(shapes)
    (161, 25557032)
    """
    convolutions = [(7, 7, 3, 64)]
    channels = 64
    for blocks, width in STAGES:
        for block in range(blocks):
            convolutions += [(1, 1, channels, width), (3, 3, width, width)]
            convolutions.append((1, 1, width, 4 * width))
            if block == 0:
                convolutions.append((1, 1, channels, 4 * width))
            channels = 4 * width
    normalizations = [(shape[-1],) for shape in convolutions for _ in ("scale", "bias")]
    shapes = [*convolutions, *normalizations, (channels, 1000), (1000,)]
    return {f"{index:03d}": shape for index, shape in enumerate(shapes)}


def count_values(shapes: Shapes) -> int:
    """Number of parameters."""
    return sum(map(math.prod, shapes.values()))


def build_updates(nodes: int) -> list[Update]:
    """The updates that are compared: by the optimizer only, and with gossip after it."""
    optimizer = optax.with_extra_args_support(optax.sgd(0.1, momentum=0.9, nesterov=True))
    updates = []
    for name, min_passes in MIN_PASSES.items():
        if name == OPTIMIZER_ONLY:
            updates.append(Update(name, optimizer, 0, min_passes))
            continue
        method = make_method(name, MethodOptions(nodes), optimizer)
        state = method.state()
        # The first step that receives a message.
        step = 0 if state is None else gx.canonical_step(state, state.overlap)
        updates.append(Update(name, method.transform, step, min_passes))
    return updates


def make_program(update: Update, nodes: gx.Nodes, donate_argnums: Sequence[int]) -> gx.Program:
    """`(params, opt_state, grads, static step) -> (params, opt_state)`, node-stacked."""

    def run_update(params: Any, opt_state: Any, grads: Any, step: int) -> tuple[Any, Any]:
        updates, opt_state = update.tx.update(grads, opt_state, params, step=step)
        return optax.apply_updates(params, updates), opt_state

    return nodes.spmd(run_update, static_argnums=3, donate_argnums=donate_argnums)


def count_passes(lowered: jax.stages.Lowered, model_bytes: float) -> dict[str, float]:
    """Passes over memory of a compiled update, by opcode; one pass is the size of the model."""
    traffic = hlo.count_traffic(hlo.parse_module(lowered.compile().as_text()))
    return {opcode: size / model_bytes for opcode, size in traffic.items()}


def make_record(update: Update, placement: str, passes: dict[str, float]) -> Record:
    """The first fields of an object in `runs`: the counts of a compiled update."""
    wire_passes = sum(count for opcode, count in passes.items() if opcode in hlo.COLLECTIVES)
    update_passes = sum(passes.values()) - wire_passes
    return {
        "update": update.name,
        "placement": placement,
        "min_passes": update.min_passes,
        "passes": update_passes,
        "ratio_passes": update_passes / update.min_passes,
        "wire_passes": wire_passes,
        "passes_by_opcode": {
            opcode: count for opcode, count in passes.items() if count >= MIN_REPORTED_PASSES
        },
    }


class TimedProgram:
    """A compiled function that is called again and again, on its results where it carries some.

    `program(*carried, *constants)` returns the next `carried`, a tuple; without any it is dropped.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        carried: Sequence[Any] = (),
        constants: Sequence[Any] = (),
    ):
        self._program = program
        self._carried = tuple(carried)
        self._constants = tuple(constants)

    def run(self) -> float:
        """Calls the program; returns the seconds until its results were there."""
        start = time.perf_counter()
        results = jax.block_until_ready(self._program(*self._carried, *self._constants))
        seconds = time.perf_counter() - start
        if self._carried:
            self._carried = tuple(results)  # after the clock has stopped: frees the old arrays
        return seconds


def make_zeros(shapes: Shapes, nodes: gx.Nodes) -> Any:
    """Arrays of these shapes, of all nodes."""
    zeros = {name: jnp.zeros((nodes.size, *shape)) for name, shape in shapes.items()}
    return nodes.run(partial(jax.tree.map, jnp.copy), zeros)


def make_copies(shapes: Shapes, nodes: gx.Nodes) -> dict[str, TimedProgram]:
    """The two kinds of plain copies of a model's size, compiled."""
    copy = nodes.spmd(jnp.copy)
    overwrite = nodes.spmd(lambda target, source: (target.at[:].set(source),), donate_argnums=0)
    source = copy(jnp.ones((nodes.size, count_values(shapes))))
    target = jax.block_until_ready(overwrite(copy(source), source))
    return {
        "fresh_buffer": TimedProgram(copy, constants=[source]),
        "in_place": TimedProgram(overwrite, target, constants=[source]),
    }


def compile_update(
    update: Update, shapes: Shapes, nodes: gx.Nodes, grads: Any
) -> tuple[TimedProgram, Record]:
    """An update, compiled and run once; and the counts of its passes."""
    program = make_program(update, nodes, gx.donate_on_accelerators(0, 1))
    params = make_zeros(shapes, nodes)
    opt_state = nodes.run(update.tx.init, params)
    lowered = program.lower(params, opt_state, grads, update.step)
    # The stack of all nodes of a device is one pass.
    passes = count_passes(lowered, 4 * nodes.per_device * count_values(shapes))
    timed = TimedProgram(program, [params, opt_state], [grads, update.step])
    timed.run()
    return timed, make_record(update, describe_nodes(nodes), passes)


def summarize_update(record: Record, samples: dict[str, list[float]], values: int) -> Record:
    """The object in `runs`, from the seconds of an update and of the copies of all nodes."""
    seconds = np.array(samples[record["update"]])
    min_bytes = record["min_passes"] * 4 * values
    summary = record | harness.summarize_samples("seconds", seconds)
    summary["bytes_per_second"] = float(np.median(min_bytes / seconds))
    for copy in COPIES:
        copy_speeds = 2 * 4 * values / np.array(samples[copy])
        summary[f"copy_bytes_per_second_{copy}"] = float(np.median(copy_speeds))
        # Both of the same turn, so that noise affects them alike.
        summary[f"ratio_{copy}"] = float(np.median(seconds * copy_speeds / min_bytes))
    return summary


def make_table(runs: Sequence[Record]) -> Table:
    """The table of the list `runs` of `summary.json`."""
    fresh_buffer, in_place = (runs[0][f"copy_bytes_per_second_{copy}"] / 1e9 for copy in COPIES)
    caption = (
        "wire: passes of the exchange; x copy: time over that of the least passes at the speed of "
        f"a plain copy into a fresh buffer ({fresh_buffer:.1f} GB/s); x in-place copy: into a "
        f"buffer that exists ({in_place:.1f} GB/s)"
    )
    columns: dict[str, harness.Cell] = {
        "update": "{update}",
        "passes": "{passes:.1f}",
        "least": "{min_passes}",
        "x least": "{ratio_passes:.2f}",
        "wire": "{wire_passes:.1f}",
        "ms": harness.scale("seconds", 1e-3, ".0f"),
        "10-90 %": lambda run: f"{1e3 * run['seconds_p10']:.0f}-{1e3 * run['seconds_p90']:.0f}",
        "x copy": "{ratio_fresh_buffer:.2f}",
        "x in-place\ncopy": "{ratio_in_place:.2f}",
    }
    title = "An update of 25.6 million parameters in 161 arrays"
    return harness.make_table(title, caption, columns, runs)


def measure_updates(nodes: gx.Nodes, shapes: Shapes, turns: int) -> harness.Measurement:
    """Compiles the updates, lets them and both copies take `turns` turns, and summarizes."""
    programs = make_copies(shapes, nodes)
    grads = make_zeros(shapes, nodes)
    records: list[Record] = []
    samples: dict[str, list[float]] = {}

    def add(update: Update) -> list[Record]:
        programs[update.name], record = compile_update(update, shapes, nodes, grads)
        records.append(record)
        return []

    def run_all(is_last: bool) -> list[Record]:
        for name, program in programs.items():
            samples.setdefault(name, []).append(program.run())
        values = nodes.size * count_values(shapes)
        return [summarize_update(r, samples, values) for r in records] if is_last else []

    compiling = [
        (f"compiling: {update.name}", partial(add, update)) for update in build_updates(nodes.size)
    ]
    running = [
        (f"update {turn} of {turns}", partial(run_all, turn == turns))
        for turn in range(1, turns + 1)
    ]
    description = f"{nodes.size} nodes, {describe_nodes(nodes)}"
    return harness.Measurement(description, [*compiling, *running], make_table)


def measure_step(options: StepTimeOptions) -> None:
    """Time of one update of a model, with and without gossip, compared with that of a copy."""

    def make_measurement() -> harness.Measurement:
        if options.placement != "vmap":
            request_cpu_devices(options.nodes)
        nodes = place_nodes(options.placement, options.nodes)
        return measure_updates(nodes, make_resnet50_shapes(), options.updates)

    harness.run_check("step", options, make_measurement)
