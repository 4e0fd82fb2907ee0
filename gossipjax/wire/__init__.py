"""What travels: the form of messages, over which axes they go, and as which words.

A message is one or several flat arrays, encoded by a codec, as unsigned integers of fixed shapes.
(Floating-point words would not do: XLA on CPU widens a bfloat16 collective to float32 by itself.)

- dense: `bfloat16()`, `float16()`, `int8()`, `int4()`: every value is rounded.
- sparse: `top_k(fraction)`, `random_k(fraction)`, `block_top_k(count, block)`: most values are left
  out.

`wire=` of a transform takes a floating-point type, such as `jnp.bfloat16`, or a dense codec;
`gx.choco`, `gx.deepsqueeze`, `gx.allreduce` and `gx.outer(error_feedback=)` take sparse codecs,
too. What a message leaves out stays at its sender, so that the sums over the nodes are exact in any
form.

Values that are not finite arrive as such; where values share a scale, all of their block do.

Rounding does not vanish as the nodes agree, so that gossip of whole models ends at a consensus
distance, measured on 8 nodes as a part of the model's norm: about 1.5e-3 in bfloat16, 5e-3 with
int8 and 0.09 with int4 in blocks of 256, where the largest value of a block is twice the root mean
square; the floor grows with that ratio. `gx.choco` sends differences, which do vanish: it goes
below 1e-6 with any codec.
"""

from gossipjax.wire._block_top_k import BlockTopK, block_top_k
from gossipjax.wire._codec import (
    Codec,
    WireLike,
    as_key,
    fold_in,
    make_seed_key,
    require_key,
    require_seed,
)
from gossipjax.wire._floats import (
    MIN_BITS,
    FloatCodec,
    bfloat16,
    float16,
    float32,
    is_real_float,
)
from gossipjax.wire._integers import IntegerCodec, int4, int8
from gossipjax.wire._messages import (
    Wire,
    concatenate_in_place,
    decode,
    decode_each,
    encode,
    encode_each,
    encode_pieces,
    is_cpu_over_processes,
    is_narrower,
    leaf_keys,
    make_wire,
    require_codec,
    split_by_size,
)
from gossipjax.wire._sparse import RandomK, TopK, random_k, top_k

__all__ = [
    "MIN_BITS",
    "BlockTopK",
    "Codec",
    "FloatCodec",
    "IntegerCodec",
    "RandomK",
    "TopK",
    "Wire",
    "WireLike",
    "as_key",
    "bfloat16",
    "block_top_k",
    "concatenate_in_place",
    "decode",
    "decode_each",
    "encode",
    "encode_each",
    "encode_pieces",
    "float16",
    "float32",
    "fold_in",
    "int4",
    "int8",
    "is_cpu_over_processes",
    "is_narrower",
    "is_real_float",
    "leaf_keys",
    "make_seed_key",
    "make_wire",
    "random_k",
    "require_codec",
    "require_key",
    "require_seed",
    "split_by_size",
    "top_k",
]
