"""What gossip costs where nodes are simulated: a step with it over the same step without it.

    python -m experiments.speed gossip --nodes 8 32 128 256

docs/evidence/speed.md says what it does, and lists columns and fields.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.table import Table

import gossipjax as gx
from experiments import tables
from experiments.models import MODELS
from experiments.options import Check, OutputOptions, PositiveInt
from experiments.results import Record
from experiments.speed import harness
from experiments.training.methods import MOMENTUM, Method, MethodOptions, make_method

IMAGE_SHAPE = (28, 28, 1)
CLASSES = 10
RATE = 0.01
PLAIN = "without gossip"
WARM = 9  # steps before all turns, so that all rounds are compiled
STEPS = 3  # of a turn

NodeCounts = tuple[
    Annotated[int, Check("an integer >= 2, so that models mix", lambda value: value >= 2)], ...
]
Loop = Callable[[int], Any]
"""Takes the step of this number, and returns its result."""


@dataclasses.dataclass(frozen=True)
class GossipTimeOptions(OutputOptions):
    """Options of the measurement of gossip between simulated nodes."""

    nodes: NodeCounts = (8, 32, 128, 256)
    """Number of simulated nodes: one or several numbers."""
    models: tuple[Literal["mlp", "small_cnn"], ...] = ("mlp", "small_cnn")
    """The models of images, as in experiments.image."""
    methods: tuple[str, ...] = (
        "sgp", "dpsgd", "1-osgp", "quasi-global", "gradient-tracking", "sgp/int8",
    )  # fmt: skip
    """Algorithms as in experiments.image, or quasi-global; each may end in /WIRE."""
    batch_size_per_node: PositiveInt = 16
    """Images per node and step."""
    turns: PositiveInt = 15
    """Turns of every loop, of three steps each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.nodes and self.models and self.methods):
            raise ValueError("--nodes, --models and --methods must be one or several, got none.")


def make_simulated_method(name: str, nodes: int) -> Method:
    """The method of a name, as `--methods` takes them."""
    algorithm, _, wire = name.partition("/")
    options = MethodOptions(nodes, rate=RATE, wire=wire or "float32")  # pyright: ignore[reportArgumentType]
    optimizer = optax.sgd(RATE, momentum=MOMENTUM)
    if algorithm == "quasi-global":
        options = dataclasses.replace(options, momentum="quasi-global")
        algorithm = "dpsgd-adapt-then-combine"
        optimizer = optax.identity()
    return make_method(algorithm, options, optimizer)


class ByHand(NamedTuple):
    """An algorithm on its graph as one would write it, for nodes whose weights stay 1."""

    combine: Callable[[jax.Array, jax.Array, int], jax.Array]  # `(x, u, round) -> x` of one leaf
    rounds: int = 1  # of which the graph consists

    def combine_trees(self, x: Any, u: Any, number: int) -> Any:
        """`combine` of all leaves."""
        return jax.tree.map(lambda a, b: self.combine(a, b, number), x, u)


WITHOUT_GOSSIP = ByHand(lambda x, u, number: x + u)


def write_by_hand(name: str, nodes: int) -> ByHand | None:
    """The form of SGP on the one-peer exponential graph, or of D-PSGD on a ring."""

    def receive(x: jax.Array, hop: int) -> jax.Array:
        return jax.lax.ppermute(x, "nodes", [(i, (i + hop) % nodes) for i in range(nodes)])

    def combine_sgp(x: jax.Array, u: jax.Array, number: int) -> jax.Array:
        return 0.5 * ((x + u) + receive(x + u, 2**number))

    def combine_dpsgd(x: jax.Array, u: jax.Array, number: int) -> jax.Array:
        return (x + receive(x, 1) + receive(x, -1)) / 3 + u

    forms = {
        "sgp": ByHand(combine_sgp, (nodes - 1).bit_length()),
        "dpsgd": ByHand(combine_dpsgd),
    }
    return forms.get(name)


class Problem:
    """A model and its data, on N simulated nodes; each of its loops has its own state."""

    def __init__(self, model_name: str, nodes: int, batch_size: int):
        model: Any = MODELS[model_name](classes=CLASSES)

        def draw() -> Any:
            keys = jax.random.split(jax.random.key(0), 3)
            images = jax.random.normal(keys[0], (nodes, batch_size, *IMAGE_SHAPE))
            labels = jax.random.randint(keys[1], (nodes, batch_size), 0, CLASSES)
            params = model.init(keys[2], images[0])["params"]
            return jax.tree.map(lambda leaf: jnp.stack([leaf] * nodes), params), (images, labels)

        self.params, self.batch = jax.jit(draw)()
        self.nodes = gx.Nodes(nodes)
        self.optimizer = optax.sgd(RATE, momentum=MOMENTUM)

        def compute_loss(params: Any, batch: Any) -> tuple[jax.Array, None]:
            logits = model.apply({"params": params}, batch[0])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1])
            return losses.mean(), None

        self.gradients = jax.grad(compute_loss, has_aux=True)

    def step_by_hand(self, form: ByHand = WITHOUT_GOSSIP) -> Loop:
        """A training step in plain JAX."""

        def step(number: int, state: Any, batch: Any) -> Any:
            params, opt_state = state
            grads, _ = self.gradients(params, batch)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            return form.combine_trees(params, updates, number), opt_state

        programs = [
            jax.jit(jax.vmap(partial(step, number), axis_name="nodes"))
            for number in range(form.rounds)
        ]
        start = self.params, jax.vmap(self.optimizer.init)(self.params)
        return _feed_back(lambda k, state: programs[k % form.rounds](state, self.batch), start)

    def step(self, method: Method) -> Loop:
        """The training step of a method."""
        train_step = gx.TrainStep(self.gradients, method.transform, nodes=self.nodes)
        start = self.params, self.nodes.run(method.transform.init, self.params)
        return _feed_back(lambda k, state: train_step(k, *state, self.batch)[:2], start)

    def update(self, method: Method) -> Loop:
        """The update of a method without its optimizer."""

        def update(step: int, updates: Any, state: Any, params: Any) -> Any:
            return method.gossip.update(updates, state, params, step=step)

        program = self.nodes.spmd(update, static_argnums=0)
        state = self.nodes.run(method.gossip.init, self.params)
        return lambda _: program(1, self.params, state, self.params)

    def update_by_hand(self, form: ByHand) -> Loop:
        """The same in plain JAX."""

        def update(u: Any, x: Any) -> Any:
            new = form.combine_trees(x, u, min(1, form.rounds - 1))
            return jax.tree.map(jnp.subtract, new, x)

        program = jax.jit(jax.vmap(update, axis_name="nodes"))
        return lambda _: program(self.params, self.params)


def _feed_back(step: Callable[[int, Any], Any], state: Any) -> Loop:
    """A loop whose state is what its last step has returned."""

    def run(number: int) -> Any:
        nonlocal state
        state = step(number, state)
        return state

    return run


def measure_loops(loops: dict[str, Loop], turns: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns the seconds of each loop's first step, and of its turns, `[turns]`, by name."""

    def run(name: str, first: int, steps: int) -> float:
        start = time.perf_counter()
        for number in range(first, first + steps):
            jax.block_until_ready(loops[name](number))
        return (time.perf_counter() - start) / steps

    first = {name: run(name, 0, 1) for name in loops}
    for name in loops:
        run(name, 1, WARM)
    turn_starts = range(1 + WARM, 1 + WARM + turns * STEPS, STEPS)
    samples = [{name: run(name, number, STEPS) for name in loops} for number in turn_starts]
    return first, {name: np.array([turn[name] for turn in samples]) for name in loops}


def measure_case(options: GossipTimeOptions, model: str, nodes: int) -> list[Record]:
    """The objects in `runs` of a model and a number of nodes."""
    problem = Problem(model, nodes, options.batch_size_per_node)
    loops = {PLAIN: problem.step_by_hand()}
    for name in options.methods:
        method = make_simulated_method(name, nodes)
        loops |= {name: problem.step(method), f"{name} update": problem.update(method)}
        form = write_by_hand(name, nodes)
        if form is not None:
            loops[f"{name} by hand"] = problem.step_by_hand(form)
            loops[f"{name} update by hand"] = problem.update_by_hand(form)
    first, seconds = measure_loops(loops, options.turns)

    def compare(name: str, to: str) -> float | None:
        return float(np.median(seconds[name] / seconds[to])) if {name, to} <= set(seconds) else None

    return [
        {
            "model": model,
            "nodes": nodes,
            "method": name,
            "plain_seconds": float(np.median(seconds[PLAIN])),
            **harness.summarize_samples("ratio", seconds[name] / seconds[PLAIN]),
            "ratio_by_hand": compare(f"{name} by hand", PLAIN),
            "update_seconds": float(np.median(seconds[f"{name} update"])),
            "update_ratio_to_hand": compare(f"{name} update", f"{name} update by hand"),
            "first_ratio": first[name] / first[PLAIN],
        }
        for name in options.methods
    ]


def make_table(runs: Sequence[Record]) -> Table:
    """A row per model, number of nodes and method."""
    columns: dict[str, tables.Cell] = {
        "model": "{model}",
        "method": "{method}",
        "nodes": "{nodes}",
        "ms without": tables.scale("plain_seconds", 1e-3, ".2f"),
        "x with": "{ratio:.2f}",
        "10-90 %": "{ratio_p10:.2f}-{ratio_p90:.2f}",
        "x by hand": tables.scale("ratio_by_hand", 1, ".2f"),
        "update ms": tables.scale("update_seconds", 1e-3, ".2f"),
        "x update": tables.scale("update_ratio_to_hand", 1, ".2f"),
        "x first": "{first_ratio:.1f}",
    }
    title = "A step of simulated nodes over the same without gossip"
    return tables.make_table(
        title, "x first: the first step, with its compilation", columns, runs, texts=2
    )


def make_measurement(options: GossipTimeOptions) -> harness.Measurement:
    """All models and numbers of nodes."""
    for name in options.methods:
        make_simulated_method(name, min(options.nodes))
    cases = [
        (f"{model}, {size} nodes", partial(measure_case, options, model, size))
        for model in options.models
        for size in options.nodes
    ]
    return harness.Measurement(
        f"simulated on one {jax.default_backend()} device", cases, make_table
    )


def measure_gossip(options: GossipTimeOptions) -> None:
    """Time of a step of simulated nodes, with and without gossip, and of one written by hand."""
    harness.run_check("gossip", options, partial(make_measurement, options))
