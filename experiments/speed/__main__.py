"""How fast training steps are, beside what the network and the memory allow at best.

    python -m experiments.speed network --bandwidth 200mbit

A subcommand per question; each prints tables and writes them, with `summary.json`, into `--out`.
Nothing here has a time limit that could fail: speed is for people to read.
"""

import sys
from collections.abc import Sequence

import tyro

from experiments import speed_network, speed_schedule, speed_simulation, speed_step

COMMANDS = {
    "network": speed_network.network,
    "schedule": speed_schedule.main,
    "simulation": speed_simulation.simulation,
    "step": speed_step.step,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options and runs the subcommand."""
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="python -m experiments.speed",
        description="How fast training steps are, beside what would be possible.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )


if __name__ == "__main__":
    main()
