"""The delays of a run of asynchronous nodes, from their journals."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def measure_delays(journals: Iterable[Path]) -> np.ndarray:
    """Returns the delays of a run, `[T, N]`, in steps of all N nodes, for `gx.adpsgd`.

    While a node computes a gradient, other nodes end m steps, and the gradient does not see their
    updates. The delay is `floor(m / N)`. If all nodes are equally fast, m is about N - 1 and the
    delay is 0: in lockstep, too, a node does not see the updates of the same step.

    Args:
      journals: the journals of the nodes, one file for each place. In the result, nodes are in the
        order of their places, and T is the smallest number of steps of a node.

    Raises:
      ValueError: if there are no journals, a journal lacks lines, or a node ended no step.

    References:
      Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018,
      arXiv:1710.06952, assumption 1.
    """
    steps: dict[int, list[tuple[float, float]]] = {}
    for path in journals:
        begin = place = None
        whole = path.read_text().rpartition("\n")[0]  # a kill cuts the last line off
        for line in map(json.loads, whole.splitlines()):
            if "missing" in line:
                raise ValueError(f"{path} must have all lines, got a disk that was full.")
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
    rounds = min(map(len, steps.values()))
    begins, ends = np.array([steps[place][:rounds] for place in places]).T
    all_ends = np.sort([end for own in steps.values() for _, end in own])
    others = np.searchsorted(all_ends, ends, "left") - np.searchsorted(all_ends, begins, "right")
    return others // len(places)
