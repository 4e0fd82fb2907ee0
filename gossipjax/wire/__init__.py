"""Messages: the form in which values travel, and the axes over which they travel.

A codec encodes one or several flat arrays as one message: unsigned integers, the words, of fixed
shapes. (Floating-point words would not do, because XLA on CPU widens a bfloat16 collective to
float32.)

- dense: `bfloat16()`, `float16()`, `int8()`, `int4()`: every value is rounded.
- sparse: `top_k(fraction)`, `random_k(fraction)`, `block_top_k(count, block)`: most values are left
  out.
- `low_rank(rank)`: matrices, for an average over all nodes. It is not a codec.

You can give `wire=` of a transform a floating-point type, such as `jnp.bfloat16`, or a dense codec.
`gx.choco`, `gx.allreduce` and `gx.outer(error_feedback=)` take sparse codecs, too. The sender keeps
what a message leaves out, so sums over the nodes are exact in any form.

A value that is not finite never arrives finite, nor does any value of its block, if values share a
scale.

Rounding errors do not vanish as the nodes agree. Gossip of whole models therefore stops at a
consensus distance above 0. On 8 nodes, as a part of the model's norm, it was about 1.5e-3 in
bfloat16, 5e-3 with int8 and 0.09 with int4 in blocks of 256, if the largest value of a block is
twice the root mean square; with a larger ratio the distance grows. Differences do vanish, so
`gx.choco`, which sends differences, goes below 1e-6 with any codec.
"""

from gossipjax.renamed import old_names

# What other modules of the library share is imported under its name, and not in `__all__`.
from gossipjax.wire._block_top_k import BlockTopK, block_top_k
from gossipjax.wire._codec import Codec
from gossipjax.wire._codec import as_key as as_key
from gossipjax.wire._codec import as_values as as_values
from gossipjax.wire._codec import as_words as as_words
from gossipjax.wire._codec import fold_in as fold_in
from gossipjax.wire._codec import make_seed_key as make_seed_key
from gossipjax.wire._codec import require_key as require_key
from gossipjax.wire._floats import MIN_BITS as MIN_BITS
from gossipjax.wire._floats import FloatCodec, bfloat16, float16, float32
from gossipjax.wire._floats import is_real_float as is_real_float
from gossipjax.wire._floats import round_to as round_to
from gossipjax.wire._integers import IntegerCodec, int4, int8
from gossipjax.wire._integers import draw_words as draw_words
from gossipjax.wire._low_rank import LowRank, low_rank
from gossipjax.wire._low_rank import matrix_shape as matrix_shape
from gossipjax.wire._messages import Wire, WireLike
from gossipjax.wire._messages import concatenate_in_place as concatenate_in_place
from gossipjax.wire._messages import decode_array as decode_array
from gossipjax.wire._messages import decode_each as decode_each
from gossipjax.wire._messages import encode_array as encode_array
from gossipjax.wire._messages import encode_each as encode_each
from gossipjax.wire._messages import encode_pieces as encode_pieces
from gossipjax.wire._messages import is_cpu_over_processes as is_cpu_over_processes
from gossipjax.wire._messages import is_narrower as is_narrower
from gossipjax.wire._messages import require_codec as require_codec
from gossipjax.wire._messages import split_by_size as split_by_size
from gossipjax.wire._sparse import RandomK, TopK, random_k, top_k

__all__ = [
    "BlockTopK",
    "Codec",
    "FloatCodec",
    "IntegerCodec",
    "LowRank",
    "RandomK",
    "TopK",
    "Wire",
    "WireLike",
    "bfloat16",
    "block_top_k",
    "float16",
    "float32",
    "int4",
    "int8",
    "low_rank",
    "random_k",
    "top_k",
]

__getattr__ = old_names("wire")
