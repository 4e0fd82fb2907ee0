"""States, models and annotations of flax, equinox and orbax; their loops are examples."""

import shutil
from typing import Any

import equinox as eqx
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from modes import make_mesh
from promotion import promoting

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState

N = 4
SCHEDULE = gx.topology.one_peer_exponential(N)
NODES = gx.Nodes(N)
TX = optax.chain(promoting(optax.adam(0.05)), gx.sgp(SCHEDULE))
PARAMS = {"a": jnp.ones(3), "b": jnp.ones((2, 2))}
KEY = jax.random.key(0)


def make_halves(size) -> Any:
    """Nodes of two devices each."""
    return gx.Nodes(mesh=make_mesh(size, 2, "fsdp"))


HALVES = make_halves(N)


class Module(nnx.Module):
    """Parameters, statistics, and a key for its dropout."""

    def __init__(self, rngs):
        self.first = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


class TestInit:
    def test_a_pytree_is_a_pytree_also_if_it_can_be_called(self):
        model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        params, opt_state = NODES.init(TX, model)
        assert type(params) is type(model)
        assert {leaf.shape[0] for leaf in jax.tree.leaves((params, opt_state))} == {N}

    def test_a_module_that_is_no_pytree_is_refused(self):
        with pytest.raises(ValueError, match=r"got Dense, .*module\.init\(key, x\)"):
            NODES.init(TX, nn.Dense(3))

    def test_leaves_that_cannot_be_averaged_are_refused_with_a_way_out(self):
        with pytest.raises(ValueError, match=r"params.dropout.*nnx\.split\(module, nnx\.Param"):
            NODES.init(TX, Module(nnx.Rngs(0)))
        for call in (lambda tree: NODES.init(TX, tree), lambda tree: NODES.run(len, tree)):
            with pytest.raises(ValueError, match=r"must be an array or a number.*eqx\.partition"):
                call({"activation": jax.nn.relu})


CHAINS = {
    "sgp": TX,
    "int8": optax.chain(gx.allreduce(wire=gx.wire.int8()), optax.sgd(0.1)),
    "easgd": gx.easgd(0.1, 2),
    "outer": gx.outer(TX, optax.sgd(0.7, momentum=0.9), 4),
    "masked": optax.masked(gx.sgp(SCHEDULE), {"a": True, "b": False}),
}


@pytest.mark.parametrize("tx", CHAINS.values(), ids=CHAINS)
def test_states_are_written_and_read_by_flax_and_orbax(tx, tmp_path):
    state = jax.tree.map(lambda leaf: leaf + 1, tx.init(PARAMS))
    other = tx.init(PARAMS)
    read = flax.serialization.from_bytes(other, flax.serialization.to_bytes(state))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", other)
    for result in (read, restored):
        assert jax.tree.structure(result) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, result, state)


def test_a_state_of_another_algorithm_is_not_read():
    saved = flax.serialization.to_bytes(gx.sgp(SCHEDULE).init(PARAMS))
    with pytest.raises(ValueError, match=r"overlap=0.*got one that was saved with .*overlap=1"):
        flax.serialization.from_bytes(gx.sgp(SCHEDULE).init(PARAMS), saved.replace(b"p=0", b"p=1"))


def test_keys_differ_by_node_and_the_rest_does_not():
    keys = jax.random.split(KEY, 2)
    rows = NODES.replicate({"keys": keys, "step": 3, "rate": 0.5}, fold_in=True)
    for node in range(N):
        expected = jax.vmap(lambda key, i=node: jax.random.fold_in(key, i))(keys)
        assert (rows["keys"][node] == expected).all()
    assert (rows["step"].tolist(), rows["step"].dtype) == ([3] * N, jnp.int32)
    assert rows["rate"].tolist() == [0.5] * N


MODELS = {
    "linen": nn.Dense(3).init(KEY, jnp.ones((1, 2)))["params"],
    "NNX module": nnx.Linear(2, 3, rngs=nnx.Rngs(0)),
    "NNX state": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param),
    "equinox": eqx.filter(eqx.nn.MLP(2, 3, 4, 1, key=KEY), eqx.is_inexact_array),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_run_is_resumed_also_with_another_number_of_nodes(model, tmp_path):
    def make_tx(metadata):
        schedule = gx.topology.one_peer_exponential(metadata["nodes"])
        return optax.chain(optax.sgd(0.1), gx.sgp(schedule))

    def start(size):
        nodes = gx.Nodes(size)
        return nodes, TrainState(0, *nodes.init(make_tx({"nodes": size}), model))

    nodes, state = start(4)
    with Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.after(state._replace(step=1))
    eqx.tree_serialise_leaves(tmp_path / "leaves", state.opt_state)
    read = eqx.tree_deserialise_leaves(tmp_path / "leaves", state.opt_state)
    assert jax.tree.structure(read) == jax.tree.structure(state.opt_state)
    for size in (4, 2):
        nodes, fresh = start(size)
        with Checkpoints(tmp_path, every=1) as checkpoints:
            resumed = checkpoints.resume(fresh, nodes, make_tx)
        assert resumed.step == 1
        assert jax.tree.structure(resumed.params) == jax.tree.structure(fresh.params)
        jax.tree.map(np.testing.assert_array_equal, resumed.params, fresh.params)


@pytest.mark.parametrize(
    ("inside", "take_params"),
    [(1, lambda state: state), (2, nnx.as_pure)],
    ids=["simulated", "sharded, pure"],
)
def test_an_optimizer_of_nnx_is_resumed_with_its_variables(take_params, inside, tmp_path):
    """`nnx.Optimizer` has each array of the state of its chain in a Variable."""
    most = 8 // inside
    params = nnx.state(Module(nnx.Rngs(0)), nnx.Param)
    specs = gx.fsdp_specs(params, HALVES.mesh)

    def make_tx(saved):
        gossip = gx.osgp(gx.topology.one_peer_exponential(saved["nodes"]))
        gossip = gx.sharded(gossip, specs) if inside > 1 else gossip
        return optax.chain(promoting(optax.adam(0.05)), gossip)

    def train(size, start, stop):
        """From `start`, which was saved, to `stop`; returns the last state and what was resumed."""
        nodes = make_halves(size) if inside > 1 else gx.Nodes(size)
        model = Module(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, make_tx({"nodes": size}), wrt=nnx.Param)
        graph, state = nnx.split((model, optimizer))

        def train_step(state, x, step):
            model, optimizer = nnx.merge(graph, state)
            grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, grads, step=step)
            return nnx.state((model, optimizer)), None

        def pack(state):
            model, optimizer = nnx.merge(graph, state)
            params, rest = nnx.state(model, nnx.Param, ...)
            others = rest, optimizer.step
            return TrainState(step, take_params(params), optimizer.opt_state, others)

        step = 0
        program = nodes.spmd(train_step, shared_argnums=2)
        where = gx.state_specs(state, params, specs) if inside > 1 else None
        state = nodes.replicate(state, where, fold_in=True)
        with Checkpoints(tmp_path / str(start), every=stop) as checkpoints:
            packed = pack(state)
            saved = checkpoints.resume(packed, nodes, make_tx)
            assert saved.step == start
            assert jax.tree.structure(saved.arrays) == jax.tree.structure(packed.arrays)
            for x, like in zip(*map(jax.tree.leaves, (saved.arrays, packed.arrays)), strict=True):
                assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
            model, optimizer = nnx.merge(graph, state)
            rest, optimizer.step = saved.rest
            nnx.update(model, saved.params, rest)
            optimizer.opt_state = saved.opt_state
            state = nnx.state((model, optimizer))
            for step in range(start, stop):
                x = np.random.default_rng(step).normal(size=(8, 4, 3)).astype("float32")
                state, _ = program(state, x[:size], np.int32(step))
            step = stop
        with Checkpoints(tmp_path / str(stop), every=stop) as checkpoints:
            checkpoints.after(pack(state))
        return state, saved

    whole, _ = train(most, 0, 6)
    train(most, 0, 3)
    shutil.rmtree(tmp_path / "6")
    for actual, expected in zip(*map(jax.tree.leaves, (train(most, 3, 6)[0], whole)), strict=True):
        assert (actual == expected).all()
    shutil.rmtree(tmp_path / "6")
    state, saved = train(most // 2, 3, 6)
    assert {x.shape[0] for x in jax.tree.leaves(state)} == {most // 2}
    kernel = jax.tree.leaves(saved.params)[1]
    assert kernel.addressable_shards[0].data.shape[1:] == (3, 8 // inside)
    moment = jax.tree.leaves(saved.opt_state)[1]
    assert np.ptp(np.asarray(moment), axis=0).max() == 0


def init_boxed():
    """A layer whose kernel `[4, 6]` is sharded as flax's annotation says."""
    init = nn.with_partitioning(nn.initializers.ones, (None, "fsdp"))
    return nn.Dense(6, kernel_init=init).init(KEY, jnp.ones((1, 4)))["params"]


def shapes_of_shards(array):
    return {shard.data.shape for shard in array.addressable_shards}


def test_models_that_flax_annotates_are_sharded_inside_a_node():
    """On four nodes of two devices, each of which has a half of the kernel."""
    specs = nn.get_partition_spec(jax.eval_shape(init_boxed))
    tx = optax.chain(optax.sgd(0.1), gx.sharded(gx.sgp(SCHEDULE), specs))
    params, opt_state = HALVES.init(tx, lambda: nn.unbox(init_boxed()))
    assert shapes_of_shards(params["kernel"]) == {(1, 4, 3)}
    model = gx.average_model(params, opt_state, nodes=HALVES)
    assert shapes_of_shards(model["kernel"]) == {(4, 3)}
    boxed, _ = HALVES.init(tx, init_boxed)  # the same specs fit, whatever is around them
    assert shapes_of_shards(boxed["kernel"].value) == {(1, 4, 3)}


def test_a_training_state_of_annotated_parameters_stays_in_parts():
    """Without specs those of the annotations hold, in a loop of any program of `spmd`."""
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), gx.sharded(gx.sgp(SCHEDULE)))

    def make_state():
        return gx.flax.TrainState.create(apply_fn=jnp.dot, params=init_boxed(), tx=tx)

    programs = []

    def train_step(state, x):
        programs.append(x)
        grads = jax.grad(lambda params: jnp.dot(x, params["kernel"].value).sum())(state.params)
        return state.apply_gradients(grads=grads), grads

    run = HALVES.spmd(train_step)
    state = HALVES.replicate(make_state)
    for _ in range(3):
        state, grads = run(state, jnp.ones((N, 2, 4)))
        for tree in (state.params, state.opt_state[0][0].trace, grads):
            assert shapes_of_shards(tree["kernel"].value) == {(1, 4, 3)}
    assert len(programs) == 1
    model = gx.average_model(state.params, state.opt_state, nodes=HALVES)
    assert shapes_of_shards(model["kernel"].value) == {(4, 3)}
    expected = 1 - 0.1 * 2 * (1 + 1.9 + 2.71)  # the gradient is 2 everywhere
    np.testing.assert_allclose(model["kernel"].value, expected, rtol=1e-6)


def test_specs_of_nnx_annotations():
    def init():
        kernel = nnx.with_partitioning(nnx.initializers.ones, (None, "fsdp"))
        with nnx.use_eager_sharding(False):
            return nnx.state(nnx.Linear(4, 6, kernel_init=kernel, rngs=nnx.Rngs(0)), nnx.Param)

    tx = optax.chain(optax.sgd(0.1), gx.sharded(gx.sgp(SCHEDULE)))
    params, _ = HALVES.init(tx, init)
    assert shapes_of_shards(params["kernel"].get_value()) == {(1, 4, 3)}
