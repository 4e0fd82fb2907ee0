"""Messages as bytes: a header in JSON, then a frame of raw numbers for each buffer.

Whatever arrives may come from a stranger: nothing is unpickled, and every value is checked before
it is used.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gossipjax.asynchronous.protocol import KINDS, Identity, Mass, Message, View

VERSION = 1
MAX_HEADER_BYTES = 1 << 22
MAX_TEXT = 300
MAX_ENTRIES = 20_000
WITH_MASS = ("share", "ask", "final")


class MessageError(Exception):
    """Bytes that are no message of this job; the text is the reason."""


class Format(NamedTuple):
    """What the messages of a job have in common.

    Attributes:
      job: its name.
      model: a text that only nodes with the same model have.
      sizes: number of values of each buffer.
      dtypes: the type in which a node holds each.
      wire_dtypes: the type in which each travels in a share.
    """

    job: str
    model: str
    sizes: tuple[int, ...]
    dtypes: tuple[np.dtype, ...]
    wire_dtypes: tuple[np.dtype, ...]

    def frame_dtypes(self, is_narrow: bool) -> tuple[np.dtype, ...]:
        """The types of the buffers in a message."""
        return self.wire_dtypes if is_narrow else self.dtypes

    @property
    def max_bytes(self) -> int:
        """The size of the largest frame that is read."""
        widths = [dtype.itemsize for dtype in self.dtypes]
        largest = [size * width for size, width in zip(self.sizes, widths, strict=True)]
        return max(MAX_HEADER_BYTES, *largest)


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
        dtypes = job.frame_dtypes(message.is_narrow)
        arrays = zip(message.mass.x, dtypes, strict=True)
        frames = [np.ascontiguousarray(x, dtype).view(np.uint8).data for x, dtype in arrays]
    return [json.dumps(header).encode(), *frames]


def decode(frames: Sequence[Any], job: Format) -> Message:
    """Returns the message in these frames; its arrays are views of them.

    Raises:
      MessageError: if they are not a message of this job.
    """
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
    number = _require_count(header.get("number"))
    applied = _require_count(header.get("applied"))
    steps = _require_count(header.get("steps"))
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
            "wants_mass": bool() as wants_mass,
            "begs": bool() as begs,
            "is_ready": bool() as is_ready,
            "is_finished": bool() as is_finished,
            "is_drained": bool() as is_drained,
            "query": query,
            "echo": echo,
        } if max(map(len, (members, deaths, steps))) <= MAX_ENTRIES:
            pairs = [_require_pair(entry) for entry in deaths]
            counts = [_require_pair(entry) for entry in steps]
            return View(
                tuple(map(_read_identity, members)),
                tuple((_read_identity(who), _require_text(life)) for who, life in pairs),
                tuple((_require_text(life), _require_count(number)) for life, number in counts),
                wants_mass,
                begs,
                is_ready,
                is_finished,
                is_drained,
                _require_count(query),
                _require_count(echo),
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


def narrow(dtype: Any, wire_dtype: Any | None) -> np.dtype:
    """The type in which values of `dtype` travel."""
    dtype = np.dtype(dtype)
    wire = dtype if wire_dtype is None else np.dtype(jnp.dtype(wire_dtype))
    return wire if wire.itemsize < dtype.itemsize else dtype
