"""Counts the steps that each method needs to reach one loss, over more and more simulated nodes.

    python -m experiments.steps_to_loss --fashion-mnist FOLDER

Nodes train a perceptron with one hidden layer by SGD with Nesterov momentum and a cosine schedule.
Each node draws its own batches from the same images. A run of K steps ends with the loss of the
average model on 5,000 of the images. The program doubles or halves K until this loss is above
`--loss` after K steps and below `--loss` after 2 K steps, and interpolates the steps in the
logarithm of K, for each seed. For each method, number of nodes and K, the learning rate is chosen
with the first seed: it is doubled and halved until the middle of three rates has the smallest loss.
All nodes are simulated in one process, so steps are measured and seconds are not.

- `allreduce` averages the gradients exactly.
- `sgp` exchanges with one peer of the exponential graph after the local step.
- `1-osgp` is `sgp` with messages that arrive one step late, hidden by the computation.
- `dpsgd` averages pairs of the bipartite exponential graph during the computation.
- `sgp-every-H` makes a round of SGP after every `--every` local steps.
- `diloco` averages the models exactly after every `--every` local steps, with Nesterov's outer step
  (rate 0.7, momentum 0.9).

The program writes `summary.json` into `--out`, whose `runs` contain `method`, `nodes`, `rates` and
`steps` (a number for each seed).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import gossipjax as gx
from experiments import data, results
from experiments.options import (
    Check,
    OptionalPath,
    OutputOptions,
    PositiveFloat,
    PositiveInt,
    Seed,
    parse_arguments,
    require_different,
)
from experiments.program import exit_on_error
from experiments.results import Record
from experiments.tuning import tune

HIDDEN = 32
CLASSES = 10
MOMENTUM = 0.9
FIRST_RATE = 0.1
FIRST_STEPS = 64
WATCHED = 5_000  # images by which the loss is judged
EVERY = "sgp-every-{}"
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)

Images = tuple[jax.Array, jax.Array]
"""Pixels `[M, 784]` and labels `[M]`."""
Make = Callable[[int, Any, int], optax.GradientTransformationExtraArgs]
"""Makes the chain of a method from the number of nodes, the learning rate and H."""


def make_sgd(rate: Any) -> optax.GradientTransformation:
    """Returns the local optimizer of all methods."""
    return optax.sgd(rate, momentum=MOMENTUM, nesterov=True)


peers = gx.topology.one_peer_exponential  # the graph of SGP
pairs = gx.topology.bipartite_exponential  # the graph of D-PSGD
METHODS: dict[str, Make] = {
    "allreduce": lambda n, rate, every: optax.chain(gx.allreduce(), make_sgd(rate)),
    "sgp": lambda n, rate, every: optax.chain(make_sgd(rate), gx.sgp(peers(n))),
    "1-osgp": lambda n, rate, every: optax.chain(make_sgd(rate), gx.osgp(peers(n))),
    "dpsgd": lambda n, rate, every: optax.chain(make_sgd(rate), gx.dpsgd(pairs(n))),
    EVERY: lambda n, rate, every: optax.chain(make_sgd(rate), gx.sgp(peers(n).every(every))),
    "diloco": lambda n, rate, every: gx.outer(make_sgd(rate), OUTER, every=every),
}


@dataclasses.dataclass(frozen=True)
class StepsOptions(OutputOptions):
    """Counts the steps that each method needs to reach one loss, over simulated nodes."""

    nodes: tuple[
        Annotated[PositiveInt, Check("even, from 2 on", lambda value: value % 2 == 0)], ...
    ] = (4, 16, 64, 256, 1024)
    """One or several numbers of simulated nodes."""
    every: PositiveInt = 16
    """H, local steps from one exchange to the next, for sgp-every-H and diloco."""
    batch_size_per_node: PositiveInt = 32
    """Images per node and step."""
    loss: PositiveFloat = 0.42
    """The loss to reach, in nats."""
    max_steps: PositiveInt = 2048
    """Largest number of steps of a run. A method that needs more is shown without a number."""
    fashion_mnist: OptionalPath = None
    """Folder with the four files of Fashion-MNIST. Without the folder, nodes train on 4,000 MNIST
    digits.
    """
    seed: tuple[Seed, ...] = (0, 1, 2)
    """One or several seeds for models and batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_different(self, "nodes", "seed")


def load_images(folder: Path | None) -> Images:
    """Returns the training images; all pixels together have mean 0."""
    name = "mnist5k" if folder is None else "fashion_mnist"
    loaded = data.load(name, folder)
    pixels = loaded.train_images.reshape(len(loaded.train_images), -1)
    return jnp.asarray(pixels - pixels.mean()), jnp.asarray(loaded.train_labels)


def make_model(key: jax.Array, inputs: int) -> Any:
    """Returns the parameters of a perceptron, drawn as He et al. do."""
    first, second = jax.random.split(key)
    return {
        "w1": jax.random.normal(first, (inputs, HIDDEN)) * math.sqrt(2 / inputs),
        "b1": jnp.zeros(HIDDEN),
        "w2": jax.random.normal(second, (HIDDEN, CLASSES)) * math.sqrt(1 / HIDDEN),
        "b2": jnp.zeros(CLASSES),
    }


def compute_loss(params: Any, batch: Images) -> jax.Array:
    """Returns the mean cross-entropy, in nats."""
    pixels, labels = batch
    hidden = jax.nn.relu(pixels @ params["w1"] + params["b1"][None])
    logits = hidden @ params["w2"] + params["b2"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def draw_batch(images: Images, size: int, key: jax.Array) -> Images:
    """Returns images that are drawn with replacement."""
    index = jax.random.randint(key, (size,), 0, len(images[1]))
    return images[0][index], images[1][index]


def make_trainer(
    make: Make, nodes: int, images: Images, options: StepsOptions
) -> Callable[[float, int, int], float]:
    """Returns a function of rate, steps and seed that trains and returns the final loss."""

    @jax.jit
    def train(rate: jax.Array, steps: jax.Array, seed: jax.Array) -> jax.Array:
        key, model_key = jax.random.split(jax.random.key(seed))

        def advance(k: jax.Array, carry: Any) -> Any:
            tx = make(nodes, rate * 0.5 * (1 + jnp.cos(jnp.pi * k / steps)), options.every)

            def step(params: Any, state: Any, key: jax.Array) -> Any:
                batch = draw_batch(images, options.batch_size_per_node, key)
                grads = jax.grad(compute_loss)(params, batch)
                updates, state = tx.update(grads, state, params, step=k)
                return optax.apply_updates(params, updates), state

            keys = jax.random.split(jax.random.fold_in(key, k), nodes)
            params, state = carry
            return jax.vmap(step, axis_name="nodes")(params, state, keys)

        model = make_model(model_key, images[0].shape[1])
        params = jax.tree.map(lambda x: jnp.broadcast_to(x, (nodes, *x.shape)), model)
        state = jax.vmap(make(nodes, rate, options.every).init, axis_name="nodes")(params)
        params, _ = jax.lax.fori_loop(0, steps, advance, (params, state))
        average = jax.tree.map(lambda x: x.mean(0), params)
        return compute_loss(average, (images[0][:WATCHED], images[1][:WATCHED]))

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


def measure(options: StepsOptions, out: Path, console: Console) -> None:
    """Counts all steps, writes the files, and prints the table."""
    images = load_images(options.fashion_mnist)
    cells = list(itertools.product(options.nodes, METHODS))
    records: list[Record] = []
    with results.make_progress_bar(console) as bar:
        task = bar.add_task("steps", total=len(cells), status="")
        for nodes, title in cells:
            name = title.format(options.every)
            bar.update(task, status=f"{name}, {nodes} nodes")
            find_loss = make_trainer(METHODS[title], nodes, images, options)
            found = count_steps(find_loss, options)
            head = {"run": f"{name}, {nodes} nodes", "method": name, "nodes": nodes}
            records.append(head | found)
            results.write_summary(out, dataclasses.asdict(options), {}, records)
            bar.advance(task)
    console.print(tabulate(records, options))


def tabulate(records: Sequence[Record], options: StepsOptions) -> Table:
    """Returns a table of methods by numbers of nodes."""
    table = Table(box=SIMPLE_HEAD, title=f"Steps to a loss of {options.loss:g}, mean (rate)")
    table.add_column("method")
    for nodes in options.nodes:
        table.add_column(f"{nodes} nodes", justify="right")
    for name in dict.fromkeys(record["method"] for record in records):
        cells = []
        for record in records:
            if record["method"] == name:
                steps = [math.inf if s is None else s for s in record["steps"]]
                cells.append(f"{np.mean(steps):.0f} ({record['rates'][-1]:g})")
        table.add_row(name, *cells)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, and reports."""
    out = None
    with exit_on_error(lambda: out):
        options = parse_arguments(StepsOptions, "experiments.steps_to_loss", arguments)
        out = results.create_run_dir("steps_to_loss", options.out, options.overwrite)
        measure(options, out, Console())


if __name__ == "__main__":
    main()
