"""What a host's process does with the others: barriers, gathered numbers, clocks, bytes."""

import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import gossipjax as gx
from experiments.results import Record, replace_text
from experiments.training.asynchronous import ASYNCHRONOUS
from experiments.training.forms import FORMS, WireName

CHUNK_BYTES = 2**20
PATIENCE = 30.0  # seconds of silence after which a node is declared dead: none is meant to be
MEETING_SECONDS = 120.0  # that nodes wait for each other: they share the cores


class Job(NamedTuple):
    """What all processes of a measurement read, as `job.json`."""

    kind: str  # "rows" or "slow nodes"
    options: Record  # of the program
    coordinator_address: str  # of host 0's coordination service of JAX
    addresses: list[str]  # of every host
    secret: str  # of the asynchronous nodes
    interface: str | None  # whose bytes are counted; None where hosts share one


class Sample(NamedTuple):
    """What was measured of a call."""

    seconds: float
    cpu_seconds: float  # of all threads of this process
    nic_bytes: int | None  # that this host sent; None where hosts share an interface


class Worker:
    """This process among the others: barriers, gathered numbers, clocks and byte counters."""

    def __init__(self, job: Job, folder: Path, rank: int):
        self.rank = rank
        self.hosts = len(job.addresses)
        self.nodes = gx.Nodes(mesh=Mesh(np.array(jax.devices()), ("nodes",)))
        self.folder = folder
        self._job = job
        self._all_gather = self.nodes.spmd(lambda x: jax.lax.all_gather(x, "nodes"))
        self._connections: tuple[socket.socket, socket.socket] | None = None

    def report_progress(self, status: str, done: float = 0, title: str = "") -> None:
        """Writes what this host is doing to where the parent reads it."""
        (self.folder / f"{self.rank}.progress").write_text(f"{int(done)}|{title}|{status}")

    def write_record(self, number: int, record: Record) -> None:
        """Writes what this host measured in the run of this number."""
        replace_text(self.folder / f"{number}-{self.rank}.json", json.dumps(record))

    def gather(self, value: float) -> np.ndarray:
        """The numbers of all hosts, float32 `[N]`; waits for all of them."""
        gathered = self._all_gather(self.nodes.put(np.array([value], np.float32)))
        return np.asarray(gathered.addressable_shards[0].data)[0]

    def time_call(
        self, call: Callable[..., Any], *args: Any, beside: Callable[[], Any] | None = None
    ) -> Sample:
        """Times a call from a common start of all hosts, and counts the bytes that it sent.

        Another call, `beside`, is repeated in a thread until it ends.
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
        if self._job.interface is None:
            return None
        file = Path(f"/sys/class/net/{self._job.interface}/statistics/tx_bytes")
        return int(file.read_text())

    def share_counts(
        self, seconds: list[float], cpu_before: float, sent_before: int | None
    ) -> list[Sample]:
        """Samples of steps made in one go: their processor time and bytes are the mean of all."""
        sent = self.count_sent_bytes(sent_before)
        steps = max(1, len(seconds))
        cpu_seconds = (time.process_time() - cpu_before) / steps
        nic_bytes = None if sent is None else sent // steps
        return [Sample(step_seconds, cpu_seconds, nic_bytes) for step_seconds in seconds]

    def connect(self) -> None:
        """Opens a plain TCP connection to the next host, and accepts the previous host's."""
        with socket.create_server((self._job.addresses[self.rank], 0)) as server:
            ports = self.gather(server.getsockname()[1])
            next_rank = (self.rank + 1) % self.hosts
            address = (self._job.addresses[next_rank], int(ports[next_rank]))
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
        if (self.rank - 1) % self.hosts in senders:
            buffer = bytearray(CHUNK_BYTES)
            missing = size
            while missing:
                count = from_previous.recv_into(buffer, min(CHUNK_BYTES, missing))
                if not count:
                    raise ConnectionError("the previous host has closed its stream")
                missing -= count
        if self.rank in senders:
            thread.join()

    def join_job(
        self,
        name: str,
        algorithm: str,
        tx: optax.GradientTransformation,
        params: Any,
        compute_gradients: Callable[..., Any],
        *example: Any,
        wire: WireName = "float32",
    ) -> gx.asynchronous.Node:
        """Returns this host's node of a job in which nobody waits, once all nodes are there.

        `compute_gradients` is compiled for arguments like `example`. Raises `TimeoutError` if the
        nodes do not hear each other.
        """
        with socket.create_server((self._job.addresses[self.rank], 0)) as server:
            ports = self.gather(server.getsockname()[1])
        listens = [f"{a}:{int(port)}" for a, port in zip(self._job.addresses, ports, strict=True)]
        node = gx.asynchronous.join(
            tx,
            params,
            address=[address for place, address in enumerate(listens) if place != self.rank],
            algorithm=ASYNCHRONOUS[algorithm].build(0, None),
            listen=listens[self.rank],
            place=self.rank,
            job=name,
            is_founder=True,
            patience=PATIENCE,
            wire=FORMS[wire].wire,
            secret=self._job.secret,
        )
        node.warm_up(compute_gradients, *example)
        if not node.wait_for_members(self.hosts, MEETING_SECONDS):
            raise TimeoutError(
                f"{self.hosts} nodes must hear each other within {MEETING_SECONDS:g} s, got nodes "
                f"{node.members}."
            )
        return node
