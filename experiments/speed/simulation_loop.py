"""A loop of `speed simulation`, timed in a separate process: `simulation.py` starts one of each.

    python -m experiments.speed.simulation_loop SETTINGS

`SETTINGS` is a `LoopSettings` as JSON. Standard output gets a line of JSON when all is compiled,
`{"placement": ..., "bytes_per_device": ...}` or `{"error": ...}`, and after every line of standard
input, a number of steps, the seconds that they took and the most memory that the process has had,
`{"seconds": ..., "peak_bytes": ...}`. The process ends with its standard input.
"""

import dataclasses
import itertools
import json
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gossipjax as gx
from experiments.data.prefetch import prefetch
from experiments.models import SmallCNN
from experiments.program import FatalError
from experiments.speed.timing import TimedLoop
from experiments.training.methods import Method, MethodOptions, make_method
from experiments.training.placement import (
    Placement,
    describe_nodes,
    place_nodes,
    request_cpu_devices,
)

DISTINCT_BATCHES = 4  # drawn once, then repeated
OPTIMIZER = optax.sgd(0.05, momentum=0.9, nesterov=True)  # of both loops
IMAGE_SHAPE = (28, 28, 1)
CLASSES = 10


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """The settings of a loop.

    Attributes:
      algorithm: that of the simulated nodes; None for one model, trained by plain optax.
      nodes: N; one model trains on the batch of all of them.
      batch_size_per_node: images per node and step.
      placement: of the simulated nodes.
      devices: D, of N / D nodes each; None for as many as `placement` takes.
    """

    algorithm: str | None
    nodes: int
    batch_size_per_node: int
    placement: Placement
    devices: int | None = None


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


def make_simulated_loop(method: Method, nodes: gx.Nodes, params: Any, batch_size: int) -> TimedLoop:
    """N nodes, each with a separate model; all programs are compiled."""
    train_step = gx.TrainStep(compute_gradients, method.transform, nodes=nodes)
    params, opt_state = nodes.init(method.transform, params)
    batches = prefetch(nodes.put(batch) for batch in draw_batches(nodes.size, batch_size))

    def run_step(step: int, state: Any, batch: Any) -> Any:
        params, opt_state, _ = train_step(step, *state, batch)
        return params, opt_state

    loop = TimedLoop(run_step, (params, opt_state), batches)
    loop.compile(train_step.canonical_steps(opt_state) or [0])
    return loop


def count_bytes_per_device(method: Method, nodes: gx.Nodes, params: Any, batch_size: int) -> int:
    """The memory of a device in a step: models, states, a batch, and what is computed between."""
    tx = method.transform

    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        grads, _ = compute_gradients(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, step=0)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = nodes.init(tx, params)
    batch = next(draw_batches(nodes.size, batch_size))
    stats = nodes.spmd(update).lower(params, opt_state, batch).compile().memory_analysis()
    parts = stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes
    return sum(parts) - stats.alias_size_in_bytes


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

    batches = prefetch(
        jax.tree.map(merge_nodes, batch) for batch in draw_batches(nodes, batch_size)
    )
    loop = TimedLoop(run_step, (params, OPTIMIZER.init(params)), batches)
    loop.compile([0])
    return loop


def make_loop(settings: LoopSettings) -> tuple[TimedLoop, str, int | None]:
    """The loop, compiled, where it runs, and the bytes of a device of the simulated nodes.

    Raises:
      FatalError: for a placement that is impossible.
    """
    if settings.algorithm is not None and settings.placement != "vmap":
        request_cpu_devices(settings.devices or settings.nodes)
    else:
        jax.config.update("jax_num_cpu_devices", 1)  # with the threads that JAX gives it
    key = jax.random.key(0)
    params = SmallCNN(CLASSES).init(key, np.zeros((1, *IMAGE_SHAPE), np.float32))["params"]
    size = settings.batch_size_per_node
    if settings.algorithm is None:
        return make_plain_loop(settings.nodes, params, size), "one device", None
    method = make_method(settings.algorithm, MethodOptions(settings.nodes), OPTIMIZER)
    try:
        nodes = place_nodes(settings.placement, settings.nodes)
    except ValueError as error:
        raise FatalError(str(error)) from error
    used_bytes = count_bytes_per_device(method, nodes, params, size)
    return make_simulated_loop(method, nodes, params, size), describe_nodes(nodes), used_bytes


def main(settings: LoopSettings) -> None:
    """Makes the loop, and runs it when asked to, until standard input ends."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what others print is no answer

        def answer(**fields: Any) -> None:
            print(json.dumps(fields), file=answers, flush=True)

        try:
            loop, placement, used_bytes = make_loop(settings)
        except FatalError as error:
            answer(error=str(error))
            return
        answer(placement=placement, bytes_per_device=used_bytes)
        for line in sys.stdin:
            seconds = loop.run(int(line))
            peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            answer(seconds=seconds, peak_bytes=peak_bytes)


if __name__ == "__main__":
    main(LoopSettings(**json.loads(sys.argv[1])))
    os._exit(0)  # the threads that make the next batches never end
