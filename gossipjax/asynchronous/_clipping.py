"""How far a received model may be from a node's own; one that is farther is pulled nearer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from statistics import median_low

import numpy as np

from gossipjax.asynchronous._messages import CHECKED, Mass

FIRST = 2  # shares in the life of a node that only say how far apart models are
REMEMBERED = 9  # distances of each node
Distances = tuple[float, ...]  # of the model, and of its momentum if that travels


def measure(mass: Mass, own: Mass, models: int) -> Distances:
    """Returns `|x / w - z|` for z of `own`, for each of the models in a mass."""
    squares = np.zeros(models)
    with np.errstate(over="ignore", invalid="ignore"):
        for number, buffers in enumerate(zip(mass.x, own.x, strict=True)):
            for i in range(0, len(buffers[0]), CHECKED):
                a, b = (np.asarray(x[i : i + CHECKED], np.float32) for x in buffers)
                apart = a * np.float32(1 / mass.w) - b * np.float32(1 / own.w)
                squares[number * models // len(mass.x)] += apart @ apart
    return tuple(np.nan_to_num(np.sqrt(squares), nan=np.inf, posinf=np.inf).tolist())


def pull(mass: Mass, own: Mass, distances: Distances, limits: Distances) -> tuple[Mass, Distances]:
    """Returns `w (z + part (x / w - z))` for z of `own`, and the parts; without if all are 1."""
    parts = tuple(r / d if d > r else 1.0 for d, r in zip(distances, limits, strict=True))
    if min(parts) == 1:
        return mass, ()
    x = list(mass.x)
    for number, (a, b) in enumerate(zip(mass.x, own.x, strict=True)):
        part = parts[number * len(parts) // len(x)]
        rest = (1 - part) * float(mass.w / own.w)
        x[number] = a if part == 1 else (part * a + rest * b).astype(a.dtype)
    return dataclasses.replace(mass, x=tuple(x), is_fresh=True), parts


def find_limits(known: Iterable[Sequence[Distances]], clip: float, models: int) -> Distances:
    """Returns `clip` times the running norms, from the last distances of each other node.

    A running norm is the median over the nodes of the median of each. So neither one large share
    nor one node that sends often moves it far. The lower of two counts.
    """
    known = [distances for distances in known if distances]
    if sum(map(len, known)) < FIRST:
        return (0.0,) * models
    medians = [map(median_low, zip(*distances, strict=True)) for distances in known]
    return tuple(clip * median_low(norms) for norms in zip(*medians, strict=True))


def pull_finals(masses: Sequence[Mass], clip: float, models: int) -> list[Mass]:
    """Pulls final models to `clip` times their median distance from the median of each value."""
    columns = zip(*([np.asarray(x) / mass.w for x in mass.x] for mass in masses), strict=True)
    middle = Mass(tuple(np.median(column, axis=0) for column in columns), 1.0)
    distances = [measure(mass, middle, models) for mass in masses]
    limits = tuple(clip * median_low(norms) for norms in zip(*distances, strict=True))
    return [pull(m, middle, d, limits)[0] for m, d in zip(masses, distances, strict=True)]
