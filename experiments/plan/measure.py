"""What `--measure` takes from this machine: the computation of a step, and a stream of bytes.

    python -m experiments.plan.measure PORT BYTES

is the process that receives the stream.
"""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
ModelName = Literal["linear", "mlp", "small_cnn", "resnet20", "resnet56", "resnet18", "resnet50"]
DIGITS = ((28, 28, 1), 10)
TINY_IMAGES = ((32, 32, 3), 10)
IMAGENET = ((224, 224, 3), 1000)
INPUTS: dict[ModelName, tuple[tuple[int, ...], int]] = {
    "linear": DIGITS,
    "mlp": DIGITS,
    "small_cnn": DIGITS,
    "resnet20": TINY_IMAGES,
    "resnet56": TINY_IMAGES,
    "resnet18": IMAGENET,
    "resnet50": IMAGENET,
}
"""Model -> the shape of an example, and the number of classes."""
STEPS = 7  # of which the median counts
STREAM_BYTES = 2**28
STREAM_TURNS = 3  # the fastest counts: the first lets TCP find its window
CHUNK_BYTES = 2**20
TIMEOUT = 120.0  # seconds that the two processes wait for each other
LEARNING_RATE = 0.05


class MeasuredStep(NamedTuple):
    """A step of one node without exchange: the model's parameters, seconds, and on what device."""

    parameters: int
    seconds: float
    device: str


def measure_step(model: ModelName, examples: int) -> MeasuredStep:
    """Measures a step of a model, a name of `INPUTS`, of some examples; the median counts."""
    # Imported here: a plan from given figures does not need it.
    import jax

    run_step, state, parameters = _compile_step(model, examples)
    samples = []
    for _ in range(STEPS):
        start = time.perf_counter()
        state = jax.block_until_ready(run_step(state))
        samples.append(time.perf_counter() - start)
    return MeasuredStep(parameters, float(np.median(samples)), jax.devices()[0].device_kind)


def _compile_step(model: ModelName, examples: int) -> tuple[Callable[[Any], Any], Any, int]:
    import jax
    import jax.numpy as jnp
    import optax

    from experiments.models import MODELS

    shape, classes = INPUTS[model]
    network: Any = MODELS[model](classes)
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.standard_normal((examples, *shape)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, classes, examples))
    variables = jax.jit(network.init)(jax.random.key(0), images[:1])
    params = variables["params"]
    others = {name: value for name, value in variables.items() if name != "params"}
    tx = optax.sgd(LEARNING_RATE, momentum=0.9, nesterov=True)

    def compute_loss(params: Any) -> jax.Array:
        logits, _ = network.apply(
            {"params": params, **others}, images, train=True, mutable=["batch_stats"]
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def run_step(state: Any) -> Any:
        params, opt_state = state
        updates, opt_state = tx.update(jax.grad(compute_loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = jax.block_until_ready(run_step((params, tx.init(params))))  # compiles
    return run_step, state, sum(x.size for x in jax.tree.leaves(params))


def measure_stream(size: int = STREAM_BYTES) -> float:
    """Bytes per second of a TCP stream over the loopback, the fastest of three."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT)
        port = server.getsockname()[1]
        receiver = subprocess.Popen(
            [sys.executable, "-m", "experiments.plan.measure", str(port), str(size)],
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C goes to the parent only
        )
        try:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(TIMEOUT)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return size / min(_send(connection, bytes(size)) for _ in range(STREAM_TURNS))
        finally:
            receiver.kill()
            receiver.wait()


def _send(connection: socket.socket, content: bytes) -> float:
    """Seconds until the other side has said that it has all of it."""
    start = time.perf_counter()
    connection.sendall(content)
    if not connection.recv(1):
        raise ConnectionError("the receiver of the stream has closed it")
    return time.perf_counter() - start


def receive_streams(port: int, size: int) -> None:
    """Receives streams of `size` bytes, and acknowledges each, until the sender closes."""
    buffer = bytearray(CHUNK_BYTES)
    with socket.create_connection(("127.0.0.1", port), TIMEOUT) as connection:
        missing = size
        while count := connection.recv_into(buffer, min(CHUNK_BYTES, missing)):
            missing -= count
            if not missing:
                connection.sendall(b"x")
                missing = size


if __name__ == "__main__":
    receive_streams(int(sys.argv[1]), int(sys.argv[2]))
