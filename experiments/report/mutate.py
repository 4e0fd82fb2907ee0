"""Runs a program of this project with a library that is wrong in one way.

    python -m experiments.report.mutate hop-1 image --nodes 8

`experiments.report.mutants` runs it, to see which sections of the report notice. What is in this
process only is wrong: processes that the program starts run the library as it is.
"""

import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gossipjax.algorithms import outer
from gossipjax.algorithms.frame import state
from gossipjax.cost_model import exchange
from gossipjax.topology import Schedule
from gossipjax.topology.schedule import Round, Segment


def exchange_nothing() -> None:
    """Every `P` is the identity. Exact averages of gradients and outer averages stay."""
    set_entries = Round._set_entries

    def set_identity(
        self: Round, size: int, receivers: np.ndarray, senders: np.ndarray, weights: np.ndarray
    ) -> None:
        del receivers, senders, weights
        nodes = np.arange(size)
        set_entries(self, size, nodes, nodes, np.ones(size))

    Round._set_entries = set_identity
    accept_unconnected()


def keep_first_hop() -> None:
    """A schedule has the first round of each segment only."""
    init = Schedule.__init__

    def keep_first(self: Schedule, rounds: Any, segments: Any = None, deaths: Any = None) -> None:
        cycles = segments or [Segment(0, (0,))]
        init(self, rounds, [Segment(s.start, s.cycle[:1]) for s in cycles], deaths)

    Schedule.__init__ = keep_first
    accept_unconnected()


def transpose() -> None:
    """The sender's weight in place of the receiver's: mixing by the transposed matrix."""
    set_entries = Round._set_entries

    def swap(
        self: Round, size: int, receivers: np.ndarray, senders: np.ndarray, weights: np.ndarray
    ) -> None:
        order = np.lexsort((receivers, senders))
        set_entries(self, size, senders[order], receivers[order], weights[order])

    Round._set_entries = swap
    accept_unconnected()


def debias_nothing() -> None:
    """Models are the numerators `x`, not `x / w`."""
    replace(state.debias, lambda x, weight: x)
    replace(state.numerators, state.models)


def send_no_average() -> None:
    """An outer optimizer averages nothing, and the cost model's all-reduce takes no time."""
    outer.exact_average = lambda tree, *_, **__: tree
    replace(exchange.find_collective_seconds, lambda *_: 0.0)


MUTATIONS: dict[str, Callable[[], None]] = {
    "no-exchange": exchange_nothing,
    "hop-1": keep_first_hop,
    "transposed": transpose,
    "no-de-biasing": debias_nothing,
    "no-average": send_no_average,
}
"""Name -> what makes the library of this process wrong."""


def accept_unconnected() -> None:
    """Lets schedules pass that do not connect all nodes."""
    Schedule._require_connected = lambda self, segment: None


def replace(old: Any, new: Any) -> None:
    """Puts a function in the place of another in all modules of the library."""
    for module in list(sys.modules.values()):
        if module.__name__.partition(".")[0] == "gossipjax":
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the library wrong, and runs the program."""
    mutation, program, *rest = sys.argv[1:] if arguments is None else arguments
    MUTATIONS[mutation]()
    sys.argv[1:] = rest
    runpy.run_module(f"experiments.{program}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
