"""Outer optimizers: each of their settings against the dense oracle, and their laws."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from algorithms.problems import flatten, make_problem, run_history, take_step, unflatten
from modes import MODES
from promotion import promoting

import gossipjax as gx
from experiments.speed.compiled.hlo import parse_module
from gossipjax.checkpoint import Checkpoints, change_nodes
from gossipjax.exchanges.chain import find_exchange
from gossipjax.exchanges.fragments import merge

N = 4
RING = gx.topology.ring(N)
BIAS = slice(6, 11)  # in the order of `flatten`, which is not that of the tree's leaves
KERNEL = slice(0, 6)
MOMENTUM = {"momentum": 0.6}
NESTEROV = {"momentum": 0.9, "nesterov": True}


class Setting(NamedTuple):
    """A method that is an outer optimizer: as the library makes it, and as the oracle."""

    every: int
    rate: float = 1.0
    optimizer: Mapping[str, Any] = MappingProxyType({})
    inner: str = "local"
    overlap: int = 1
    is_directed: bool = False
    average: Any = "exact"  # or "neighbours", "sgp", "gradient_tracking"
    damped: bool = False
    fragments: Any = 1
    delay: int = 0
    mix: float = 0.0
    pull: float = 1.0

    @property
    def steps(self):
        return (5 if self.gossips else 2) * self.every + self.delay + 2

    @property
    def gossips(self):
        return self.average in ("sgp", "gradient_tracking")

    def matrices(self, rng, n):
        make = oracle.column_stochastic if self.is_directed else oracle.doubly_stochastic
        return make(rng, n)

    def transform(self, schedule, neighbours, **options):
        inner = {
            "local": optax.identity,
            "sgp": lambda: gx.sgp(schedule),
            "osgp": lambda: gx.osgp(schedule, self.overlap),
            "dpsgd": lambda: gx.dpsgd(schedule),
        }[self.inner]()
        average = neighbours if self.average == "neighbours" else self.average
        if self.gossips:
            average = getattr(gx, self.average)(schedule, damped=self.damped)
        return gx.outer(
            inner,
            optax.sgd(self.rate, **self.optimizer),
            self.every,
            average=average,
            fragments=self.fragments,
            delay=self.delay,
            strength=1 - self.mix,
            anchor_strength=self.pull,
            **options,
        )

    def oracle(self, matrices, neighbours, starts, updates):
        if self.gossips:
            results = oracle.push_sum_outer(
                matrices,
                starts,
                updates,
                oracle.sgd(self.rate, **self.optimizer),
                self.every,
                self.average == "gradient_tracking",
                self.damped,
            )
            return [(r["y"], r["y"], r["w"], r["anchor"]) for r in results]
        return oracle.outer(
            matrices,
            starts,
            updates,
            oracle.sgd(self.rate, **self.optimizer),
            self.every,
            self.inner,
            self.overlap,
            neighbours if self.average == "neighbours" else self.average,
            PARTS[self.fragments],
            self.delay,
            self.mix,
            self.pull,
        )


TWO_LAYERS = gx.layer_fragments(2, {"kernel": 1, "bias": None})
AND_THE_REST = gx.layer_fragments(3, {"kernel": 1, "bias": None})
NO_STACK = gx.layer_fragments(3, None)
PARTS = {
    1: (slice(None),),
    2: (BIAS, KERNEL),
    TWO_LAYERS: ([0, 2, 4, 6, 7], [1, 3, 5, 8, 9, 10]),
    AND_THE_REST: ([0, 2, 4, 6], [1, 3, 5], [7, 8, 9, 10]),
    NO_STACK: ([6, 7, 8, 9], [10, 0, 1], [2, 3, 4, 5]),
}
STREAMING: dict[str, Any] = {"optimizer": NESTEROV, "fragments": 2, "delay": 2, "mix": 0.25}
SETTINGS = {
    "local sgd": Setting(3),
    "every step": Setting(1, 0.5, MOMENTUM),
    "slowmo over sgp": Setting(3, 0.9, MOMENTUM, "sgp", is_directed=True),
    "slowmo over osgp": Setting(3, 0.9, MOMENTUM, "osgp", is_directed=True),
    "slowmo over osgp 2": Setting(4, 0.9, MOMENTUM, "osgp", 2, is_directed=True),
    "slowmo over dpsgd": Setting(3, 0.9, MOMENTUM, "dpsgd"),
    "slowmo without average": Setting(3, 0.9, MOMENTUM, "sgp", is_directed=True, average="none"),
    "diloco": Setting(4, 0.7, NESTEROV),
    "diloco, delay over osgp": Setting(4, 0.7, NESTEROV, "osgp", is_directed=True, delay=3),
    "streaming": Setting(5, 0.4, **STREAMING),
    "streaming over sgp": Setting(5, 0.4, inner="sgp", is_directed=True, **STREAMING),
    "streaming over dpsgd": Setting(5, 0.4, inner="dpsgd", **STREAMING),
    "layers": Setting(5, 0.4, NESTEROV, fragments=TWO_LAYERS, delay=2, mix=0.25),
    "layers and the rest": Setting(3, 0.7, NESTEROV, fragments=AND_THE_REST),
    "layers over sgp": Setting(
        3, 0.7, NESTEROV, "sgp", is_directed=True, fragments=AND_THE_REST, delay=1, mix=0.5
    ),
    "layers of neighbours": Setting(
        3, 0.7, {"momentum": 0.5}, average="neighbours", pull=1 / 0.7, fragments=NO_STACK
    ),
    "noloco": Setting(3, 0.7, {"momentum": 0.5}, average="neighbours", pull=1 / 0.7),
    "sgp": Setting(2, 0.4, MOMENTUM, is_directed=True, average="sgp"),
    "sgp, damped": Setting(2, 0.4, NESTEROV, is_directed=True, average="sgp", damped=True),
    "tracking": Setting(2, 0.02, MOMENTUM, is_directed=True, average="gradient_tracking"),
    "tracking, damped": Setting(
        3, 0.05, NESTEROV, is_directed=True, average="gradient_tracking", damped=True
    ),
    "neighbours": Setting(3, 0.8, MOMENTUM, average="neighbours", delay=1),
}
# Each step of a cycle stands in a program of static steps, which compiles long.
STATIC = ("slowmo over osgp", "layers and the rest", "sgp, damped", "neighbours")
ON_A_MESH = (
    "tracking, damped",
    "slowmo over sgp",
    "slowmo over dpsgd",
    "diloco, delay over osgp",
    "layers of neighbours",
)
CASES = [(name, "vmap", 3, "static" if name in STATIC else "counted") for name in SETTINGS]
CASES += [(name, "vmap", 8, "counted") for name in ("slowmo over osgp 2", "neighbours")]
CASES += [(name, "shard_map_check_vma", 3, "traced") for name in ON_A_MESH]
CASES += [("streaming", "vmap", 1, "counted")]
CASES += [("slowmo over osgp", mode, 3, "static") for mode in MODES[1:]]
LOW_PRECISION = {
    "sgp, damped": "vmap",
    "tracking, damped": "shard_map_check_vma",
    "slowmo over osgp 2": "vmap",
    "streaming": "shard_map_check_vma",
    "layers over sgp": "shard_map_check_vma",
}


def make_case(setting, n, dtype, **options):
    rng, starts, updates = make_problem(n, dtype, setting.steps)
    schedule = gx.topology.from_matrices(setting.matrices(rng, n))
    neighbours = gx.topology.from_matrices(oracle.doubly_stochastic(rng, n)[::-1])
    tx = setting.transform(schedule, neighbours, **options)
    expected = setting.oracle(schedule.matrices(), neighbours.matrices(), starts, updates)
    return tx, starts, updates, list(expected)


@pytest.mark.parametrize(("name", "mode", "n", "style"), CASES)
def test_equals_the_oracle_round_by_round(name, mode, n, style):
    compare_with_the_oracle(SETTINGS[name], mode, n, jnp.float32, style)


@pytest.mark.parametrize(("name", "mode"), [*LOW_PRECISION.items()])
def test_equals_the_oracle_in_bfloat16(name, mode):
    compare_with_the_oracle(SETTINGS[name], mode, 3, jnp.bfloat16, "counted")


def join_fragments(outer, models):
    """The anchor like the models, `[N, S, ...]`."""

    def join(parts, model):
        for part, fragment in zip(parts, outer.plan.split(model), strict=True):
            model = merge(model, part, fragment)
        return model

    like = jax.tree.map(lambda x: np.asarray(x, np.float32), models)
    return jax.vmap(jax.vmap(join))(outer.anchor, like)


def compare_with_the_oracle(setting, mode, n, dtype, style):
    tx, starts, updates, expected = make_case(setting, n, dtype)
    params = unflatten(starts, dtype)
    tolerance = 1e-5 if dtype == jnp.float32 else 2.0**-8
    inputs = unflatten(updates.swapaxes(0, 1))
    start, models, states, mass, total_weight = run_history(mode, tx, style, params, inputs)
    for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(start), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, (n, setting.steps, *b.shape[1:]))
    gossip = gx.gossip_state(states)
    outer = find_exchange(states)
    assert gossip is not None
    assert outer is not None
    anchors = flatten(join_fragments(outer, models), 2)
    for k, (z, _, w, anchor) in enumerate(expected):
        where = f"{style}, step {k}"
        change = np.abs(z - (expected[k - 1][0] if k else starts))
        held = flatten(models, 2)[:, k]
        errors = np.abs(held - z)
        assert (errors <= 3 * tolerance * (1 + np.abs(z) + change)).all(), where
        if gossip.weight is not None:
            np.testing.assert_allclose(gossip.weight[:, k], w, rtol=1e-5, err_msg=where)
        if gossip.residual is not None:  # to full precision, whatever z was rounded to
            model = held + flatten(gossip.residual, 2)[:, k]
            np.testing.assert_allclose(model, z, rtol=1e-4, atol=3e-5, err_msg=where)
        np.testing.assert_allclose(anchors[:, k], anchor, rtol=1e-4, atol=3e-5, err_msg=where)
        np.testing.assert_allclose(total_weight[:, k], n, rtol=1e-6, err_msg=where)
        if setting.inner != "osgp":  # nothing is in flight
            total = (w[:, None] * z).sum(axis=0)
            np.testing.assert_allclose(flatten(mass, 2)[0, k], total, rtol=1e-4, atol=n * 3e-5)
    if setting.average == "exact":
        np.testing.assert_array_equal(anchors, np.tile(anchors[:1], (n, 1, 1)))


def test_canonical_steps_are_the_smallest_with_the_same_program():
    """Three rounds, and a period of 500: no program for each step of both."""
    schedule = gx.topology.one_peer_exponential(8)
    inner = optax.chain(optax.sgd(0.1), gx.sgp(schedule))
    streaming = gx.outer(inner, optax.sgd(0.7), 500, fragments=2, delay=3, strength=0.5)
    state = streaming.init({"a": jnp.zeros(3), "b": jnp.zeros(2)})
    steps = gx.canonical_steps(state)
    # Three rounds at each of: nothing, first sent, first used, second sent, second used.
    assert len(steps) == 15
    plan = find_exchange(state).plan
    for k in [*range(520), *range(740, 760), *range(10**6, 10**6 + 30), 10**6 + 249]:
        roles = {
            step: (schedule.canonical_step(step), plan.sent_at(step), plan.used_at(step))
            for step in [*steps, k]
        }
        same = [step for step in steps if roles[step] == roles[k]]
        assert [gx.canonical_step(state, k)] == same
        assert min(same) <= k


def test_reset_inner_zeroes_momentum_and_keeps_counts_and_gossip():
    inner = optax.chain(
        promoting(optax.scale_by_adam()), optax.trace(0.9), optax.scale_by_schedule(lambda k: -0.1)
    )
    tx = gx.outer(optax.chain(inner, gx.sgp(RING)), optax.sgd(1.0), 2, reset_inner=True)
    kept = gx.outer(optax.chain(inner, gx.sgp(RING)), optax.sgd(1.0), 2)
    z = jnp.arange(4.0 * N).reshape(N, 4)
    states = {}
    for name, transform in (("reset", tx), ("kept", kept)):
        state = gx.spmd(transform.init, nodes=N)(z)
        update = gx.spmd(transform.update, nodes=N)
        for _ in range(2):
            _, state = update(z, state, z)
        states[name] = state.inner
    (adam, trace, schedule), gossip = states["reset"]
    for tree in (adam.mu, adam.nu, trace.trace):
        assert not np.any(tree)
    assert adam.count.tolist() == schedule.count.tolist() == [2] * N
    assert np.asarray(gossip.count).tolist() == [2] * N
    assert all(np.any(leaf) for leaf in (states["kept"][0][0].mu, states["kept"][0][1].trace))


def test_an_outer_step_that_is_called_is_the_step_that_is_counted():
    """The page's own `synchronize`, here called at every third step."""
    page = Path(__file__).parents[2] / "docs" / "guides" / "transforms.md"
    _, _, code = page.read_text().partition("```python\ndef synchronize")
    code = code.partition("```")[0].replace("gx.Nodes(8)", f"gx.Nodes({N})")
    before, _, call = code.partition("# In the loop")
    sgd, nesterov = optax.sgd(0.1, momentum=0.9), optax.sgd(0.7, momentum=0.9, nesterov=True)
    names = {"jax": jax, "jnp": jnp, "gx": gx, "optax": optax, "adamw": sgd, "nesterov": nesterov}
    exec(f"def synchronize{before}", names)
    train_step = gx.TrainStep(tree_gradients, sgd, nodes=names["nodes"])
    for step in range(9):
        state = names["params"], names["opt_state"]
        names["params"], names["opt_state"], _ = train_step(step, *state, TARGETS)
        if step % 3 == 2:
            exec(call.partition("\n")[2], names)
    counted = gx.outer(sgd, nesterov, every=3)
    train_step = gx.TrainStep(tree_gradients, counted, nodes=names["nodes"])
    params, opt_state = names["nodes"].init(counted, names["start"])
    for step in range(9):
        params, opt_state, _ = train_step(step, params, opt_state, TARGETS)
    np.testing.assert_allclose(names["params"]["w"], params["w"], rtol=1e-5, atol=1e-6)
    assert np.abs(params["w"]).max() > 0.1


STREAM = {"every": 4, "fragments": 2, "delay": 3, "strength": 0.5}


def make_streaming(**changes):
    inner = optax.sgd(0.1, momentum=0.9)
    return gx.outer(inner, optax.sgd(0.7, momentum=0.9), **(STREAM | changes))


def tree_gradients(z, target):
    return jax.tree.map(lambda x: x - target, z), jnp.sum(target)


TARGETS = jnp.asarray(np.random.default_rng(3).normal(size=N), jnp.float32)
START = {"a": jnp.zeros(4), "b": jnp.ones(2)}


def run_steps(tx, steps, state=None, first=0, nodes=None, bad_steps=(), **options):
    """The results of a loop of train steps from `first` to `steps`, and its step."""
    nodes = nodes or gx.Nodes(N)
    train_step = gx.TrainStep(tree_gradients, tx, nodes=nodes, **options)
    params, opt_state = nodes.init(tx, START) if state is None else state
    for step in range(first, steps):
        targets = TARGETS.at[0].set(jnp.nan) if step in bad_steps else TARGETS
        params, opt_state, _ = train_step(step, params, opt_state, targets)
    return (params, opt_state), train_step


def assert_equal_bits(actual, expected):
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


class TestInATrainStep:
    @pytest.mark.parametrize(
        ("gossip", "options"),
        [
            (optax.identity(), STREAM),
            (optax.identity(), STREAM | {"average": gx.topology.random_pairs(N, 3, seed=0)}),
            (gx.osgp(RING), {"every": 3, "delay": 1}),
            (gx.osgp(RING, 2), {"every": 3, "average": "none"}),
            (gx.dpsgd(RING), {"every": 3}),
        ],
        ids=["exact", "pairs", "osgp, delay", "osgp, no average", "dpsgd"],
    )
    def test_a_thread_changes_nothing(self, gossip, options):
        inner = optax.chain(optax.sgd(0.1, momentum=0.9), gossip)
        tx = gx.outer(inner, optax.sgd(0.7, momentum=0.5), **options)
        expected, _ = run_steps(tx, 14, overlap_in_thread=False)
        actual, train_step = run_steps(tx, 14, overlap_in_thread=True)
        assert train_step.overlaps(actual[1])
        for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)

    def test_an_average_is_on_its_way_until_it_is_used(self):
        (_, state), train_step = run_steps(make_streaming(), 4, overlap_in_thread=True)
        update: Any
        ((update, *_),) = train_step._programs.values()
        # Sent at the end of steps 1 and 3, used at the end of steps 4 and 6.
        assert list(update._pending) == [4, 6]
        assert gx.canonical_steps(state) == [0, 1, 3, 4, 6]
        train_step.run(gx.spmd(gx.average_model, nodes=N), *run_steps(make_streaming(), 1)[0])
        assert all(future.done() for future in update._pending.values())
        train_step.close()

    def test_resumes_with_the_same_bits_in_the_middle_of_a_delay(self):
        tx = make_streaming()
        state, train_step = run_steps(tx, 4, overlap_in_thread=True)
        saved = {}
        for step in range(4, 13):
            saved[step] = jax.tree.map(np.asarray, state)
            *state, _ = train_step(step, *state, TARGETS)
        for saved_at in (4, 6, 8):
            resumed, _ = run_steps(tx, 13, saved[saved_at], saved_at, overlap_in_thread=True)
            assert_equal_bits(resumed, tuple(state))

    @pytest.mark.parametrize("overlap_in_thread", [False, True])
    @pytest.mark.parametrize(
        ("first", "bad", "models"),
        [
            # It begins where averages of a period before would arrive: what was sent at step 7, 4,
            # is used at step 9.
            (4, None, [1, 2, 3, 4, 5, 4, 5, 6]),
            # At step 5 comes the 4 of step 3; step 7 sends nothing; at step 13 comes the 9 of 11.
            (0, 7, [1, 2, 3, 4, 5, 4, 5, 5, 6, 7, 8, 9, 10, 9]),
        ],
        ids=["begins late", "skips a step"],
    )
    def test_what_was_not_sent_is_not_used(self, first, bad, models, overlap_in_thread):
        tx = gx.outer(optax.sgd(1.0), optax.sgd(1.0), 4, delay=2)
        tx = tx if bad is None else gx.apply_if_finite(tx)
        nodes = gx.Nodes(2)

        def gradients(z, is_bad):
            return jnp.where(is_bad, jnp.nan, -jnp.ones_like(z)), ()

        step: Any = None
        z, state = nodes.init(tx, jnp.zeros(()))
        for k, expected in enumerate(models, first):
            if k in (first, 12):  # resumes
                step = gx.TrainStep(gradients, tx, nodes=nodes, overlap_in_thread=overlap_in_thread)
            z, state, _ = step(k, z, state, jnp.full(2, k == bad))
            assert float(z[0]) == expected, k


MESH = jax.sharding.Mesh(np.array(jax.devices()[:N]), ("nodes",))
BY_LAYERS = {"fragments": gx.layer_fragments(2, {"a": 0, "b": None})}
FSDP: Any = gx.Nodes(mesh=gx.launch.mesh(N, fsdp=2))


def places_of(state):
    outer: Any = find_exchange(state[1])
    waiting = jax.tree.leaves((outer.anchor, outer.outer, outer.sent, outer.error))
    return {x.sharding.memory_kind for x in waiting}


class TestOnTheHost:
    @pytest.mark.parametrize(
        ("place", "setting"),
        [
            (gx.Nodes(N), {"every": 4, "error_feedback": 0.9, "wire": gx.wire.int8()}),
            (gx.Nodes(N, mesh=jax.sharding.Mesh(jax.devices()[:2], "nodes")), STREAM | BY_LAYERS),
            (FSDP, STREAM),
        ],
        ids=["vmap", "blocks", "fsdp"],
    )
    def test_it_changes_no_bit_and_goes_on_from_a_checkpoint(self, place, setting, tmp_path):
        tx = gx.outer(optax.sgd(0.1, momentum=0.9), optax.sgd(0.7, momentum=0.9), **setting)
        if place is FSDP:
            tx = gx.sharded(tx, gx.fsdp_specs(START, FSDP.mesh))
        tx = gx.apply_if_finite(tx)
        options: Any = {"nodes": place, "offload_outer": True, "bad_steps": (8, 13)}
        expected, _ = run_steps(tx, 14, **options | {"offload_outer": False})
        actual, train_step = run_steps(tx, 14, **options)
        assert_equal_bits(actual, expected)
        for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            assert a.sharding.with_memory_kind("device") == b.sharding
        assert places_of(actual) == {"pinned_host"}
        update: Any
        ((update, *_),) = train_step._programs.values()
        programs = update._fused._jitted._cache_size()  # nothing is compiled anew
        assert programs == len(gx.canonical_steps(actual[1]))
        halfway, _ = run_steps(tx, 7, **options)
        with Checkpoints(tmp_path / "run") as checkpoints:
            checkpoints.save(7, halfway, {})
            for like in (halfway, place.init(tx, START)):
                restored = checkpoints.restore(lambda _, like=like: like)
                assert restored is not None
                assert places_of(restored[1]) == places_of(like)
                assert_equal_bits(run_steps(tx, 14, restored[1], 7, **options)[0], expected)
        model = gx.average_model(*actual, nodes=place)
        assert_equal_bits(model, gx.average_model(*expected, nodes=place))
        assert_equal_bits(place.to_host(actual), expected)
        assert_equal_bits(change_nodes(*actual, tx, 2)[:2], change_nodes(*expected, tx, 2)[:2])

    def test_a_program_takes_what_its_step_needs(self):
        inner = optax.sgd(0.1, momentum=0.9)
        tx = gx.outer(inner, optax.sgd(0.7, momentum=0.9), **STREAM)
        nodes = gx.Nodes(1)

        def count_bytes(tx, step):
            train_step = gx.TrainStep(tree_gradients, tx, nodes=nodes, offload_outer=True)
            state = nodes.init(tx, START)
            lowered = train_step.lower(step, *state, TARGETS[:1])
            return lowered.compile().memory_analysis().argument_size_in_bytes

        plain = count_bytes(inner, 0) + 4 * 4  # and four counts
        # Fragments of 4 and 2 values: the anchor, and where it is used what was sent and momentum.
        needed = {0: 0, 1: 4, 3: 2, 4: 3 * 4, 6: 3 * 2}
        assert gx.canonical_steps(nodes.init(tx, START)[1]) == [*needed]
        for step, values in needed.items():
            assert count_bytes(tx, step) - plain == 4 * values, step

    def test_what_takes_all_of_the_state_is_refused(self):
        tx = make_streaming()
        with pytest.raises(ValueError, match="offload_outer must be False where steps are traced"):
            run_steps(tx, 1, offload_outer=True, max_programs=1)
        state, train_step = run_steps(tx, 1, offload_outer=True)
        with pytest.raises(ValueError, match=r"scan must not be called .* offload_outer"):
            train_step.scan(1, *state, TARGETS[None])

    def test_the_limit_of_pinned_memory_is_named(self, monkeypatch):
        def run_out(_):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of pinned memory")

        monkeypatch.setattr("gossipjax.step.offloaded._to_host", run_out)
        with pytest.raises(jax.errors.JaxRuntimeError) as raised:
            run_steps(make_streaming(), 1, offload_outer=True)
        assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in raised.value.__notes__[0]


ONE_PEER = gx.topology.one_peer_exponential(N)


GOSSIPS = {
    "sgp": gx.sgp(ONE_PEER),
    "sgp-cwa": gx.sgp(ONE_PEER, order="combine-while-adapting"),
    "osgp": gx.osgp(ONE_PEER, 2),
    "dpsgd": gx.dpsgd(RING),
}
NOT_REPLACED: Any = ({"average": "none"}, {"strength": 0.5}, {"fragments": 2})


@pytest.mark.parametrize("name", GOSSIPS)
def test_the_gossip_inside_does_not_exchange_before_an_exact_average(name):
    nodes = gx.Nodes(mesh=jax.sharding.Mesh(np.array(jax.devices()[:N]), ("nodes",)))

    def count_permutes(step, shared=False, **options):
        tx = gx.outer(optax.chain(optax.sgd(0.1), GOSSIPS[name]), optax.sgd(0.7), 3, **options)
        params, state = nodes.init(tx, START)
        argnums: Any = {"shared_argnums": 2} if shared else {"static_argnums": 2}
        program = nodes.spmd(lambda z, s, k: take_step(tx, (z, s), z, k), **argnums)
        return program.lower(params, state, step).as_text().count("collective_permute")

    assert count_permutes(2) == 0
    assert count_permutes(1) > 0
    if name == "sgp":
        assert count_permutes(np.int32(2), shared=True) > 0
        assert count_permutes(3, delay=1) > 0
        assert all(count_permutes(2, **options) > 0 for options in NOT_REPLACED)


@pytest.mark.parametrize("delay", [0, 3])
def test_the_exchange_of_a_delayed_fragment_needs_nothing_of_its_step(delay):
    """In the compiled program no gradient reaches the all-reduce; without delay, all do."""
    tx = make_streaming(every=20, delay=delay)
    nodes = gx.Nodes(mesh=jax.sharding.Mesh(np.array(jax.devices()[:N]), ("nodes",)))
    params, state = nodes.init(tx, START)
    plan = find_exchange(state).plan

    def step(params, state, target, k):
        grads, _ = tree_gradients(jax.tree.map(jnp.sin, params), target)
        return take_step(tx, (params, state), grads, k)

    program = nodes.spmd(step, static_argnums=3)
    for k in gx.canonical_steps(state):
        text = program.lower(params, state, TARGETS, k).compile().as_text()
        exchanges = find_all_reduces(text)
        assert len(exchanges) == (plan.used_at(k) is not None), k
        for inputs in exchanges:
            assert ("sine" in inputs) == (delay == 0)


def find_all_reduces(text):
    """The operations on which each all-reduce of a compiled program depends."""
    module = parse_module(text)

    def follow(it, body, seen):
        if it.name in seen:
            return
        seen[it.name] = it.opcode
        for name in it.operands:
            if name in body:
                follow(body[name], body, seen)
        for called in it.called:
            for inner in module.computations[called].values():
                follow(inner, module.computations[called], seen)

    results = []
    for it, body in module.list_collectives():
        assert it.collective == "all-reduce"
        seen = {}
        follow(it, body, seen)
        results.append(set(seen.values()))
    return results


@pytest.mark.parametrize("axis", [0, 1])
def test_layers_that_flax_scans_are_found_by_their_name(axis):
    """Boxed parameters, and a prefix for those without boxes: the same pieces."""

    shape, names = [4, 4], ["embed", "mlp"]
    shape.insert(axis, 3)
    names.insert(axis, "layers")  # as nn.scan does by PARTITION_NAME
    boxed: Any = {
        "dense": {"kernel": jnp.zeros((5, 4)), "bias": jnp.zeros(4)},
        "layers": nn.Partitioned(jnp.zeros(shape), tuple(names)),
    }
    axes = {name: axis if name == "layers" else None for name in boxed}
    pieces = gx.layer_fragments(3).split(boxed)
    assert pieces == gx.layer_fragments(3, axes).split(nn.unbox(boxed))
    tx = gx.outer(optax.sgd(0.1), optax.sgd(0.7, momentum=0.9), 3, fragments=gx.layer_fragments(3))
    state: Any = tx.init(boxed)
    sizes = [sum(x.size for x in jax.tree.leaves(part)) for part in state.outer]
    assert sum(sizes) == 72
    assert max(sizes) - min(sizes) <= 4


@pytest.mark.parametrize(
    ("mode", "wire"), [("vmap", None), ("shard_map_check_vma", gx.wire.bfloat16())], ids=str
)
def test_a_robust_rule_takes_the_place_of_the_average(mode, wire):
    """Of outer gradients, with weights; all anchors stay equal, and feedback keeps what is cut."""
    weights = np.array([1.0, 2.0, 1.0, 4.0])
    p = weights / weights.sum()
    rule = gx.contrib.ClippedGossip(1.5)
    feedback = None if wire is None else 1.0
    options = {"average": rule, "weights": weights, "wire": wire, "error_feedback": feedback}
    tx = gx.outer(optax.identity(), optax.sgd(0.5), 2, **options)
    _, starts, updates = make_problem(N, jnp.float32, 6)
    starts[:] = starts[0]
    args = unflatten(starts), unflatten(updates.swapaxes(0, 1))
    _, models, states, *_ = run_history(mode, tx, "traced", *args)
    z, anchor = starts.copy(), starts[0]
    for k, u in enumerate(updates):
        z = z + u
        if k % 2:
            change = oracle.clipped_gossip(np.zeros_like(anchor), anchor - z, p, radius=1.5)
            anchor = anchor - 0.5 * change
            z[:] = anchor
        tolerance = 1e-5 if wire is None else 2e-2
        np.testing.assert_allclose(flatten(models, 2)[:, k], z, rtol=tolerance, atol=tolerance)
    for leaf in jax.tree.leaves(states.anchor):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    sent = gx.bytes_per_step(tx, unflatten(starts[0]), N).sent
    assert sent.tolist() == [[0] * N, [(N - 1) * starts.shape[1] * (4 if wire is None else 2)] * N]


def test_what_a_robust_rule_cannot_hold_is_refused():
    rule = gx.contrib.CoordinateMedian()
    refused: list[dict[str, Any]] = [
        {"weights": "counted"},
        {"wire": gx.wire.low_rank(2), "error_feedback": 1.0},
        {"wire": gx.wire.top_k(0.1), "error_feedback": 1.0, "mean_over": "senders"},
    ]
    for options in refused:
        with pytest.raises(ValueError, match="can be a rule if"):
            gx.outer(optax.identity(), optax.sgd(1.0), 2, average=rule, **options)
    tx = gx.outer(gx.sgp(RING), optax.sgd(1.0), 2, average=rule)
    with pytest.raises(ValueError, match="one liar moves all"):
        tx.init(jnp.zeros(3))
