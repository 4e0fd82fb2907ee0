"""A small task for tests of the image program: a tenth of the digits, and a linear model."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from experiments import data, models, report


class Linear(nn.Module):
    """What takes the place of the CNN in most tests: it compiles in no time."""

    classes: int = 10
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    normalization: str = "none"

    @nn.compact
    def __call__(self, images, train=False):
        if self.normalization == "batch":
            images = nn.BatchNorm(not train, momentum=0.9, use_scale=False, use_bias=False)(images)
        dense = nn.Dense(self.classes, dtype=self.dtype, param_dtype=self.param_dtype)
        return dense(images.reshape(len(images), -1)).astype(jnp.float32)


def make_small(setattr: Callable[..., None], model: bool = True, plots: bool = False) -> None:
    """Has the image program train on 512 digits and test on 101; and, as they are asked for, with
    the linear model, and without its table and plots."""
    load = data.load
    full = load("mnist5k")
    few = full._replace(
        train_images=full.train_images[:512],
        train_labels=full.train_labels[:512],
        test_images=full.test_images[:101],
        test_labels=full.test_labels[:101],
    )
    setattr(data, "load", lambda name, *of: few if name == "mnist5k" else load(name, *of))
    if model:
        setattr(models, "SmallCNN", Linear)
    if not plots:
        setattr(report, "write_report", lambda *_: None)
        setattr(report, "plot_topology", lambda *_: None)
