"""How far a received model may be from a node's own; one that is farther is pulled nearer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from statistics import median_low

import numpy as np

from gossipjax.asynchronous._messages import CHUNK, Mass

FIRST_SHARES = 2  # at the start of a life; they bring weight and tell distances, but no model
REMEMBERED = 9  # distances of each node
Distances = tuple[float, ...]  # of the model, and of its momentum if that travels


def measure(mass: Mass, own: Mass, num_models: int) -> Distances:
    """Returns the norm of the distance between a mass's model and `own`'s, and of the momenta's."""
    squares = np.zeros(num_models)
    with np.errstate(over="ignore", invalid="ignore"):
        for index, buffers in enumerate(zip(mass.x, own.x, strict=True)):
            for i in range(0, len(buffers[0]), CHUNK):
                a, b = (np.asarray(x[i : i + CHUNK], np.float32) for x in buffers)
                apart = a * np.float32(1 / mass.w) - b * np.float32(1 / own.w)
                # The model is in the first half of the buffers, and a momentum in the second.
                squares[index * num_models // len(mass.x)] += apart @ apart
    return tuple(np.nan_to_num(np.sqrt(squares), nan=np.inf, posinf=np.inf).tolist())


def pull(
    mass: Mass, own: Mass, distances: Distances, limits: Distances
) -> tuple[Mass, tuple[float, ...]]:
    """Pulls the model (and the momentum) of a mass towards z, the node's own, if it is too far.

    Returns `w (z + part (x / w - z))` with `part = min(1, limit / distance)`, and the part of each
    of the two. If both are near enough, returns the mass as it is, and `()`.
    """
    parts = tuple(r / d if d > r else 1.0 for d, r in zip(distances, limits, strict=True))
    if min(parts) == 1:
        return mass, ()
    x = list(mass.x)
    for index, (a, b) in enumerate(zip(mass.x, own.x, strict=True)):
        part = parts[index * len(parts) // len(x)]  # the momentum is in the second half
        own_factor = (1 - part) * float(mass.w / own.w)  # brings b to the weight of a, too
        x[index] = a if part == 1 else (part * a + own_factor * b).astype(a.dtype)
    return dataclasses.replace(mass, x=tuple(x), is_fresh=True), parts


def find_limits(known: Iterable[Sequence[Distances]], clip: float, num_models: int) -> Distances:
    """Computes how far a received model may be from the node's own.

    `known` has the last distances of each other node. The limit is `clip` times the median over the
    nodes of the median of each node's distances. So neither one large share nor one node that sends
    often moves it far. Of two middle values the lower counts. Until `FIRST_SHARES` distances are
    known the limit is 0: a share then brings its weight, but no model.
    """
    known = [distances for distances in known if distances]
    if sum(map(len, known)) < FIRST_SHARES:
        return (0.0,) * num_models
    medians = [map(median_low, zip(*distances, strict=True)) for distances in known]
    return tuple(clip * median_low(by_node) for by_node in zip(*medians, strict=True))


def pull_finals(masses: Sequence[Mass], clip: float, num_models: int) -> list[Mass]:
    """Pulls final models that are far from the middle, the median of each value over the nodes.

    The limit is `clip` times the median of their distances from the middle.
    """
    models = ([np.asarray(x) / mass.w for x in mass.x] for mass in masses)
    buffers_by_node = zip(*models, strict=True)
    middle = Mass(tuple(np.median(buffers, axis=0) for buffers in buffers_by_node), 1.0)
    distances = [measure(mass, middle, num_models) for mass in masses]
    limits = tuple(clip * median_low(norms) for norms in zip(*distances, strict=True))
    return [pull(m, middle, d, limits)[0] for m, d in zip(masses, distances, strict=True)]
