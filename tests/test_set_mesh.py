"""Under `jax.set_mesh`, nodes give the same bits, as arrays of the mesh that is set.

Simulated nodes, whose program XLA then partitions over the mesh, give the same up to rounding.

`jax.make_mesh` makes Explicit axes by default, under which JAX refuses arrays of any other mesh.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from modes import make_mesh

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState

pytestmark = pytest.mark.smoke

STEPS = 3
LINE = jax.make_mesh((8,), ("nodes",))
GRID = jax.make_mesh((4, 2), ("nodes", "fsdp"))
OTHER = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Auto, AxisType.Explicit))


class Case(NamedTuple):
    """Nodes, and the mesh that is set around them."""

    nodes: gx.Nodes
    mesh: Mesh
    in_thread: bool | None = None


CASES = {
    "a node per device": Case(gx.Nodes(mesh=LINE), LINE),
    "exchange in a thread": Case(gx.Nodes(mesh=LINE), LINE, in_thread=True),
    "two nodes per device": Case(gx.Nodes(16, mesh=LINE), LINE),
    "sharded inside": Case(gx.Nodes(mesh=GRID), GRID),
    "simulated": Case(gx.Nodes(8), LINE),
    "Auto axes of another mesh": Case(gx.Nodes(mesh=LINE), make_mesh(4, 2)),
    "Explicit axes of another mesh": Case(gx.Nodes(mesh=make_mesh(4)), OTHER),
}


def make_tx(nodes, size):
    gossip = gx.osgp(gx.topology.ring(size))
    if nodes.inner_axes:
        gossip = gx.sharded(gossip, {"w": P("fsdp")})
    return optax.chain(optax.sgd(0.1, momentum=0.9), gossip)


def gradients(params, batch):
    return {"w": params["w"] - batch.mean(axis=0)}, batch.sum()


def scale(params, settings):
    return params["w"] * settings["rate"]


def train(case, put, folder) -> dict[str, Any]:
    """What all that nodes do returns; `put` says where batches lie."""
    nodes = case.nodes
    rng = np.random.default_rng(0)
    batches = [put(rng.normal(size=(nodes.size, 3, 4)).astype(np.float32)) for _ in range(STEPS)]

    def make_start(nodes):
        params, opt_state = nodes.init(make_tx(case.nodes, nodes.size), {"w": jnp.arange(4.0)})
        return TrainState(0, params, opt_state, nodes.replicate({"key": jax.random.key(1)}))

    def resume(start, nodes):
        return checkpoints.resume(start, nodes, lambda saved: make_tx(case.nodes, saved["nodes"]))

    tx = make_tx(nodes, nodes.size)
    step = gx.TrainStep(gradients, tx, nodes=nodes, overlap_in_thread=case.in_thread)
    state = make_start(nodes)
    losses = None
    with Checkpoints(folder, every=1) as checkpoints:
        for number, batch in enumerate(batches):
            params, opt_state, losses = step(number, state.params, state.opt_state, batch)
            state = TrainState(number + 1, params, opt_state, state.rest)
            checkpoints.after(state)
        resumed = resume(make_start(nodes), nodes)
        resized = resume(make_start(gx.Nodes(2)), gx.Nodes(2))
    average = nodes.run(gx.average_model, state.params, state.opt_state)
    settings = {"rate": jnp.float32(0.5)}
    return {
        "state": state.arrays,
        "losses": losses,
        "resumed": step(STEPS, resumed.params, resumed.opt_state, batches[0]),
        "resized": resized.arrays,
        "average": average,
        "one": nodes.one(average),
        "scaled": nodes.run(scale, state.params, nodes.shared(settings)),
        "shared": nodes.put_shared(settings),
        "host": nodes.to_host(state.params),
    }


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def to_host(tree):
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if is_key(x) else x), tree)


def put_on(case):
    """Puts rows on the mesh that is set: over its axis of the nodes, if it has one."""
    spec = P("nodes") if "nodes" in case.mesh.axis_names else P()
    return lambda rows: jax.device_put(rows, NamedSharding(case.mesh, spec))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_all_that_nodes_do_gives_the_same(case, tmp_path):
    expected = train(case, case.nodes.put, tmp_path / "unset")
    with jax.set_mesh(case.mesh):
        actual = train(case, put_on(case), tmp_path / "set")
        # XLA partitions a simulated program over the mesh, which may round otherwise.
        tolerance = 1e-6 if case.nodes.is_simulated else 0
        compare = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
        jax.tree.map(compare, to_host(actual), to_host(expected))
        if case.mesh is OTHER:
            return
        del actual["resized"]  # on one device
        is_on_mesh = case.mesh in (LINE, GRID) and not case.nodes.is_simulated
        for leaf in jax.tree.leaves(actual):
            if isinstance(leaf, jax.Array):
                jnp.copy(leaf)  # a program of the mesh that is set
                assert not is_on_mesh or getattr(leaf.sharding, "mesh", None) == case.mesh


def node_mean(x):
    return x - jax.lax.pmean(x, "nodes")


@pytest.mark.parametrize("name", ["two nodes per device", "Explicit axes of another mesh"])
def test_arrays_of_explicit_axes_where_no_mesh_is_set(name):
    case = CASES[name]
    x = np.arange(4.0 * case.nodes.size, dtype=np.float32).reshape(-1, 4)
    program = case.nodes.spmd(node_mean, donate_argnums=0)
    np.testing.assert_array_equal(program(put_on(case)(x)), x - x.mean(axis=0))


@pytest.mark.parametrize("name", ["two nodes per device", "simulated"])
def test_inside_of_a_jitted_function(name):
    nodes, mesh, _ = CASES[name]
    x = np.arange(2.0 * nodes.size, dtype=np.float32).reshape(-1, 2)
    program = nodes.spmd(lambda x, factor: factor * node_mean(x), static_argnums=1)
    with jax.set_mesh(mesh):
        out = jax.jit(lambda x: program(x, 2) + x)(put_on(CASES[name])(x))
    np.testing.assert_array_equal(out, 3 * x - 2 * x.mean(axis=0))


def test_inside_of_a_jitted_function_with_axes_inside():
    nodes, mesh, _ = CASES["sharded inside"]
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="called outside of jax"):
        jax.jit(nodes.spmd(node_mean))(nodes.put(np.ones((4, 2), np.float32)))
