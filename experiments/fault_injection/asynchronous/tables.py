"""Tables with a row per kill and per stop."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.fault_injection.asynchronous.faults import Fault
from experiments.fault_injection.asynchronous.kills import Kill
from experiments.fault_injection.asynchronous.stops import Stop


def make_kills_table(kills: list[Kill], start: float) -> Table:
    """Makes a table with a row per kill."""
    table = make_table("kill", "seconds", "node", "started\nagain s", "back s", "others'\npause s")
    for number, kill in enumerate(kills, 1):
        row = [f"{number}", f"{kill.time - start:.1f}", f"{kill.place}"]
        row += [f"{kill.restarted - kill.time:.1f}", show_back(kill)]
        table.add_row(*row, f"{kill.pause:.2f}")
    return table


def make_stops_table(stops: list[Stop], start: float) -> Table:
    """Makes a table with a row per stop."""
    columns = ("others' step\nbefore ms", "during ms", "change %")
    table = make_table("stop", "seconds", "node", "stopped s", "back s", *columns)
    for number, stop in enumerate(stops, 1):
        row = [f"{number}", f"{stop.time - start:.1f}", f"{stop.place}"]
        row += [f"{stop.continued - stop.time:.1f}", show_back(stop)]
        row += [f"{1000 * stop.step_before:.2f}", f"{1000 * stop.step_during:.2f}"]
        table.add_row(*row, f"{100 * stop.change:+.1f}")
    return table


def make_table(*headers: str) -> Table:
    """Makes a table without rows."""
    table = Table(box=SIMPLE_HEAD, padding=0)
    for header in headers:
        table.add_column(header, justify="right")
    return table


def show_back(fault: Fault) -> str:
    """After how many seconds a node was back."""
    return "never" if fault.back is None else f"{fault.back - fault.since:.1f}"
