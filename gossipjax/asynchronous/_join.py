"""How a node joins a job, and what it must be given for it."""

from __future__ import annotations

import hashlib
import ipaddress
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from gossipjax.asynchronous._node import Node
from gossipjax.asynchronous.algorithms import Algorithm
from gossipjax.asynchronous.transport import Format, Service, narrow
from gossipjax.collectives import Layout, require_floats
from gossipjax.spmd.arguments import require_transform
from gossipjax.wire import require_wire_dtype

MAX_PORT = 65535
MIN_PATIENCE = 0.1  # seconds


def join(
    address: str | Sequence[str] | None,
    tx: optax.GradientTransformation,
    params: Any,
    *,
    algorithm: Algorithm,
    listen: str = "127.0.0.1:0",
    place: int = 0,
    job: str = "",
    is_founder: bool | None = None,
    patience: float = 10.0,
    wire_dtype: DTypeLike | None = None,
    secret: str | None = None,
    journal: Path | None = None,
    opt_state: Any = None,
    steps: int = 0,
) -> Node:
    """Joins a job of nodes that wait for nobody, or starts one.

    Args:
      address: where living nodes of the job listen, one or several `host:port`; None starts a job.
      tx: the optax chain, whose updates are local.
      params: the model at which a founder starts, and the shapes and types for others.
      algorithm: `sgp()` or `adpsgd()`.
      listen: where this node listens; port 0 is any that is free.
      place: its number in the job, the same whenever it is started again.
      job: a name that messages of other jobs do not have.
      is_founder: whether it brings `params`, with weight 1. Others ask a living node for half of
        what it holds, and bring nothing. None: if there is no `address`.
      patience: seconds of silence after which another node is declared dead.
      wire_dtype: bfloat16 halves the bytes of shares; what it leaves out stays at the sender.
      secret: only nodes that have it can connect. It is needed unless `listen` is a loopback
        address.
      journal: a file to which every event is appended, for `replay`.
      opt_state: that of an earlier life or job, to go on with; None is a new one.
      steps: the local steps of an earlier job that `total_steps` of the nodes counts.

    Returns:
      The node, whose thread receives from now on.

    Raises:
      ValueError: if an argument cannot be used.
      OSError: if it cannot listen there.
      ImportError: without pyzmq.

    >>> import jax.numpy as jnp, optax, gossipjax as gx
    >>> a = gx.asynchronous.join(
    ...     None, optax.sgd(0.1), jnp.zeros(3), algorithm=gx.asynchronous.sgp())
    >>> b = gx.asynchronous.join(
    ...     a.address, optax.sgd(0.1), jnp.zeros(3), algorithm=gx.asynchronous.sgp(), place=1)
    >>> def gradients(params, target):
    ...     return params - target, None
    >>> for _ in range(20):
    ...     _ = a.step(gradients, 1.0), b.step(gradients, 3.0)
    >>> b.leave()  # hands over what it holds
    >>> bool(0.0 < a.params[0] < 3.0)
    True
    >>> a.leave()
    """
    addresses = [address] if isinstance(address, str) else address or []
    require_addresses(listen, addresses)
    require_numbers(place, patience, steps)
    require_secret(listen, secret)
    require_transform(tx)
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm must be sgp() or adpsgd(), got {algorithm!r}.")
    wire = require_wire_dtype(wire_dtype)
    if wire is not None and wire not in (jnp.bfloat16, np.float32, np.float64):
        raise ValueError(
            f"wire_dtype must be bfloat16, or a wider type, got {wire}: half of a numerator may "
            "lie outside of its range."
        )
    require_floats(params, "params")
    if not jax.tree.leaves(params):
        raise ValueError("params must have an array, got none.")
    layout = Layout(params)
    wires = tuple(narrow(dtype, wire) for dtype in layout.dtypes)
    shapes = [(jnp.shape(x), str(jnp.result_type(x))) for x in jax.tree.leaves(params)]
    model = f"{jax.tree.structure(params)} {shapes}"
    digest = hashlib.sha256(model.encode()).hexdigest()
    form = Format(job, digest, tuple(layout.sizes), tuple(layout.dtypes), wires)
    service = Service(listen, form, patience, secret)
    if is_founder is None:
        is_founder = not addresses
    return Node(
        tx,
        params,
        algorithm,
        form,
        service,
        place,
        addresses,
        is_founder,
        patience,
        journal,
        opt_state,
        steps,
    )


def require_addresses(listen: str, addresses: Sequence[str]) -> None:
    """Raises `ValueError` unless these are addresses; port 0 is for `listen` only."""
    if not isinstance(addresses, Sequence):
        raise ValueError(f"address must be HOST:PORT, several of them, or None, got {addresses!r}.")
    for name, value in (("listen", listen), *(("address", value) for value in addresses)):
        host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
        is_port = port.isascii() and port.isdigit() and int(port) <= MAX_PORT
        if not host or not is_port or (name == "address" and not int(port)):
            raise ValueError(f"{name} must be HOST:PORT, got {value!r}: as in 127.0.0.1:5000.")


def require_numbers(place: int, patience: float, steps: int) -> None:
    """Raises `ValueError` unless these are a place, a number of seconds and one of steps."""
    for name, value in (("place", place), ("steps", steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be an integer >= 0, got {value!r}.")
    if not MIN_PATIENCE <= patience < math.inf:
        raise ValueError(f"patience must be seconds >= {MIN_PATIENCE}, got {patience!r}.")


def require_secret(listen: str, secret: str | None) -> None:
    """Raises `ValueError` if strangers may connect and there is no secret."""
    if secret == "":
        raise ValueError("secret must not be empty: give the same text to all nodes, or None.")
    if secret is None and not is_loopback(listen.rpartition(":")[0]):
        raise ValueError(
            f"a node that listens at {listen}, where strangers may connect, needs a secret, got "
            "none: give the same text to all nodes of the job."
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a host.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name
        return False
