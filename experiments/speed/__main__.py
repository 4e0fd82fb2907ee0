"""Benchmarks of training steps: each compares a measurement with a lower bound.

    python -m experiments.speed wire --bandwidth 200mbit

One subcommand per question. Each prints tables and writes them, with `summary.json`, into `--out`.
Nothing here has a time limit that could fail: the results are for people to read.
"""

import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import tyro

from experiments.speed.compiled.schedule import inspect_schedules
from experiments.speed.local.gossip import measure_gossip
from experiments.speed.wire.measure import measure_wire
from experiments.speed.wire.stragglers import measure_stragglers

COMPILED = {"schedule": inspect_schedules}
LOCAL = {"gossip": measure_gossip}


def join(description: str, checks: Mapping[str, Callable[..., Any]]) -> Callable[..., None]:
    """A command whose first argument is the name of one of these checks."""
    kinds = [
        Annotated[Any, tyro.conf.subcommand(name=name, constructor=check)]
        for name, check in checks.items()
    ]
    kinds.append(Annotated[None, tyro.conf.Suppress])  # tyro leaves out the name of a single one

    def run(check: Any) -> None:
        del check  # has run: its function is the constructor

    run.__doc__ = description
    run.__annotations__["check"] = Annotated[
        functools.reduce(operator.or_, kinds), tyro.conf.OmitSubcommandPrefixes
    ]
    return run


COMMANDS = {
    "compiled": join("Reads compiled train steps, also for chips that are not here.", COMPILED),
    "local": join("Measures what this machine computes.", LOCAL),
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
