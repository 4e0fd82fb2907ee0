"""Algorithms against uneven data with the settings of the report, for `--algorithm`.

    python -m experiments.image --algorithm experiments.uneven:gut --dirichlet-alpha 0.1

`experiments.examples.methods` has them as functions of their parameters, docs/your_algorithm.md
their equations. The local optimizer stands before them, as before D-PSGD.
"""

import optax

import gossipjax as gx
from experiments.examples import methods


def gut(schedule: gx.Schedule) -> optax.GradientTransformation:
    """GUT with mu = 0.5, behind the momentum of the local optimizer."""
    return methods.gut(schedule, 0.5)


def decentlam(schedule: gx.Schedule) -> optax.GradientTransformation:
    """DecentLaM with momentum 0.9, behind `--optimizer sgd`, whose updates are `-rate g`."""
    return optax.chain(optax.scale(-1.0), methods.decentlam(schedule, 1.0))


def scaffnew(schedule: gx.Schedule) -> optax.GradientTransformation:
    """Scaffnew (ProxSkip), whose nodes exchange in one of 5 steps, at random."""
    return methods.proxskip(gx.topology.random_rounds(schedule, 100, 0, probability=0.2), 0.2)
