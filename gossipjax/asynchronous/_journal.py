"""The event log of a node: what it applied, sent and took back, in order."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gossipjax.asynchronous.protocol import Identity, Mass

Line = dict[str, Any]


class Journal:
    """Appends a line of JSON for each event to a file; without a file it does nothing.

    A line is `{"event", "time", "life", "peer", "number", "w", "count", "sum"}`: the event, seconds
    since 1970, the node's own life, the other one, the number of the parcel or step, and weight,
    count and the sum over the values of the mass that it adds or takes. Lines of a process that is
    killed stay. A line `life` begins each life of a process.

    Args:
      path: the file, or None.
      is_continued: whether the node goes on from what an earlier process has saved.
    """

    def __init__(self, path: Path | None, is_continued: bool = False):
        self._is_continued = is_continued
        self._life = ""
        self._process = uuid.uuid4().hex
        self._file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1)

    def begin_life(self, identity: Identity) -> None:
        """The lines that follow are of another life."""
        self._life = identity.life
        line: dict[str, object] = {"event": "life", "process": self._process}
        self._write(line | identity._asdict() | {"is_continued": self._is_continued})

    def add(self, event: str, peer: str, number: int, mass: Mass | None) -> None:
        """Adds an event."""
        if self._file is None:
            return
        line: dict[str, object] = {"event": event, "time": time.time(), "life": self._life}
        line |= {"peer": peer, "number": number}
        if mass is not None:
            total = float(sum(x.sum(dtype="float64") for x in mass.x))
            line |= {"w": float(mass.w), "count": float(mass.count), "sum": total}
        self._write(line)

    def _write(self, line: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_journal(path: Path) -> Iterator[Line]:
    """Yields the lines of a journal; the last may be cut off, where its process was killed.

    Raises:
      ValueError: if a line cannot be read.
    """
    lines = path.read_text().split("\n")
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if {"event", "life"} <= line.keys():
                yield line
                continue
        except (ValueError, AttributeError):
            if number == len(lines):
                return
        raise ValueError(f"{path}, line {number} must be an event, got {text[:80]!r}.")
