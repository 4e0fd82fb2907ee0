"""Benchmarks of training steps: each compares a measurement with a lower bound.

    python -m experiments.speed wire --bandwidth 200mbit

One subcommand per question. Each prints tables and writes them, with `summary.json`, into `--out`.
Nothing here has a time limit that could fail: the results are for people to read.
"""

import sys
from collections.abc import Sequence

import tyro

from experiments.speed.compiled.schedule import inspect_schedules
from experiments.speed.gossip import measure_gossip
from experiments.speed.wire.measure import measure_wire
from experiments.speed.wire.stragglers import measure_stragglers

COMMANDS = {
    "schedule": inspect_schedules,
    "gossip": measure_gossip,
    "wire": measure_wire,
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
