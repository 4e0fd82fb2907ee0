"""Steps to a loss, with rates by one rule."""

import math

import jax
import numpy as np
import pytest

from experiments import steps_to_loss
from experiments.steps_to_loss import METHODS, StepsOptions, count_steps, make_trainer


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


def test_all_methods_learn(monkeypatch):
    images = steps_to_loss.load_images(None)
    images = jax.tree.map(lambda x: x[:500], images)
    monkeypatch.setattr(steps_to_loss, "HIDDEN", 4)
    options = StepsOptions(nodes=(4,), every=3, batch_size_per_node=8)
    losses = {}
    for name in ("allreduce", "sgp", steps_to_loss.EVERY):
        find_loss = make_trainer(METHODS[name], 4, images, options)
        losses[name] = [find_loss(0.05, steps, 1) for steps in (0, 60)]
        assert find_loss(1e9, 20, 1) > 100
    assert len({begin for begin, _ in losses.values()}) == 1  # of the same model
    assert all(end < begin - 0.5 for begin, end in losses.values())
    assert len(np.unique([end for _, end in losses.values()])) == 3
