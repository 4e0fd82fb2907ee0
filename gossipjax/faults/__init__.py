"""Simulates faults: tables say what fails at which step, so a run can be repeated.

- `Faults` contains the tables. `independent_drops`, `gilbert_elliott`, `markov_activity`,
  `cyclic_activity`, `poisson_activity` and `uniform_delays` draw tables.
- `apply(schedule, faults)` removes from a schedule the messages that fail. The result works with
  every algorithm that takes a schedule. The sender keeps the share that it did not send.
- `sgp` and `dpsgd` lose, delay and disturb messages, and the sender does not know it. `account`
  says how much mass nodes hold, is on its way, and was lost.
- `inactive(chain, faults)` stops the computation of nodes that sleep or are dead.
- `Lying(rule, liars, attack)` replaces what honest nodes hear of liars; `shout` scales the updates
  of nodes.
- `noise(std)`, for `wire=`, adds noise to messages, and the sender knows it.

`gx.asynchronous` and `gx.launch` handle real faults of real processes.
"""

from gossipjax.faults._faults import Faults
from gossipjax.faults._inactive import InactiveState, inactive
from gossipjax.faults._lies import Lying, shout
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
    "Lying",
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
    "shout",
    "uniform_delays",
]
