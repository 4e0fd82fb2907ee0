"""The numbers of names, for which threads ask: a name server may be silent."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
import threading
import time

MAX_NAMES = 10_000


def is_numeric(address: str) -> bool:
    """Whether the host of an address is given in numbers.

    >>> is_numeric("[::1]:5000"), is_numeric("localhost:5000")
    (True, False)
    """
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(address.rpartition(":")[0].strip("[]")))
    return False


def find_numbers(address: str) -> tuple[str, ...]:
    """Returns an address in numbers, for each number of its name; those of IPv4 come first.

    >>> find_numbers("127.0.0.1:5000")
    ('127.0.0.1:5000',)
    """
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    hosts = sorted({(":" in str(where[0]), str(where[0])) for *_, where in found})
    return tuple(f"[{host}]:{port}" if is_6 else f"{host}:{port}" for is_6, host in hosts)


class Names:
    """Knows the numbers of names by the last good answer.

    A name is asked for again when a connection to it is made, or when the node there is silent, but
    once in `seconds` at most.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._answers: dict[str, tuple[str, ...]] = {}  # address -> the same in numbers
        self._asked: dict[str, float] = {}
        self._turns: dict[str, int] = {}

    def find(self, address: str, is_silent: bool = False) -> str | None:
        """Returns an address in numbers; None while nobody has said them.

        If a name has several numbers, and where it is silent, the next one has its turn.
        """
        if is_numeric(address):
            return address
        answers = self._answers.get(address, ())
        since = time.monotonic() - self._asked.get(address, -math.inf)
        if since > self._seconds and len(self._asked.keys() | {address}) <= MAX_NAMES:
            if is_silent and since < 2 * self._seconds:  # the same number was tried meanwhile
                self._turns[address] = self._turns.get(address, 0) + 1
            self._asked[address] = math.inf  # until there is an answer
            threading.Thread(target=self._ask, args=(address,), daemon=True).start()
        return answers[self._turns.get(address, 0) % len(answers)] if answers else None

    def _ask(self, address: str) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            self._answers[address] = find_numbers(address)
        self._asked[address] = time.monotonic()
