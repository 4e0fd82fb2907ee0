"""What a row of a measurement exchanges, as the cost model has it."""

import dataclasses

import gossipjax as gx
from experiments.speed.network.loops.buckets import BUCKET_LAYERS
from experiments.speed.network.loops.model import LAYERS
from experiments.speed.network.rows import BUCKETS, CENTRALIZED, Row
from experiments.training.asynchronous import ASYNCHRONOUS
from experiments.training.methods import FORMS
from gossipjax.cost_model import (
    Exchange,
    Method,
    allreduce,
    async_sgp,
    centralized,
    diloco,
    streaming_diloco,
)

PARAMETERS = 2**20  # of a message whose bits per parameter are counted


def make_modelled_method(row: Row) -> Method | None:
    """The exchanges of a row.

    None for a topology that changes during the run, whose rounds take different times, and for
    sparse averages over all nodes, which are no all-reduce.

    >>> from experiments.speed.network.rows import make_row
    >>> method = make_modelled_method(make_row("1-osgp", "bfloat16", 4))
    >>> method.name, method.exchanges[0].overlap, method.exchanges[0].bits
    ('1-osgp', 1, 16.0)
    """
    if not is_modelled(row):
        return None
    if row.outer is not None:
        return _make_outer(row)
    if row.algorithm in ASYNCHRONOUS:
        exchange = _make_asynchronous(row)
    elif row.state is None or row.state.schedule is None:
        exchange = _make_all_reduce(row)
    else:
        exchange = _make_gossip(row, row.state)
    return Method(row.algorithm, (exchange,))


def is_modelled(row: Row) -> bool:
    """Whether the cost model has this row."""
    schedule = None if row.state is None else row.state.schedule
    is_sparse = row.wire in ("top_k", "random_k")
    if schedule is None:
        return not is_sparse
    return len(schedule.segments) == 1


def count_bits(row: Row) -> float:
    """Bits of a parameter in a message, scales and indices included."""
    codec = FORMS[row.wire].codec
    return 32.0 if codec is None else 8 * codec.count_bytes(PARAMETERS) / PARAMETERS


def _make_outer(row: Row) -> Method:
    outer = row.outer
    assert outer is not None
    bits = count_bits(row)
    if outer.delay == 0:
        return diloco(outer.every, wire=bits)
    return streaming_diloco(outer.every, outer.fragments, outer.delay, wire=bits)


def _make_all_reduce(row: Row) -> Exchange:
    bits = count_bits(row)
    if row.algorithm == CENTRALIZED:
        return centralized(bits).exchanges[0]
    if row.algorithm == BUCKETS:
        return allreduce(wire=bits, layers=LAYERS // BUCKET_LAYERS).exchanges[0]
    exchange = allreduce(wire=bits).exchanges[0]
    return dataclasses.replace(exchange, overlap=int(row.overlaps))


def _make_gossip(row: Row, state: gx.GossipState) -> Exchange:
    assert state.schedule is not None
    models = 1 if row.algorithm.startswith("choco") else state.plan.models
    overlap = state.overlap or int(row.overlaps)
    return Exchange(
        schedule=state.schedule,
        bits=count_bits(row),
        fraction=models,
        every=max(1, state.overlap),
        overlap=overlap,
    )


def _make_asynchronous(row: Row) -> Exchange:
    """A message to one other node, unless that before it is still on its way."""
    schedule = gx.topology.one_peer_exponential(row.nodes)
    return async_sgp(schedule, count_bits(row)).exchanges[0]
