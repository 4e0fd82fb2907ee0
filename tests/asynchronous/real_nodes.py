"""Real nodes on loopback, of a model of three numbers."""

import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

import gossipjax.asynchronous as ga

SECRET = "a secret that is long"


def join(address: Any = None, **options: Any) -> ga.Node:
    arguments = {"algorithm": ga.sgp(), "job": "job"} | options
    return ga.join(optax.sgd(0.1), jnp.zeros(3), address=address, **arguments)


def gradients(params, target):
    return params - target, None


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
