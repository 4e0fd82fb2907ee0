"""The arguments of `join`, and their checks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from gossipjax.asynchronous._messages import MAX_AGE, is_address, read_numeric
from gossipjax.asynchronous.algorithms import Algorithm
from gossipjax.wire import WireLike

MIN_SECRET = 16  # characters
COMPARE = (
    "Compare GOSSIPJAX_SECRET, or secret=, on both machines: `echo $GOSSIPJAX_SECRET | sha256sum` "
    "must print the same"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `join`, which describes them."""

    algorithm: Algorithm
    contacts: tuple[str, ...]  # where other nodes of the job listen
    num_nodes: int = 0  # number of nodes at the start of the job; 0 is unknown
    listen: str = "127.0.0.1:0"
    place: int = 0
    job: str = ""
    is_founder: bool | None = True  # None: brings its model once it is clear that the job is new
    patience: float = 10.0
    max_received: int = 16
    wire: WireLike | None = None
    secret: str | None = dataclasses.field(default=None, repr=False)
    journal: Path | None = None
    folder: Path | None = None
    every: int = 100
    nonfinite: Literal["raise", "skip"] = "raise"
    node_weight: float | None = None
    clip: float | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for an argument that is not valid."""
        for name, value in [("listen", self.listen), *(("address", one) for one in self.contacts)]:
            if not is_address(value, may_be_any=name == "listen"):
                raise ValueError(f"{name} must be HOST:PORT, got {value!r}: as in 127.0.0.1:5000.")
            if value.rpartition(":")[0] in ("0.0.0.0", "[::]"):
                raise ValueError(
                    f"{name} must say where others reach a node, got {value}, all addresses of a "
                    "machine: write one that `hostname -I` prints, or a name, which may lead to "
                    "another address on other machines."
                )
            if not may_connect(value, self.secret):
                raise ValueError(
                    f"a node must have a secret if others of its job are on other machines, got "
                    f"none with {name} {value}: give all nodes the same line of "
                    "`openssl rand -hex 32`, as secret= or in GOSSIPJAX_SECRET."
                )
        if self.secret is not None and len(self.secret) < MIN_SECRET:
            raise ValueError(
                f"secret must have {MIN_SECRET} characters or more, got {len(self.secret)}: who "
                "hears a message could try all that are shorter. Use `openssl rand -hex 32`."
            )
        if not isinstance(self.algorithm, Algorithm):
            raise ValueError(
                "algorithm must be gx.asynchronous.sgp(), adpsgd() or outer(every), got "
                f"{self.algorithm!r:.60}."
            )
        if not 0 < (1 if self.node_weight is None else self.node_weight) < MAX_AGE:
            raise ValueError(
                f"node_weight must be a number > 0 and < {MAX_AGE:g}, such as the number of "
                f"examples of this node, got {self.node_weight!r}: take thousands of them."
            )
        if not 1 <= (1 if self.clip is None else self.clip) < MAX_AGE:
            raise ValueError(f"clip must be a number >= 1, such as 1, or None, got {self.clip!r}.")
        for name, value in (("wire", self.wire), ("clip", self.clip)):
            if self.algorithm.averages and value is not None:
                raise ValueError(
                    f"{name} must be None with adpsgd, in which two nodes make the same change, "
                    f"from copies in full, got {value!r}: use sgp() or outer(every)."
                )


def may_connect(address: str, secret: str | None) -> bool:
    """Says whether a node may connect to an address, or listen there.

    Without a secret the node may do so only where no other machine can reach the address.

    >>> may_connect("127.0.0.1:5000", None), may_connect("192.0.2.1:5000", None)
    (True, False)
    """
    if secret is not None:
        return True
    number = read_numeric(address)
    return address.startswith("localhost:") if number is None else number.is_loopback
