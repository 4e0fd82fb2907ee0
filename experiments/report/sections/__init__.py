"""The sections of the report, in its order.

Each is a module that has `SECTION`; it is imported when its section is made.

- samples: what a run says of a method, over its seeds, as values and as text.
- curves: figures of metrics over steps and over settings.
"""

import difflib
import importlib
from collections.abc import Iterable

from experiments.report.section import Section

MODULES: dict[str, str] = {
    # name of the section -> its module in this folder
    "averaging": "theory.averaging",
    "rates": "theory.rates",
    "sgp19-table1": "sgp19.table1",
    "sgp19-figure2": "sgp19.figure2",
    "sgp19-table3": "sgp19.table3",
    "sgp19-table4": "sgp19.table4",
    "sgp19-table5": "sgp19.table5",
    "rand20": "methods.rand20",
    "relaysgd": "methods.relaysgd",
    "slowmo": "methods.slowmo",
    "diloco": "methods.diloco",
    "translation": "methods.translation",
    "dpsgd17": "dpsgd17",
    "step-time": "times.step_time",
    "stragglers": "times.stragglers",
    "cost-model": "times.cost_model",
}


def check_names(names: Iterable[str]) -> None:
    """Raises `ValueError` for a name of no section; the message has the nearest ones.

    >>> check_names(["no-such"])
    Traceback (most recent call last):
    ValueError: --section must be the name of a section, got 'no-such': `python -m \
experiments.report --list-sections` lists them.
    """
    for name in names:
        if name not in MODULES:
            nearest = difflib.get_close_matches(name, MODULES, n=3)
            question = f"did you mean {', '.join(nearest)}? " if nearest else ""
            raise ValueError(
                f"--section must be the name of a section, got {name!r}: {question}`python -m "
                "experiments.report --list-sections` lists them."
            )


def load_section(name: str) -> Section:
    """Returns a section by its name."""
    return importlib.import_module(f"{__name__}.{MODULES[name]}").SECTION
