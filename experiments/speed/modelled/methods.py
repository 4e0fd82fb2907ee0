"""What a row of a measurement exchanges, as the cost model has it."""

import gossipjax as gx
from experiments.speed.network.loops.buckets import BUCKET_LAYERS
from experiments.speed.network.loops.model import LAYERS
from experiments.speed.network.rows import BUCKETS, CENTRALIZED, Row
from experiments.training.asynchronous import ASYNCHRONOUS
from experiments.training.methods import FORMS
from gossipjax.cost_model import (
    Method,
    allreduce,
    async_sgp,
    centralized,
    diloco,
    from_plan,
    streaming_diloco,
)


def make_modelled_method(row: Row) -> Method | None:
    """The exchanges of a row.

    None for a topology that changes during the run, whose rounds take different times, and for
    sparse averages over all nodes, which are no all-reduce.

    >>> from experiments.speed.network.rows import make_row
    >>> method = make_modelled_method(make_row("1-osgp", "bfloat16", 4))
    >>> method.name, method.exchanges[0].overlap, method.exchanges[0].bits
    ('1-osgp', 1, 16.0)
    """
    codec = FORMS[row.wire].codec
    outer = row.outer
    if outer is not None:
        if outer.delay == 0:
            return diloco(outer.every, wire=codec)
        return streaming_diloco(outer.every, outer.fragments, outer.delay, wire=codec)
    if row.algorithm in ASYNCHRONOUS:
        return async_sgp(gx.topology.one_peer_exponential(row.nodes), codec)
    if row.state is not None:
        schedule = row.state.schedule
        is_modelled = schedule is None or len(schedule.segments) == 1
        return from_plan(row.state.plan, row.algorithm) if is_modelled else None
    if row.algorithm == CENTRALIZED:
        return centralized(codec)
    if row.algorithm == BUCKETS:
        return allreduce(wire=codec, layers=LAYERS // BUCKET_LAYERS)
    return None if codec is not None and codec.is_sparse else allreduce(wire=codec)
