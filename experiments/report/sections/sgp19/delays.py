"""How old the gradients of AD-PSGD are, real and simulated."""

import contextlib
import statistics

import gossipjax as gx
from experiments.report.section import Result, Results, Scale
from experiments.report.sections.sgp19 import grid
from experiments.report.sections.sgp19.grid import Cell


def describe_delays(results: Results, cells: list[Cell], scale: Scale) -> str:
    """Returns how old the models of the real AD-PSGD's gradients were, and what is simulated."""
    parts = []
    for cell in cells:
        if grid.is_real(cell, scale):
            result = results.get(grid.find_place(cell, scale).run, Result(status="missing"))
            delays = measure_delays(result)
            if delays:
                parts.append(f"{statistics.fmean(delays):.2f} steps over {cell.nodes} nodes")
    real = f"The real AD-PSGD's gradients were late by {' and '.join(parts)}. "
    simulated = (
        "Over more nodes AD-PSGD is simulated, as so many processes would compete for the cores: "
        f"there they are late by {grid.STALENESS} steps. "
    )
    return f"{real if parts else ''}{simulated}"


def measure_delays(result: Result) -> list[float]:
    """Returns the mean delay of the gradients of each run of nodes that wait for nobody.

    In steps, from the nodes' journals; those that cannot be read are left out.
    """
    delays = []
    for run in sorted(result.folder.glob("nodes/*")) if result.folder is not None else []:
        with contextlib.suppress(OSError, ValueError):
            table = gx.asynchronous.measure_delays(sorted(run.glob("journals/*/*.jsonl")))
            delays.append(float(table.mean()))
    return delays
