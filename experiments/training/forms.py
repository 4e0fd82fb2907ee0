"""The forms of messages that options name."""

from typing import Literal, NamedTuple, get_args

import gossipjax as gx

DenseName = Literal["float32", "bfloat16", "int8", "int4"]
CodecName = Literal[DenseName, "top_k", "random_k", "block_top_k"]
WireName = Literal[CodecName, "low_rank"]

SPARSE_FRACTION = 0.1  # part of the values that sparse codecs send
RANK = 4  # of the factors that PowerSGD averages


class Form(NamedTuple):
    """A form of messages that options name."""

    wire: gx.wire.Codec | gx.wire.LowRank | None  # None for full precision
    gamma: float = 1.0  # of CHOCO


FORMS: dict[WireName, Form] = {
    "float32": Form(None),
    "bfloat16": Form(gx.wire.bfloat16()),
    "int8": Form(gx.wire.int8()),
    "int4": Form(gx.wire.int4(), 0.5),
    "top_k": Form(gx.wire.top_k(SPARSE_FRACTION), 0.2),
    "random_k": Form(gx.wire.random_k(SPARSE_FRACTION), 0.1),
    "block_top_k": Form(gx.wire.block_top_k(), 0.03),
    "low_rank": Form(gx.wire.low_rank(RANK)),
}
DENSE: tuple[DenseName, ...] = get_args(DenseName)
CODECS: tuple[CodecName, ...] = tuple(name for name in FORMS if name != "low_rank")
