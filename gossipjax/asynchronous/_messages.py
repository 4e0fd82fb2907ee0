"""What nodes tell each other, and its bytes: a header in JSON, then a frame of numbers per buffer.

A message may come from a stranger: nothing is unpickled, and every value is checked before it is
used.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gossipjax.wire import FloatCodec, WireLike, require_codec

VERSION = 1
MAX_HEADER_BYTES = 1 << 22
MAX_TEXT = 300
MAX_ENTRIES = 20_000
KINDS = ("view", "ack", "answer", "dead", "share", "ask", "final", "bye")
WITH_MASS = ("share", "ask", "final")
VIEW_FLAGS = {"wants_mass", "begs", "is_ready", "is_finished", "is_drained"}


@dataclasses.dataclass(frozen=True)
class Mass:
    """A numerator with its weight; masses are added and divided, and their sum stays.

    Attributes:
      x: the numerator: arrays, or numbers, of any type.
      w: its push-sum weight; the model is `x / w`.
      count: the nodes that it stands for. The ratio `w / count` is the same on all nodes but for
        what gossip has not mixed yet: the weight of all living nodes over their number. It scales
        updates, since nodes that die take weight with them, and nodes that join bring none.
    """

    x: tuple[Any, ...]
    w: Any
    count: Any

    def __add__(self, other: Mass) -> Mass:
        x = tuple(a + b for a, b in zip(self.x, other.x, strict=True))
        return Mass(x, self.w + other.w, self.count + other.count)

    def __sub__(self, other: Mass) -> Mass:
        x = tuple(a - b for a, b in zip(self.x, other.x, strict=True))
        return Mass(x, self.w - other.w, self.count - other.count)

    def __neg__(self) -> Mass:
        return Mass(tuple(-a for a in self.x), -self.w, -self.count)

    def __truediv__(self, divisor: int) -> Mass:
        return Mass(tuple(a / divisor for a in self.x), self.w / divisor, self.count / divisor)


class Identity(NamedTuple):
    """One life of a node. Lives are ordered by age: an older one is smaller."""

    born: float  # when it joined, in seconds since 1970
    life: str  # a name that no other life has
    place: int  # the node's number in its job, the same in all its lives
    address: str  # where it listens, `host:port`


class View(NamedTuple):
    """What a node knows of the job, and of itself."""

    members: tuple[Identity, ...] = ()  # the nodes that it hears
    deaths: tuple[tuple[Identity, str], ...] = ()  # a node, and the life that it declared dead
    steps: tuple[tuple[str, int], ...] = ()  # a life, dead or not, and its local steps
    wants_mass: bool = False  # it has none
    begs: bool = False  # it asks for half of the receiver's mass
    is_ready: bool = False  # to begin
    is_finished: bool = False  # it makes no more steps and sends no more shares
    is_drained: bool = False  # nothing that it sent is on its way, either
    query: int = 0  # to be sent back as `echo`; 0 is none
    echo: int = 0  # the receiver's newest query


class Message(NamedTuple):
    """A message from one life to another.

    `view` says that the sender lives. `share`, `ask`, `final` and `bye` are parcels: numbered for
    each pair of lives, sent again until they are acknowledged, and acted upon once. An `answer`
    acknowledges an `ask`, an `ack` the others. `dead` says that the receiver was declared dead.

    """

    kind: str  # one of `KINDS`
    sender: Identity
    receiver: str | None  # the life that it is for; None is whichever listens at the address
    number: int = 0  # of a parcel, from 1 on, or of the parcel that is acknowledged
    # Of `share`, the share; of `ask`, `answer` and `final`, a copy of what the sender holds. None
    # in an `answer` declines.
    mass: Mass | None = None
    view: View | None = None
    applied: int = 0  # of `bye`: the number of the newest parcel that the sender applied
    steps: int = 0  # the local steps that the sender has made in this life
    is_narrow: bool = False  # whether the mass is exact in the job's type of the wire


class MessageError(Exception):
    """Bytes are not a message of this job; the text is the reason."""


class Format(NamedTuple):
    """What the messages of a job have in common."""

    job: str  # its name
    model: str  # a text that only nodes with the same model have
    sizes: tuple[int, ...]  # of each buffer
    dtypes: tuple[np.dtype, ...]  # in which a node holds each
    wire_dtypes: tuple[np.dtype, ...]  # in which each travels in a share

    def frame_dtypes(self, is_narrow: bool) -> tuple[np.dtype, ...]:
        """The types of the buffers in a message."""
        return self.wire_dtypes if is_narrow else self.dtypes

    @property
    def max_bytes(self) -> int:
        """The size of the largest frame that is read."""
        frames = zip(self.sizes, self.dtypes, strict=True)
        return max(MAX_HEADER_BYTES, *(size * dtype.itemsize for size, dtype in frames))


def encode(message: Message, job: Format) -> list[Any]:
    """Returns the frames of a message: those of its buffers are not copied where they fit."""
    header: dict[str, Any] = {
        "version": VERSION,
        "job": job.job,
        "model": job.model,
        "kind": message.kind,
        "sender": message.sender,
        "receiver": message.receiver,
        "number": message.number,
        "applied": message.applied,
        "steps": message.steps,
        "is_narrow": message.is_narrow,
    }
    frames: list[Any] = []
    if message.view is not None:
        header["view"] = message.view._asdict()
    if message.mass is not None:
        header["weights"] = [float(message.mass.w), float(message.mass.count)]
        arrays = zip(message.mass.x, job.frame_dtypes(message.is_narrow), strict=True)
        frames = [np.ascontiguousarray(x, dtype).view(np.uint8).data for x, dtype in arrays]
    return [json.dumps(header).encode(), *frames]


def decode(frames: Sequence[Any], job: Format) -> Message:
    """Returns the message in these frames; its arrays are views of them."""
    header = _read_header(frames[0])
    for name, own in (("version", VERSION), ("job", job.job), ("model", job.model)):
        if header.get(name) != own:
            raise MessageError(f"of another {name}")
    kind = header.get("kind")
    if kind not in KINDS:
        raise MessageError("of an unknown kind")
    receiver = header.get("receiver")
    if receiver is not None:
        receiver = _require_text(receiver)
    is_narrow = header.get("is_narrow") is True
    mass = _read_mass(kind, header.get("weights"), frames[1:], job, is_narrow)
    view = _read_view(header.get("view")) if kind == "view" else None
    number, applied, steps = (
        _require_count(header.get(name)) for name in ("number", "applied", "steps")
    )
    sender = _read_identity(header.get("sender"))
    return Message(kind, sender, receiver, number, mass, view, applied, steps, is_narrow)


def _read_header(frame: Any) -> dict[str, Any]:
    if len(frame) > MAX_HEADER_BYTES:
        raise MessageError("too large")
    try:
        header = json.loads(bytes(frame).decode())
    except (ValueError, RecursionError) as error:
        raise MessageError("not readable") from error
    if not isinstance(header, dict):
        raise MessageError("not readable")
    return header


def _read_mass(
    kind: str, weights: object, frames: Sequence[Any], job: Format, is_narrow: bool
) -> Mass | None:
    if kind not in WITH_MASS and not (kind == "answer" and weights is not None):
        if frames:
            raise MessageError("of another shape")
        return None
    match weights:
        case [float() as w, float() as count] if w >= 0 and math.isfinite(w + count):
            pass
        case _:
            raise MessageError("with a weight that is none")
    dtypes = job.frame_dtypes(is_narrow)
    expected = [size * dtype.itemsize for size, dtype in zip(job.sizes, dtypes, strict=True)]
    if [len(frame) for frame in frames] != expected:
        raise MessageError("of another shape")
    x = tuple(
        np.frombuffer(frame, wire).astype(dtype, copy=False)
        for frame, wire, dtype in zip(frames, dtypes, job.dtypes, strict=True)
    )
    if not all(np.isfinite(buffer).all() for buffer in x):
        raise MessageError("with NaN or infinity")
    return Mass(x, w, count)


def _read_view(view: object) -> View:
    match view:
        case {
            "members": [*members],
            "deaths": [*deaths],
            "steps": [*steps],
            "query": query,
            "echo": echo,
            **flags,
        } if (
            max(map(len, (members, deaths, steps))) <= MAX_ENTRIES
            and flags.keys() == VIEW_FLAGS
            and all(isinstance(flag, bool) for flag in flags.values())
        ):
            pairs = [_require_pair(entry) for entry in deaths]
            counts = [_require_pair(entry) for entry in steps]
            return View(
                tuple(map(_read_identity, members)),
                tuple((_read_identity(who), _require_text(life)) for who, life in pairs),
                tuple((_require_text(life), _require_count(number)) for life, number in counts),
                query=_require_count(query),
                echo=_require_count(echo),
                **flags,
            )
    raise MessageError("with a view that is none")


def _read_identity(identity: object) -> Identity:
    match identity:
        case [float() as born, life, place, address] if math.isfinite(born):
            number = _require_count(place)
            return Identity(born, _require_text(life), number, _require_text(address))
    raise MessageError("with an identity that is none")


def _require_pair(value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise MessageError("with a view that is none")
    return value


def _require_count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**53:
        raise MessageError("with a number that is none")
    return value


def _require_text(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise MessageError("with a name that is none")
    return value


def wire_types(dtypes: Iterable[np.dtype], wire: WireLike | None) -> tuple[np.dtype, ...]:
    """The types in which values of these types travel."""
    if wire is None:
        return tuple(dtypes)
    codec = require_codec(wire, "wire")
    if not isinstance(codec, FloatCodec) or codec.dtype == np.float16:
        raise ValueError(
            f"wire must be bfloat16 or a wider type, got {codec}: half of a numerator may lie "
            "outside of a smaller range, and a share is read without a scale."
        )
    return tuple(min(dtype, codec.dtype, key=lambda d: d.itemsize) for dtype in dtypes)
