"""`join`, which makes a program a node of an asynchronous job."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import optax

from gossipjax import launch
from gossipjax.asynchronous._node import Node
from gossipjax.asynchronous._settings import Settings
from gossipjax.asynchronous.algorithms import Algorithm
from gossipjax.collectives import require_floats
from gossipjax.wire import WireLike


@launch.final_errors()
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
    node_weight: float | None = None,
    clip: float | None = None,
) -> Node:
    """Joins a job of asynchronous nodes, or starts one.

    Under `python -m gossipjax.launch --asynchronous`, or if the variables of `find_node` are set,
    you need not give `address`, `listen`, `place` and `job`. docs/guides/asynchronous.md says who
    brings the first model, and what a node does when it comes back.

    Args:
      tx: the optax chain, whose updates must need no other node.
      params: the model with which a founder starts. Of another node's `params`, only shapes and
        types are used.
      algorithm: `sgp()`, `adpsgd()` or `outer(every)`.
      address: where other nodes of the job listen, one or several `host:port`. If neither `address`
        nor the variables name one, this node starts a job.
      listen: where this node listens, and where other nodes reach it. Port 0 means any free port.
        The default is `127.0.0.1:0`.
      place: the number of this node in the job. Give it the same number when you start it again.
        The default is 0.
      job: the name of the job. Messages of other jobs are dropped. The default is an empty name.
      is_founder: if true, this node brings `params` at once, with weight 1. If false, it asks a
        living node for half of its mass. If you give nothing, a node without an `address` brings
        `params`; for other nodes, the guide says which.
      patience: the seconds of silence after which another node is declared dead.
      max_received: how many shares this node takes, 1 or more, before it sends a share itself. The
        node answers each further share with half of its mass, so a slow node does not gather all
        the weight. A node counts in full if the others are faster by less than this factor.
      wire: the form of shares: `jnp.bfloat16`, `gx.wire.int8()` or `int4()`. The sender keeps what
        rounding leaves over.
      secret: a text of 16 characters or more. Only nodes with the same secret can connect. The
        default is `GOSSIPJAX_SECRET`, if it is set. You need a secret unless `listen` and `address`
        are loopback addresses.
      journal: a file to which this node appends every event, without end, for `account`.
      folder: where this node saves its model, momentum and optimizer state, in a subfolder named by
        `place`. After SIGTERM, SIGHUP or Ctrl-C the node saves. At the end of the `with` block it
        gives its mass to another node and raises `Preempted`. A folder needs orbax.
      every: the number of local steps from one save to the next.
      nonfinite: what happens at a step whose update is NaN or infinite. The update is never
        applied; `raise` raises an error, and `skip` goes on and counts the step.
      node_weight: n, how much this node counts, in a unit that all nodes share, such as its number
        of examples. Give it to all nodes or to none. A step (of `outer`, an outer step) then moves
        the mass by `n / max n` of its update, with the maximum over the living nodes that train.
        With SGD, the nodes so minimize `sum_i n_i f_i / sum_i n_i`, where `f_i` is the mean loss
        over the examples of living node i. The average model moves `mean n / max n` times as fast.
      clip: c, 1 or more, says how far a received model may be; the same for all nodes. The limit r
        is c times the usual distance: the median over the nodes of the median of their last
        distances. A share `(x, w)` at the distance `d = |x / w - z| > r` from the node's model z is
        pulled to `w (z + (x / w - z) r / d)`, and its momentum likewise. The first 2 shares of a
        life bring weight alone. Clipping costs accuracy where nodes exchange seldom, so by default
        nothing is clipped. `average` pulls final models in the same way, towards the median over
        the nodes of each value.

    Returns:
      The node. A thread of it receives messages from now on.

    Raises:
      ValueError: if an argument or an environment variable is not valid.
      OSError: if the node cannot listen at `listen`.
      ImportError: if pyzmq is not installed, or a `folder` is given and orbax is not installed.

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
        secret=os.environ.get("GOSSIPJAX_SECRET") if secret is None else secret,
        journal=journal,
        folder=None if folder is None else Path(folder),
        every=every,
        nonfinite=nonfinite,
        node_weight=node_weight,
        clip=clip and float(clip),
    )
    require_floats(params, "params")
    return Node(tx, params, settings)
