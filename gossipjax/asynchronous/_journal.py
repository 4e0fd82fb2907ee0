"""The journal of a node, and the account of weight that is read from it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, NamedTuple

from gossipjax.asynchronous._messages import Identity, Mass

Line = dict[str, Any]
Parcel = tuple[str, str, int]  # sender, receiver, number
# Events that add weight, and events that take weight.
ADDS = {"found", "receive", "return", "average", "averaged", "undo", "revive"}
MAX_LINE_BYTES = 1 << 12
MAX_WAITING = 50_000  # lines, about 30 MB
TAKES = {"share", "grant", "hand over", "give up", "write off"}


class Journal:
    """Appends a line of JSON for each event to a file; does nothing without a file.

    The weight `w` of a line is what the event adds or takes, in units of `2^exponent`; at `begin`
    it is what the node holds. A line that begins a life also contains `more`. A thread writes the
    file, so a disk that freezes does not stop the node.
    """

    def __init__(self, path: Path | None, **more: object):
        self._life = {"process": uuid.uuid4().hex, **more}
        self._path = path
        self._file: IO[bytes] | None = None
        self._missing = 0  # lines that could not be written
        self._lines: queue.Queue[Line | None] = queue.Queue()  # to write; None ends the thread
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            # There is no buffer, so lines stay that a process wrote before it was killed.
            self._file = path.open("ab+", buffering=0)
            self._file.seek(-min(MAX_LINE_BYTES, self._file.tell()), os.SEEK_END)
            # A killed process may have left a part of a line at the end.
            last = self._file.read().rpartition(b"\n")[2]
            self._file.truncate(self._file.tell() - len(last))
            threading.Thread(target=self._run, name="journal", daemon=True).start()

    def begin_life(self, identity: Identity) -> None:
        """Begins another life of this node, to which the lines that follow belong."""
        self._life |= identity._asdict()
        self._put({"event": "life"} | self._life)

    def add(
        self, event: str, peer: str, number: int, mass: Mass | None = None, part: Any = 1.0
    ) -> None:
        """Adds an event, with the peer, the number and the mass of its message, if it has one.

        `part` says which part of an update moved the mass, or which part of each distance a clipped
        share has kept. A part of 1 is not written.
        """
        names = {"life": self._life["life"], "peer": peer, "number": number}
        line: Line = {"event": event, "time": time.time()} | names
        line |= {} if part == 1 else {"part": part}
        if mass is not None:
            line |= {"w": float(mass.w)} | ({"exponent": mass.exponent} if mass.exponent else {})
        self._put(line)

    def has_written(self, seconds: float) -> bool:
        """Waits up to `seconds` until all events are written; returns whether they are."""
        done = self._lines.all_tasks_done
        with done:
            return done.wait_for(lambda: not self._lines.unfinished_tasks, seconds)

    def _put(self, line: Line) -> None:
        """Queues a line for the thread that writes; counts it as missing if too many wait."""
        if self._lines.qsize() >= MAX_WAITING:
            self._count_missing("it takes nothing")
        elif self._file is not None:
            self._lines.put(line)

    def _run(self) -> None:
        """Writes lines, in a thread, until None comes; later lines say how many were lost."""
        assert self._file is not None
        while (line := self._lines.get()) is not None:
            self._write(self._file, line | ({"missing": self._missing} if self._missing else {}))
            self._lines.task_done()
        self._file.close()
        self._lines.task_done()

    def _write(self, file: IO[bytes], line: Line) -> None:
        """Writes a whole line, or nothing of it."""
        data = json.dumps(line).encode() + b"\n"
        try:
            size = file.seek(0, os.SEEK_END)
            written = file.write(data)
            if written < len(data):  # a part of a line would spoil the next line
                file.truncate(size)
                raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            self._count_missing(error)

    def _count_missing(self, reason: object) -> None:
        """Counts a line that is lost; the next line that is written says how many are."""
        self._missing += 1
        if self._missing == 1:
            with contextlib.suppress(UserWarning):  # the node goes on even if warnings are errors
                warnings.warn(
                    f"{self._path} cannot be written: {reason}. The node goes on; its journal will "
                    "say how many lines are missing.",
                    stacklevel=2,
                )

    def close(self, seconds: float = 10.0) -> None:
        """Waits up to `seconds` until all events are written, and closes the file."""
        if not self.has_written(seconds):
            warnings.warn(
                f"{self._path} lacks its last {self._lines.unfinished_tasks} lines so far: its "
                f"disk has not taken them in {seconds:g} seconds.",
                stacklevel=2,
            )
        self._lines.put(None)


def read_journal(path: Path) -> Iterator[Line]:
    """Yields the lines of a journal; ignores a last line that was cut off by the end of a process.

    Raises:
      ValueError: if another line is not JSON, or lines are missing because the disk was full.
    """
    with path.open() as file:
        for number, text in enumerate(file, 1):
            if not text.endswith("\n"):
                return
            line = json.loads(text)
            if "missing" in line:
                raise ValueError(
                    f"{path} must have all events, got none of {line['missing']} lines before line "
                    f"{number}, which could not be written: the disk was full."
                )
            yield line


class Account(NamedTuple):
    """Says where the push-sum weight of a job is, exactly. Each founder brought a weight of 1.

    >>> nodes = {0: Fraction(3, 4), 1: Fraction(1, 2)}
    >>> Account(Fraction(2), nodes, Fraction(1, 2), Fraction(1, 4), Fraction(0)).difference
    0.0
    """

    founded: Fraction  # the weight that founders brought
    living: dict[int, Fraction]  # place -> the weight that its last life holds
    # Weight that was sent, and has neither arrived nor been taken back. If a life is dead and
    # nobody takes what it sent, that weight stays here.
    in_flight: Fraction
    # The weight of earlier lives at their end, less what they had applied but the sender took
    # back, because the acknowledgement was lost.
    dead: Fraction
    written_off: Fraction  # the weight of models that were not finite

    @property
    def difference(self) -> float:
        """The weight that was found less the weight that was founded: 0 up to rounding."""
        found = sum(self.living.values()) + self.in_flight + self.dead + self.written_off
        return float(found - self.founded)


def account(journals: Iterable[Path]) -> Account:
    """Adds up the push-sum weights of a job: of living nodes, messages on their way, and the dead.

    `sum living + in flight + dead + written off = founded`, even if messages were lost or doubled
    and nodes were killed. The weight of a node is read from its last `begin` line and the events
    after it. A share that was clipped counts in full.

    Args:
      journals: the journals of the nodes, one file for each place.

    Raises:
      ValueError: if a journal cannot be read, or a parcel was received that nobody sent, or was
        received twice.

    >>> account([]).difference
    0.0
    """
    held: dict[str, Fraction] = defaultdict(Fraction)  # life -> its weight
    last: dict[int, str] = {}  # place -> its last life
    sent: set[Parcel] = set()
    received: dict[Parcel, Fraction] = {}
    returned: set[Parcel] = set()  # that their sender took back
    sums: dict[str, Fraction] = defaultdict(Fraction)  # event -> weight
    for line in (line for path in journals for line in read_journal(path)):
        life = line["life"]
        event = line["event"]
        if event == "life":
            last[line["place"]] = life
            continue
        weight = Fraction(line.get("w", 0.0)) * Fraction(2) ** line.get("exponent", 0)
        outgoing = (life, line["peer"], line["number"])
        incoming = (line["peer"], life, line["number"])
        match event:
            case "found":
                weight = Fraction(1)
            case "begin" if "w" in line:
                held[life] = weight
            case "share" | "grant" | "hand over" | "ask":
                sent.add(outgoing)
            case "receive" | "average":
                if incoming in received:
                    raise ValueError(f"a parcel must be received once, got {incoming} twice.")
                received[incoming] = weight
            case "return":
                returned.add(outgoing)
        sums[event] += weight
        if event in TAKES:
            held[life] -= weight
        elif event in ADDS:
            held[life] += weight
    if missing := received.keys() - sent:
        sender, receiver, number = next(iter(missing))
        raise ValueError(
            f"the journals must have what life {sender} sent as number {number} to {receiver}, got "
            "none: give those of all nodes, whole."
        )
    # A parcel that was applied and also taken back is subtracted twice below. Only a life that was
    # declared dead can have applied it, so its weight is taken off that of the dead.
    doubled = sum(weight for parcel, weight in received.items() if parcel in returned)
    in_flight = sums["share"] + sums["grant"] + sums["hand over"] + doubled
    in_flight -= sums["receive"] + sums["return"]
    # What the answering nodes gained and have not undone, and what the asking nodes gained.
    in_flight -= sums["average"] + sums["undo"] + sums["averaged"]
    living = {place: held.pop(life, Fraction()) for place, life in sorted(last.items())}
    dead = sum(held.values(), sums["give up"] - sums["revive"]) - doubled
    return Account(sums["found"], living, in_flight, dead, sums["write off"])
