"""The algorithms and topologies that programs know by name, and the method that a name means."""

from experiments.training.methods.algorithms import (
    ALGORITHM_HELP,
    ALGORITHMS,
    MAX_DELAY,
    MOMENTUM_HELP,
    MOMENTUMS,
    OUTER_HELP,
    TOPOLOGY_HELP,
    WIRE_HELP,
    Algorithm,
    parse_name,
    spell_name,
)
from experiments.training.methods.method import Method, make_method
from experiments.training.methods.options import (
    DENSE,
    FORMS,
    DenseName,
    MethodOptions,
    Momentum,
    OuterAverage,
    OuterOptions,
    Sharding,
    WireName,
)
from experiments.training.methods.topologies import MAX_ROUNDS, TOPOLOGIES, make_schedule

__all__ = [
    "ALGORITHMS",
    "ALGORITHM_HELP",
    "DENSE",
    "FORMS",
    "MAX_DELAY",
    "MAX_ROUNDS",
    "MOMENTUMS",
    "MOMENTUM_HELP",
    "OUTER_HELP",
    "TOPOLOGIES",
    "TOPOLOGY_HELP",
    "WIRE_HELP",
    "Algorithm",
    "DenseName",
    "Method",
    "MethodOptions",
    "Momentum",
    "OuterAverage",
    "OuterOptions",
    "Sharding",
    "WireName",
    "make_method",
    "make_schedule",
    "parse_name",
    "spell_name",
]
