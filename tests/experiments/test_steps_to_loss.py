"""Steps to a loss, with rates by one rule."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.simulated import make_task
from experiments.steps_to_loss import (
    METHODS,
    StepsOptions,
    count_steps,
    list_methods,
    make_loss_finder,
    show,
)


def test_steps_are_counted_between_both_sides_of_the_loss():
    """The loss is inverse to the steps, and the best rate 0.2."""
    options = StepsOptions(loss=0.01, seed=(0, 1))

    def find_loss(rate: float, steps: int, seed: int) -> float:
        return (1 + math.log2(rate / 0.2) ** 2) * (1 + 0.1 * seed) / steps

    found = count_steps(find_loss, options)
    assert found["rates"] == [0.2, 0.2]
    for seed, steps in enumerate(found["steps"]):
        above, below = (find_loss(0.2, end, seed) for end in (64, 128))
        assert steps == pytest.approx(64 * 2 ** ((above - 0.01) / (above - below)))
    never = count_steps(lambda rate, steps, seed: 1.0, options)
    assert never["steps"] == [None, None]
    quick = count_steps(lambda rate, steps, seed: 0.02 / steps, options)
    assert quick["steps"] == pytest.approx([2.0, 2.0])


def test_all_methods_learn():
    options = StepsOptions(nodes=(4,), every=3, batch_size_per_node=8)
    task = make_task("image", 12, None)
    task = task._replace(examples=jax.tree.map(lambda x: x[:500], task.examples))
    losses = {}
    for name in ("allreduce", "allreduce-low-rank-1", "sgp", "sgp-every-H"):
        find_loss = make_loss_finder(METHODS[name], 4, task, options)
        losses[name] = [find_loss(0.05, steps, 1) for steps in (0, 60)]
        assert find_loss(1e9, 20, 1) > 100
    assert len({begin for begin, _ in losses.values()}) == 1  # of the same model
    assert all(end < begin - 0.5 for begin, end in losses.values())
    assert len(np.unique([end for _, end in losses.values()])) == 4


def test_a_transformer_learns():
    options = StepsOptions(task="language", nodes=(2,), batch_size_per_node=2)
    find_loss = make_loss_finder(
        METHODS["allreduce-low-rank-1"], 2, make_task("language", 0, None), options
    )
    start, end = (find_loss(0.01, steps, 0) for steps in (0, 20))
    assert start == pytest.approx(math.log(512), rel=0.02)  # all tokens are equally likely
    assert end < start - 0.5


def test_hours_are_steps_times_seconds():
    """Over 8 nodes AllReduce makes 56,250 steps; SGP sends 102.4 MB at each of twice as many."""
    head = {"nodes": 8, "rates": [0.1]}
    records = [
        {"method": name, "steps": steps, **head}
        for name, steps in (("allreduce", [100, 200]), ("sgp", [200, 400]), ("1-osgp", [None] * 2))
    ]
    table = show(StepsOptions(nodes=(8,)), records, Path())
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["times\nAllReduce"] == ["1.00 1.00", "2.00 2.00", "inf inf"]
    seconds = 0.228 + 102.4e6 / 1.25e6 + 5e-5
    assert cells["hours,\n10\nMbit/s"][1] == f"{2 * 56_250 * seconds / 3600:.4g}"
    (factors,) = list_methods("allreduce-low-rank-4", 8, 16)
    assert sum(exchange.models for exchange in factors.exchanges) == pytest.approx(0.015, abs=1e-3)
