"""The rendezvous: processes that meet, are missing or wrong, and strangers that connect."""

import itertools
import json
import os
import re
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from launching import TIMEOUT, free_address

from gossipjax.launch import ProcessInfo, _rendezvous
from gossipjax.launch._process_info import parse_address
from gossipjax.launch._rendezvous import encode, rendezvous

SECRET, ANOTHER = "a secret that is long", "another secret, as long"
both = pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])


class Job:
    """Processes that meet at one address, each on a thread."""

    def __init__(self, timeout: float = TIMEOUT, secret: str | None = None):
        self.address = free_address()
        self.timeout = timeout
        self.secret = secret
        self._pool = ThreadPoolExecutor(16)
        self._servers: list[socket.socket] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pool.shutdown()
        for server in self._servers:
            server.close()

    def start(self, process_id: int, num_processes: int) -> "Future[str | None]":
        """Start the rendezvous of a process. The result is its error, or None."""
        info = ProcessInfo(process_id, num_processes)
        return self._pool.submit(self._meet, info, self.timeout, self.secret)

    def _meet(self, info: ProcessInfo, timeout: float, secret: str | None) -> str | None:
        try:
            connections = rendezvous(self.address, info, timeout, secret)
        except ConnectionError as error:
            return str(error).replace(self.address, "ADDRESS")
        self._servers += [connection for connection, _ in connections.values()]
        if info.process_id == 0:  # as JAX does then
            self._servers.append(socket.create_server(parse_address(self.address)))
        return None

    def connect(self) -> socket.socket:
        """Connect a stranger, once process 0 listens."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                return socket.create_connection(parse_address(self.address), TIMEOUT)
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)


def errors_of(infos: list[tuple[int, int]], timeout: float, secret: str | None) -> list[str]:
    """Run the rendezvous of these processes, all at once. Return the error of each, or ""."""
    with Job(timeout, secret) as job:
        results = [job.start(*info) for info in infos]
        return [result.result() or "" for result in results]


@both
def test_all_meet_and_those_that_are_missing_are_named(secret):
    assert errors_of([(i, 5) for i in range(5)], TIMEOUT, secret) == [""] * 5
    first, second = errors_of([(0, 4), (2, 4)], 0.5, secret)
    assert first == second
    assert first.startswith("processes 1, 3 of 4 did not connect to ADDRESS within 0.5 s")
    assert "can they reach 127.0.0.1, where process 0 listens? If not, " in first
    assert "JAX_COORDINATOR_BIND_ADDRESS=0.0.0.0:" in first


@both
def test_doubled_processes_and_those_that_disagree_are_named(secret):
    errors = errors_of([(0, 3), (1, 3), (1, 3)], 20, secret)
    assert len(set(errors)) == 1
    assert "there are two processes 1 of 3" in errors[0]
    assert f"pid {os.getpid()}" in errors[0]
    errors = errors_of([(0, 3), (2, 4)], TIMEOUT, secret)
    assert len(set(errors)) == 1
    assert "the same for all processes, got 3 in process 0 (" in errors[0]
    assert "and 4 in process 2 (" in errors[0]


NONCE = b"0123456789abcdef" * 2
HELLO = {"process_id": 1, "num_processes": 2, "host": "somewhere", "job": "'', restart 0"}
WRONG = {
    "a bool": {**HELLO, "process_id": True},
    "0 of 2": {**HELLO, "process_id": 0},
    "2 of 2": {**HELLO, "process_id": 2},
    "1 of 10**3000": {**HELLO, "num_processes": 10**3000},
    "host controls a terminal": {**HELLO, "host": "\x1b[2J"},
    "no job": {name: HELLO[name] for name in ("process_id", "num_processes", "host")},
    "only a list": [1, 2],
}
LINES = {name: json.dumps(message).encode() + b"\n" for name, message in WRONG.items()}
LINES |= {
    "nesting": b"[" * 4000 + b"\n",
    "no JSON": b"GET / HTTP/1.1\r\n\r\n",
    "no text": b"\xff\xfe\x00\n",
    "too long": b"1" * 100_000,
}


def test_malformed_messages_do_not_end_the_job():
    with Job() as job:
        first = job.start(0, 2)
        for begins, (name, line) in itertools.product((b"", NONCE + b"\n"), LINES.items()):
            with job.connect() as stranger:
                stranger.sendall(begins + line)
                assert is_dropped(stranger), name
        assert [job.start(1, 2).result(), first.result()] == [None, None]


def is_dropped(stranger: socket.socket) -> bool:
    try:
        # What process 0 begins with, and nothing more.
        return re.fullmatch(rb"([0-9a-f]{32}\n)?", stranger.makefile("rb").read()) is not None
    except ConnectionResetError:  # it had sent more
        return True


def say(job: Job, text: bytes) -> socket.socket:
    """Begins a connection as a process does, and says this."""
    stranger = job.connect()
    stranger.sendall(NONCE + b"\n" + text)
    return stranger


def test_without_the_secret_nobody_ends_the_job():
    with Job(secret=SECRET) as job:
        first = job.start(0, 2)
        for known, info in itertools.product((None, b"a key"), ((1, 2), (1, 3))):
            hello = HELLO | dict(zip(("process_id", "num_processes"), info, strict=True))
            with say(job, encode(hello, known, NONCE)) as stranger:
                assert is_dropped(stranger)
        assert [job.start(1, 2).result(), first.result()] == [None, None]


def test_what_was_signed_on_one_connection_is_worth_nothing_on_another(monkeypatch):
    """Not what a process says, nor what process 0 answers, of this job or an earlier one."""
    said: dict[bytes, bytes] = {}
    sign = _rendezvous._sign

    def record(text: bytes, key: bytes, nonces: bytes) -> bytes:
        said[text] = b"%s %s\n" % (sign(text, key, nonces), text)
        return sign(text, key, nonces)

    monkeypatch.setattr(_rendezvous, "_sign", record)
    with Job(secret=SECRET) as job:  # somebody listens
        first = job.start(0, 2)
        assert [job.start(1, 2).result(), first.result()] == [None, None]
    hello, answer = said.values()
    assert b'"process_id": 1' in hello
    with Job(secret=SECRET) as job:
        first = job.start(0, 2)
        with say(job, hello) as stranger:
            assert is_dropped(stranger)
        assert [job.start(1, 2).result(), first.result()] == [None, None]
    with Job(secret=SECRET) as job, socket.create_server(parse_address(job.address)) as server:
        job.timeout = 1
        second = job.start(1, 2)
        connection, _ = server.accept()
        with connection:
            connection.sendall(NONCE + b"\n" + answer)
        assert "does not expect it" in (second.result() or "")


@both
@pytest.mark.parametrize("name", ["GOSSIPJAX_JOB", "GOSSIPJAX_RESTART"])
def test_a_process_of_another_job_or_attempt_is_told_so_and_ends_nothing(name, secret, monkeypatch):
    with Job(secret=secret) as job:
        monkeypatch.setenv(name, "7")
        first = job.start(0, 2)
        job.connect().close()  # process 0 has read its variables
        monkeypatch.setenv(name, "6")
        job.timeout = 0.5
        error = job.start(1, 2).result() or ""
        assert re.search(r"process 1 \(.*6.*, not .*7.*: give all .* same GOSSIPJAX_JOB", error)
        monkeypatch.setenv(name, "7")
        assert [job.start(1, 2).result(), first.result()] == [None, None]


@pytest.mark.parametrize(("mine", "other"), [(SECRET, ANOTHER), (None, SECRET)])
def test_different_secrets_are_named(mine, other):
    with Job(timeout=1, secret=mine) as job:
        first = job.start(0, 2)
        job.secret = other
        error = job.start(1, 2).result() or ""
        reported = first.result() or ""
    assert "GOSSIPJAX_SECRET differs" in error
    named = "is not signed with this GOSSIPJAX_SECRET" if mine else "does not understand"
    assert re.search(rf"Dropped: 127\.0\.0\.1 sent a message that .*{named}", reported)


def test_a_process_that_has_left_is_missing_and_may_come_again():
    with Job(timeout=1.5) as job:
        first = job.start(0, 3)
        hello = HELLO | {"num_processes": 3, "host": "host-1 pid 7"}
        with say(job, encode(hello, None, NONCE)):
            pass
        time.sleep(0.2)
        second = job.start(1, 3)
        error = first.result()
        assert error == second.result()
    assert error is not None
    assert error.startswith("process 2 of 3 did not connect")
    assert "process 1 (host-1 pid 7) connected and left" in error


def test_silent_connections_neither_stall_the_job_nor_move_its_deadline():
    with Job(timeout=1) as job:
        first = job.start(0, 3)
        with job.connect(), job.connect() as other:
            other.sendall(b" ")
            job.start(1, 3)
            assert "process 2 of 3 did not connect" in (first.result() or "")


def test_a_port_that_is_in_use():
    with Job() as job, socket.create_server(parse_address(job.address)) as server:
        message = f"process 0 of 2 cannot listen at {job.address} "
        with pytest.raises(ConnectionError, match=message):
            rendezvous(job.address, ProcessInfo(0, 2), TIMEOUT)
        job.timeout = 1
        second = job.start(1, 2)
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"220 mail.example.org\n")
        assert "another program's" in (second.result() or "")


def test_a_process_waits_until_an_earlier_attempt_has_ended(monkeypatch, capsys):
    monkeypatch.setattr(_rendezvous, "WAIT_SECONDS", 0.05)
    with Job() as job:
        with socket.create_server(parse_address(job.address)) as server:  # its coordinator, of JAX
            second = job.start(1, 2)
            for _ in range(3):
                server.accept()[0].close()
        first = job.start(0, 2)
        assert [first.result(), second.result()] == [None, None]
    assert capsys.readouterr().err.count("in an attempt that has not ended yet") == 1


@pytest.fixture
def named(monkeypatch):
    """Give a name an IPv4 address for this process."""
    addresses = {}
    resolve = socket.getaddrinfo

    def resolve_named(host, *arguments, **options):
        return resolve(addresses.get(host, host), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_named)
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    return addresses


def listening_at(address: str) -> list[str]:
    servers = _rendezvous.listen(address, 2, time.monotonic())
    names = [server.getsockname()[0] for server in servers]
    for server in servers:
        server.close()
    return names


def test_process_0_listens_at_no_other_address(named, monkeypatch):
    named["node-0"] = "127.0.0.2"
    port = free_address().rpartition(":")[2]
    assert listening_at(f"node-0:{port}") == ["127.0.0.2"]
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", f"127.0.0.3:{port}")
    assert listening_at(f"node-0:{port}") == ["127.0.0.3"]


def test_a_name_that_is_another_machine(named):
    named["node-0"] = "203.0.113.7"  # for documentation: nobody's
    port = free_address().rpartition(":")[2]
    message = rf"it is 203\.0\.113\.7 here, .* set JAX_COORDINATOR_BIND_ADDRESS=HOST:{port}"
    with pytest.raises(ConnectionError, match=message):
        rendezvous(f"node-0:{port}", ProcessInfo(0, 2), TIMEOUT)


def test_a_name_that_is_known_after_a_while(named, monkeypatch):
    monkeypatch.setattr(_rendezvous, "RESOLVE_SECONDS", 0.01)
    named["node-0"] = "127.0.0.2"
    resolve = socket.getaddrinfo
    attempts = []

    def resolve_later(*arguments, **options):
        attempts.append(arguments)
        if len(attempts) < 5:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_later)
    address = free_address().replace("127.0.0.1", "node-0")
    servers = _rendezvous.listen(address, 2, time.monotonic() + TIMEOUT)
    for server in servers:
        server.close()
    attempts.clear()
    message = r"process 0 of 2 cannot listen at node-0:1: the name is not known here"
    with pytest.raises(ConnectionError, match=message):
        _rendezvous.listen("node-0:1", 2, time.monotonic())
