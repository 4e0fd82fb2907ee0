"""The training step: one program per round, and the exchange of OSGP during the gradients."""

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from modes import make_mesh

import gossipjax as gx
from gossipjax.exchanges.chain import start_at
from gossipjax.nodes.program import Program
from gossipjax.step.train_step import MAX_PROGRAMS

N = 8
SCHEDULE = gx.topology.one_peer_exponential(N)
RANDOM = gx.topology.random_pairs(N, MAX_PROGRAMS + 1, seed=0)  # too many for a program each
IRREGULAR = gx.topology.random_peer(N, MAX_PROGRAMS + 1, seed=0)
GRID = gx.Nodes(mesh=make_mesh(4, 2))
PLACEMENTS = {
    "mesh": gx.Nodes(mesh=make_mesh(N)),
    "vmap": gx.Nodes(N),
    "several per device": gx.Nodes(N, mesh=make_mesh(2)),
}


def gradients(z, target):
    return z - target, jnp.sum(jnp.square(z - target))


def make_targets(dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).normal(size=(N, 5)), dtype)


def train(gossip, nodes, steps=9, dtype=jnp.float32, overlap_in_thread=None):
    """A quadratic per node: the train step, its state, and all models and losses."""
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), gossip)
    train_step = gx.TrainStep(gradients, tx, nodes=nodes, overlap_in_thread=overlap_in_thread)
    targets = make_targets(dtype)
    z, opt_state = nodes.init(tx, jnp.zeros(5, dtype))
    models = []
    losses = []
    for step in range(steps):
        z, opt_state, loss = train_step(step, z, opt_state, targets)
        models.append(np.asarray(z, np.float32))
        losses.append(np.asarray(loss, np.float32))
    return train_step, opt_state, np.array(models), np.array(losses)


def train_densely(schedule, steps=9):
    """The same by D-PSGD, in float64."""
    targets = np.asarray(make_targets(), np.float64)
    x = np.zeros((N, 5))
    momentum = np.zeros((N, 5))
    for step in range(steps):
        momentum = 0.9 * momentum + x - targets
        x = schedule.round_at(step).matrix @ x - 0.1 * momentum
    return x


EARLY = "combine-while-adapting"
THREADED = {
    "osgp": (gx.osgp(SCHEDULE), "mesh"),
    "osgp 3, biased": (gx.osgp(SCHEDULE, 3, biased=True), "vmap"),
    "osgp, bfloat16": (gx.osgp(SCHEDULE, wire=jnp.bfloat16), "mesh"),
    "osgp 2, int8": (gx.osgp(SCHEDULE, 2, wire=gx.wire.int8(block=8)), "vmap"),
    "osgp 3, random": (gx.osgp(RANDOM, 3), "vmap"),
    "sgp": (gx.sgp(SCHEDULE, order=EARLY), "mesh"),
    "dpsgd": (gx.dpsgd(gx.topology.ring(N)), "several per device"),
    "adpsgd": (gx.adpsgd(gx.topology.bipartite_exponential(N), 2), "vmap"),
}


@pytest.mark.parametrize("name", THREADED)
def test_the_thread_changes_nothing(name):
    gossip, place = THREADED[name]
    dtype = jnp.bfloat16 if "bfloat16" in name else jnp.float32
    tolerance = 1e-6 if name.startswith("osgp") else 1e-5
    tolerance = 2**-8 if dtype == jnp.bfloat16 else tolerance
    results = []
    for in_thread in (False, True):
        train_step, opt_state, *history = train(
            gossip, PLACEMENTS[place], 11, dtype, overlap_in_thread=in_thread
        )
        assert train_step.overlaps(opt_state) == in_thread
        results.append((history, opt_state))
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    for expected, actual in zip(*map(jax.tree.leaves, results), strict=True):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        as_float = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
        np.testing.assert_allclose(*as_float, rtol=10 * tolerance, atol=tolerance)


def test_a_run_with_a_thread_goes_on_at_any_step():
    """Messages in flight at any step are those of the updates before."""
    nodes = gx.Nodes(N)
    tx = optax.chain(optax.sgd(0.1), gx.osgp(SCHEDULE, 2))
    models = []
    for restarts in ((), (4, 8, 11)):
        train_step = gx.TrainStep(gradients, tx, nodes=nodes, overlap_in_thread=True)
        z, opt_state = nodes.init(tx, jnp.zeros(5))
        for step in range(15):
            if step in restarts:
                train_step = gx.TrainStep(gradients, tx, nodes=nodes, overlap_in_thread=True)
            z, opt_state, _ = train_step(step, z, opt_state, make_targets() + step)
        models.append(np.asarray(z))
    np.testing.assert_allclose(*models, rtol=1e-5, atol=1e-6)


def test_the_exchange_is_traced_here_and_run_on_another_thread(monkeypatch):
    """A thread has none of the caller's JAX context, such as x64, matrix precision or mesh."""
    traced = []
    ran = []
    exchange = gx.exchange
    prepare = Program.prepare

    def record_trace(*args, **options):
        traced.append(threading.current_thread())
        return exchange(*args, **options)

    def record_run(self, *args):
        run = prepare(self, *args)

        def recorded():
            ran.append(threading.current_thread().name)
            return run()

        return recorded

    monkeypatch.setattr("gossipjax.step.beside.exchange", record_trace)
    monkeypatch.setattr(Program, "prepare", record_run)
    train(gx.osgp(SCHEDULE), gx.Nodes(N), overlap_in_thread=True)
    assert set(traced) == {threading.main_thread()}
    assert len(ran) == 9
    assert all(name.startswith("exchange") for name in ran)


LAYERS = [{"w": jnp.full((5, 5), 0.1 * i), "b": jnp.ones(5)} for i in range(4)]


def loss_of_layers(layers, x, key, scans=False, talks=False, meets=False):
    """Jitted functions, a loop inside a layer and a random number all stand in its program."""

    def apply(h, layer):
        h = jax.jit(jax.nn.tanh)(h @ layer["w"] + layer["b"][None])
        return jax.lax.fori_loop(0, 2, lambda _, h: h + 0.1 * jnp.sin(h), h), None

    h = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
    if scans:
        h, _ = jax.lax.scan(apply, h, jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers))
    else:
        for layer in layers:
            h, _ = apply(h, layer)
    if talks:
        jax.debug.callback(lambda: None)
    if meets:
        h = h - jax.lax.pmean(h, "nodes")
    return jnp.mean(h**2), {"last": h}


def train_layers(place, gradients, tx, overlap_in_thread):
    nodes = PLACEMENTS[place]
    options = {"overlap_in_thread": overlap_in_thread, "bucket_bytes": 100}
    train_step = gx.TrainStep(gradients, tx, nodes=nodes, **options)
    layers, opt_state = nodes.init(tx, LAYERS)
    aux = None
    keys = nodes.replicate(jax.random.key(1), fold_in=True)
    for step in range(3):
        x = np.random.default_rng(step).normal(size=(N, 6, 5)).astype(np.float32)
        layers, opt_state, aux = train_step(step, layers, opt_state, x, keys)
    return jax.tree.map(np.asarray, (layers, aux)), train_step, opt_state


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
WHOLE = jax.grad(loss_of_layers, has_aux=True)


@pytest.mark.parametrize(
    ("gradients", "place", "wire", "places_before"),
    [
        (WHOLE, "vmap", None, ()),
        (jax.jit(WHOLE), "mesh", jnp.bfloat16, ()),
        (jax.grad(partial(loss_of_layers, scans=True), has_aux=True), "vmap", None, None),
        (jax.grad(partial(loss_of_layers, talks=True), has_aux=True), "vmap", None, None),
        (jax.grad(partial(loss_of_layers, meets=True), has_aux=True), "mesh", None, None),
        (WHOLE, "vmap", gx.wire.top_k(0.5), None),  # the codec's error is of the whole model
        (WHOLE, "vmap", None, (optax.clip(0.01),)),  # averages what it clips
    ],
)
def test_gradients_travel_in_buckets(gradients, place, wire, places_before, monkeypatch):
    """One after another in a thread, the last layer's first; what cannot be cut stays whole."""
    tx = optax.chain(*(places_before or ()), gx.allreduce(wire=wire), OPTIMIZER)
    expected, *_ = train_layers(place, gradients, tx, False)
    sent = []
    prepare = Program.prepare

    def record(self, *args):
        sent.append([leaf.shape[1:] for leaf in jax.tree.leaves(args)])
        return prepare(self, *args)

    monkeypatch.setattr(Program, "prepare", record)
    actual, train_step, opt_state = train_layers(place, gradients, tx, True)
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert train_step.overlaps(opt_state) == (places_before == ())
    assert sent == (3 * len(LAYERS) * [[(5,), (5, 5)]] if places_before == () else [])


@pytest.mark.parametrize("end", ["close", "del"])
def test_the_thread_ends_with_its_step(end):
    def threads():
        return {thread for thread in threading.enumerate() if thread.name.startswith("exchange")}

    before = threads()
    train_step, *_ = train(gx.osgp(SCHEDULE), gx.Nodes(N), overlap_in_thread=True)
    started = threads() - before
    assert len(started) == 1
    if end == "close":
        train_step.close()
    del train_step
    for thread in started:
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("make", "processes", "local_devices", "overlaps"),
    [
        (gx.osgp, 1, 1, False),  # there is no wire
        (gx.osgp, 4, 1, True),
        (gx.osgp, 4, 2, False),  # on CPU, XLA runs the programs of both one after another
        (gx.sgp, 4, 1, False),  # the exchange needs what its step computes
    ],
)
def test_a_thread_only_where_it_hides_an_exchange(
    make, processes, local_devices, overlaps, monkeypatch
):
    nodes = gx.Nodes(N)
    tx = make(SCHEDULE)
    _, opt_state = nodes.init(tx, jnp.ones(()))
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "local_device_count", lambda: local_devices)
    assert gx.TrainStep(gradients, tx, nodes=nodes).overlaps(opt_state) == overlaps


@pytest.mark.parametrize(("overlap_in_thread", "is_awaited"), [(True, True), (None, False)])
def test_a_program_between_steps_is_awaited_where_a_thread_exchanges(
    overlap_in_thread, is_awaited, monkeypatch
):
    awaited = []
    nodes = gx.Nodes(N)
    tx = gx.osgp(SCHEDULE)
    _, opt_state = nodes.init(tx, jnp.ones(()))
    train_step = gx.TrainStep(gradients, tx, nodes=nodes, overlap_in_thread=overlap_in_thread)
    mix = nodes.spmd(gx.mix_batch_stats, static_argnums=2)
    block_until_ready = jax.block_until_ready
    monkeypatch.setattr(
        jax, "block_until_ready", lambda x: awaited.append(x) or block_until_ready(x)
    )
    mixed = train_step.run(mix, jnp.arange(float(N)), opt_state, 0)
    assert len(awaited) == is_awaited
    np.testing.assert_allclose(
        np.asarray(mixed), SCHEDULE.round_at(0).matrix @ np.arange(N), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("place", "rounds", "max_programs", "programs"),
    [("mesh", 3, None, 3), ("mesh", 3, 2, 1), ("mesh", 40, None, 1), ("vmap", 3, None, 1)],
)
def test_one_trace_per_program(place, rounds, max_programs, programs):
    nodes = PLACEMENTS[place]
    schedule = gx.topology.random_ring(N, rounds, seed=0)
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), gx.dpsgd(schedule))
    traced = []

    def count_traces(z, target):
        traced.append(z.shape)
        return gradients(z, target)

    train_step = gx.TrainStep(count_traces, tx, nodes=nodes, max_programs=max_programs)
    z, opt_state = nodes.init(tx, jnp.zeros(5))
    for step in range(9):
        z, opt_state, _ = train_step(step, z, opt_state, make_targets())
    assert len(traced) == programs
    expected = [0, 1, 2] if programs > 1 else None
    assert train_step.canonical_steps(opt_state) == expected
    np.testing.assert_allclose(z, train_densely(schedule), rtol=1e-4, atol=1e-5)


# Messages of one value per row (overlap 2 and 3) met a fusion of XLA on CPU that overwrote them.
@pytest.mark.parametrize(
    ("overlap", "size", "schedule"),
    [(1, 1, IRREGULAR), (2, 2, gx.topology.bipartite_exponential(6)), (3, 2, IRREGULAR)],
)
def test_messages_are_delivered_by_the_round_that_sent_them(overlap, size, schedule):
    """With a wrong round at the receiver, z would not be that of the mixing matrices."""
    nodes = gx.Nodes(schedule.size)
    tx = optax.chain(optax.sgd(0.0), gx.osgp(schedule, overlap))
    train_step = gx.TrainStep(gradients, tx, nodes=nodes)
    _, opt_state = nodes.init(tx, jnp.zeros(size))
    z = start = jnp.stack([jnp.arange(float(schedule.size))] * size, axis=1)
    mass = np.concatenate([np.ones_like(start[:, :1]), start], axis=1)  # weight and numerator
    sent = np.zeros_like(mass)
    for step in range(4 * overlap):
        z, opt_state, _ = train_step(step, z, opt_state, jnp.zeros_like(start))
        if step % overlap == 0:
            matrix = schedule.round_at(step // overlap).matrix
            kept = np.diag(matrix)[:, None]
            mass, sent = kept * mass + sent, (matrix - np.diag(np.diag(matrix))) @ mass
        np.testing.assert_allclose(np.asarray(z), mass[:, 1:] / mass[:, :1], rtol=1e-5)


class TestNodesOfSeveralDevices:
    schedule = gx.topology.one_peer_exponential(4)

    @staticmethod
    def mean_gradients(z, batch):
        return z - batch.mean(axis=0), jnp.mean(batch)

    @pytest.mark.parametrize("gossip", [gx.sgp, gx.osgp], ids=["sgp", "osgp"])
    def test_equals_one_device_with_the_whole_batch(self, gossip):
        batches = jnp.asarray(np.random.default_rng(1).normal(size=(5, 4, 6, 3)), jnp.float32)
        several = optax.chain(
            gx.allreduce(axis_name="local"),
            optax.sgd(0.1, momentum=0.9),
            gossip(self.schedule, local_axis_name="local"),
        )
        single = optax.chain(optax.sgd(0.1, momentum=0.9), gossip(self.schedule))
        results = []
        for tx, nodes in ((several, GRID), (single, gx.Nodes(4))):
            train_step = gx.TrainStep(self.mean_gradients, tx, nodes=nodes, local_argnums=1)
            z, opt_state = nodes.init(tx, jnp.ones(3))
            for step, batch in enumerate(batches):
                z, opt_state, _ = train_step(step, z, opt_state, batch)
            results.append(np.asarray(z))
        np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)

    def test_gradients_of_parts_that_nobody_averages_are_refused(self):
        tx = optax.chain(optax.sgd(0.1), gx.sgp(self.schedule))

        def gradients(z, batch):  # that a device asks who it is, as for dropout, averages nothing
            device = jax.lax.axis_index("local").astype(jnp.float32)
            return z - batch.mean(axis=0) + device, ()

        train_step = gx.TrainStep(gradients, tx, nodes=GRID, local_argnums=1)
        z, opt_state = GRID.init(tx, jnp.ones(3))
        batch = jnp.ones((4, 6, 3))
        with pytest.raises(ValueError, match=r"put gx.allreduce\('local'\) first in the chain"):
            train_step(0, z, opt_state, batch)


@pytest.mark.parametrize(
    ("gossip", "overlap_in_thread", "place"),
    [
        (gx.sgp(SCHEDULE), None, "mesh"),
        (gx.sgp(RANDOM), None, "several per device"),
        (gx.osgp(SCHEDULE), True, "vmap"),
    ],
    ids=["static", "traced", "in a thread"],
)
def test_a_step_moves_nothing_between_host_and_devices(gossip, overlap_in_thread, place):
    nodes = PLACEMENTS[place]
    tx = optax.chain(optax.sgd(0.1), gossip)
    train_step = gx.TrainStep(gradients, tx, nodes=nodes, overlap_in_thread=overlap_in_thread)
    z, opt_state = nodes.init(tx, jnp.zeros(5))
    targets = nodes.put(make_targets())
    for step in range(4):  # compiles
        z, opt_state, _ = train_step(step, z, opt_state, targets)
    with jax.transfer_guard("disallow"):  # of implicit ones
        for step in range(4, 8):
            z, opt_state, _ = train_step(step, z, opt_state, targets)
        jax.block_until_ready(z)


def test_an_error_in_the_thread_is_raised():
    nodes = gx.Nodes(4)
    tx = gx.osgp(gx.topology.ring(4))
    train_step = gx.TrainStep(gradients, tx, nodes=nodes, overlap_in_thread=True)
    z, opt_state = nodes.init(tx, jnp.ones(()))
    with pytest.raises(ValueError, match="leading axis of 4 nodes"):
        train_step(0, z, jax.tree.map(lambda x: x[:3], opt_state), z)


def count_updates(tx, updates):
    """The state of `tx` after so many updates."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.full_like(x, updates) if "count" in str(path[-1]) else x,
        tx.init(jnp.ones(3)),
    )


EVERY = gx.sgp(gx.topology.ring(4).every(20, phase=19))
SWITCHED = gx.sgp(
    gx.topology.piecewise({0: gx.topology.complete(4), 9: gx.topology.one_peer_exponential(4)})
)
OUTER = gx.outer(optax.sgd(0.1), optax.sgd(1.0), every=20)
OVERLAPPED = gx.osgp(gx.topology.one_peer_exponential(8))


COUNTED_ANEW = [
    (OUTER, 15, 0),  # epochs of 15 steps never come to the average
    (gx.apply_if_finite(OUTER), 14, 0),
    (EVERY, 25, 0),  # an exchange every 25 steps
    (SWITCHED, 8, 0),
    (gx.sgp(gx.topology.one_peer_exponential(4)), 15, 0),
    (gx.osgp(gx.topology.one_peer_exponential(4)), 15, 0),
]
GO_ON = [
    (OUTER, 0, 0),  # a new run
    (OUTER, 15, 15),  # resumed where it was saved
    (OUTER, 14, 15),  # a step was skipped
    (OUTER, 40, 0),  # whole periods
    (EVERY, 20, 0),
    (SWITCHED, 21, 11),
    (gx.sgp(gx.topology.one_peer_exponential(4)), 16, 0),
    (gx.sgp(gx.topology.ring(4)), 15, 0),  # all steps are alike
    (OVERLAPPED, 2, 5),  # the same rounds before it
    (optax.sgd(0.1), 15, 0),
]


def test_steps_that_are_counted_anew_in_every_epoch_are_refused():
    for tx, updates, step in COUNTED_ANEW:
        message = rf"step must be {updates} or more, .* got {step}, .* epoch \* steps_per_epoch"
        with pytest.raises(ValueError, match=message):
            start_at(count_updates(tx, updates), step)
    for tx, updates, step in GO_ON:
        state = count_updates(tx, updates)
        assert jax.tree.structure(start_at(state, step)) == jax.tree.structure(state)


def test_a_loop_that_started_late_goes_on_where_it_was():
    """Of messages in flight the state then counts steps, and outside of them updates."""
    gossip = gx.osgp(gx.topology.one_peer_exponential(4))
    tx = gx.outer(optax.chain(optax.sgd(0.1), gossip), optax.sgd(1.0), every=4)
    started = start_at(count_updates(tx, 0), 7)
    later = jax.tree.map(lambda x: x + 2 if x.dtype == jnp.int32 else x, started)
    assert later.count == 2
    start_at(later, 9)
    with pytest.raises(ValueError, match="step must be 9 or more"):
        start_at(later, 2)


@pytest.mark.parametrize("step", [3, 4, 6])
def test_messages_in_flight_are_not_returned_to_their_senders(step):
    """They are delivered by the round before, that of another step."""
    message = f"step must be 2, or one with the same rounds before it, .* got {step}: pass the step"
    with pytest.raises(ValueError, match=message):
        start_at(count_updates(OVERLAPPED, 2), step)


def test_a_loop_that_counts_anew_in_every_epoch():
    nodes = gx.Nodes(4)
    train_step = gx.TrainStep(lambda z: (z, ()), EVERY, nodes=nodes)
    z, state = nodes.init(EVERY, jnp.ones(3))
    for _ in range(2):  # runs, each with a state of its own
        z, state = nodes.init(EVERY, jnp.ones(3))
        for step in range(2):
            z, state, _ = train_step(step, z, state)
    with pytest.raises(ValueError, match=r"step must be 2 or more"):
        train_step(0, z, state)
    train_step(2, z, state)
