"""Outer optimizers of workers that are not equally fast, against oracles that tick like clocks."""

import functools
import json
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gossipjax as gx
from experiments import survival
from experiments.asynchronous_outer import __main__ as program
from experiments.asynchronous_outer.events import Rule, Workers, list_arrivals, list_shares
from experiments.asynchronous_outer.training import (
    Job,
    average_living,
    train_with_server,
    train_without_server,
)

SIZE = 4
SCALES = np.linspace(0.5, 1.5, SIZE)[:, None] * np.array([1.0, 0.3, 0.1])
OPTIMA = np.random.default_rng(0).normal(size=(SIZE, 3))
BEGIN = np.array([1.0, -2.0, 0.5])
RATE = 0.6
BETA = 0.8
INNER = 0.2
TICKS = (1, 1, 2, 3)  # of a local step; a tick is a second, so that all times are exact
EVERY = 6
END = 60


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def gradient(model, worker, step):
    """Quadratics, whose optima move from step to step."""
    return jnp.asarray(SCALES)[worker] * (model - jnp.asarray(OPTIMA)[worker] * (1 + 0.1 * step))


JOB = Job(BEGIN, optax.sgd(INNER, momentum=0.5), gradient)


class Walker:
    """A worker of the oracles: SGD with momentum 0.5."""

    def __init__(self, worker):
        self.worker = worker
        self.made = 0
        self.velocity = np.zeros(3)

    def update(self, model):
        g = SCALES[self.worker] * (model - OPTIMA[self.worker] * (1 + 0.1 * self.made))
        self.made += 1
        self.velocity = 0.5 * self.velocity + g
        return -INNER * self.velocity


def tick_server(rule, tokens=(1, 1, 1, 1), deaths=None):
    """The models after each arrival, by making every local step when its time has come."""
    deaths = deaths or {}
    walkers = [Walker(i) for i in range(SIZE)]
    targets = [max(1, EVERY * min(TICKS) // s) if rule.dynamic else EVERY for s in TICKS]
    local = [BEGIN] * SIZE
    anchor = [BEGIN] * SIZE
    begun = [0] * SIZE
    steps = [0] * SIZE
    version = [0] * SIZE
    x, m, pending, waiting, deadline, rounds, models = BEGIN, 0.0, 0.0, [], None, 0, []

    def hand(i, time):
        local[i], anchor[i], begun[i], steps[i], version[i] = x, x, time, 0, rounds

    def close(time):
        nonlocal x, m, pending, waiting, deadline, rounds
        models.extend([x] * (len(waiting) - 1))
        weights = np.array([(steps[i] * tokens[i]) * tokens[i] for i in waiting], float)
        g = sum(w * (anchor[i] - local[i]) for w, i in zip(weights, waiting, strict=True))
        g = g / weights.sum()
        pending = pending + g
        rounds += 1
        push = 0.0
        if rounds % rule.momentum_every == 0:
            m = BETA * m + pending / rule.momentum_every
            push, pending = BETA * m, 0.0
        x = x - RATE * (push + g / rule.momentum_every)
        models.append(x)
        for i in waiting:
            hand(i, time)
        waiting, deadline = [], None

    for time in range(1, END + 1):
        arrived = []
        for i in range(SIZE):
            is_due = (time - begun[i]) % TICKS[i] == 0 and time <= deaths.get(i, END)
            if is_due and (steps[i] < targets[i] or rule.goes_on):
                local[i] = local[i] + walkers[i].update(local[i])
                steps[i] += 1
                arrived += [i] * (steps[i] == targets[i])
        for i in arrived:
            if rule.late == "drop" and version[i] < rounds:
                hand(i, time)
                models.append(x)
                continue
            waiting.append(i)
            if len(waiting) == rule.quorum:
                deadline = time + rule.grace
            if deadline is not None and rule.grace == 0:
                close(time)
        hopes = [
            i
            for i in range(SIZE)
            if i not in waiting
            and begun[i] + targets[i] * TICKS[i] <= deaths.get(i, math.inf)
            and (rule.late == "next" or version[i] == rounds)
        ]
        if deadline is not None and (time >= deadline or not hopes):
            close(time)
    return np.array(models)


CASES = {
    "synchronous": (Rule(SIZE), {}),
    "nesterov": (Rule(), {}),
    "delayed": (Rule(momentum_every=3), {}),
    "delayed, dynamic, deaths": (Rule(momentum_every=2, dynamic=True), {"deaths": {1: 20}}),
    "quorum": (Rule(2, 5, goes_on=True), {"tokens": (1, 2, 1, 3)}),
    "quorum, drop": (Rule(2, 7, goes_on=True, late="drop"), {"deaths": {0: 31}}),
    "quorum that waits": (Rule(3, math.inf, momentum_every=2), {"deaths": {3: 40}}),
}


train = jax.jit(functools.partial(train_with_server, JOB))


@pytest.mark.parametrize("name", CASES)
def test_a_server_is_its_oracle(name):
    rule, more = CASES[name]
    deaths = more.get("deaths", {})
    workers = Workers(TICKS, EVERY, more.get("tokens"), deaths)
    arrivals = list_arrivals(workers, rule, END)
    expected = tick_server(rule, **more)
    assert 100 > len(expected) > 8
    padded = program.pad(arrivals, 100)
    models = train(padded, rule.momentum_every, RATE, BETA)[: len(expected)]
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-12)
    rounds = np.cumsum(arrivals.closes) - arrivals.closes
    shares = np.bincount(rounds, arrivals.share)
    np.testing.assert_allclose(shares[shares > 0], 1, rtol=1e-12)
    assert (arrivals.share == 0).any() == (rule.late == "drop")


def tick_nodes(shares, deaths):
    """Models and weights after each outer step; peers are those of `shares`."""
    walkers = [Walker(i) for i in range(SIZE)]
    x = np.tile(BEGIN, (SIZE, 1))
    m = np.zeros((SIZE, 3))
    w = np.ones(SIZE)
    p = np.zeros((SIZE, 3))
    inbox = [[] for _ in range(SIZE)]
    updates = [walker.update(BEGIN) for walker in walkers]  # of the steps that have begun
    targets = iter(shares.target)
    found = []
    for time in range(1, END + 1):
        ends = [i for i in range(SIZE) if time % TICKS[i] == 0 and time <= deaths.get(i, END)]
        for i in ends:
            p[i] += updates[i]
            for dx, dw, dm in inbox[i]:
                x[i] += dx
                w[i] += dw
                m[i] += dm
            inbox[i] = []
        for i in ends:
            if time % (EVERY * TICKS[i]):
                continue
            m[i] = BETA * m[i] - w[i] * p[i]
            x[i] = x[i] + RATE * (w[i] * p[i] - BETA * m[i])
            p[i] = 0
            half = (x[i] / 2, w[i] / 2, m[i] / 2)
            x[i], w[i], m[i] = half
            target = next(targets)
            assert target != i
            assert time < deaths.get(int(target), END + 1)
            inbox[target].append(half)
            if target in ends:
                x[target] += half[0]
                w[target] += half[1]
                m[target] += half[2]
                inbox[target] = []
            masses = [[x[j], *(part[0] for part in inbox[j])] for j in range(SIZE)]
            weights = [w[j] + sum(part[1] for part in inbox[j]) for j in range(SIZE)]
            sums = np.array([sum(parts) for parts in masses])
            found.append((sums / np.array(weights)[:, None], weights))
        for i in ends:
            updates[i] = walkers[i].update(x[i] / w[i] + p[i])
    return [np.array(part) for part in zip(*found, strict=True)]


@pytest.mark.parametrize("deaths", [{}, {1: 30}], ids=["living", "a death"])
def test_nodes_without_a_server_are_their_oracle(deaths):
    shares = list_shares(Workers(TICKS, EVERY, deaths=deaths), END, seed=3)
    models, weights = train_without_server(JOB, shares, RATE, BETA)
    expected = tick_nodes(shares, deaths)
    np.testing.assert_allclose(models, expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(weights, expected[1], rtol=0, atol=1e-12)
    np.testing.assert_allclose(weights.sum(axis=1), SIZE, rtol=0, atol=1e-12)
    living = shares.living
    assert living.all() == (not deaths)
    average = average_living(models, weights, living)
    alone = [
        np.average(z[a], axis=0, weights=w[a]) for z, w, a in zip(*expected, living, strict=True)
    ]
    np.testing.assert_allclose(average, alone, rtol=0, atol=1e-12)


def train_outer(size, rounds):
    """The anchors of `gx.outer` after each outer step."""
    outer_tx = optax.sgd(RATE, momentum=BETA, nesterov=True)
    tx = gx.outer(JOB.tx, outer_tx, EVERY)

    def node(worker):
        def step(carry, k):
            z, state = carry
            updates, state = tx.update(gradient(z, worker, k), state, z, step=k)
            return (z + updates, state), z + updates

        start = (jnp.asarray(BEGIN), tx.init(jnp.asarray(BEGIN)))
        return jax.lax.scan(step, start, jnp.arange(rounds * EVERY))[1][EVERY - 1 :: EVERY]

    return jax.vmap(node, axis_name="nodes")(jnp.arange(size))[0]


@pytest.mark.parametrize("size", [1, SIZE])
def test_equal_speeds_are_gx_outer(size):
    """All rules of one worker, and a quorum of all workers."""
    workers = Workers((1,) * size, EVERY)
    anchors = train_outer(size, rounds=5)
    arrivals = list_arrivals(workers, Rule(size, math.inf, goes_on=True), 5 * EVERY)
    np.testing.assert_array_equal(arrivals.share, 1 / size)
    models = train_with_server(JOB, arrivals, 1, RATE, BETA)[size - 1 :: size]
    np.testing.assert_allclose(models, anchors, rtol=0, atol=1e-12)
    if size == 1:
        shares = list_shares(workers, 5 * EVERY, seed=0)
        models, weights = train_without_server(JOB, shares, RATE, BETA)
        np.testing.assert_allclose(models[:, 0], anchors, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(weights, 1)


def test_a_slow_worker_is_late_counts_later_or_never():
    workers = Workers((1, 1, 4), 2)
    late = list_arrivals(workers, Rule(2, 1.0), 12)
    assert late.staleness[late.worker == 2].tolist() == [2]
    dropped = list_arrivals(workers, Rule(2, 1.0, late="drop"), 12)
    assert dropped.share[dropped.worker == 2].tolist() == [0]
    whole = list_arrivals(workers, Rule(2, 6.0, goes_on=True), 12)
    assert whole.steps.tolist()[:3] == [8, 8, 2]  # who waits goes on
    assert whole.tokens.tolist()[:3] == [8, 16, 18]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workers((), 1), "step_seconds of Workers must be numbers above 0"),
        (lambda: Workers((1.0, math.nan), 1), "step_seconds of Workers must be"),
        (lambda: Workers((1.0,), 0), "every of Workers must be at least 1, got 0"),
        (lambda: Workers((1.0,), 1, (1, 1)), "tokens_per_step of Workers must be 1 integers"),
        (lambda: Workers((1.0,), 1, (0,)), "tokens_per_step of Workers must be"),
        (lambda: Workers((1.0,), 1, deaths={1: 2.0}), "deaths of Workers must be seconds"),
        (lambda: Workers((1.0,), 1, deaths={0: -2.0}), "deaths of Workers must be seconds"),
        (lambda: Rule(0), "quorum of Rule must be at least 1, got 0"),
        (lambda: Rule(momentum_every=0), "momentum_every of Rule must be at least 1"),
        (lambda: Rule(grace=math.nan), "grace of Rule must be seconds from 0 on"),
        (lambda: Rule(late=cast(Any, "never")), "late of Rule must be 'next' or 'drop'"),
        (lambda: list_arrivals(Workers((1,), 1), Rule(2), 9), "quorum of Rule must be at most"),
        (lambda: list_arrivals(Workers((1,), 9), Rule(), 8), "seconds must be enough"),
        (lambda: list_shares(Workers((1,), 9), 8, 0), "seconds must be enough"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_program(tmp_path, capsys, monkeypatch):
    images, labels = survival.load_examples()
    monkeypatch.setattr(survival, "load_examples", lambda: (images[:, ::25], labels[:, ::25]))
    monkeypatch.setattr(program, "POINTS", 4)
    out = tmp_path / "out"
    with jax.enable_x64(False):
        program.main(["--seconds", "0.8", "--every", "4", "--death", "0.3", "--out", str(out)])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = [*program.make_rules(program.Options()), "push-sum", "push-sum, nodes"]
    assert [line["rule"] for line in lines] == names
    assert all(line["loss"][0][0] == pytest.approx(math.log(10)) for line in lines)
    assert all(line["loss"][0][-1] < 2.2 for line in lines)
    summary = json.loads((out / "summary.json").read_text())
    assert [run["rule"] for run in summary["runs"]] == names
    assert (out / "asynchronous_outer.png").stat().st_size > 10_000
    assert "delayed, dynamic" in capsys.readouterr().out
