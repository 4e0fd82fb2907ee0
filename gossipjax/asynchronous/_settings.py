"""How a node takes part in a job: the arguments of `join`, checked."""

from __future__ import annotations

import dataclasses
import ipaddress
from pathlib import Path
from typing import Any, Literal

from gossipjax.asynchronous._messages import is_address
from gossipjax.asynchronous.algorithms import Algorithm
from gossipjax.wire import WireLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `join`, which describes them."""

    algorithm: Algorithm
    contacts: tuple[str, ...]  # where others of the job listen
    listen: str = "127.0.0.1:0"
    place: int = 0
    job: str = ""
    is_founder: bool = True
    patience: float = 10.0
    wire: WireLike | None = None
    secret: str | None = None
    journal: Path | None = None
    opt_state: Any = None
    steps: int = 0
    nonfinite: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        listen = ("listen", self.listen)
        for name, value in (listen, *(("address", value) for value in self.contacts)):
            if not is_address(value, may_be_any=name == "listen"):
                raise ValueError(f"{name} must be HOST:PORT, got {value!r}: as in 127.0.0.1:5000.")
        if not self.secret and not is_loopback(self.listen.rpartition(":")[0]):
            raise ValueError(
                f"a node that listens at {self.listen}, where strangers may connect, needs a "
                "secret, got none: give the same text to all nodes of the job."
            )
        if self.algorithm.averages and self.wire is not None:
            raise ValueError(
                f"wire must be None with adpsgd, which sends copies in full, got {self.wire!r}."
            )

    @property
    def is_continued(self) -> bool:
        """Whether it goes on with what an earlier process saved, which no journal has."""
        return self.opt_state is not None or self.steps > 0


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a host.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return False
