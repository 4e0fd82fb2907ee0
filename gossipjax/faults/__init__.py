"""Faults as arguments, simulated: what fails at which step is data, and a run can be replayed.

- `Faults`: the tables of what goes wrong. Drawn from a seed by `independent_drops`,
  `gilbert_elliott`, `markov_activity`, `cyclic_activity`, `poisson_activity`, `uniform_delays`.
- `apply(schedule, faults)`: a schedule in which drops, sleeps and deaths have happened, for any
  algorithm that takes a schedule. Who keeps what was lost: the sender, or both ends of an edge.
- `sgp`, `dpsgd`: links that lose, delay and disturb messages without the knowledge of the sender;
  `account` is the mass that nodes hold, that is on its way, and that was lost.
- `inactive(chain, faults)`: nodes that do not compute while they sleep or are dead.
- `noise(std)`: a form of messages for `wire=`, with noise that the sender knows.

A lost message whose share the sender keeps is a schedule; one that the sender takes for delivered
is state. Real faults of real processes are in `gx.asynchronous` and `gx.launch`.
"""

from gossipjax.faults._faults import Faults
from gossipjax.faults._inactive import InactiveState, inactive
from gossipjax.faults._noise import NoiseCodec, noise
from gossipjax.faults._rounds import apply
from gossipjax.faults._tables import (
    cyclic_activity,
    gilbert_elliott,
    independent_drops,
    markov_activity,
    poisson_activity,
    uniform_delays,
)
from gossipjax.faults._transforms import Account, account, dpsgd, sgp

__all__ = [
    "Account",
    "Faults",
    "InactiveState",
    "NoiseCodec",
    "account",
    "apply",
    "cyclic_activity",
    "dpsgd",
    "gilbert_elliott",
    "inactive",
    "independent_drops",
    "markov_activity",
    "noise",
    "poisson_activity",
    "sgp",
    "uniform_delays",
]
