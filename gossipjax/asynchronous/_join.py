"""`join`, by which a program becomes a node of an asynchronous job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import optax

from gossipjax import launch
from gossipjax.asynchronous._node import Node
from gossipjax.asynchronous._settings import Settings
from gossipjax.asynchronous.algorithms import Algorithm
from gossipjax.collectives import require_floats
from gossipjax.launch.secret import secret_from_env
from gossipjax.wire import WireLike


def join(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    algorithm: Algorithm,
    address: str | Sequence[str] | None = None,
    listen: str | None = None,
    place: int | None = None,
    job: str | None = None,
    is_founder: bool | None = None,
    patience: float = 10.0,
    max_received: int = 16,
    wire: WireLike | None = None,
    secret: str | None = None,
    journal: Path | None = None,
    folder: str | Path | None = None,
    every: int = 100,
    nonfinite: Literal["raise", "skip"] = "raise",
) -> Node:
    """Joins a job of asynchronous nodes, or starts one.

    Under `python -m gossipjax.launch --asynchronous`, and where the variables of `find_node` are
    set, it finds `address`, `listen`, `place` and `job` by itself. docs/guides/asynchronous.md says
    who brings the first model, and what a node does that comes back.

    Args:
      tx: the optax chain, whose updates are local.
      params: the model at which a founder starts, and the shapes and types for others.
      algorithm: `sgp()`, `adpsgd()` or `outer(every)`.
      address: where others of the job listen, one or several `host:port`. With none, here and in
        the variables, the node starts a job.
      listen: where this node listens; port 0 is any that is free. None: `127.0.0.1:0`.
      place: its number in the job, the same whenever it is started again. None: 0.
      job: its name; messages of other jobs are dropped. None: empty.
      is_founder: whether it brings `params` at once, with weight 1; others ask a living node for
        half of what it holds. None: as the guide says, or True if there is no `address`.
      patience: seconds of silence after which another node is declared dead.
      max_received: how many shares this node takes between two that it gives, 1 or more. It answers
        each further share with half of all that it holds. A node that is slower than the others by
        less than this factor counts in full.
      wire: the form of shares: `jnp.bfloat16`, `gx.wire.int8()` or `int4()`. What rounding leaves
        out stays at the sender.
      secret: only nodes that have it can connect, 16 characters or more; None is that in
        `GOSSIPJAX_SECRET`, if any. It is needed unless `listen` and `address` are loopback ones.
      journal: a file to which every event is appended, for `replay`.
      folder: where this node saves its model, momentum and optimizer state, in a part named by its
        place. After SIGTERM it saves, hands over what it holds at the end of its `with` block, and
        raises `Preempted`. It needs orbax.
      every: local steps from one save to the next.
      nonfinite: what a step does whose update is NaN or infinite, which is never applied: `raise`
        an error, or `skip` the step and count it.

    Returns:
      The node, whose thread receives from now on.

    Raises:
      ValueError: if an argument, or a variable, cannot be used.
      OSError: if it cannot listen there.
      ImportError: without pyzmq, or orbax for a `folder`.

    >>> import jax.numpy as jnp, optax, gossipjax as gx
    >>> def gradients(params, target):
    ...     return params - target, None
    >>> options = {"algorithm": gx.asynchronous.sgp()}
    >>> with gx.asynchronous.join(optax.sgd(0.5), jnp.zeros(3), **options) as node:
    ...     for _ in range(2):
    ...         _ = node.step(gradients, 4.0)
    ...     node.average().tolist()
    [3.0, 3.0, 3.0]
    """
    info = launch.find_node() if address is None else None
    contacts = (address,) if isinstance(address, str) else tuple(address or ())
    if info is None:
        info = launch.NodeInfo(0, 0, "127.0.0.1:0", contacts, is_restart=False, job="")
        is_founder = not contacts if is_founder is None else is_founder
    settings = Settings(
        algorithm=algorithm,
        contacts=info.contacts,
        num_nodes=info.num_nodes,
        listen=info.listen if listen is None else listen,
        place=info.place if place is None else place,
        job=info.job if job is None else job,
        is_founder=is_founder,
        patience=patience,
        max_received=max_received,
        wire=wire,
        secret=secret_from_env() if secret is None else secret,
        journal=journal,
        folder=None if folder is None else Path(folder),
        every=every,
        nonfinite=nonfinite,
    )
    require_floats(params, "params")
    return Node(tx, params, settings)
