"""The meeting: processes that come, are missing or wrong, and strangers that connect."""

import contextlib
import json
import os
import re
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from launching import TIMEOUT, free_address

from gossipjax.launch import ProcessInfo, _hello
from gossipjax.launch._hello import meet
from gossipjax.launch._process_info import find_gloo_problem, parse_address


class Job:
    """Processes that meet at one address, each on a thread."""

    def __init__(self, timeout: float = TIMEOUT):
        self.address = free_address()
        self.timeout = timeout
        self._pool = ThreadPoolExecutor(16)
        self._sockets: list[socket.socket] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pool.shutdown()
        for each in self._sockets:
            each.close()

    def start(self, process_id: int, num_processes: int) -> "Future[str | None]":
        """Starts the meeting of a process. The result is its error, or None."""
        return self._pool.submit(self._meet, ProcessInfo(process_id, num_processes), self.timeout)

    def _meet(self, info: ProcessInfo, timeout: float) -> str | None:
        try:
            connections = meet(self.address, info, timeout)
        except ConnectionError as error:
            return str(error).replace(self.address, "ADDRESS")
        self._sockets += [connection for connection, _ in connections.values()]
        if info.process_id == 0:  # as JAX does then
            self._sockets.append(socket.create_server(parse_address(self.address)))
        return None

    def connect(self) -> socket.socket:
        """Connects a stranger, once process 0 listens."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                return socket.create_connection(parse_address(self.address), self.timeout)
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)

    def say_hello(self, process_id: int, num_processes: int) -> socket.socket:
        """Connects as a process of the job, which does not wait for an answer."""
        process = self.connect()
        process.sendall(json.dumps([process_id, num_processes, *HELLO[2:]]).encode() + b"\n")
        return process

    def wait_until_heard(self) -> None:
        """Waits until process 0 has heard all who spoke before: it answers in their order."""
        with self.connect() as stranger:
            stranger.sendall(b"none\n")
            assert stranger.makefile("rb").read() == b""


def errors_of(infos: list[tuple[int, int]], timeout: float) -> list[str]:
    """Lets these processes meet, all at once. Returns the error of each, or ""."""
    with Job(timeout) as job:
        results = [job.start(*info) for info in infos]
        return [result.result() or "" for result in results]


def test_all_meet_and_those_that_are_missing_are_named_before_the_end(capsys):
    assert errors_of([(i, 5) for i in range(5)], TIMEOUT) == [""] * 5
    assert capsys.readouterr().err == ""
    first, second = errors_of([(0, 4), (2, 4)], 0.8)
    assert first == second
    assert first.startswith("processes 1, 3 of 4 did not connect to ADDRESS within 0.8 s")
    assert "can they reach 127.0.0.1, where process 0 listens? If not, " in first
    assert "JAX_COORDINATOR_BIND_ADDRESS=0.0.0.0:" in first
    said = re.findall(r"processes 1, 3 of 4 .* within (\S+) s", capsys.readouterr().err)
    assert said == ["0.4"]


def test_doubled_processes_and_those_that_disagree_are_named():
    errors = errors_of([(0, 3), (1, 3), (1, 3)], 20)
    assert len(set(errors)) == 1
    assert "there are two processes 1 of 3" in errors[0]
    assert f"pid {os.getpid()}" in errors[0]
    errors = errors_of([(0, 3), (2, 4)], TIMEOUT)
    assert len(set(errors)) == 1
    assert "the same for all processes, got 3 in process 0 (" in errors[0]
    assert "and 4 in process 2 (" in errors[0]


HELLO = [1, 2, "somewhere", "'', restart 0"]
WRONG = [
    [0, *HELLO[1:]],
    [2, *HELLO[1:]],
    [1, 2, "\x1b[2J", *HELLO[3:]],  # controls a terminal
    HELLO[:3],
    [*HELLO, 1],
    {"process_id": 1},
]
LINES = [json.dumps(message).encode() + b"\n" for message in WRONG]
LINES += [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\x00\n", b"1" * 100_000]


def test_strangers_do_not_end_the_job():
    """Nor do they hear anything; those that say nothing keep nobody waiting."""
    with Job() as job:
        first = job.start(0, 2)
        for line in LINES:
            with job.connect() as stranger:
                stranger.sendall(line)
                with contextlib.suppress(ConnectionResetError):  # it had sent more
                    assert stranger.makefile("rb").read() == b"", line
        with contextlib.ExitStack() as silent:
            for _ in range(200):
                silent.enter_context(job.connect())
            # One after the other they would take longer than the meeting may.
            assert [job.start(1, 2).result(), first.result()] == [None, None]


@pytest.mark.parametrize("name", ["GOSSIPJAX_JOB", "GOSSIPJAX_RESTART"])
def test_a_process_of_another_job_or_attempt_is_told_so_and_ends_nothing(name, monkeypatch):
    monkeypatch.setattr(_hello, "WAIT_SECONDS", TIMEOUT)  # it does not try again
    monkeypatch.setattr(_hello, "LINE_SECONDS", TIMEOUT)
    with Job() as job:
        monkeypatch.setenv(name, "7")
        first = job.start(0, 2)
        job.connect().close()  # process 0 has read its variables
        monkeypatch.setenv(name, "6")
        error = job.start(1, 2).result() or ""
        assert re.search(r"process 1 \(.*6.*, and not .*7.*: give all .* GOSSIPJAX_JOB", error)
        monkeypatch.setenv(name, "7")
        assert [job.start(1, 2).result(), first.result()] == [None, None]


@pytest.mark.parametrize("order", [(1, 2), (2, 1), (2,)])
def test_who_has_left_is_waited_for_again(order, monkeypatch):
    """Process 1 comes again, before process 2 or after it, or does not and is named."""
    now = 0.0
    monkeypatch.setattr(_hello, "time", SimpleNamespace(monotonic=lambda: now))
    with Job(20) as job, contextlib.ExitStack() as stack:
        first = job.start(0, 3)
        job.say_hello(1, 3).close()
        job.wait_until_heard()
        others = [stack.enter_context(job.say_hello(order[0], 3))]
        job.wait_until_heard()
        others += [stack.enter_context(job.say_hello(number, 3)) for number in order[1:]]
        if 1 not in order:
            now = 20.0
        errors = [first.result() or ""]
        errors += [json.loads(each.makefile("rb").readline())[1] or "" for each in others]
        start = "" if 1 in order else "process 1 of 3 did not connect"
        assert [error[: len(start) or None] for error in errors] == [start] * len(errors)


def test_a_port_that_is_in_use():
    with Job() as job, socket.create_server(parse_address(job.address)) as server:
        message = f"process 0 of 2 cannot listen at {job.address}, got Address already in use"
        with pytest.raises(ConnectionError, match=message):
            meet(job.address, ProcessInfo(0, 2), TIMEOUT)
        job.timeout = 1
        second = job.start(1, 2)
        with server.accept()[0] as connection:
            connection.sendall(b"220 mail.example.org\n")
        assert "another program's" in (second.result() or "")


def test_a_process_waits_until_an_earlier_attempt_has_ended(monkeypatch):
    monkeypatch.setattr(_hello, "WAIT_SECONDS", 0.05)
    with Job() as job:
        with socket.create_server(parse_address(job.address)) as server:  # its coordinator, of JAX
            second = job.start(1, 2)
            for _ in range(3):
                server.accept()[0].close()
        assert [job.start(0, 2).result(), second.result()] == [None, None]


@pytest.fixture
def named(monkeypatch):
    """Gives a name an IPv4 address, or none yet, for this process."""
    addresses = {}
    getaddrinfo = socket.getaddrinfo

    def resolve(host, port, *options, **more):
        found = addresses.get(host, host)
        if found == "":
            addresses[host] = "127.0.0.2"  # the next time
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return getaddrinfo(found, port, *options, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    return addresses


def listening_at(address: str, seconds: float = 0) -> str:
    with _hello.listen(address, 2, time.monotonic() + seconds) as server:
        return server.getsockname()[0]


def test_process_0_listens_at_no_other_address(named, monkeypatch):
    named["node-0"] = "127.0.0.2"
    port = free_address().rpartition(":")[2]
    assert listening_at(f"node-0:{port}") == "127.0.0.2"
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", f"127.0.0.3:{port}")
    assert listening_at(f"node-0:{port}") == "127.0.0.3"


def test_a_name_that_is_another_machine_or_known_later(named):
    named["node-0"] = "203.0.113.7"  # for documentation: nobody's
    port = free_address().rpartition(":")[2]
    message = rf"cannot listen at node-0:{port}, got .*assign.* set .*_BIND_ADDRESS=HOST:{port}"
    with pytest.raises(ConnectionError, match=message):
        meet(f"node-0:{port}", ProcessInfo(0, 2), TIMEOUT)
    named["node-0"] = "no-such-name.invalid"
    message = "process 0 of 2 cannot listen at node-0:1, got Name or service not known.* Is this"
    with pytest.raises(ConnectionError, match=message):
        listening_at("node-0:1")
    named["node-0"] = ""
    assert listening_at(f"node-0:{port}", TIMEOUT) == "127.0.0.2"


@pytest.mark.parametrize(
    ("own", "other", "gloo", "is_refused"),
    [
        ("10.99.0.2", "10.99.0.1", "10.99.0.2", False),
        ("::ffff:10.99.0.2", "::ffff:10.99.0.1", "10.99.0.2", False),
        ("10.99.0.2", "10.99.0.1", "203.0.113.2", True),  # around the tunnel
        ("10.99.0.2", "10.99.0.1", "127.0.1.1", True),  # of a fresh Debian
        ("10.99.0.2", "10.99.0.1", "no address", True),
        ("10.99.0.2", "10.99.0.1", "fd00::1", False),  # the same machine's, perhaps
        ("10.99.0.2", "10.99.0.2", "127.0.1.1", False),  # both are on one machine
        ("127.0.0.1", "127.0.0.2", "10.99.0.2", False),
    ],
)
def test_where_gloo_would_listen(own, other, gloo, is_refused, monkeypatch):
    """`gloo` is the first address of this machine's name."""

    def resolve(name, *_, **options):
        assert name == socket.gethostname()
        if gloo == "no address":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (gloo, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    connection: Any = SimpleNamespace(getsockname=lambda: (own, 1), getpeername=lambda: (other, 2))
    problem = find_gloo_problem(connection, 1) or ""
    line = f"`10.99.0.2 {socket.gethostname()}`"
    shown = f"Gloo of process 1 would listen at {gloo}, .* Let {line} be the only"
    assert bool(re.match(shown, problem)) == bool(problem) == is_refused
