"""Images per second of many nodes on one machine, compared with one plain optax loop.

    python -m experiments.speed local simulation --nodes 8 32 64 128

Trains the small CNN on random images: by SGP over N nodes, each with a separate model; and by plain
optax one model on the batch of all nodes together. Each loop runs in a separate process, because
the N devices and 2 N threads of the nodes slow down a plain loop beside them, which would flatter
the ratio. The two take turns, so that noise affects both alike; the process whose turn it is not
waits for its input.

As a program this module is one of the two processes: its argument is a `LoopSettings` as JSON.
Standard output gets a line of JSON: where it runs, when all is compiled; and after every line of
standard input, a number of steps, the seconds that they took.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.table import Table

import gossipjax as gx
from experiments.models import SmallCNN
from experiments.options import PositiveInt
from experiments.program import ProgramError
from experiments.results import Record
from experiments.speed import harness
from experiments.training.methods import Method, MethodOptions, make_method
from experiments.training.placement import (
    Placement,
    describe_nodes,
    place_nodes,
    request_cpu_devices,
)

LOOP = "experiments.speed.local.simulation"
TURNS = 7  # of which the median is reported
DISTINCT_BATCHES = 4  # drawn once, then repeated
OPTIMIZER = optax.sgd(0.05, momentum=0.9, nesterov=True)  # of both loops
IMAGE_SHAPE = (28, 28, 1)
CLASSES = 10


@dataclasses.dataclass(frozen=True)
class SimulationOptions(harness.CheckOptions):
    """Options of the measurement of simulated nodes."""

    nodes: tuple[PositiveInt, ...] = (8, 32, 64, 128)
    """Number of simulated nodes: one or several numbers."""
    algorithm: str = "sgp"
    """ALGORITHM or ALGORITHM@TOPOLOGY, as in experiments.image."""
    batch_size_per_node: PositiveInt = 32
    """Images per node and step."""
    steps: PositiveInt = 5
    """Steps of one turn."""
    placement: Placement = "auto"
    """mesh: a device per node, virtual ones on a CPU. vmap: one device. auto: mesh if possible."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.nodes:
            raise ValueError("--nodes must be one or several numbers, got none.")


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """The settings of a loop."""

    algorithm: str | None  # of the nodes; None for one model, by plain optax on all their images
    nodes: int
    batch_size_per_node: int
    placement: Placement


def compute_loss(params: Any, batch: Any) -> jax.Array:
    """Cross-entropy of one batch of images and labels."""
    images, labels = batch
    logits: Any = SmallCNN(CLASSES).apply({"params": params}, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def compute_gradients(params: Any, batch: Any) -> tuple[Any, jax.Array]:
    """Gradients and loss of one node, in the form that `gx.TrainStep` takes."""
    loss, grads = jax.value_and_grad(compute_loss)(params, batch)
    return grads, loss


def draw_batches(nodes: int, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Infinite random batches: images `[N, B, 28, 28, 1]` and labels `[N, B]`."""
    rng = np.random.default_rng(0)
    batches = [
        (
            rng.normal(size=(nodes, batch_size, *IMAGE_SHAPE)).astype(np.float32),
            rng.integers(0, CLASSES, (nodes, batch_size), dtype=np.int32),
        )
        for _ in range(DISTINCT_BATCHES)
    ]
    yield from itertools.cycle(batches)


class TimedLoop:
    """A training loop, `train_step(step, state, batch) -> state`, that runs a few steps at a time.

    It first runs the steps `compiled` on one batch, so that no timed step compiles.
    """

    def __init__(
        self,
        train_step: Callable[[int, Any, Any], Any],
        state: Any,
        batches: Iterator[Any],
        compiled: Sequence[int],
    ):
        self._train_step = train_step
        self._batches = batches
        self._batch = next(batches)
        for step in compiled:
            state = jax.block_until_ready(train_step(step, state, self._batch))
        self._state = state
        self._step = len(compiled)  # the updates that the state has counted

    def run(self, steps: int) -> float:
        """Runs the next `steps` steps; returns the seconds that they took, input included."""
        start = time.perf_counter()
        for _ in range(steps):
            self._state = self._train_step(self._step, self._state, self._batch)
            self._batch = next(self._batches)
            self._step += 1
        jax.block_until_ready(self._state)
        return time.perf_counter() - start


def make_simulated_loop(method: Method, nodes: gx.Nodes, params: Any, batch_size: int) -> TimedLoop:
    """N nodes, each with a separate model; all programs are compiled."""
    train_step = gx.TrainStep(compute_gradients, method.transform, nodes=nodes)
    params, opt_state = nodes.init(method.transform, params)
    batches = gx.prefetch(nodes.put(batch) for batch in draw_batches(nodes.size, batch_size))

    def run_step(step: int, state: Any, batch: Any) -> Any:
        params, opt_state, _ = train_step(step, *state, batch)
        return params, opt_state

    compiled = train_step.canonical_steps(opt_state) or [0]
    return TimedLoop(run_step, (params, opt_state), batches, compiled)


def make_plain_loop(nodes: int, params: Any, batch_size: int) -> TimedLoop:
    """One model, trained on the batch of all nodes together; its program is compiled."""

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        grads, _ = compute_gradients(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def run_step(step: int, state: Any, batch: Any) -> Any:
        del step
        return update(*state, batch)

    def merge_nodes(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x.reshape(-1, *x.shape[2:]))

    batches = gx.prefetch(
        jax.tree.map(merge_nodes, batch) for batch in draw_batches(nodes, batch_size)
    )
    return TimedLoop(run_step, (params, OPTIMIZER.init(params)), batches, [0])


def make_loop(settings: LoopSettings) -> tuple[TimedLoop, str]:
    """The loop, compiled, and where it runs."""
    if settings.algorithm is not None and settings.placement != "vmap":
        request_cpu_devices(settings.nodes)
    else:
        jax.config.update("jax_num_cpu_devices", 1)  # with the threads that JAX gives it
    key = jax.random.key(0)
    params = SmallCNN(CLASSES).init(key, np.zeros((1, *IMAGE_SHAPE), np.float32))["params"]
    size = settings.batch_size_per_node
    if settings.algorithm is None:
        return make_plain_loop(settings.nodes, params, size), "one device"
    method = make_method(settings.algorithm, MethodOptions(settings.nodes), OPTIMIZER)
    nodes = place_nodes(settings.placement, settings.nodes)
    return make_simulated_loop(method, nodes, params, size), describe_nodes(nodes)


def run_loop(settings: LoopSettings) -> None:
    """Makes the loop, and runs it when asked to, until standard input ends."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print is no answer

        loop, placement = make_loop(settings)
        print(json.dumps(placement), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(loop.run(int(line))), file=answers, flush=True)


class LoopProcess:
    """The process of a loop, as a context that ends it."""

    def __init__(self, settings: LoopSettings):
        self._settings = settings

    def __enter__(self) -> Self:
        path = os.pathsep.join(filter(None, [str(harness.ROOT), os.environ.get("PYTHONPATH")]))
        environment = {
            # Both processes share an accelerator: none may take most of its memory at once.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **os.environ,
            "PYTHONPATH": path,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", LOOP, json.dumps(dataclasses.asdict(self._settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C goes to the parent only
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def read(self) -> Any:
        """Returns what it says next: where it runs, when it has compiled."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ProgramError(
                f"the process of {self._settings} must answer, got its end with status "
                f"{self._process.wait()}: its error output says why."
            )
        return json.loads(line)

    def run(self, steps: int) -> float:
        """Runs the next steps; returns the seconds that they took."""
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        return self.read()


def measure_case(options: SimulationOptions, method: Method, size: int) -> list[Record]:
    """Runs both loops in turns; returns the one object in `runs`."""
    settings = LoopSettings(None, size, options.batch_size_per_node, options.placement)
    simulated_settings = dataclasses.replace(settings, algorithm=options.algorithm)
    with LoopProcess(simulated_settings) as simulated, LoopProcess(settings) as plain:
        placement = simulated.read()
        plain.read()
        seconds = [(simulated.run(options.steps), plain.run(options.steps)) for _ in range(TURNS)]
    return [summarize_case(options, method, size, placement, seconds)]


def summarize_case(
    options: SimulationOptions,
    method: Method,
    size: int,
    placement: str,
    seconds: Sequence[tuple[float, float]],
) -> Record:
    """The object in `runs`; `seconds` are of the simulated and of the plain loop, turn by turn."""
    simulated_seconds, plain_seconds = np.transpose(seconds)
    images = options.steps * size * options.batch_size_per_node  # of a turn
    return {
        "algorithm": method.algorithm,
        "topology": method.topology,
        "nodes": size,
        "placement": placement,
        "images_per_second": images / float(np.median(simulated_seconds)),
        "plain_images_per_second": images / float(np.median(plain_seconds)),
        **harness.summarize_samples("ratio", plain_seconds / simulated_seconds),
    }


def make_table(runs: Sequence[Record]) -> Table:
    """A row per number of nodes."""
    columns: dict[str, harness.Cell] = {
        "placement": "{placement}",
        "nodes": "{nodes}",
        "simulated": "{images_per_second:,.0f}",
        "one model,\none batch": "{plain_images_per_second:,.0f}",
        "ratio": "{ratio:.2f}",
        "10-90 %": "{ratio_p10:.2f}-{ratio_p90:.2f}",
    }
    return harness.make_table("Images per second, all nodes together", "", columns, runs)


def make_measurement(options: SimulationOptions) -> harness.Measurement:
    """All numbers of nodes."""
    methods = [
        make_method(options.algorithm, MethodOptions(size), OPTIMIZER) for size in options.nodes
    ]
    cases = [
        (f"{size} nodes", partial(measure_case, options, method, size))
        for method, size in zip(methods, options.nodes, strict=True)
    ]
    return harness.Measurement("simulated on this machine", cases, make_table)


def measure_simulation(options: SimulationOptions) -> None:
    """Images per second of simulated nodes, compared with one plain loop."""
    harness.run_check("simulation", options, partial(make_measurement, options))


if __name__ == "__main__":
    run_loop(LoopSettings(**json.loads(sys.argv[1])))
    os._exit(0)  # the threads that make the next batches never end
