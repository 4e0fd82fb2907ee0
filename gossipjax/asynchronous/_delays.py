"""The delays of gradients that a run has shown, for its simulation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from gossipjax.asynchronous._journal import read_journal


def measure_delays(journals: Iterable[Path]) -> np.ndarray:
    """Returns the delays of a run, `[T, N]`, in steps of all N nodes, as `gx.adpsgd` takes them.

    While a node computes a gradient, others end steps, whose updates it does not see: if these are
    m, the delay is `floor(m / N)`. With equal nodes m is about N - 1, and the delay 0: in lockstep,
    too, a node does not see the updates that the others make at the same step.

    Args:
      journals: the files that the nodes wrote, one for each place. Nodes are in the order of their
        places, T is the smallest number of steps of a node, and steps of an earlier process of a
        place come first.

    Raises:
      ValueError: if there are no journals, one cannot be read, or a node ended no step.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for place, (begin, end) in enumerate([(0.0, 4.0), (0.5, 1.0), (0.5, 2.0)]):
    ...     head = f'{{"event": "life", "life": "{place}", "place": {place}}}'
    ...     lines = [
    ...         f'{{"event": "{event}", "life": "{place}", "time": {time}, "number": 0}}'
    ...         for event, time in [("begin", begin), ("end", end)]
    ...     ]
    ...     _ = (folder / f"{place}.jsonl").write_text("\\n".join([head, *lines]))
    >>> measure_delays(sorted(folder.glob("*.jsonl"))).tolist()
    [[0, 0, 0]]

    References:
      Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
      arXiv:1710.06952, assumption 1.
    """
    steps: dict[int, list[tuple[float, float]]] = {}
    for path in journals:
        begin: float | None = None
        place = None
        for line in read_journal(path):
            if line["event"] == "life":
                place = line["place"]
            elif line["event"] == "begin":
                begin = line["time"]
            elif line["event"] == "end" and begin is not None and place is not None:
                steps.setdefault(place, []).append((begin, line["time"]))
                begin = None
    if not steps:
        raise ValueError("journals must have a step that ended, got none.")
    places = sorted(steps)
    ends = np.sort([end for own in steps.values() for _, end in own])
    rounds = min(map(len, steps.values()))
    delays = np.zeros((rounds, len(places)), np.int64)
    for (column, place), row in itertools.product(enumerate(places), range(rounds)):
        begin, end = steps[place][row]
        others = np.searchsorted(ends, end, "left") - np.searchsorted(ends, begin, "right")
        delays[row, column] = others // len(places)
    return delays
