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

# What `wire=` takes: a codec, or a floating-point type, which stands for its `FloatCodec`. Only
# averages over all nodes take a `LowRank`.
WireLike = Codec | DTypeLike | LowRank

MAX_JOINED = 2**14  # values; larger arrays are encoded one by one, because joining costs a copy


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
        """What a transform gets as `wire=` to make this form: a codec, a `LowRank`, or None."""
        return self.low_rank or self.codec

    def __repr__(self) -> str:
        # Saved states contain this text, so it stays as it was before there was a `low_rank`.
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
                f"wire must be a dense codec, such as gx.wire.int8(), got {codec}: this algorithm "
                "sends whole models, and must not leave out values. Use gx.choco, which sends "
                "differences, gx.allreduce(wire=codec), or gx.outer(error_feedback=1)."
            )
        return cls(axis_name, local_axis_name, codec)

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments with which a transform's factory makes this wire again."""
        return {
            "axis_name": self.axis_name,
            "local_axis_name": self.local_axis_name,
            "wire": self.form,
        }

    def make_key(self, count: Any) -> jax.Array | None:
        """Returns the PRNG key for the exchange of update `count`; None if the codec is not random.

        All nodes get the same key. Each then folds in its index, by `fold_in_node`.
        """
        if self.codec is None or not self.codec.needs_key:
            return None
        seed = getattr(self.codec, "seed", 0)
        return jax.random.fold_in(make_seed_key(seed), count)


def require_codec(wire: WireLike, name: str) -> Codec:
    """Returns `wire` if it is a codec; for a floating-point type, the codec that rounds to it."""
    if isinstance(wire, Codec):
        return wire
    if isinstance(wire, LowRank):
        raise ValueError(
            f"{name} must be a codec, such as gx.wire.int8(), got {wire}, whose factors must be "
            "averaged over all nodes at once. Use gx.allreduce(wire=), or gx.outer(wire=, "
            "error_feedback=1)."
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
    """Says whether the codec makes messages of `dtype` smaller; if not, they travel unchanged."""
    return codec is not None and codec.applies_to(dtype)


def encode_array(array: jax.Array, codec: Codec | None, key: jax.Array | None = None) -> jax.Array:
    """Encodes a flat array as words.

    A single value, such as a push-sum weight, keeps its full precision. Values that are not finite
    do not become finite.
    """
    if codec is None or not codec.applies_to(array.dtype):
        return array
    if array.size == 1:  # its bits, as words of the type that the codec's messages have
        return jax.lax.bitcast_convert_type(array, codec.word).ravel()
    return codec.encode(array, key)


def encode_each(
    arrays: Sequence[jax.Array], codec: Codec | None, key: jax.Array | None = None
) -> list[jax.Array]:
    """Encodes flat arrays of one type; their words in this order are one message.

    Small arrays of one size are encoded together if the codec allows it, because XLA takes long to
    compile one encoding for each of them. Every encoding draws its numbers with another key.
    """
    groups = _group_arrays(codec, arrays)
    keys = [None] * len(groups)
    if key is not None:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(len(groups)))
    words = []
    for number, (group_codec, padded_sizes) in enumerate(groups):
        values = []
        for i, size in padded_sizes.items():
            padding = size - arrays[i].size
            values.append(jnp.pad(arrays[i], (0, padding)) if padding else arrays[i])
        words.append(encode_array(concatenate_in_place(values), group_codec, keys[number]))
    return words


def _group_arrays(
    codec: Codec | None, like: Sequence[Like]
) -> list[tuple[Codec | None, dict[int, int]]]:
    """Groups arrays that are encoded as one; a group is a codec, and the padded sizes by index."""
    groups: dict[Any, dict[int, int]] = {}  # by the joint codec, or the index of a single array
    for i, array in enumerate(like):
        joined = None
        if codec is not None and 1 < array.size <= MAX_JOINED and codec.applies_to(array.dtype):
            joined = codec.join(array.size)
        group, size = joined or (i, array.size)
        groups.setdefault(group, {})[i] = size
    return [(codec if isinstance(group, int) else group, sizes) for group, sizes in groups.items()]


def encode_pieces(
    pieces: Sequence[jax.Array], codec: Codec, key: jax.Array | None = None
) -> jax.Array:
    """Encodes one array that is given in pieces; the words are those of the whole array.

    If the codec allows it, the pieces are encoded before they are concatenated, because then the
    concatenation moves fewer bytes.
    """
    whole = jax.ShapeDtypeStruct((sum(piece.size for piece in pieces),), pieces[0].dtype)
    # Ask for the whole: a piece of a single value would never be scaled.
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
    # A single value travels as its bits, in one word or several.
    words = words if words.dtype.itemsize == like.dtype.itemsize else words.reshape(1, -1)
    return jax.lax.bitcast_convert_type(words, like.dtype)


def decode_each(
    words: Sequence[jax.Array], codec: Codec | None, like: Sequence[Like]
) -> list[jax.Array]:
    """Decodes `words`, which `encode_each` made, to flat arrays with sizes and types of `like`."""
    arrays: list[Any] = [None] * len(like)
    groups = _group_arrays(codec, like)
    for group_words, (group_codec, padded_sizes) in zip(words, groups, strict=True):
        dtype = like[next(iter(padded_sizes))].dtype  # that of all arrays of the group
        whole = jax.ShapeDtypeStruct((sum(padded_sizes.values()),), dtype)
        values = decode_array(group_words, group_codec, whole)
        # Several arrays read these values: without `compute_once`, XLA would decode the group again
        # for each of them. It takes integers, so the values pass through it as bits.
        if len(padded_sizes) > 1:
            bits = np.dtype(f"uint{8 * dtype.itemsize}")
            once = compute_once(jax.lax.bitcast_convert_type(values, bits))
            values = jax.lax.bitcast_convert_type(once, dtype)
        parts = split_by_size(values, list(padded_sizes.values()))
        for i, padded in zip(padded_sizes, parts, strict=True):
            arrays[i] = padded[: like[i].size]
    return arrays


def split_by_size(buffer: Any, sizes: Sequence[int]) -> list[Any]:
    """Cuts a flat buffer, of JAX or NumPy, into consecutive slices of these sizes."""
    ends = itertools.accumulate(sizes, initial=0)
    return [buffer[start:stop] for start, stop in itertools.pairwise(ends)]


def concatenate_in_place(arrays: Sequence[jax.Array]) -> jax.Array:
    """Concatenates flat arrays, by writing each into one buffer where that is faster.

    It is faster on GPUs, and on CPU over several processes: a concatenation of many arrays costs
    two more passes over memory, and explicit writes cost one. Elsewhere it is a plain
    concatenation: in one process on CPU, where nodes are simulated, XLA may fuse such writes with a
    permutation of what they write to. The result must not be an output that takes a donated
    argument's memory.
    """
    if len(arrays) == 1:
        return arrays[0]
    if is_cpu_over_processes():
        return _write_slices(arrays)
    on_gpu = {"cuda": _write_slices, "rocm": _write_slices}
    return jax.lax.platform_dependent(arrays, default=jnp.concatenate, **on_gpu)


def is_cpu_over_processes() -> bool:
    """Says whether JAX runs on CPU over several processes, whose messages go through Gloo."""
    return jax.default_backend() == "cpu" and jax.process_count() > 1


def _write_slices(arrays: Sequence[jax.Array]) -> jax.Array:
    """Concatenates flat arrays by writing each into an empty buffer."""
    buffer = jax.lax.empty((sum(array.size for array in arrays),), arrays[0].dtype)
    start = 0
    for array in arrays:
        buffer = jax.lax.dynamic_update_slice(buffer, array, (start,))
        start += array.size
    return buffer
