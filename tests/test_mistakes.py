"""What people write: refused with a way out, warned of, right, or on a page.

A row for each kind; `tests/bad_input` has the bad values of single arguments.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import PartitionSpec as P

import gossipjax as gx

N = 4
NODES = gx.Nodes(N)
RING = gx.topology.ring(N)
ONE_PEER = gx.topology.one_peer_exponential(N)
IRREGULAR = gx.topology.random_peer(N, 3, seed=0)
SGD: Any = optax.sgd(0.1)
ADAM: Any = optax.adam(0.1)
NESTEROV: Any = optax.sgd(0.7, momentum=0.9, nesterov=True)
SGP: Any = gx.sgp(ONE_PEER)
DPSGD: Any = gx.dpsgd(RING)
chain = optax.chain
CHAIN: Any = chain(SGD, SGP)
WEIGHTED: Any = gx.weighted([1, 2, 3, 4])
PARAMS = {"a": jnp.arange(3.0), "b": jnp.zeros(2)}
HALF = {"a": True, "b": False}
OTHER_HALF = {"a": False, "b": True}
SPECS = {"a": P(), "b": P()}
PAGES = Path(__file__).parents[1] / "docs"


def first_program(tx: Any) -> int:
    return gx.canonical_step(jax.eval_shape(tx.init, PARAMS), 0)


def pull(params: Any, target: Any) -> Any:
    return jax.tree.map(lambda p: p - target, params), ()


def train(tx: Any = None, change: Any = None, check_mass: int = 1) -> Any:
    """Trains; after step 5 `change(new, old)` makes parameters and state."""
    tx = chain(SGD, gx.sgp(IRREGULAR)) if tx is None else tx
    train_step = gx.TrainStep(pull, tx, nodes=NODES, check_mass=check_mass)
    state = NODES.init(tx, PARAMS)
    for step in range(12):
        old = state
        *state, _ = train_step(step, *state, jnp.arange(4.0))
        if step == 5 and change is not None:
            state = change(state, list(old))
    return state


def train_once(gradients: Any, step: Any = 0) -> None:
    gx.TrainStep(gradients, CHAIN, NODES)(step, *NODES.init(CHAIN, PARAMS), jnp.arange(4.0))


def step_closed(train_step: Any) -> None:
    step = gx.decentralize(train_step, SGP, NODES, params=lambda state: state["p"])
    step({"p": jnp.ones(2)}, jnp.arange(4.0))


def scan_with_change(change: Any) -> None:
    """Calls of 5 steps from step 0; a check is due after steps 6, 13, ..."""
    tx = chain(SGD, gx.sgp(IRREGULAR))
    train_step = gx.TrainStep(pull, tx, nodes=NODES, check_mass=7)
    state = NODES.init(tx, PARAMS)
    for step in range(0, 20, 5):
        old = jax.tree.map(jnp.copy, state)
        *state, _ = train_step.scan(step, *state, jnp.tile(jnp.arange(4.0), (5, 1)))
        if step == 5:
            train_step._mass._sums = None  # the change comes before the next check only
            state = change(state, list(old))


def keep_old_at_node_0(new: Any, old: Any) -> Any:
    """As `jnp.where(is_finite, new, old)` does where one node alone has a NaN."""
    is_ok = jnp.arange(N) > 0
    return jax.tree.map(
        lambda a, b: jnp.where(is_ok.reshape(N, *[1] * (a.ndim - 1)), a, b), new, old
    )


def skip_at_node_0(inner: Any) -> Any:
    """A transform of one's own around a chain: node 0 skips step 5."""

    def update(updates: Any, state: Any, params: Any = None, **arguments: Any) -> Any:
        result = inner.update(updates, state, params, **arguments)
        is_skipped = (jax.lax.axis_index("nodes") == 0) & (state[-1].count == 5)
        skipped = jax.tree.map(jnp.zeros_like, updates), state
        return jax.tree.map(lambda a, b: jnp.where(is_skipped, b, a), result, skipped)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def average_masked() -> Any:
    tx = chain(SGD, optax.masked(gx.dpsgd(RING), HALF))
    params, opt_state = NODES.init(tx, PARAMS)
    params = params | {"b": jnp.arange(8.0).reshape(N, 2)}
    return gx.average_model(params, opt_state, nodes=NODES)


def inject(make: Any) -> Any:
    return optax.inject_hyperparams(make)(learning_rate=0.1)


def is_even(step: Any, **_: Any) -> Any:
    return step % 2 == 0


SKIPPING = optax.MultiSteps(CHAIN, 2, should_skip_update_fn=optax.skip_not_finite)
# The order of a chain: its state shows it.
WRONG: dict[str, list[Any]] = {
    r"gossip must be last in a chain, .* got \w+State after it: optimizers go before": [
        chain(SGD, SGP, optax.trace(0.9)),
        chain(SGP, optax.adamw(0.1)),
        optax.named_chain(("a", SGP), ("b", ADAM)),
        chain(CHAIN, chain(optax.clip(1.0), optax.trace(0.9))),
        chain(SGP, optax.scale_by_learning_rate(optax.linear_schedule(0.1, 0.01, 10))),
        chain(SGP, inject(optax.adam)),
        chain(optax.masked(SGP, HALF), ADAM),
        chain(gx.apply_if_finite(SGP), ADAM),
        chain(SGP, optax.conditionally_transform(optax.trace(0.9), is_even)),
        gx.outer(chain(DPSGD, optax.sgd(0.1, 0.9)), SGD, 2),
        chain(gx.outer(SGD, SGD, 2), optax.trace(0.9)),
        chain(gx.sharded(SGP, SPECS), ADAM),
    ],
    r"the exchange must get gradients, .* of \w+State before it: .* wraps it": [
        chain(ADAM, gx.outer(SGD, NESTEROV, 4)),
        chain(inject(optax.adam), gx.outer(SGD, NESTEROV, 4)),
        chain(NESTEROV, gx.quasi_global(RING, 0.1)),
    ],
    "gx.weighted must stand directly before the gossip, or first before gx.allreduce": [
        chain(CHAIN, WEIGHTED),
        chain(WEIGHTED, ADAM, SGP),
        chain(gx.allreduce(), WEIGHTED, ADAM),
        gx.outer(chain(WEIGHTED, optax.trace(0.9)), SGD, 2),
        chain(SGD, WEIGHTED),
    ],
    "gx.allreduce must go first": [
        chain(ADAM, gx.allreduce()),
        chain(NESTEROV, gx.allreduce(axis_name="local"), SGP),
    ],
    "a chain must exchange over 'nodes' once": [
        chain(gx.allreduce(), SGD, SGP),
        chain(SGD, SGP, gx.allreduce()),
        gx.outer(chain(gx.allreduce(), SGD), NESTEROV, 4),
    ],
    # A node that decides alone.
    r"gossip must not stand inside .*apply_if_finite": [
        optax.apply_if_finite(CHAIN, 5),
        SKIPPING.gradient_transformation(),
    ],
}


@pytest.mark.parametrize(
    ("tx", "message"), [(tx, message) for message, chains in WRONG.items() for tx in chains]
)
def test_a_chain_is_refused(tx: Any, message: str):
    with pytest.raises(ValueError, match=message):
        first_program(tx)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: train(chain(SGD, SGP, optax.trace(0.9))), "gossip must be last in a chain"),
    # A node that decides alone.
    (lambda: train(change=keep_old_at_node_0), "between steps 5 and 6, .*gx.apply_if_finite"),
    (
        lambda: train(change=lambda new, old: [keep_old_at_node_0(new, old)[0], new[1]]),
        "must stay .* between steps 5 and 6",
    ),
    (lambda: train(change=keep_old_at_node_0, check_mass=4), "after step 7, .*other counts"),
    (lambda: scan_with_change(keep_old_at_node_0), "after step 14, .*other counts"),
    (lambda: train(skip_at_node_0(chain(SGD, SGP))), "after step 5, .*other counts"),
    # What is stacked, split and drawn.
    (
        lambda: NODES.init(SGP, NODES.replicate({"a": jnp.arange(3.0)})),
        "must be the tree of one node",
    ),
    (
        lambda: NODES.replicate(
            {"raw": jax.random.PRNGKey(0), "typed": jax.random.key(0)}, fold_in=True
        ),
        "wrap_key_data",
    ),
    (lambda: NODES.split({"x": np.array(["a"] * 8)}), "encode texts"),
    (
        lambda: NODES.split({"x": np.ones(8), "y": np.ones(4)}),
        r"\['y'\] must have as many examples",
    ),
    (
        lambda: gx.accumulate_gradients(lambda params: (params, ()), 2)(jnp.ones(())),
        "inputs of accumulated gradients must be given",
    ),
    # What newcomers write.
    (lambda: gx.diagnostics.consensus_distance(jnp.ones((N, 3))), r"nodes.run\(fn, params\)"),
    (lambda: gx.topology.from_matrices(np.ones((3, 3)) - np.eye(3)), "gx.topology.from_graph"),
    (
        lambda: gx.dirichlet_split(np.arange(9), NODES, 0.1),  # pyright: ignore
        "such as nodes.size",
    ),
    (
        lambda: jax.jit(lambda step: train_once(lambda p, x: (p, ()), step))(0),
        "in a loop of Python, .* or train_step.scan",
    ),
    (
        lambda: train_once(lambda p, x: (jax.lax.pmean(p, "batch"), ())),
        "Remove the lax.pmean",
    ),
    (
        lambda: train_once(lambda p, x: (p, {"name": "adam"})),
        r"aux\['name'\] must be an array or a number",
    ),
    (
        lambda: step_closed(lambda state, x: (0.0, state)),
        "state, metrics., which train_step returns in this order, must have the structure",
    ),
    (
        lambda: step_closed(lambda state, x: state),
        r"lambda \*args: \(train_step\(\*args\), None\)",
    ),
    (
        lambda: step_closed(lambda state, x: (jax.lax.pmean(state, "batch"), None)),
        "Remove the lax.pmean",
    ),
    (average_masked, r"\['b'\] that differ by 85.7%, .*nodes.run\(gx.average_model"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_is_refused(call: Callable[[], Any], message: str):
    with pytest.raises(ValueError, match=message):
        call()


def step_by_hand() -> None:
    """A loop of one's own, whose static step is given as it is."""

    def update(params: Any, state: Any, step: Any) -> Any:
        return SGP.update(params, state, params, step=step)

    program = NODES.spmd(update, static_argnums=2)
    params, state = NODES.init(SGP, PARAMS)
    for step in range(40):
        _, state = program(params, state, step)


def draw(key: Any) -> Any:
    train_step = gx.TrainStep(lambda p, key: (p, jax.random.normal(key)), SGP, nodes=NODES)
    return train_step(0, *NODES.init(SGP, PARAMS), key)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (step_by_hand, "gx.canonical_step"),
        (lambda: draw(NODES.replicate(jax.random.key(0))), "fold_in=True"),
        (lambda: draw(NODES.replicate(jax.random.PRNGKey(0))), "fold_in=True"),
    ],
)
def test_is_warned_of_once(call: Callable[[], Any], message: str):
    with pytest.warns(UserWarning, match=message) as warned:
        call()
    assert len(warned) == 1


def watch(update: Callable[[Any, Any, Any], Any], start: Any = jnp.zeros) -> Any:
    """A transform of one's own that hands updates on and keeps something."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: start(jnp.shape(p)), params),
        lambda updates, state, params=None: (updates, update(updates, state, params)),
    )


RIGHT: list[Any] = [
    CHAIN,
    chain(CHAIN, optax.monitor({"u": lambda updates, **_: updates})),
    chain(CHAIN, optax.snapshot("u", lambda updates, **_: updates)),
    chain(CHAIN, watch(lambda u, ema, p: optax.incremental_update(p, ema, 0.1))),
    chain(CHAIN, watch(lambda u, counts, p: jax.tree.map(lambda n: n + 1, counts))),
    chain(optax.masked(CHAIN, HALF), optax.masked(ADAM, OTHER_HALF)),
    optax.partition({"x": CHAIN, "y": ADAM}, {"a": "x", "b": "y"}),
    chain(ADAM, WEIGHTED, SGP),
    chain(WEIGHTED, gx.allreduce(), ADAM),
    gx.outer(chain(ADAM, WEIGHTED), SGD, 2, average=RING),
    chain(optax.scale_by_schedule(lambda count: 0.5), gx.outer(SGD, NESTEROV, 2)),
    optax.named_chain(("o", ADAM), ("g", SGP)),
    chain(CHAIN, optax.identity(), optax.scale(1.0)),
    chain(CHAIN, optax.keep_params_nonnegative()),
    optax.masked(CHAIN, HALF),
    optax.multi_transform({"x": CHAIN, "y": SGD}, {"a": "x", "b": "y"}),
    gx.apply_if_finite(CHAIN),
    optax.contrib.sam(CHAIN, optax.sgd(0.05), sync_period=2),
    gx.outer(CHAIN, NESTEROV, 2),
    chain(ADAM, gx.sharded(SGP, SPECS)),
    chain(optax.contrib.schedule_free(SGD, 0.1), DPSGD),
    chain(optax.clip(1.0), gx.quasi_global(RING, 0.1)),
    chain(optax.clip(1.0), gx.outer(ADAM, NESTEROV, 4)),
    chain(optax.add_noise(0.1, 0.5, 0), gx.allreduce(), ADAM),
    chain(gx.allreduce(axis_name="local"), ADAM, SGP),
    gx.outer(chain(gx.allreduce(axis_name="local"), ADAM), NESTEROV, 4),
    chain(optax.masked(gx.allreduce(), HALF), ADAM, optax.masked(SGP, OTHER_HALF)),
]


@pytest.mark.parametrize("tx", RIGHT)
def test_is_right(tx: Any):
    assert first_program(tx) == 0


@pytest.mark.parametrize(
    "tx",
    [
        chain(SGD, gx.osgp(IRREGULAR)),
        chain(SGD, gx.adpsgd(RING, 2)),
        gx.outer(chain(SGD, SGP), NESTEROV, 4),
        gx.faults.inactive(
            chain(SGD, gx.faults.sgp(ONE_PEER, gx.faults.Faults(N))), gx.faults.Faults(N)
        ),
        chain(gx.allreduce(), NESTEROV),
    ],
    ids=["osgp", "adpsgd", "outer", "faults", "allreduce"],
)
def test_a_check_of_mass_finds_nothing_where_nothing_is_lost(tx: Any):
    train(tx, check_mass=True)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("is_scanned", [False, True])
def test_the_first_loss_that_is_not_finite_is_named_with_its_node(is_scanned):
    tx = optax.chain(SGD, gx.sgp(gx.topology.ring(N)))
    train_step = gx.TrainStep(
        lambda z, y: (jax.tree.map(lambda x: x - y, z), {"loss": y}), tx, NODES, check_mass=1
    )
    state = NODES.init(tx, PARAMS)
    targets = np.tile(np.arange(N, dtype=np.float32), (9, 1))
    targets[6, 2] = np.nan

    def train_on() -> None:
        nonlocal state
        for step, target in enumerate(targets):
            *state, _ = train_step(step, *state, target)

    program = (lambda: train_step.scan(0, *state, targets)) if is_scanned else train_on
    when = "step 8" if is_scanned else "step 6"
    with pytest.warns(UserWarning, match=rf"after {when} on the nodes \[2\]") as warned:
        program()
    assert len(warned) == 1


def test_counts_of_a_long_run_are_compared_exactly():
    """In float32 a sum of large counts is none of its terms times N."""
    nodes = gx.Nodes(5)
    tx = chain(SGD, gx.sgp(gx.topology.directed_ring(5)))
    train_step = gx.TrainStep(pull, tx, nodes=nodes, check_mass=1)
    params, state = nodes.init(tx, jnp.zeros(2))
    start = 3_400_001
    state = jax.tree.map(lambda x: x + np.int32(start) if x.dtype == jnp.int32 else x, state)
    for step in range(start, start + 2):
        params, state, _ = train_step(step, params, state, jnp.arange(5.0))


def test_the_average_of_another_tree():
    """Messages in flight are of the parameters: they are not in the mean of a moving average."""
    params, _ = train(chain(SGD, gx.osgp(ONE_PEER)))
    zeros = gx.average_batch_stats(jax.tree.map(jnp.zeros_like, params), nodes=NODES)
    assert not any(leaf.any() for leaf in jax.tree.leaves(zeros))


def test_a_dynamic_scale_and_a_step_that_all_nodes_skip():
    tx = gx.apply_if_finite(chain(optax.sgd(0.0), SGP))

    def step(params: Any, state: Any, scale: Any, x: Any) -> Any:
        scale, _, _, grads = scale.value_and_grad(
            lambda p: (p.astype(jnp.float16) * x).astype(jnp.float32)
        )(params)
        updates, state = tx.update(grads, state, params, step=0)
        return optax.apply_updates(params, updates), scale

    params = jnp.arange(4.0)
    x = jnp.array([60000.0, 1, 1, 1], jnp.float16)  # the gradient of node 0 overflows
    scale = NODES.replicate(DynamicScale(scale=1024.0))  # pyright: ignore[reportArgumentType]
    params, scale = NODES.spmd(step)(params, NODES.run(tx.init, params), scale, x)
    assert params.tolist() == [0, 1, 2, 3]
    assert scale.scale.tolist() == [512, 1024, 1024, 1024]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("guides/trouble.md", "DynamicScale"),
        ("guides/trouble.md", "reduce_on_plateau"),
        ("guides/trouble.md", "two optimizers are swapped"),
        ("guides/trouble.md", "`lax.pmean` of the gradients is still in the step"),
        ("guides/trouble.md", "do not see clipping, decay or `optax.scale` after the gossip"),
        ("guides/trouble.md", "A batch of N examples that was not split"),
        ("guides/trouble.md", "average_batch_stats(ema, nodes=nodes)"),
        ("guides/trouble.md", "A key that is made inside the step"),
        ("guides/trouble.md", "gx.sgp(schedule, damped=True)"),
        ("guides/transforms.md", "No node decides alone about what is shared"),
        ("guides/your_loop.md", "DynamicScale"),
        ("api/flax.md", "apply_if_finite"),
    ],
)
def test_what_cannot_be_seen_is_on_a_page(page: str, words: str):
    assert words in (PAGES / page).read_text()
