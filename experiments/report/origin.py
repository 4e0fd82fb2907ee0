"""How a report was made: command, versions, machine, data sets, time."""

import collections
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from experiments.report.section import Scale
from experiments.runner import Result, find_commit, find_machine

PACKAGES = ("gossipjax", "jax", "optax", "flax", "numpy", "scipy")


class Origin(NamedTuple):
    """How a report was made.

    Attributes:
      command: that made it, as on the command line.
      scale: quick or full.
      code: the commit, with `-dirty` if files differ from it, and those of the runs if they are
        others; "" if it is not known.
      versions: of Python and of packages.
      machine: processor and cores, and those of the runs if they are others.
      data: the data sets.
      seconds: of all runs together, one after the other.
      wall_seconds: of this call.
      taken: runs of other reports.
    """

    command: str
    scale: str
    code: str
    versions: str
    machine: str
    data: str
    seconds: float
    wall_seconds: float
    taken: tuple[str, ...] = ()

    def list_facts(self) -> dict[str, str]:
        """Returns title -> text, for those that are known."""
        facts = {
            "command": f"`{self.command}`",
            "scale": self.scale,
            "code": self.code,
            "versions": self.versions,
            "machine": self.machine,
            "data": self.data,
            "time": f"{format_seconds(self.seconds)} of runs, one after the other; "
            f"{format_seconds(self.wall_seconds)} in this call",
            "taken from other reports": f"{len(self.taken)} runs" if self.taken else "",
        }
        return {title: text for title, text in facts.items() if text}


def find_origin(
    command: str,
    scale: Scale,
    results: Mapping[str, Result],
    wall_seconds: float,
    taken: tuple[str, ...],
) -> Origin:
    """Returns how a report is made on this machine."""
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    ended = [result for result in results.values() if result.folder is not None]
    kind = "quick: small versions of all runs" if scale.is_quick else "full"
    return Origin(
        command=command,
        scale=kind,
        code=count_origins([result.code for result in ended], find_commit()),
        versions=", ".join(versions),
        machine=count_origins([result.machine for result in ended], find_machine()),
        data=describe_data(scale),
        seconds=sum(result.seconds for result in results.values()),
        wall_seconds=wall_seconds,
        taken=taken,
    )


def count_origins(texts: Iterable[str], current: str) -> str:
    """Returns what runs were made by, with their numbers where that is not what it is now.

    Args:
      texts: one for each run; "" if it is not known.
      current: that of this call.

    >>> count_origins(["b", "b"], "b"), count_origins(["a", "a", "b"], "b"), count_origins([], "")
    ('b', 'b; runs: a (2), b (1)', '')
    """
    counts = collections.Counter(text or "not known" for text in texts)
    if set(counts) <= {current}:
        return current
    runs = ", ".join(f"{text} ({count})" for text, count in counts.items())
    return f"{current or 'not known'}; runs: {runs}"


def describe_data(scale: Scale) -> str:
    """Returns the data sets of a report in words.

    >>> describe_data(Scale())
    '5,000 MNIST digits in the place of Fashion-MNIST; no speech; no translations'
    """
    return "; ".join(
        [
            "Fashion-MNIST"
            if scale.fashion_mnist is not None
            else "5,000 MNIST digits in the place of Fashion-MNIST",
            "speech" if scale.speech is not None else "no speech",
            "translations" if scale.translation is not None else "no translations",
        ]
    )


def format_seconds(seconds: float) -> str:
    """Returns a time in words.

    >>> format_seconds(7.3), format_seconds(191), format_seconds(7262)
    ('7 s', '3 min 11 s', '2 h 1 min')
    """
    minutes = round(seconds) // 60
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {round(seconds) % 60} s" if minutes else f"{seconds:.0f} s"
