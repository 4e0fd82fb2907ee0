"""The numbers of names, for which threads ask: a name server may be silent."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
import threading
import time


def read_numeric(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the host of `host:port` if it is given in numbers.

    >>> read_numeric("[::1]:5000"), read_numeric("localhost:5000")
    (IPv6Address('::1'), None)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    return None


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

    def find(self, address: str, is_silent: bool = False) -> str | None:
        """Returns an address in numbers; None while nobody has said them."""
        if read_numeric(address) is not None:
            return address
        since = time.monotonic() - self._asked.get(address, -math.inf)
        if since > self._seconds:
            self._asked[address] = math.inf  # until there is an answer
            # If a name has several numbers, the next one has its turn where this one was tried.
            arguments = address, is_silent and since < 2 * self._seconds
            threading.Thread(target=self._ask, args=arguments, daemon=True).start()
        return self._answers.get(address, (None,))[0]

    def _ask(self, address: str, takes_next: bool) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found = find_numbers(address)
            last = self._answers.get(address, found)[0]
            first = (found.index(last) + takes_next) % len(found) if last in found else 0
            self._answers[address] = found[first:] + found[:first]
        self._asked[address] = time.monotonic()
