"""The algorithms of nodes that wait for nobody, by name."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import gossipjax as gx

WIRES = ("float32", "bfloat16")


class AsynchronousMethod(NamedTuple):
    """A row of `ASYNCHRONOUS`.

    Attributes:
      build: makes the algorithm from a seed.
      topology: the graph of its messages, as tables name it.
    """

    build: Callable[[int], gx.asynchronous.Algorithm]
    topology: str


ASYNCHRONOUS = {
    "async-sgp": AsynchronousMethod(lambda seed: gx.asynchronous.sgp(seed=seed), "exponential"),
    "async-adpsgd": AsynchronousMethod(lambda seed: gx.asynchronous.adpsgd(seed=seed), "complete"),
    "async-adpsgd@bipartite": AsynchronousMethod(
        lambda seed: gx.asynchronous.adpsgd("bipartite", seed), "bipartite"
    ),
}


def is_asynchronous(names: Sequence[str]) -> bool:
    """Whether all algorithms are of nodes that wait for nobody.

    Raises:
      ValueError: if only some are, or one is unknown.
    """
    given = [name for name in names if name.startswith("async-")]
    if not given:
        return False
    if len(given) < len(names):
        raise ValueError(
            "--algorithm must be of one kind, got "
            f"{' '.join(names)}: those that begin with async- run under `python -m "
            "gossipjax.launch --asynchronous`, others do not. Run the program twice."
        )
    for name in given:
        if name not in ASYNCHRONOUS:
            raise ValueError(f"--algorithm must be one of {', '.join(ASYNCHRONOUS)}, got {name}.")
    return True
