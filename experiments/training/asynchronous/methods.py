"""The algorithms of nodes that wait for nobody, by name."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class AsynchronousMethod(NamedTuple):
    """A row of `ASYNCHRONOUS`.

    Attributes:
      build: makes the algorithm from a seed.
      topology: the graph of its messages, as tables name it.
    """

    build: Callable[[int], Any]
    topology: str


def _build_sgp(seed: int) -> Any:
    import gossipjax.asynchronous as ga  # here: it needs pyzmq

    return ga.sgp(seed=seed)


def _build_adpsgd(seed: int) -> Any:
    import gossipjax.asynchronous as ga

    return ga.adpsgd(seed=seed)


def _build_adpsgd_bipartite(seed: int) -> Any:
    import gossipjax.asynchronous as ga

    return ga.adpsgd("bipartite", seed)


ASYNCHRONOUS = {
    "async-sgp": AsynchronousMethod(_build_sgp, "exponential"),
    "async-adpsgd": AsynchronousMethod(_build_adpsgd, "complete"),
    "async-adpsgd@bipartite": AsynchronousMethod(_build_adpsgd_bipartite, "bipartite"),
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
