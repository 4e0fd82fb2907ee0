"""One host of the network measurement: a JAX process that `experiments.speed_network` starts.

    python -m experiments.speed_worker FOLDER RANK

It reads `FOLDER/setting.json` and writes `FOLDER/RANK.json`; where it is just now stands in
`FOLDER/RANK.progress`. In every round it takes one iteration of every row after another, so that
noise hits all alike. All hosts start an iteration together, after a barrier that is not counted.
"""

import dataclasses
import json
import os
import resource
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gossipjax as gx
from experiments.speed_model import gradients, init_params, layer_width, loss, make_step
from experiments.speed_rows import ALONE, COMPUTATION, RATE, RING, Row, Width, row

TRIES, NEAR_ENOUGH = 6, 0.08  # calibration ends when the time is off by less than this share
STREAM_BYTES = (2**20, 20_000_000)  # a stream is as long as the model, between these
CHUNK = 2**20


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all hosts of a measurement share; written as `setting.json`.

    Attributes:
      coordinator: address and port where host 0 starts JAX's coordination service.
      addresses: of every host.
      rows: pairs of an algorithm and the width of its messages.
      megabytes: 1e6 bytes of float32 parameters.
      compute: seconds of an iteration without exchange, all hosts at once, to size the batch for.
      iterations: that are measured of each row.
      interface: the network interface whose counter is read; None where hosts share one.
    """

    coordinator: str
    addresses: list[str]
    rows: list[tuple[str, Width]]
    megabytes: float
    compute: float
    iterations: int
    interface: str | None

    @property
    def hosts(self) -> int:
        """N."""
        return len(self.addresses)


class Host:
    """This process among the others: barriers, agreed numbers, clocks and counters."""

    def __init__(self, setting: Setting, folder: Path, rank: int):
        self.setting, self.rank = setting, rank
        self.mesh = Mesh(np.array(jax.devices()), ("nodes",))
        self._progress = folder / f"{rank}.progress"
        self._gather = gx.spmd(lambda x: jax.lax.all_gather(x, "nodes"), mesh=self.mesh)
        self._links: tuple[socket.socket, socket.socket] | None = None

    def say(self, text: str) -> None:
        """Leaves word of what is being done."""
        self._progress.write_text(text)

    def gather(self, value: float) -> np.ndarray:
        """The numbers of all hosts, float32 `[N]`; waits for all of them."""
        own = np.array([value], np.float32)
        everywhere = NamedSharding(self.mesh, P("nodes"))
        stacked = jax.make_array_from_callback((self.setting.hosts,), everywhere, lambda _: own)
        return np.asarray(self._gather(stacked).addressable_shards[0].data)[0]

    def timed(self, run: Callable[[], Any]) -> tuple[float, int | None]:
        """The seconds that it took, from a common start on, and the bytes that were sent."""
        self.gather(0)
        sent, began = self._counter(), time.perf_counter()
        jax.block_until_ready(run())
        seconds = time.perf_counter() - began
        self.gather(0)  # until all has arrived: what is sent last waits in the kernel
        now = self._counter()
        return seconds, None if sent is None or now is None else now - sent

    def _counter(self) -> int | None:
        if self.setting.interface is None:
            return None
        file = Path(f"/sys/class/net/{self.setting.interface}/statistics/tx_bytes")
        return int(file.read_text())

    def connect(self) -> None:
        """A plain TCP connection to the next host and one from the host before."""
        with socket.create_server((self.setting.addresses[self.rank], 0)) as server:
            ports = self.gather(server.getsockname()[1])
            after = (self.rank + 1) % self.setting.hosts
            to_next = socket.create_connection((self.setting.addresses[after], int(ports[after])))
            self._links = to_next, server.accept()[0]
        to_next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def stream(self, size: int, senders: range) -> None:
        """The hosts of `senders` send so many bytes to their next ones; until all has arrived."""
        assert self._links is not None
        to_next, from_last = self._links
        thread = threading.Thread(target=to_next.sendall, args=(bytes(size),))
        if self.rank in senders:
            thread.start()
        if (self.rank - 1) % self.setting.hosts in senders:
            buffer, missing = bytearray(CHUNK), size
            while missing:
                count = from_last.recv_into(buffer, min(CHUNK, missing))
                if not count:
                    raise ConnectionError("the host before has closed its stream")
                missing -= count
        if self.rank in senders:
            thread.join()


class Model:
    """The parameters and the batch that all rows share, and what has been measured of each row.

    One model for all of them, handed from row to row, so that many rows fit into memory: for the
    time it does not matter. What a row has in flight is its own.
    """

    def __init__(self, host: Host):
        self.host, self.mesh, self.width = host, host.mesh, layer_width(host.setting.megabytes)
        self.params = gx.spmd(lambda: init_params(self.width), mesh=self.mesh)()
        self.parameters = sum(x[0].size for x in jax.tree.leaves(self.params))
        self.batch: Any = None
        self._local = make_step(optax.with_extra_args_support(optax.sgd(RATE)), self.mesh)
        self._no_state = optax.sgd(RATE).init(())

    def draw_batch(self, size: int) -> None:
        """Other examples on every node."""

        def draw() -> tuple[jax.Array, jax.Array]:
            key = jax.random.fold_in(jax.random.key(1), jax.lax.axis_index("nodes"))
            x, y = jax.random.normal(key, (2, size, self.width))
            return x, y

        self.batch = gx.spmd(draw, mesh=self.mesh)()

    def compute(self) -> Any:
        """One iteration without any exchange."""
        self.params, _ = self._local(0, self.params, self._no_state, self.batch)
        return self.params

    def calibrate(self) -> int:
        """Sizes the batch so that an iteration without exchange takes about `compute` seconds."""
        target, found = self.host.setting.compute, {}
        size = 1
        while size not in found and len(found) < TRIES:
            self.host.say(f"sizing the batch: {size} examples")
            self.draw_batch(size)
            jax.block_until_ready(self.compute())
            slowest = [self.host.gather(self.host.timed(self.compute)[0]).max() for _ in range(3)]
            found[size] = float(statistics.median(slowest))
            if abs(found[size] - target) < NEAR_ENOUGH * target:
                break
            size = next_batch(found, target)
        size = min(found, key=lambda s: abs(found[s] - target))
        self.draw_batch(size)
        jax.block_until_ready(self.compute())
        return size

    def stepper(self, of: Row) -> Callable[[int], Any]:
        """`take(step)`: one iteration of this row."""
        tx = of.method.transform
        how = of.method
        step = gx.TrainStep(gradients, tx, how.schedule, how.lookback, mesh=self.mesh)
        state = gx.spmd(tx.init, mesh=self.mesh)(self.params)

        def take(number: int) -> Any:
            nonlocal state
            self.params, state, _ = step(number, self.params, state, self.batch)
            return self.params, state

        return take


def next_batch(found: dict[int, float], target: float) -> int:
    """The batch that should take `target` seconds, by the line through the two nearest in `found`.

    >>> next_batch({1: 0.1}, 0.5), next_batch({1: 0.1, 33: 0.26}, 0.5)
    (33, 81)
    """
    if len(found) == 1:
        return 33 if found[1] < target else 1
    (a, low), (b, high) = sorted(found.items(), key=lambda item: abs(item[1] - target))[:2]
    slope, largest = (high - low) / (b - a), max(found)
    wanted = a + (target - low) / slope if slope > 0 else largest * target / found[largest]
    return max(1, min(round(wanted), 8 * largest))


def measure(host: Host) -> dict[str, Any]:
    """Every row in every round; the seconds and bytes of this host."""
    setting = host.setting
    host.say("connecting")
    host.connect()
    model = Model(host)
    examples = model.calibrate()
    least, most = STREAM_BYTES
    size = min(max(least, 4 * model.parameters), most)
    jobs: dict[str, Callable[[int], Any]] = {
        COMPUTATION: lambda step: model.compute(),
        RING: lambda step: host.stream(size, range(setting.hosts)),
        ALONE: lambda step: host.stream(size, range(1)),
    }
    for algorithm, wire in setting.rows:
        own = row(algorithm, wire, setting.hosts)
        jobs[own.name] = model.stepper(own)
        for step in sorted({own.canonical_step(step) for step in range(setting.iterations)}):
            host.say(f"compiling {own.name}, step {step}")
            jax.block_until_ready(jobs[own.name](step))
    for name in (RING, ALONE):
        host.timed(lambda name=name: jobs[name](0))  # until TCP has found its window
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    sent: dict[str, list[int | None]] = {name: [] for name in jobs}
    for step in range(setting.iterations):
        for name, take in jobs.items():
            host.say(f"iteration {step + 1} of {setting.iterations}: {name}")
            took, count = host.timed(lambda take=take, step=step: take(step))
            seconds[name].append(took)
            sent[name].append(count)
    last = gx.spmd(loss, mesh=host.mesh)(model.params, model.batch)
    if not np.isfinite(last.addressable_shards[0].data).all():
        raise FloatingPointError("the model is no longer finite")
    return {
        "seconds": seconds,
        "sent_bytes": sent,
        "stream_bytes": size,
        "parameters": model.parameters,
        "examples": examples,
        "peak_memory_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def end_with_launcher() -> None:
    """Ends this process at once when the launcher has gone: its end of the pipe closes then."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: Path, rank: int) -> None:
    """Joins the others, measures, writes the results."""
    end_with_launcher()
    setting = Setting(**json.loads((folder / "setting.json").read_text()))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(setting.coordinator, setting.hosts, rank)
    host = Host(setting, folder, rank)
    (folder / f"{rank}.json").write_text(json.dumps(measure(host)))
    host.gather(0)  # nobody leaves while others still need the coordinator
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
