"""Benchmarks of training steps: each compares a measurement with a lower bound.

    python -m experiments.speed network --bandwidth 200mbit

One subcommand per question. Each prints tables and writes them, with `summary.json`, into `--out`.
Nothing here has a time limit that could fail: the results are for people to read.
"""

import sys
from collections.abc import Sequence

import tyro

from experiments.speed.input_feed import measure_input
from experiments.speed.islands.measure import measure_islands
from experiments.speed.network.measure import measure_network
from experiments.speed.schedule.compiled import inspect_schedules
from experiments.speed.schedule.scaling import inspect_scaling
from experiments.speed.schedule.slices import inspect_slices
from experiments.speed.simulation import measure_simulation
from experiments.speed.step import measure_step
from experiments.speed.stragglers.measure import measure_stragglers

COMMANDS = {
    "input": measure_input,
    "islands": measure_islands,
    "network": measure_network,
    "scaling": inspect_scaling,
    "schedule": inspect_schedules,
    "simulation": measure_simulation,
    "slices": inspect_slices,
    "step": measure_step,
    "stragglers": measure_stragglers,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options and runs the subcommand."""
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="python -m experiments.speed",
        description="Benchmarks of training steps, each compared with a lower bound.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )


if __name__ == "__main__":
    main()
