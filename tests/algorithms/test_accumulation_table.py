"""Gradients of several steps in one update: every chain, in every loop, in one table.

A cell is `=` where the parameters after every update are, to 1e-12, those of one update of the mean
gradient, which the chain itself makes, with nothing accumulated and steps counted. It is `refused`
where a `ValueError` says what to do instead, and `-` where a loop is not asked.

Loops: of one's own with a traced step; and `gx.TrainStep`, which compiles each canonical step.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
from algorithms.rows import ROWS

import gossipjax as gx

N = 4
EVERY = 4
UPDATES = 3  # outer steps, and delays after them
STEPS = UPDATES * EVERY
SCHEDULE = gx.topology.one_peer_exponential(N)
IRREGULAR = gx.topology.from_matrices(oracle.column_stochastic(np.random.default_rng(N), N)[:2])
NODES = gx.Nodes(N)
ALGORITHMS = (
    "allreduce",
    "dpsgd",
    "sgp",
    "choco, random_k",
    "osgp 2",
    "adpsgd",
    "easgd",
    "gradient_tracking",
    "d2",
    "quasi_global",
    "relay",
)
OPTIMIZERS = [name for name in ROWS if name.startswith(("quasi_global", "mixed_momentum"))]
LOOPS = ("traced", "step")
STEPPED = (  # of the accumulated chains
    "allreduce",
    "sgp",
    "osgp 2",
    "adpsgd",
    "gradient_tracking",
    "masked",
    "finite around sgp",
    "finite around osgp",
    "outer, delay",
    "outer, fragments",
    "outer around osgp",
)
WAYS = {
    "accumulate": lambda tx: gx.accumulate(tx, EVERY),
    "MultiSteps": lambda tx: optax.MultiSteps(
        tx, EVERY, accumulator_dtype=jnp.float64
    ).gradient_transformation(),
}


def make_chain_of_row(name):
    """The row, after momentum where it is not an optimizer itself."""
    row = ROWS[name]
    schedule = {oracle.static_ring: gx.topology.ring(N), oracle.doubly_stochastic: SCHEDULE}.get(
        row.matrices, IRREGULAR
    )
    inner = optax.sgd(0.1, 0.9) if name not in OPTIMIZERS else optax.add_decayed_weights(0.1)
    return row.chain(inner, schedule)


def falling_rate(count):
    return 0.1 / (1 + jnp.asarray(count, jnp.float64))


def make_chains():
    sgd = optax.sgd(0.1, 0.9)
    sgp = gx.sgp(SCHEDULE)
    local = optax.chain(sgd, sgp)
    nesterov = optax.sgd(0.7, 0.9, nesterov=True)
    pairs = gx.topology.random_pairs(N, rounds=3, seed=0)
    return {name: make_chain_of_row(name) for name in ALGORITHMS} | {
        "sgp, cwa": optax.chain(sgd, gx.sgp(SCHEDULE, "combine-while-adapting")),
        "sgp, local steps": optax.chain(sgd, gx.sgp(SCHEDULE.every(2))),
        "adamw, clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1), sgp),
        "inject_hyperparams": optax.chain(
            optax.inject_hyperparams(optax.sgd)(learning_rate=falling_rate), sgp
        ),
        "masked": optax.chain(sgd, optax.masked(sgp, {"kernel": True, "bias": False})),
        "multi_transform": optax.multi_transform(
            {"x": local, "y": optax.adam(0.1)}, {"kernel": "x", "bias": "y"}
        ),
        "finite before sgp": optax.chain(gx.apply_if_finite(sgd), sgp),
        "finite around sgp": gx.apply_if_finite(local),
        "finite around osgp": gx.apply_if_finite(optax.chain(sgd, gx.osgp(SCHEDULE))),
        "outer, local": gx.outer(optax.adam(0.1), nesterov, 2),
        "outer, delay": gx.outer(sgd, nesterov, 2, delay=1),
        "outer, fragments": gx.outer(sgd, nesterov, 2, fragments=2, delay=1, mix=0.5),
        "outer, average=schedule": gx.outer(sgd, nesterov, 2, average=pairs, pull=1.4),
        'outer, average="none"': gx.outer(local, nesterov, 2, average="none"),
        "outer, reset_inner": gx.outer(sgd, nesterov, 2, reset_inner=True),
        "outer around sgp": gx.outer(local, nesterov, 2),
        "outer around osgp": gx.outer(optax.chain(sgd, gx.osgp(SCHEDULE)), nesterov, 2),
        "outer around dpsgd": gx.outer(
            optax.chain(sgd, gx.dpsgd(gx.topology.ring(N))), nesterov, 3
        ),
    }


CHAINS = make_chains()


def gradients(params, batch):
    """Of a quadratic; `batch` `[B]` of trees like the parameters."""
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), batch)
    return jax.tree.map(jnp.subtract, params, mean), None


def make_data():
    """Parameters `[N, ...]`, and a batch of one example for each step, `[N, STEPS, 1, ...]`."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return {"kernel": rng.normal(size=(N, *shape, 3)), "bias": rng.normal(size=(N, *shape, 1))}

    return draw(), draw(STEPS, 1)


def take(tree, step):
    return jax.tree.map(lambda x: x[:, step], tree)


def join(batches, count):
    """`[N, S, B, ...]` -> `[N, S / count, count B, ...]`."""
    return jax.tree.map(lambda x: x.reshape(N, len(x[0]) // count, -1, *x.shape[3:]), batches)


def run_train_step(tx, params, state, batches):
    """The models after every step, `[N, S, ...]`."""
    train_step = gx.TrainStep(gradients, tx, nodes=NODES)
    history = []
    for k in range(len(jax.tree.leaves(batches)[0][0])):
        params, state, _ = train_step(k, params, state, take(batches, k))
        history.append(params)
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *history)


def run_traced_loop(chains, params, states, batches, is_counted=False):
    """All chains in one program: the models after every step, and who refused."""
    refused = {}

    def body(carry, inputs):
        batch, step = inputs
        new = {}
        for name, (z, state) in carry.items():
            try:
                grads, _ = gradients(z, batch)
                step = None if is_counted else step
                updates, state = chains[name].update(grads, state, z, step=step)
                new[name] = optax.apply_updates(z, updates), state
            except ValueError as error:
                refused[name] = str(error)
                new[name] = carry[name]
        return new, {name: z for name, (z, _) in new.items()}

    def train(params, states, batches):
        carry = {name: (params, states[name]) for name in states}
        steps = jnp.arange(len(jax.tree.leaves(batches)[0]))
        return jax.lax.scan(body, carry, (batches, steps))[1]

    return NODES.spmd(train)(params, states, batches), refused


def init(chains, params):
    """The states of all chains, by one program."""
    return NODES.run(lambda z: {name: tx.init(z) for name, tx in chains.items()}, params)


def run_loop(loop, chains, params, states, batches):
    """Models by chain after every step, `[N, S, ...]`, and the errors of those that refuse."""
    if loop == "traced":
        return run_traced_loop(chains, params, states, batches)
    models, refused = {}, {}
    for name, tx in chains.items():
        try:
            models[name] = run_train_step(tx, params, states[name], batches)
        except ValueError as error:
            refused[name] = str(error)
    return models, refused


def compare(models, expected):
    """`=`, or the largest distance after an update; between them, nothing may move."""
    worst = 0.0
    for actual, wanted in zip(*map(jax.tree.leaves, (models, expected)), strict=True):
        held = np.repeat(np.asarray(wanted), np.shape(actual)[1] // UPDATES, axis=1)
        after = np.asarray(actual)[:, np.shape(actual)[1] // UPDATES - 1 :]
        worst = max(worst, np.abs(after - held[:, : after.shape[1]]).max())
    return "=" if worst < 1e-12 else f"{worst:.0e}"


TABLE = """
                          accumulate      MultiSteps
                          traced  step    traced  step
allreduce                 =       =       =       =
dpsgd                     =       -       refused refused
sgp                       =       =       refused refused
choco, random_k           =       -       refused refused
osgp 2                    =       =       refused refused
adpsgd                    =       =       refused refused
easgd                     =       -       refused refused
gradient_tracking         =       =       refused refused
d2                        =       -       refused refused
quasi_global              =       -       refused refused
relay                     =       -       refused refused
sgp, cwa                  =       -       refused refused
sgp, local steps          =       -       refused refused
adamw, clipped            =       -       refused refused
inject_hyperparams        =       -       refused refused
masked                    =       =       refused refused
multi_transform           =       -       refused refused
finite before sgp         =       -       refused refused
finite around sgp         =       =       refused refused
finite around osgp        refused refused refused refused
outer, local              =       -       refused refused
outer, delay              =       =       refused refused
outer, fragments          =       =       refused refused
outer, average=schedule   =       -       refused refused
outer, average="none"     =       -       refused refused
outer, reset_inner        =       -       refused refused
outer around sgp          =       -       refused refused
outer around osgp         =       =       refused refused
outer around dpsgd        =       -       refused refused
"""


@functools.cache
def find_expected():
    """The models of all chains after every update, of mean gradients, with steps counted."""
    params, batches = make_data()
    means = join(batches, EVERY)
    models, refused = run_traced_loop(CHAINS, params, init(CHAINS, params), means, is_counted=True)
    assert not refused
    return models


def make_columns(way):
    """The cells of all chains, for each loop."""
    params, batches = make_data()
    chains = {name: WAYS[way](tx) for name, tx in CHAINS.items()}
    states = init(chains, params)
    for loop in LOOPS:
        is_partial = (way, loop) == ("accumulate", "step")
        asked = {name: tx for name, tx in chains.items() if not is_partial or name in STEPPED}
        models, refused = run_loop(loop, asked, params, {n: states[n] for n in asked}, batches)
        assert all(" must " in message and ", got " in message for message in refused.values())
        cells = dict.fromkeys(CHAINS, "-") | dict.fromkeys(refused, "refused")
        compared = asked.keys() - refused.keys()
        yield cells | {name: compare(models[name], find_expected()[name]) for name in compared}


def test_accumulation_is_one_update_of_the_mean_gradient_or_refused():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        columns = [column for way in WAYS for column in make_columns(way)]
    lines = [f"{'':26}{''.join(f'{way:16}' for way in WAYS)}".rstrip()]
    lines.append(f"{'':26}{''.join(f'{loop:8}' for loop in LOOPS * len(WAYS))}".rstrip())
    rows = {name: "".join(f"{column[name]:8}" for column in columns) for name in CHAINS}
    lines += [f"{name:26}{cells}".rstrip() for name, cells in rows.items()]
    table = "\n".join(["", *lines, ""])
    print(table)
    assert table == TABLE
