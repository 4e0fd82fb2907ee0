"""Messages: their axes, their form, and how several arrays become one message."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gossipjax.wire._codec import Codec, Like, compute_once, make_seed_key
from gossipjax.wire._floats import MIN_BITS, FloatCodec, is_real_float
from gossipjax.wire._low_rank import LowRank

# What `wire=` takes: a codec, or the type of `FloatCodec`; averages over all nodes, factors, too.
WireLike = Codec | DTypeLike | LowRank

MAX_JOINED = 2**14  # values of an array that is encoded with others, which costs a copy


class Wire(NamedTuple):
    """The axes and the form of messages.

    Attributes:
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of the devices of one node; None if a node is one device.
      codec: the form of the values in a message; None for their full precision.
      low_rank: the rank of the factors that travel in place of matrices; None for whole leaves.

    >>> import gossipjax as gx
    >>> Wire("nodes", codec=gx.wire.bfloat16()).axis_name
    'nodes'
    """

    axis_name: str = "nodes"
    local_axis_name: str | None = None
    codec: Codec | None = None
    low_rank: LowRank | None = None

    @property
    def form(self) -> Codec | LowRank | None:
        """The codec or the rank."""
        return self.low_rank or self.codec

    def __repr__(self) -> str:
        # As before there was a `low_rank`: saved states are compared with it.
        axes = f"axis_name={self.axis_name!r}, local_axis_name={self.local_axis_name!r}"
        return f"Wire({axes}, codec={self.form!r})"

    @classmethod
    def make(
        cls,
        axis_name: str,
        local_axis_name: str | None = None,
        wire: WireLike | None = None,
        takes_sparse: bool = False,
        takes_low_rank: bool = False,
    ) -> Wire:
        """Makes a `Wire` from the arguments of a transform's factory.

        Raises:
          ValueError: if `wire` is neither a floating-point type of at least 16 bits nor a codec, or
            if it is sparse or of a low rank and `takes_sparse` or `takes_low_rank` is false.

        >>> Wire.make("nodes", wire="bfloat16").codec
        bfloat16()
        """
        if isinstance(wire, LowRank) and takes_low_rank:
            return cls(axis_name, local_axis_name, low_rank=wire)
        codec = None if wire is None else require_codec(wire, "wire")
        if codec is not None and codec.is_sparse and not takes_sparse:
            raise ValueError(
                f"wire must be a dense codec, such as gx.wire.int8(), got {codec}: values that are "
                "not sent would keep their mass and lose their weight. Use gx.choco, which sends "
                "differences, gx.allreduce(wire=codec), or gx.outer(error_feedback=1)."
            )
        return cls(axis_name, local_axis_name, codec)

    def arguments(self) -> dict[str, Any]:
        """The arguments with which a transform's factory makes this wire again."""
        return {
            "axis_name": self.axis_name,
            "local_axis_name": self.local_axis_name,
            "wire": self.form,
        }

    def make_key(self, count: Any) -> jax.Array | None:
        """The key of the exchange of update `count`; None for a codec that draws no numbers.

        All nodes get the same key, and fold their index in; see `fold_in_node`.
        """
        if self.codec is None or not self.codec.needs_key:
            return None
        seed = getattr(self.codec, "seed", 0)
        return jax.random.fold_in(make_seed_key(seed), count)


def require_codec(wire: WireLike, name: str) -> Codec:
    """Returns a codec; for a floating-point type, the codec that rounds to this type."""
    if isinstance(wire, Codec):
        return wire
    if isinstance(wire, LowRank):
        raise ValueError(
            f"{name} must be a codec, such as gx.wire.int8(), got {wire}, whose factors are "
            "averages over all nodes: what a message left out would keep its mass and lose its "
            "weight. Use gx.allreduce(wire=), or gx.outer(wire=, error_feedback=1)."
        )
    try:
        dtype = None if wire is None else jnp.dtype(wire)
    except TypeError:
        dtype = None
    if dtype is None or not is_real_float(dtype):
        raise ValueError(
            f"{name} must be a codec, such as gx.wire.int8(), or a floating-point type of "
            f"{MIN_BITS} bits or more, such as jnp.bfloat16, got {wire!r}."
        )
    return FloatCodec(dtype)


def is_narrower(codec: Codec | None, dtype: np.dtype) -> bool:
    """Whether this codec encodes a message of `dtype`."""
    return codec is not None and codec.applies_to(dtype)


def encode_array(array: jax.Array, codec: Codec | None, key: jax.Array | None = None) -> jax.Array:
    """Encodes a flat array as words.

    A single value, such as a push-sum weight, keeps its full precision. Values that are not finite
    do not become finite.
    """
    if codec is None or not codec.applies_to(array.dtype):
        return array
    if array.size == 1:
        return jax.lax.bitcast_convert_type(array, codec.word).ravel()
    return codec.encode(array, key)


def encode_each(
    arrays: Sequence[jax.Array], codec: Codec | None, key: jax.Array | None = None
) -> list[jax.Array]:
    """Encodes flat arrays of one type; their words in this order are one message.

    Small arrays are encoded together where the codec allows it, since XLA takes long to compile a
    program for each. Each of the returned arrays of words has drawn with another key.
    """
    groups = _group(codec, arrays)
    keys = [None] * len(groups)
    if key is not None:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(len(groups)))
    words = []
    for number, (joint, group) in enumerate(groups):
        values = []
        for i, size in group.items():
            padding = size - arrays[i].size
            values.append(jnp.pad(arrays[i], (0, padding)) if padding else arrays[i])
        words.append(encode_array(concatenate_in_place(values), joint, keys[number]))
    return words


def _group(codec: Codec | None, like: Sequence[Like]) -> list[tuple[Codec | None, dict[int, int]]]:
    """Returns codecs with the arrays that each encodes as one: their numbers and padded sizes."""
    groups: dict[Any, dict[int, int]] = {}
    for i, array in enumerate(like):
        joint = None
        if codec is not None and 1 < array.size <= MAX_JOINED and codec.applies_to(array.dtype):
            joint = codec.join(array.size)
        joint, size = joint or (i, array.size)
        groups.setdefault(joint, {})[i] = size
    return [(codec if isinstance(joint, int) else joint, group) for joint, group in groups.items()]


def encode_pieces(
    pieces: Sequence[jax.Array], codec: Codec, key: jax.Array | None = None
) -> jax.Array:
    """Encodes one array that is given in pieces.

    If the codec allows it, pieces are rounded before they are concatenated, which then moves half
    the bytes.
    """
    whole = jax.ShapeDtypeStruct((sum(piece.size for piece in pieces),), pieces[0].dtype)
    # The whole decides about the scale: pieces of one value would seem to need none.
    is_scaled = isinstance(codec, FloatCodec) and codec.is_scaled(whole)
    if is_scaled or not codec.is_elementwise:
        pieces = [concatenate_in_place(pieces)]
    return concatenate_in_place([codec.encode(piece, key) for piece in pieces])


def decode_array(words: jax.Array, codec: Codec | None, like: Like) -> jax.Array:
    """Decodes `words`, which `encode` made, to a flat array with the size and type of `like`.

    >>> from gossipjax.wire import bfloat16
    >>> sent = jnp.array([1.0, 0.1])
    >>> decode_array(encode_array(sent, bfloat16()), bfloat16(), sent).tolist()
    [1.0, 0.10009765625]
    """
    if codec is None or not codec.applies_to(like.dtype):
        return words
    if like.size > 1 or not like.size:
        return codec.decode(words, like)
    words = words if words.dtype.itemsize == like.dtype.itemsize else words.reshape(1, -1)
    return jax.lax.bitcast_convert_type(words, like.dtype)


def decode_each(
    words: Sequence[jax.Array], codec: Codec | None, like: Sequence[Like]
) -> list[jax.Array]:
    """Decodes `words`, which `encode_each` made, to flat arrays with sizes and types of `like`."""
    arrays: list[Any] = [None] * len(like)
    for part, (joint, group) in zip(words, _group(codec, like), strict=True):
        whole = jax.ShapeDtypeStruct((sum(group.values()),), like[next(iter(group))].dtype)
        values = decode_array(part, joint, whole)
        if len(group) > 1:  # else XLA would decode again in the program of each array
            bits = np.dtype(f"uint{8 * whole.dtype.itemsize}")
            once = compute_once(jax.lax.bitcast_convert_type(values, bits))
            values = jax.lax.bitcast_convert_type(once, whole.dtype)
        for i, padded in zip(group, split_by_size(values, list(group.values())), strict=True):
            arrays[i] = padded[: like[i].size]
    return arrays


def split_by_size(buffer: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts a flat buffer, of JAX or NumPy, into consecutive slices of these sizes."""
    ends = itertools.accumulate(sizes, initial=0)
    return [buffer[start:stop] for start, stop in itertools.pairwise(ends)]


def concatenate_in_place(arrays: Sequence[jax.Array]) -> jax.Array:
    """Concatenates; computes every array at its offset in the result, if that is faster.

    It is faster on GPUs, and on CPU over several processes: a concatenation of many arrays costs
    two more passes over memory, and explicit writes cost one. But the result may not be an output
    that takes a donated argument's memory. In one process on CPU, where nodes are simulated, XLA
    may fuse such writes with a permutation of what they write to.
    """
    if len(arrays) == 1:
        return arrays[0]
    if is_cpu_over_processes():
        return _write_slices(arrays)
    on_gpu = {"cuda": _write_slices, "rocm": _write_slices}
    return jax.lax.platform_dependent(arrays, default=jnp.concatenate, **on_gpu)


def is_cpu_over_processes() -> bool:
    """Whether messages go through Gloo: JAX on CPU, over several processes."""
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def _write_slices(arrays: Sequence[jax.Array]) -> jax.Array:
    buffer = jax.lax.empty((sum(array.size for array in arrays),), arrays[0].dtype)
    start = 0
    for array in arrays:
        buffer = jax.lax.dynamic_update_slice(buffer, array, (start,))
        start += array.size
    return buffer
