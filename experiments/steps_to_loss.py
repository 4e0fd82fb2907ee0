"""Counts the steps that each method needs to reach one loss, over more and more simulated nodes.

    python -m experiments.steps_to_loss --fashion-mnist FOLDER
    python -m experiments.steps_to_loss --task language --nodes 8

By default nodes train a perceptron with one hidden layer on images, by SGD with Nesterov momentum.
With `--task language` they train the smallest Transformer of `experiments.language` by Adam. The
schedule is a cosine. Each node draws its own batches from the same examples. A run of K steps ends
with the loss of the average model on a part of the examples. The program doubles or halves K until
this loss is above `--loss` after K steps and below `--loss` after 2 K steps, and interpolates the
steps in the logarithm of K, for each seed. For each method, number of nodes and K, the learning
rate is chosen with the first seed: it is doubled and halved until the middle of three rates has the
smallest loss. All nodes are simulated in one process, so steps are measured and seconds are not.

- `allreduce` averages the gradients exactly, `allreduce-int8` in messages of int8.
- `allreduce-low-rank-R` is PowerSGD: it averages factors of the gradients, of rank R.
- `sgp` exchanges with one peer of the exponential graph after the local step.
- `1-osgp` is `sgp` with messages that arrive one step late, hidden by the computation.
- `dpsgd` averages pairs of the bipartite exponential graph during the computation.
- `sgp-every-H` makes a round of SGP after every `--every` local steps.
- `diloco` averages the models exactly after every `--every` local steps, with Nesterov's outer step
  (rate 0.7, momentum 0.9), and `diloco-low-rank-R` averages factors, with error feedback.

The program also models hours. ResNet-50 trains on ImageNet, 256 images a node and step, of which
the computation takes 0.228 s, on links of several bandwidths and 50 us. AllReduce, the best of a
ring and a tree, whole or in 5 buckets during the backward pass, trains for 90 epochs. The other
methods make more steps by the factor that they need here.

The program writes `summary.json` into `--out`, whose `runs` contain `method`, `nodes`, `rates` and
`steps` (a number for each seed).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.box import SIMPLE_HEAD
from rich.table import Table

import gossipjax as gx
from experiments.cells import run_study
from experiments.models.resnet import ResNet
from experiments.options import Check, PositiveFloat, PositiveInt
from experiments.results import Record
from experiments.simulated import SimulatedOptions, Task, Trainer, average_nodes, make_task
from experiments.tuning import tune
from gossipjax.cost_model import Method, Network, Workload, from_transform, predict_step

HIDDEN = 32
FIRST_RATE = 0.1
FIRST_STEPS = 64
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
WORKLOAD = Workload(parameters=25.6e6, compute_seconds=0.228, examples=256)  # of SGP-19
EXAMPLES = 90 * 1.28e6  # of AllReduce: 90 epochs of ImageNet
LATENCY = 5e-5  # seconds of a message
BUCKETS = 5  # of 25 MB, as PyTorch's DDP makes them
BANDWIDTHS = {"10 Mbit/s": 1e7, "50 Mbit/s": 5e7, "200 Mbit/s": 2e8, "1 Gbit/s": 1e9}

Make = Callable[[int, optax.GradientTransformation, int], optax.GradientTransformationExtraArgs]
"""Makes the chain of a method from the number of nodes, the local optimizer and H."""
TaskName = Literal["image", "language"]

peers = gx.topology.one_peer_exponential  # the graph of SGP
pairs = gx.topology.bipartite_exponential  # the graph of D-PSGD


def make_allreduce(wire: Any = None) -> Make:
    """Returns AllReduce with messages of a form."""
    return lambda n, inner, every: optax.chain(gx.allreduce(wire=wire), inner)


METHODS: dict[str, Make] = {
    "allreduce": make_allreduce(),
    "sgp": lambda n, inner, every: optax.chain(inner, gx.sgp(peers(n))),
    "1-osgp": lambda n, inner, every: optax.chain(inner, gx.osgp(peers(n))),
    "dpsgd": lambda n, inner, every: optax.chain(inner, gx.dpsgd(pairs(n))),
    "sgp-every-H": lambda n, inner, every: optax.chain(inner, gx.sgp(peers(n).every(every))),
    "diloco": lambda n, inner, every: gx.outer(inner, OUTER, every=every),
    "allreduce-int8": make_allreduce(gx.wire.int8()),
    "allreduce-low-rank-1": make_allreduce(gx.wire.low_rank(1)),
    "allreduce-low-rank-2": make_allreduce(gx.wire.low_rank(2)),
    "allreduce-low-rank-4": make_allreduce(gx.wire.low_rank(4)),
    "diloco-low-rank-4": lambda n, inner, every: gx.outer(
        inner, OUTER, every=every, wire=gx.wire.low_rank(4), error_feedback=1.0
    ),
}
if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = tyro.extras.literal_type_from_choices(tuple(METHODS))


@dataclasses.dataclass(frozen=True)
class StepsOptions(SimulatedOptions):
    """Counts the steps that each method needs to reach one loss, over simulated nodes."""

    GRID = ("method", "nodes")
    task: TaskName = "image"
    """What nodes learn: to classify images, or to predict Python's manual, which is installed."""
    method: tuple[MethodName, ...] = tuple(METHODS)[:6]
    """One or several methods."""
    nodes: tuple[
        Annotated[PositiveInt, Check("even, from 2 on", lambda value: value % 2 == 0)], ...
    ] = (4, 16, 64, 256, 1024)
    """One or several numbers of simulated nodes."""
    every: PositiveInt = 16
    """H, local steps from one exchange to the next, for sgp-every-H and both diloco."""
    loss: PositiveFloat = 0.42
    """The loss to reach, in nats."""
    max_steps: PositiveInt = 2048
    """Largest number of steps of a run. A method that needs more is shown without a number."""


def make_loss_finder(
    make: Make, nodes: int, task: Task, options: StepsOptions
) -> Callable[[float, int, int], float]:
    """Returns a function of rate, steps and seed that trains and returns the final loss."""

    def transform(rate: Any, part: Any) -> optax.GradientTransformationExtraArgs:
        cosine = 0.5 * (1 + jnp.cos(jnp.pi * part))
        return make(nodes, task.make_optimizer(rate * cosine), options.every)

    trainer = Trainer(transform, nodes, task, options.batch_size_per_node)

    @jax.jit
    def train(rate: jax.Array, steps: jax.Array, seed: jax.Array) -> jax.Array:
        params, _ = trainer.advance(trainer.start(seed), rate, seed, 0, steps, steps)
        return task.compute_loss(average_nodes(params), task.watched)

    return functools.partial(find_loss, train)


def find_loss(train: Callable[..., jax.Array], rate: float, steps: int, seed: int) -> float:
    """Returns the loss at the end of a run; infinite if it diverged."""
    loss = float(train(jnp.float32(rate), jnp.int32(steps), jnp.uint32(seed)))
    return loss if math.isfinite(loss) else math.inf


def count_steps(find_loss: Callable[[float, int, int], float], options: StepsOptions) -> Record:
    """Returns the steps to the loss for each seed, and the rates for K and 2 K steps."""
    seed = options.seed[0]
    rates: dict[int, float] = {}
    losses: dict[int, float] = {}

    def try_steps(steps: int) -> float:
        if steps not in losses:
            near = min(rates, key=lambda other: abs(math.log(other / steps)), default=None)
            first = FIRST_RATE if near is None else rates[near]
            rates[steps] = tune(lambda rate: find_loss(rate, steps, seed), first)
            losses[steps] = find_loss(rates[steps], steps, seed)
        return losses[steps]

    few = FIRST_STEPS
    while try_steps(few) <= options.loss and few > 1:
        few //= 2
    while few < options.max_steps and try_steps(2 * few) > options.loss:
        few *= 2
    ends = (few, 2 * few)
    if ends[1] > options.max_steps or try_steps(ends[1]) > options.loss:
        return {"rates": [rates[few]], "steps": [None] * len(options.seed)}
    steps = []
    for other in options.seed:
        above, below = (find_loss(rates[end], end, other) for end in ends)
        part = (above - options.loss) / (above - below)
        steps.append(few * 2**part)
    return {"rates": [rates[end] for end in ends], "steps": steps}


def list_methods(name: str, nodes: int, every: int) -> list[Method]:
    """Returns what a method sends for ResNet-50; of averages in full, each that may be the best."""
    tx = METHODS[name](nodes, optax.identity(), every)
    is_full = name in ("allreduce", "diloco")
    return [
        from_transform(tx, name, kind, params=make_resnet(), layers=layers)
        for kind in (("ring", "tree") if is_full else ("ring",))
        for layers in ((0, BUCKETS) if name == "allreduce" else (0,))
    ]


@functools.cache
def make_resnet() -> Any:
    """Returns the shapes of the parameters of ResNet-50."""
    image = jnp.zeros((1, 224, 224, 3))
    return jax.eval_shape(ResNet().init, jax.random.key(0), image)["params"]


def predict_seconds(name: str, nodes: int, every: int, bandwidths: Iterable[float]) -> np.ndarray:
    """Returns the modelled seconds of a step of ResNet-50 at each bandwidth, in bit/s."""
    methods = list_methods(name, nodes, every)
    seconds = []
    for bits in bandwidths:
        network = Network(bandwidth=bits / 8, latency=LATENCY)
        predictions = [predict_step(x, WORKLOAD, network, nodes) for x in methods]
        seconds.append(min(prediction.seconds for prediction in predictions))
    return np.array(seconds)


def measure(options: StepsOptions, task: Task, nodes: int, name: str) -> Record:
    """Counts the steps of a method."""
    head = {"run": f"{name}, {nodes} nodes", "method": name, "nodes": nodes}
    find_loss = make_loss_finder(METHODS[name], nodes, task, options)
    return head | count_steps(find_loss, options)


def start(options: StepsOptions) -> tuple[Iterable[Any], Callable[..., Record]]:
    """Loads the task, and lists the cells."""
    task = make_task(options.task, HIDDEN, options.fashion_mnist)
    cells = itertools.product(options.nodes, options.method)
    return cells, functools.partial(measure, options, task)


def show(options: StepsOptions, records: Sequence[Record], out: Path) -> Table:
    """Returns a table of the steps, those over AllReduce's by seed, and the hours of ResNet-50."""
    del out
    title = f"Steps to a loss of {options.loss:g}, and hours of ResNet-50, modelled"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    hours = [f"hours,\n{bandwidth}" for bandwidth in BANDWIDTHS]
    for header in ("nodes", "method", "steps", "times\nAllReduce", *hours):
        table.add_column(header.replace(" ", "\n"), no_wrap=True)
    exact = {}
    for record in records:
        nodes = record["nodes"]
        name = record["method"]
        steps = np.array([math.inf if s is None else s for s in record["steps"]])
        cells = [f"{nodes}", name, f"{steps.mean():.0f}"]
        if name == "allreduce":
            exact[nodes] = steps
        if nodes in exact:
            times = steps / exact[nodes]
            count = EXAMPLES / (WORKLOAD.examples * nodes) * steps.mean() / exact[nodes].mean()
            seconds = predict_seconds(name, nodes, options.every, BANDWIDTHS.values())
            cells.append(" ".join(f"{ratio:.2f}" for ratio in times))
            cells += [f"{hours:.4g}" for hours in count * seconds / 3600]
        table.add_row(*cells)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures all cells, and reports."""
    run_study("steps_to_loss", StepsOptions, start, show, arguments)


if __name__ == "__main__":
    main()
