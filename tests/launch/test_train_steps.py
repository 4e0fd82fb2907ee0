"""Train steps over several processes: nothing gathered on the way, collectives in one order."""

import pytest
from launching import run_job

PROLOGUE = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
import gossipjax as gx
from gossipjax import processes

gx.launch.initialize()
nodes = gx.Nodes(mesh=gx.launch.mesh())

def gradients(z, stats, batch):
    return z - batch.mean(axis=0), 0.9 * stats + 0.1 * batch.mean(axis=0)

def train(gossip, steps):
    # Statistics are mixed before every step; batches are NumPy arrays.
    tx = optax.chain(optax.sgd(0.05), gossip)
    train_step = gx.TrainStep(gradients, tx, nodes=nodes)
    z, opt_state = nodes.init(tx, jnp.zeros(3))
    stats = nodes.replicate(jnp.zeros(3))
    mix = nodes.spmd(gx.mix_batch_stats, shared_argnums=2)
    batches = np.arange(nodes.size, dtype=np.float32)[:, None, None] + np.zeros((1, 4, 3), "f")
    for step in range(steps):
        stats = train_step.run(mix, stats, opt_state, np.int32(step))
        z, opt_state, stats = train_step(step, z, opt_state, stats, batches)
    return train_step, z, opt_state, stats
"""

COUNT_GATHERS = """
# `jax.device_put` of a host value over processes gathers it everywhere, at every step.
gathers = []
gather = multihost_utils.process_allgather
def count(*args, **options):
    gathers.append(args)
    return gather(*args, **options)
multihost_utils.process_allgather = count
import gossipjax.step.train_step
limit = gossipjax.step.train_step.MAX_PROGRAMS
gossipjax.step.train_step.MAX_PROGRAMS = 2
rounds = gx.topology.from_matrices([[[1 - a, a], [a, 1 - a]] for a in (0.1, 0.2, 0.3)])
train_step, z, opt_state, stats = train(gx.sgp(rounds), 3)
assert train_step.canonical_steps(opt_state) is None  # the step is traced
assert not gathers, gathers
train_step, _, opt_state, _ = train(gx.osgp(rounds), 3)
assert train_step.overlaps(opt_state)
assert not gathers, gathers
jax.device_put(np.ones(2), jax.sharding.NamedSharding(nodes.mesh, jax.sharding.PartitionSpec()))
assert len(gathers) == 1, gathers  # they are counted
gossipjax.step.train_step.MAX_PROGRAMS = limit
print("no gather")
"""

MANY_STEPS = """
# A program in flight beside the exchange would hang, sooner or later.
train_step, z, opt_state, stats = train(gx.osgp(gx.topology.one_peer_exponential(2)), 200)
assert train_step.overlaps(opt_state)
mass = nodes.one(nodes.run(gx.diagnostics.total_mass, z, opt_state))
model = nodes.one(nodes.run(gx.average_model, z, opt_state))
stats = nodes.to_host(stats)
if processes.is_main_process():
    np.testing.assert_allclose(mass[1], 2, rtol=1e-5)
    np.testing.assert_allclose(model, 0.5, atol=0.02)
    np.testing.assert_allclose(stats, 0.5, atol=0.3)
    print("many steps")
"""

BUCKETS = """
# The gradients of a layer are averaged while those of the layers before it are computed.
def train_layers(nodes, batches):
    def loss(layers, x):
        for layer in layers:
            x = jnp.tanh(x @ layer)
        return jnp.mean(x**2), x
    tx = optax.chain(gx.allreduce(), optax.adam(0.01))
    gradients = jax.grad(loss, has_aux=True)
    train_step = gx.TrainStep(gradients, tx, nodes=nodes, bucket_bytes=100)
    layers, opt_state = nodes.init(tx, [jnp.eye(8) for _ in range(6)])
    for step in range(100):
        layers, opt_state, _ = train_step(step, layers, opt_state, batches)
    return nodes.one(layers), train_step.overlaps(opt_state)

batches = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)
layers, overlaps = train_layers(nodes, batches)
assert overlaps
expected, _ = train_layers(gx.Nodes(2), batches)
if processes.is_main_process():
    for a, b in zip(layers, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    print("gradients in buckets")
"""

STREAMING = """
def stream(nodes, overlap_in_thread, first=0, state=None, inner=optax.identity()):
    tx = gx.outer(
        optax.chain(inner, optax.sgd(0.05, momentum=0.9)),
        optax.sgd(0.4, momentum=0.9, nesterov=True), 6, fragments=2, delay=2, strength=0.5,
    )
    def gradients(z, goal):
        return jax.tree.map(lambda x: x - goal, z), goal
    train_step = gx.TrainStep(gradients, tx, nodes=nodes, overlap_in_thread=overlap_in_thread)
    z, opt_state = state or nodes.init(tx, {"a": jnp.zeros(3), "b": jnp.ones(2)})
    goals = nodes.put(np.arange(2, dtype=np.float32)[list(nodes.local)])
    on_their_way = 0
    for step in range(first, 120):
        z, opt_state, _ = train_step(step, z, opt_state, goals)
        if step % 20 == 13:  # another program with collectives, while an average is on its way
            train_step.run(nodes.spmd(gx.average_model), z, opt_state)
        if step == 60:
            halfway = z, opt_state
        for programs in train_step._programs.values():
            on_their_way += len(getattr(programs.update, "_pending", ()))
    return train_step, z, opt_state, on_their_way, None if first else halfway

train_step, z, opt_state, on_their_way, halfway = stream(nodes, None)
assert train_step.overlaps(opt_state)
assert on_their_way > 70, on_their_way  # of two fragments, each for two of six steps
_, again, *_ = stream(nodes, None, 61, halfway)
_, expected, *_ = stream(gx.Nodes(2), False)
z, again = nodes.to_host((z, again))
# Beside other collectives nothing is exchanged: one could overtake the other.
guard = gx.apply_if_finite(optax.identity())
train_step, guarded, opt_state, *_ = stream(nodes, None, 108, None, guard)
assert not train_step.overlaps(opt_state)
_, simulated, *_ = stream(gx.Nodes(2), False, 108, None, guard)
guarded = nodes.to_host(guarded)
if processes.is_main_process():
    for key in z:
        np.testing.assert_array_equal(again[key], z[key])
        np.testing.assert_allclose(z[key], np.asarray(expected[key]), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(guarded[key], np.asarray(simulated[key]), rtol=1e-4, atol=1e-5)
    print("averages beside the steps")
"""

ISLANDS = """
import tempfile
from jax.sharding import Mesh, PartitionSpec as P
from gossipjax.checkpoint import Checkpoints, TrainState

MODEL = {"w": jnp.ones((4, 2)), "b": jnp.zeros(4)}
SPECS = {"w": P("fsdp"), "b": P("fsdp")}

def make_tx(saved):
    gossip = gx.osgp(gx.topology.one_peer_exponential(saved["nodes"]), overlap=2)
    return optax.chain(optax.sgd(0.05, momentum=0.9), gx.sharded(gossip, SPECS))

def descend(params, goal):
    return jax.tree.map(lambda x: x - goal, params), None

def train_islands(nodes, steps, params, opt_state):
    train_step = gx.TrainStep(descend, make_tx({"nodes": nodes.size}), nodes=nodes)
    goals = nodes.put(np.arange(nodes.size, dtype=np.float32)[nodes.local])
    for step in steps:
        params, opt_state, _ = train_step(step, params, opt_state, goals)
    return params, opt_state

def start(nodes):
    return nodes.init(make_tx({"nodes": nodes.size}), MODEL)

def check(nodes, params, opt_state, steps):
    whole = gx.Nodes(nodes.size)
    expected = train_islands(whole, range(steps), *start(whole))
    for a, b in zip(
        jax.tree.leaves(nodes.to_host((params, opt_state))), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(a, np.asarray(b), rtol=1e-5, atol=1e-6)

def shape_of_part(x):
    return x.addressable_shards[0].data.shape

# Each node has a device of both processes; then all four devices are one node.
folder = processes.broadcast_text(tempfile.mkdtemp())
islands = Mesh(np.array(jax.devices()).reshape(2, 2).T, ("nodes", "fsdp"))
nodes = gx.Nodes(mesh=islands)
params, opt_state = train_islands(nodes, range(3), *start(nodes))
check(nodes, params, opt_state, 3)
assert shape_of_part(params["w"]) == (1, 2, 2), shape_of_part(params["w"])
model = nodes.one(nodes.run(gx.average_model, params, opt_state))
assert shape_of_part(model["w"]) == (2, 2)
with Checkpoints(folder) as checkpoints:
    checkpoints.save(3, (params, opt_state, None), {"nodes": 2})
    checkpoints.wait()
for mesh in (islands, gx.launch.mesh(1, fsdp=4)):
    nodes = gx.Nodes(mesh=mesh)
    with Checkpoints(folder, read_only=True) as checkpoints:
        state = checkpoints.resume(TrainState(3, *start(nodes)), nodes, make_tx)
    params, opt_state = train_islands(nodes, range(3, 5), state.params, state.opt_state)
    if nodes.size == 2:
        check(nodes, params, opt_state, 5)
    assert shape_of_part(params["w"]) == (1, 4 // nodes.mesh.shape['fsdp'], 2)
if processes.is_main_process():
    print("islands over processes")
"""

SEVERAL_PER_PROCESS = """
def train_pairs(nodes):  # in pairs, which processes exchange by sums over groups
    tx = optax.chain(optax.sgd(0.05), gx.osgp(gx.topology.bipartite_exponential(6)))
    train_step = gx.TrainStep(lambda z, goal: (z - goal, None), tx, nodes=nodes)
    z, opt_state = nodes.init(tx, jnp.zeros(3))
    goals = nodes.put(np.arange(6, dtype=np.float32)[nodes.local])
    for step in range(20):
        z, opt_state, _ = train_step(step, z, opt_state, goals)
    model = nodes.one(nodes.run(gx.average_model, z, opt_state))
    return train_step.overlaps(opt_state), z, model

several = gx.Nodes(6, mesh=gx.launch.mesh())
assert several.local == list(range(3 * jax.process_index(), 3 * jax.process_index() + 3))
overlaps, z, model = train_pairs(several)
assert overlaps
_, expected, expected_model = train_pairs(gx.Nodes(6))
np.testing.assert_allclose(several.to_host(z), expected, rtol=1e-5, atol=1e-6)
np.testing.assert_allclose(model, expected_model, rtol=1e-5)
print("several per process")
"""


def run_parts(devices, cache, *parts):
    code = "".join((PROLOGUE, *parts, "gx.launch.exit_process(0)\n"))
    names = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    more = dict(zip(names, (str(cache), "0"), strict=True))
    job = run_job(code, "--processes", 2, "--local-devices", devices, **more)
    assert job.returncode == 0, job.stderr
    return job.stdout


@pytest.mark.smoke
def test_two_processes(tmp_path):
    """No host value is gathered; collectives keep one order beside overlap and averages.

    Several nodes of a process train as without processes.
    """
    parts = (COUNT_GATHERS, SEVERAL_PER_PROCESS, MANY_STEPS, BUCKETS, STREAMING)
    output = run_parts(1, tmp_path, *parts)
    assert output.count("no gather") == 2
    assert output.count("several per process") == 2
    assert output.count("many steps") == 1
    assert output.count("gradients in buckets") == 1
    assert output.count("averages beside the steps") == 1


def test_nodes_of_two_processes(tmp_path):
    assert run_parts(2, tmp_path, ISLANDS).count("islands over processes") == 1
