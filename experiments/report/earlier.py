"""What an earlier call has left in the folder of a report."""

from collections.abc import Sequence
from pathlib import Path

from experiments.report.chapters import list_runs
from experiments.report.options import RUNS
from experiments.report.section import Result, Scale, Section
from experiments.results import Record
from experiments.results.records import LIST, parse_object, read_text
from experiments.runner import find_result, is_run

SUMMARY = "summary.json"


def read_sections(out: Path) -> list[Record]:
    """Returns the entries of the sections in `summary.json`; none if it is not there or damaged."""
    path = out / SUMMARY
    try:
        summary = parse_object(read_text(path), f"{path}", {"sections": LIST})
    except (FileNotFoundError, ValueError):
        return []
    return [entry for entry in summary["sections"] if isinstance(entry, dict)]


def find_ended(
    sections: Sequence[Section], scale: Scale, out: Path
) -> dict[str, dict[str, Result]]:
    """Returns the results of those sections all of whose runs have ended in earlier calls.

    Args:
      sections: that are not run in this call.
      scale: of the report; runs of another scale are other calls.
      out: the folder of the report.
    """
    ended: dict[str, dict[str, Result]] = {}
    for name, runs in list_runs(sections, scale).items():
        found = {run.name: find_result(run, out / RUNS / run.name) for run in runs}
        results = {run: result for run, result in found.items() if result is not None}
        if len(results) == len(runs):
            ended[name] = results
    return ended


def remove_figures(entries: Sequence[Record], folder: Path) -> None:
    """Removes the figures that `summary.json` names, and nothing else."""
    for entry in entries:
        for name in entry.get("figures", ()):
            for suffix in (".png", ".svg"):
                (folder / Path(name).name).with_suffix(suffix).unlink(missing_ok=True)


def remove_plots(names: Sequence[str], folder: Path) -> None:
    """Removes the plots of a report's runs, which `experiments.plots` makes again.

    Args:
      names: of the runs.
      folder: of all runs.
    """
    for name in names:
        if is_run(folder / name):
            for path in (folder / name).rglob("*.png"):
                path.unlink()
