"""The passes over memory of an update of a model, with and without gossip, as compiled.

    python -m experiments.speed compiled step

The model has the size and the arrays of a ResNet-50: 25.6 million float32 in 161 arrays. Compiles
its updates for 8 H100, which need not be present, and counts passes. `speed local step` counts them
in the programs of this machine, and times these.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from rich.table import Table

import gossipjax as gx
from experiments.results import Record
from experiments.speed import harness
from experiments.speed.compiled import hlo
from experiments.speed.compiled.targets import choose_targets, make_devices, stack_shapes
from experiments.training.methods import MethodOptions, make_method

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


def count_updates(shapes: Shapes, mesh: Mesh, placement: str) -> list[Record]:
    """Compiles every update for the devices of `mesh`, which need not be present; runs nothing."""
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    stacked = stack_shapes(params, mesh, PartitionSpec("nodes"))
    records = []
    for update in build_updates(mesh.size):
        opt_state = jax.eval_shape(update.tx.init, params)
        opt_state = stack_shapes(opt_state, mesh, PartitionSpec("nodes"))
        program = make_program(update, gx.Nodes(mesh=mesh), (0, 1))
        lowered = program.lower(stacked, opt_state, stacked, update.step)
        passes = count_passes(lowered, 4 * count_values(shapes))
        records.append(make_record(update, placement, passes))
    return records


TITLE = "An update of 25.6 million parameters in 161 arrays"
PASSES: dict[str, harness.Cell] = {
    "update": "{update}",
    "passes": "{passes:.1f}",
    "least": "{min_passes}",
    "x least": "{ratio_passes:.2f}",
    "wire": "{wire_passes:.1f}",
}
"""The columns of counted passes."""


def make_table(runs: Sequence[Record]) -> Table:
    """The table of the list `runs` of `summary.json`."""
    return harness.make_table(TITLE, "wire: passes of the exchange", PASSES, runs)


def make_plan() -> harness.Plan:
    """All updates, for H100s."""
    (target,) = choose_targets(("gpu",))

    def count() -> list[Record]:
        mesh = Mesh(np.array(make_devices(target)), ("nodes",))
        return count_updates(make_resnet50_shapes(), mesh, target.description)

    description = f"compiled for {target.description}, nothing runs"
    return harness.Plan(description, [("compiling", count)], make_table)


def inspect_step(options: harness.CheckOptions) -> None:
    """Passes over memory of an update of a model, with and without gossip, for absent GPUs."""
    harness.run_check("step", options, make_plan)
