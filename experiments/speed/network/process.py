"""A process among those of all hosts: barriers, gathered numbers, clocks and byte counters."""

import dataclasses
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import gossipjax as gx
from experiments.training.methods import WireName

CHUNK_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """Settings that all hosts of a measurement share; written as `config.json`.

    Attributes:
      coordinator_address: address and port where host 0 starts JAX's coordination service.
      addresses: of every host.
      rows: pairs of an algorithm and the type of its messages.
      megabytes: 1e6 bytes of float32 parameters.
      compute_seconds: of an iteration without exchange on all hosts at once; sizes the batch.
      iterations: to measure of each row.
      outer: the fields of `OuterTimes`.
      secret: of the nodes that wait for nobody.
      interface: the network interface whose counter is read; None where hosts share one.
    """

    coordinator_address: str
    addresses: list[str]
    rows: list[tuple[str, WireName]]
    megabytes: float
    compute_seconds: float
    iterations: int
    outer: tuple[int, int, int]
    secret: str
    interface: str | None

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.addresses)


class Sample(NamedTuple):
    """What was measured of a call.

    Attributes:
      seconds: that it took.
      cpu_seconds: of all threads of this process.
      nic_bytes: that this host sent; None where hosts share an interface.
    """

    seconds: float
    cpu_seconds: float
    nic_bytes: int | None


class Worker:
    """This process among the others: barriers, gathered numbers, clocks and byte counters."""

    def __init__(self, config: WorkerConfig, folder: Path, rank: int):
        self.config = config
        self.rank = rank
        self.nodes = gx.Nodes(mesh=Mesh(np.array(jax.devices()), ("nodes",)))
        self._progress = folder / f"{rank}.progress"
        self._all_gather = self.nodes.spmd(lambda x: jax.lax.all_gather(x, "nodes"))
        self._connections: tuple[socket.socket, socket.socket] | None = None

    def report_progress(self, progress: str) -> None:
        """Writes what this host is doing to where the parent reads it."""
        self._progress.write_text(progress)

    def gather(self, value: float) -> np.ndarray:
        """The numbers of all hosts, float32 `[N]`; waits for all of them."""
        gathered = self._all_gather(self.nodes.put(np.array([value], np.float32)))
        return np.asarray(gathered.addressable_shards[0].data)[0]

    def time_call(
        self, call: Callable[..., Any], *args: Any, beside: Callable[[], Any] | None = None
    ) -> Sample:
        """Times a call from a common start of all hosts, and counts the bytes that it sent.

        Another call is repeated beside it in a thread, until it ends.
        """
        has_ended = threading.Event()

        def repeat() -> None:
            while beside is not None and not has_ended.is_set():
                beside()

        companion = threading.Thread(target=repeat)
        self.gather(0)
        sent_before = self.read_sent_bytes()
        cpu_start = time.process_time()
        start = time.perf_counter()
        companion.start()
        jax.block_until_ready(call(*args))
        seconds = time.perf_counter() - start
        has_ended.set()
        companion.join()
        self.gather(0)  # until all has arrived: what is sent last waits in the kernel
        cpu_seconds = time.process_time() - cpu_start
        return Sample(seconds, cpu_seconds, self.count_sent_bytes(sent_before))

    def time_slowest(self, call: Callable[[], Any]) -> float:
        """Seconds that a call took on the slowest host."""
        return float(self.gather(self.time_call(call).seconds).max())

    def count_sent_bytes(self, before: int | None) -> int | None:
        """Bytes since an earlier `read_sent_bytes`; None where hosts share an interface."""
        now = self.read_sent_bytes()
        return None if now is None or before is None else now - before

    def read_sent_bytes(self) -> int | None:
        """Bytes that this host has sent so far; None where hosts share an interface."""
        if self.config.interface is None:
            return None
        file = Path(f"/sys/class/net/{self.config.interface}/statistics/tx_bytes")
        return int(file.read_text())

    def connect(self) -> None:
        """Opens a plain TCP connection to the next host, and accepts the previous host's."""
        with socket.create_server((self.config.addresses[self.rank], 0)) as server:
            ports = self.gather(server.getsockname()[1])
            next_rank = (self.rank + 1) % self.config.hosts
            address = (self.config.addresses[next_rank], int(ports[next_rank]))
            to_next = socket.create_connection(address)
            from_previous, _ = server.accept()
        to_next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections = to_next, from_previous

    def stream(self, size: int, senders: range) -> None:
        """Sends `size` bytes from each host of `senders` to its next; waits until they arrive."""
        assert self._connections is not None
        to_next, from_previous = self._connections
        thread = threading.Thread(target=to_next.sendall, args=(bytes(size),))
        if self.rank in senders:
            thread.start()
        if (self.rank - 1) % self.config.hosts in senders:
            buffer = bytearray(CHUNK_BYTES)
            missing = size
            while missing:
                count = from_previous.recv_into(buffer, min(CHUNK_BYTES, missing))
                if not count:
                    raise ConnectionError("the previous host has closed its stream")
                missing -= count
        if self.rank in senders:
            thread.join()
