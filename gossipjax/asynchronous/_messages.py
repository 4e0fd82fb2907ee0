"""The messages of nodes, and their bytes: a header in JSON, then a frame for each buffer.

A frame has a buffer as it is, or as the words of a codec. A message may come from a stranger. So
nothing is unpickled, and every value is checked before it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from gossipjax.wire import Codec, WireLike, fold_in, require_codec

Wire = Codec | None  # None: a buffer travels as it is
VERSION = 7
MAX_HEADER_BYTES = 1 << 22
MAX_TEXT = 300
MAX_ENTRIES = 20_000
MAX_NAME = 64
MAX_AGE = 1e9  # seconds
MAX_WEIGHT = 1 << 14  # of as many founders as a job may have
MIN_EXPONENT = -(1 << 30)
MAX_COUNT = 2**53
CHUNK = 1 << 16  # numbers that are checked or compared together
WITH_MASS = ("share", "ask", "final")
KINDS = ("view", "ack", "answer", "refuse", "dead", "gone", "bye", "withdraw", *WITH_MASS)


@dataclasses.dataclass(frozen=True)
class Mass:
    """A numerator with its weight. Masses are added and divided, and their sum stays the same."""

    # The numerator: arrays, or numbers, of any type, in units of `2^exponent`. Where momentum
    # travels, the second half of them is the momentum, times the weight.
    x: tuple[Any, ...]
    w: Any  # the push-sum weight, in the same units; the model is `x / w`
    # Weight is lost when nodes die. So nodes choose units in which their weight is near 1, which
    # changes no bit of the model.
    exponent: int = 0
    # Whether nothing else uses the arrays of `x`, so that who gets this mass may overwrite them.
    is_fresh: bool = dataclasses.field(default=False, compare=False)

    def at(self, exponent: int) -> Mass:
        """Returns the same mass in units of `2^exponent`."""
        if exponent == self.exponent:
            return self
        factor = self._factor(exponent)
        return Mass(tuple(a * factor for a in self.x), self.w * factor, exponent)

    def __add__(self, other: Mass) -> Mass:
        # The sum is in the larger units; those of a mass without weight do not count.
        exponents = [m.exponent for m in (self, other) if m.w] or [self.exponent, other.exponent]
        one, two = (mass.at(max(exponents)) for mass in (self, other))
        x = tuple(a + b for a, b in zip(one.x, two.x, strict=True))
        return Mass(x, one.w + two.w, one.exponent)

    def __neg__(self) -> Mass:
        return Mass(tuple(-a for a in self.x), -self.w, self.exponent)

    def __sub__(self, other: Mass) -> Mass:
        return self + -other

    def __truediv__(self, divisor: int) -> Mass:
        x = tuple(a / divisor for a in self.x)
        return Mass(x, self.w / divisor, self.exponent)

    def weight_at(self, exponent: int) -> Any:
        """Returns the weight in units of `2^exponent`."""
        return self.w * self._factor(exponent)

    def _factor(self, exponent: int) -> float:
        """Returns the factor that brings a number of this mass into units of `2^exponent`."""
        return 2.0 ** min(self.exponent - exponent, 1000)  # 2^1024 is no float

    @property
    def bare(self) -> Mass:
        """The same mass without its numerator, for whoever needs the weight only."""
        return dataclasses.replace(self, x=())

    @property
    def weight(self) -> float:
        """`w 2^exponent`, or 0 if a float cannot hold so small a number."""
        return math.ldexp(float(self.w), self.exponent)


class Identity(NamedTuple):
    """Identifies one life of a node, from its start until it exits or is declared dead.

    A node that starts again, or goes on after others declared it dead, gets a new identity. If only
    one of two lives may go on or be answered, it is the one whose identity is smaller.
    """

    place: int  # the node's number in its job, the same in all its lives
    life: str  # a name that no other life has
    address: str  # where it listens, `host:port`


class View(NamedTuple):
    """Tells other nodes what a node knows about the job and about itself."""

    members: tuple[Identity, ...] = ()  # the nodes that it hears
    beats: tuple[int, ...] = ()  # how often each member has said that it lives
    # A node, the life that it declared dead, and the seconds since then.
    deaths: tuple[tuple[Identity, str, float], ...] = ()
    steps: tuple[tuple[int, int], ...] = ()  # a place, and the local steps of its lives
    finals: tuple[tuple[str, int], ...] = ()  # life -> version of the final mass that it has
    wants_mass: bool = False  # whether the node has no mass
    begs: bool = False  # whether it asks for half of the receiver's mass
    is_ready: bool = False  # whether it is ready to begin
    is_finished: bool = False  # whether it makes no more steps and sends no more shares
    is_drained: bool = False  # whether also nothing that it sent is on its way
    is_ending: bool = False  # whether the eldest has said that all are drained
    is_ended: bool = False  # whether the eldest has said that `finals` count
    beat: int = 0  # how often it has said that it lives
    branch: int = 0  # `Founding.branch`
    query: int = 0  # the receiver sends it back as `echo`; 0 is none
    echo: int = 0  # the receiver's newest query
    node_weight: float = 0.0  # as its `join` got it
    figure: str = "none"  # the newest number of `Node.mean`, and " last" after `Node.average`


VIEW_FORMS = get_type_hints(View)
# Why a message is dropped, by the form that one of its values should have. Values of all other
# forms are parts of a view.
REASONS: dict[Any, str] = {
    int: "with a number that is none",
    str: "with a name that is none",
    Identity: "with an identity that is none",
}


class Message(NamedTuple):
    """A message from one node to another, each in one of its lives; see `Identity`.

    `view` says that the sender lives. `share`, `ask`, `final` and `bye` are parcels. An `answer`
    acknowledges an `ask`, and an `ack` the other parcels. `refuse` says why a parcel will never be
    acted upon, and `withdraw` takes a parcel back. `dead` says that the receiver was declared dead,
    and `gone` that another life has its address.
    """

    kind: str  # one of `KINDS`
    sender: Identity
    receiver: str | None  # the life that it is for; None is whichever listens at the address
    number: int = 0  # of a parcel, from 1 on, or of the parcel that is acknowledged
    # Of `share`, the share; of `ask` and `final`, a copy of what a node holds; of `answer`, what
    # its sender has gained. None in that declines, and stands for a mass that cannot be read.
    mass: Mass | None = None
    view: View | None = None
    applied: int = 0  # of `bye`: the number of the newest parcel that the sender applied
    steps: int = 0  # the local steps of the sender's place
    is_narrow: bool = False  # whether the mass is exact in the job's type of the wire
    text: str = ""  # of `refuse`, the reason; of `gone`, the life
    origin: Identity | None = None  # of `final`: whose mass it is
    # Of `final`: which of those that this node had at the end; of `share`, its sender's clock.
    version: int = 0


class MessageError(Exception):
    """The bytes that arrived are not a message of this job. The text says why."""


class MisfitError(MessageError):
    """The sender does not fit into this job. Its arguments are the reason, and what would fit."""


class Format(NamedTuple):
    """The properties that all messages of a job share."""

    header: dict[str, Any]  # job, model, algorithm and wire, and the version of the protocol
    # For each buffer: how it travels in a share, its size, and the type in which a node holds it.
    buffers: tuple[tuple[Wire, int, np.dtype], ...]

    def list_forms(self, is_narrow: bool) -> list[tuple[Wire, int, np.dtype]]:
        """Returns how each buffer travels (coded only if `is_narrow`), its size and its type."""
        return [(wire if is_narrow else None, size, dtype) for wire, size, dtype in self.buffers]


def encode(message: Message, job: Format) -> list[Any]:
    """Returns the frames of a message; does not copy buffers that are in the right form."""
    # In a header, `version` is that of the protocol, so the message's own is named `final`.
    header: dict[str, Any] = message._asdict() | {"final": message.version} | job.header
    del header["mass"], header["view"]
    frames: list[Any] = []
    if message.view is not None:
        header["view"] = message.view._asdict()
    if message.mass is not None:
        mass = message.mass
        header["weight"] = [float(mass.w), mass.exponent]
        buffers = zip(mass.x, job.list_forms(message.is_narrow), strict=True)
        frames = [as_bytes(x, wire, dtype) for x, (wire, _, dtype) in buffers]
    return [json.dumps(header).encode(), *frames]


def decode(frames: Sequence[Any], job: Format) -> Message:
    """Returns the message in these frames; its arrays are views of the frames.

    Raises:
      MessageError: if the frames are not a message of this job.
    """
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise MessageError("too large")
    header = read_json(frames[0])
    if not isinstance(header, dict):
        raise MessageError("not readable")
    for name, own in job.header.items():
        if header.get(name) != own:
            raise MisfitError(f"of another {name}", str(own))
    kind = header.get("kind")
    if kind not in KINDS:
        raise MessageError("of an unknown kind")
    receiver = None if header.get("receiver") is None else read_as(str, header["receiver"])
    is_narrow = header.get("is_narrow") is True
    text = header.get("text")
    if not isinstance(text, str) or len(text) > MAX_TEXT or not text.isprintable():
        raise MessageError(REASONS[str])
    try:
        mass = _read_mass(kind, header.get("weight"), frames[1:], job, is_narrow)
    except MessageError as error:
        if kind not in WITH_MASS:
            raise
        mass = None  # the receiver refuses a parcel without mass, so its sender takes the mass back
        text = str(error)
    view = _read_view(header.get("view")) if kind == "view" else None
    names = ("number", "applied", "steps", "final")
    number, applied, steps, version = (read_as(int, header.get(name)) for name in names)
    sender = read_as(Identity, header.get("sender"))
    origin = None if header.get("origin") is None else read_as(Identity, header["origin"])
    return Message(  # in the order of its fields
        kind, sender, receiver, number, mass, view, applied, steps, is_narrow, text, origin, version
    )


def read_json(frame: Any) -> Any:
    """Returns the value in a frame of JSON; raises `MessageError` if it cannot be read."""
    try:
        return json.loads(bytes(frame).decode())
    except (ValueError, RecursionError) as error:
        raise MessageError("not readable") from error


def _read_mass(
    kind: str, weight: object, frames: Sequence[Any], job: Format, is_narrow: bool
) -> Mass | None:
    """Returns the mass of a message, None if its kind has none; raises `MessageError` if wrong."""
    if kind not in WITH_MASS and not (kind == "answer" and weight is not None):
        if frames:
            raise MessageError("of another shape")
        return None
    match weight:
        case [float() as w, int() as exponent] if (
            (kind == "answer" or w >= 0)
            and abs(w) < MAX_WEIGHT**2  # in units that may be too small for it by now
            and MIN_EXPONENT <= exponent <= math.log2(MAX_WEIGHT)
            and math.ldexp(abs(w), exponent) <= MAX_WEIGHT
        ):
            pass
        case _:
            raise MessageError("with a weight that is none")
    forms = job.list_forms(is_narrow)
    if [len(frame) for frame in frames] != [count_bytes(*form) for form in forms]:
        raise MessageError("of another shape")
    x = tuple(read_frame(frame, *form) for frame, form in zip(frames, forms, strict=True))
    # An answer contains a change, whose weight may be 0, so its values must be finite as they are.
    # Of all others `x / w` must be finite. Without weight there is no model, and x must be 0.
    divisor = 1.0 if kind == "answer" else w
    if not all(is_finite(buffer, divisor) if divisor else not buffer.any() for buffer in x):
        raise MessageError("with NaN or infinity")
    return Mass(x, w, exponent, all(buffer.flags.writeable for buffer in x))


def is_finite(x: np.ndarray, w: float = 1.0) -> bool:
    """Says whether all values of `x / w` are finite; computed in parts that fit into the cache."""
    with np.errstate(over="ignore", invalid="ignore"):
        scale = x.dtype.type(1 / w)
        parts = (x[i : i + CHUNK] for i in range(0, len(x), CHUNK))
        return all(np.isfinite(part * scale).all() for part in parts)


def _read_view(view: object) -> View:
    """Returns a view that has each field in its form; raises `MessageError` for anything else."""
    if isinstance(view, dict) and view.keys() == VIEW_FORMS.keys():
        read = View(**{name: read_as(form, view[name]) for name, form in VIEW_FORMS.items()})
        if len(read.members) == len(read.beats):
            return read
    raise MessageError("with a view that is none")


def read_as(form: Any, value: Any) -> Any:
    """Returns a value of JSON as a type: a number, text, flag, `Identity`, or tuple of these.

    Raises `MessageError` if it does not fit, or is too large. Numbers must be at least 0.
    """
    if form is int and type(value) is int and 0 <= value < MAX_COUNT:
        return value
    if form is str and type(value) is str and 0 < len(value) <= MAX_NAME and value.isprintable():
        return value
    if form is bool and type(value) is bool:
        return value
    if form is float and isinstance(value, int | float) and 0 <= value < MAX_AGE:
        return float(value)
    parts = get_args(form)
    if parts[1:] == (...,) and type(value) is list and len(value) <= MAX_ENTRIES:
        return tuple(read_as(parts[0], one) for one in value)
    if parts and type(value) is list and len(value) == len(parts):
        return tuple(map(read_as, parts, value))
    match value:
        case [place, life, str() as address] if form is Identity and is_address(address):
            return Identity(read_as(int, place), read_as(str, life), address)
    raise MessageError(REASONS.get(form, "with a view that is none"))


def read_numeric(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Returns the host of `host:port` if it is an IP address, and None if it is a name.

    >>> read_numeric("[::1]:5000"), read_numeric("localhost:5000")
    (IPv6Address('::1'), None)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    return None


def is_address(address: str, may_be_any: bool = False) -> bool:
    """Says whether a text is `host:port` in plain letters.

    `may_be_any` allows port 0, for any free port.

    >>> is_address("127.0.0.1:5000"), is_address("[::1]:5000"), is_address("any text")
    (True, True, False)
    """
    host, _, port = address.rpartition(":")
    is_host = re.fullmatch(r"[A-Za-z0-9.-]{1,253}|\[[0-9a-fA-F:.]{2,45}\]", host) is not None
    is_port = re.fullmatch(r"[0-9]{1,5}", port) is not None and int(port) <= 65535
    return is_host and is_port and (may_be_any or int(port) > 0)


def choose_wires(dtypes: Iterable[np.dtype], wire: WireLike | None) -> tuple[Wire, ...]:
    """Returns for each buffer's type the codec that encodes it; None if it travels as it is."""
    if wire is None:
        return tuple(None for _ in dtypes)
    codec = require_codec(wire, "wire")
    if codec.is_sparse:
        raise ValueError(
            f"wire must be a floating-point type, int8() or int4(), got {codec}: a "
            "share must contain every value."
        )
    return tuple(codec if codec.applies_to(dtype) else None for dtype in dtypes)


def make_key(wires: Sequence[Wire], place: int, step: int) -> jax.Array | None:
    """Returns the random key that rounds a node's message of a step; None if no codec needs it."""
    seeds = [wire.seed for wire in wires if wire and wire.needs_key]  # pyright: ignore[reportAttributeAccessIssue]
    return fold_in(fold_in(jax.random.key(seeds[0]), place), step) if seeds else None


class Words:
    """A buffer that a codec has encoded; read as an array, it is what the receiver decodes."""

    def __init__(self, words: np.ndarray, codec: Codec, size: int, dtype: np.dtype):
        self.words = words
        self._codec = codec
        self._like = jax.ShapeDtypeStruct((size,), dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        array = _decode(self.words, self._codec, self._like.size, self._like.dtype)
        return np.asarray(array, dtype)

    def __mul__(self, factor: float) -> np.ndarray:
        return np.asarray(self) * factor


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _decode(words: Any, codec: Codec, size: int, dtype: np.dtype) -> jax.Array:
    """Returns the buffer, `size` numbers, that a codec has encoded as `words`."""
    return codec.decode(jnp.asarray(words), jax.ShapeDtypeStruct((size,), dtype))


def as_bytes(x: Any, wire: Wire, dtype: np.dtype) -> memoryview:
    """Returns the bytes of a buffer, or of its `Words`; copies only to change type or layout."""
    array = np.ascontiguousarray(x, dtype) if wire is None else x.words
    return array.view(np.uint8).data


def count_bytes(wire: Wire, size: int, dtype: np.dtype) -> int:
    """Returns the number of bytes of the frame of a buffer."""
    if wire is None:
        return size * dtype.itemsize
    return wire.count_words(jax.ShapeDtypeStruct((size,), dtype)) * wire.word.itemsize


def read_frame(frame: Any, wire: Wire, size: int, dtype: np.dtype) -> np.ndarray:
    """Returns the buffer in a frame, in the type in which a node holds it."""
    if wire is None:
        return np.frombuffer(frame, dtype)
    return np.asarray(Words(np.frombuffer(frame, wire.word), wire, size, dtype))
