"""`gx.bytes_per_step` against the collectives of compiled programs: all algorithms, all wires."""

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import oracle
import pytest
from algorithms.rows import NO_VARIANTS, ROWS
from compiled_bytes import count_bytes
from jax.sharding import PartitionSpec as P
from modes import make_mesh
from promotion import promoting

import gossipjax as gx
from experiments.speed.compiled.hlo import parse_module
from gossipjax.step import bytes_per_step as counting

N = 4
# Sizes that fill no block of a codec and no row of N.
PARAMS = {"kernel": jnp.ones((7, 9)), "bias": jnp.ones(5), "scale": jnp.ones((3, 11))}
IRREGULAR = gx.topology.from_matrices(
    [[0.5, 0, 0, 0.5], [0.25, 0.5, 0, 0], [0.25, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]]
)
ONE_PEER = gx.topology.one_peer_exponential(N)
RING = gx.topology.ring(N)
COMPLETE = gx.topology.complete(N)
HYBRID = gx.topology.piecewise({0: COMPLETE, 2: gx.topology.star(N), 4: ONE_PEER.every(2)})
DENSE = {
    "bfloat16": gx.wire.bfloat16(),
    "float16": gx.wire.float16(),
    "int8": gx.wire.int8(block=16),
    "int4": gx.wire.int4(block=16),
}
SPARSE = {
    "top_k": gx.wire.top_k(0.1),
    "random_k": gx.wire.random_k(0.1),
    "block_top_k": gx.wire.block_top_k(4, 32),
}
SGD = optax.sgd(0.1, momentum=0.9)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def list_cases():
    rng = np.random.default_rng(1)
    for name in NO_VARIANTS:
        schedule = gx.topology.from_matrices(ROWS[name].matrices(rng, N))
        yield name, ROWS[name].transform(schedule)
    for name in ("float16", "int4"):
        yield f"allreduce, {name}", optax.chain(gx.allreduce(wire=DENSE[name]), SGD)
    for name in ("bfloat16", "int8"):
        yield f"sgp, {name}", gx.sgp(IRREGULAR, wire=DENSE[name])
    wire = DENSE["int8"]  # the others are made as this one is
    yield "sgp of a hybrid, int8", gx.sgp(HYBRID, wire=wire)
    yield "osgp 2, int8", gx.osgp(ONE_PEER, 2, wire=wire)
    yield "osgp 1, int8, complete", gx.osgp(COMPLETE, 1, wire=wire)
    pairs = {"average": gx.topology.random_pairs(N, 2, 0), "anchor_strength": 0.5}
    yield "outer over pairs, int8", gx.outer(SGD, optax.sgd(0.7), 2, wire=wire, **pairs)
    yield "streaming, int8", gx.outer(SGD, OUTER, 3, fragments=3, delay=1, wire=wire)
    for name, wire in SPARSE.items():
        yield f"choco, {name}", gx.choco(RING, wire, 0.05)
        yield f"allreduce, {name}", optax.chain(gx.allreduce(wire=wire), SGD)
    yield "deepsqueeze, int4", gx.contrib.deepsqueeze(RING, DENSE["int4"], 0.4)
    yield "outer, top_k", gx.outer(SGD, OUTER, 2, wire=SPARSE["top_k"], error_feedback=0.9)
    factors = {"wire": gx.wire.low_rank(1), "error_feedback": 0.9}
    yield "outer, low_rank", gx.outer(SGD, OUTER, 2, fragments=2, **factors)
    lazy = gx.topology.from_matrices(oracle.lazy_ring(N))
    yield "d2", gx.contrib.d2(lazy)
    yield "mixed_momentum", gx.contrib.mixed_momentum(RING, 0.1)
    yield "quasi_global_adam", gx.contrib.quasi_global_adam(RING, 0.1)
    yield "relay", gx.contrib.relay(nx.full_rary_tree(2, N))
    yield "sparta", gx.contrib.sparta(RING, 0.25)
    yield "local steps", gx.sgp(HYBRID.every(2))
    yield "osgp of a hybrid", gx.osgp(HYBRID, 2)
    yield "osgp of 5 pieces", gx.osgp(RING, 5)
    yield "outer around osgp", gx.outer(optax.chain(SGD, gx.osgp(ONE_PEER, 2)), OUTER, 4)
    yield "outer around sgp", gx.outer(optax.chain(SGD, gx.sgp(RING)), OUTER, 3, strength=0.5)
    yield "outer over sgp", gx.outer(SGD, optax.sgd(0.7), 2, average=gx.sgp(IRREGULAR))
    layers = gx.layer_fragments(3, {"kernel": 1, "bias": None, "scale": None})
    yield "fragments of layers", gx.outer(SGD, OUTER, 3, fragments=layers)
    yield "outer, none", gx.outer(SGD, OUTER, 2, average="none")
    yield "outer, weighted", gx.outer(SGD, OUTER, 2, weights=[1, 2, 3, 4])
    yield "weighted", optax.chain(SGD, gx.weighted([1, 2, 3, 4]), gx.sgp(RING))
    yield "if finite", gx.apply_if_finite(optax.chain(SGD, gx.sgp(RING)))
    yield "masked", optax.masked(gx.sgp(RING), {"kernel": True, "bias": False, "scale": True})
    faults = gx.faults.Faults(N, arrives=gx.faults.independent_drops(N, 3, 0, 0.3))
    yield "lost messages", gx.faults.sgp(IRREGULAR, faults)
    yield "nothing", SGD


CASES = dict(list_cases())


def compare(nodes, tx, params=PARAMS, specs=None):
    """Asserts that what is counted is what compiled programs send, wherever that is new."""
    traffic = gx.bytes_per_step(tx, params, nodes)
    stacked, state = nodes.init(tx, params)
    seen = set()
    for step, counted in enumerate(np.stack(traffic, axis=1)):
        if counted.tobytes() not in seen:
            seen.add(counted.tobytes())

            def update(updates, state, params, step=step):
                return tx.update(updates, state, params, step=step)

            text = nodes.spmd(update).lower(stacked, state, stacked).compile().as_text()
            compiled = count_bytes(parse_module(text), N, nodes.mesh.size // N)
            np.testing.assert_array_equal(counted, compiled, f"step {step}")
    return traffic


@pytest.mark.parametrize("name", CASES)
def test_equals_what_compiled_programs_send(name):
    compare(gx.Nodes(mesh=make_mesh(N)), CASES[name])


def test_of_random_rounds_one_is_traced(monkeypatch):
    """And the others are what they are alone."""
    traced = []

    def count(*args, count=counting._count):
        traced.append(args)
        return count(*args)

    schedule = gx.topology.random_peer(6, 12, 0)
    outer = gx.outer(SGD, optax.sgd(0.7), 2, average=gx.sgp(schedule, damped=True))
    for tx in (gx.sgp(schedule), gx.osgp(schedule, 2), outer):
        sent, received = gx.bytes_per_step(tx, PARAMS, 6)
        for step, counted in enumerate(zip(sent, received, strict=True)):
            alone = gx.bytes_per_step(tx, PARAMS, 6, steps=[step])
            np.testing.assert_array_equal(counted, [rows[0] for rows in alone])
    monkeypatch.setattr(counting, "_count", count)
    gx.bytes_per_step(gx.sgp(gx.topology.random_pairs(6, 12, 0)), [1.0], 6)
    assert len({args[0] for args in traced if len(args[2]) == 0}) == 1


ON_TWO_DEVICES = {
    "sgp": gx.sgp(HYBRID, local_axis_name="local"),
    "sgp, int8": gx.sgp(IRREGULAR, local_axis_name="local", wire=DENSE["int8"]),
    "choco": gx.choco(RING, SPARSE["top_k"], 0.4, local_axis_name="local"),
    "outer": gx.outer(SGD, OUTER, 2, local_axis_name="local"),
    "after allreduce": optax.chain(
        gx.allreduce(axis_name="local"), gx.sgp(RING, local_axis_name="local")
    ),
}


@pytest.mark.parametrize("name", ON_TWO_DEVICES)
def test_nodes_of_two_devices(name):
    traffic = compare(gx.Nodes(mesh=make_mesh(N, 2)), ON_TWO_DEVICES[name])
    alone = gx.bytes_per_step(ON_TWO_DEVICES[name], PARAMS, gx.Nodes(mesh=make_mesh(N, 1)))
    # Each sends its share, rounded up to equal sizes, and not the whole model.
    assert (traffic.sent <= 1.5 * alone.sent).all()


EVEN = {"kernel": jnp.ones((8, 9)), "scale": jnp.ones((3, 12))}
SPECS = {"kernel": P("fsdp"), "scale": P(None, "fsdp")}
IN_PARTS = {
    "sgp": gx.sgp(HYBRID),
    "allreduce": gx.allreduce(),
    "osgp 2": gx.osgp(RING, 2),
    "outer": gx.outer(SGD, OUTER, 2),
    "streaming": gx.outer(SGD, OUTER, 2, fragments=2, delay=1),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", IN_PARTS)
def test_nodes_that_shard_their_model(name):
    compare(gx.Nodes(mesh=make_mesh(N, 2, "fsdp")), gx.sharded(IN_PARTS[name], SPECS), EVEN)


def test_parameters_of_several_types():
    params = {"a": jnp.ones(6, jnp.bfloat16), "b": jnp.ones((5, 3)), "c": jnp.ones((), jnp.float16)}
    traffic = compare(gx.Nodes(mesh=make_mesh(N)), gx.sgp(RING), params)
    assert (traffic.sent == 2 * 4 * (6 + 15 + 1 + 1)).all()  # numerators are float32


def test_nodes_of_one_device_send_as_if_each_had_its_own():
    shapes = jax.eval_shape(lambda: PARAMS)
    expected = gx.bytes_per_step(gx.sgp(HYBRID), PARAMS, gx.Nodes(mesh=make_mesh(N)))
    for nodes in (N, gx.Nodes(N), gx.Nodes(N, mesh=make_mesh(2))):
        np.testing.assert_array_equal(gx.bytes_per_step(gx.sgp(HYBRID), shapes, nodes), expected)


def test_the_hub_of_a_star_sends_and_receives_all_that_others_do():
    star = gx.bytes_per_step(gx.sgp(gx.topology.star(N)), {"w": jnp.zeros(99)}, N)
    assert star.sent.tolist() == star.received.tolist() == [[1200.0, 400.0, 400.0, 400.0]]
    sent, received = gx.bytes_per_step(gx.sgp(IRREGULAR), {"w": jnp.zeros(99)}, N)
    assert sent.tolist() == [[800.0, 400, 400, 400]]
    assert received.tolist() == [[400.0, 400, 800, 400]]


def test_steps_of_a_run_and_what_an_update_needs():
    tx = optax.chain(SGD, gx.weighted(), gx.sgp(HYBRID))
    sent, _ = gx.bytes_per_step(tx, PARAMS, N, steps=range(9), node_weight=3.0)
    first, _ = gx.bytes_per_step(gx.sgp(HYBRID), PARAMS, N)  # up to the end of the first cycle
    weights = 4 * 2 * (N - 1) / N  # of which the nodes take the sum
    np.testing.assert_array_equal(sent - weights, np.concatenate([first, first[4:5]]))
    assert len(first) == 8
    assert gx.bytes_per_step(gx.sgp(RING), PARAMS, N, steps=[]).sent.shape == (0, N)


@pytest.mark.parametrize(
    "tx",
    [
        gx.contrib.desloc(SGD, RING, 2, 3, 4),
        promoting(optax.MultiSteps(optax.chain(gx.allreduce(), SGD), 4).gradient_transformation()),
    ],
)
def test_exchanges_that_values_decide_are_refused(tx):
    with pytest.raises(ValueError, match="must be known when traced"):
        gx.bytes_per_step(tx, PARAMS, N)
