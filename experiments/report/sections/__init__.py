"""The sections of the report, in its order."""

import difflib
from collections.abc import Iterable

from experiments.report.section import Section
from experiments.report.sections import (
    averaging,
    cost_model,
    diloco,
    dpsgd17,
    rand20,
    rates,
    relaysgd,
    sgp19_figure2,
    sgp19_tables,
    slowmo,
    step_time,
    stragglers,
    translation,
)

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        averaging.SECTION,
        rates.SECTION,
        sgp19_tables.TABLE1_SECTION,
        sgp19_figure2.SECTION,
        sgp19_tables.TABLE3_SECTION,
        sgp19_tables.TABLE4_SECTION,
        sgp19_tables.TABLE5_SECTION,
        rand20.SECTION,
        relaysgd.SECTION,
        slowmo.SECTION,
        diloco.SECTION,
        translation.SECTION,
        dpsgd17.SECTION,
        step_time.SECTION,
        stragglers.SECTION,
        cost_model.SECTION,
    )
}


def check_names(names: Iterable[str]) -> None:
    """Refuses names of sections that are not there, and suggests the nearest ones.

    >>> check_names(["no-such"])
    Traceback (most recent call last):
    ValueError: --section must be the name of a section, got 'no-such': `python -m \
experiments.report --list-sections` lists them.
    """
    for name in names:
        if name not in SECTIONS:
            nearest = difflib.get_close_matches(name, SECTIONS, n=3)
            question = f"did you mean {', '.join(nearest)}? " if nearest else ""
            raise ValueError(
                f"--section must be the name of a section, got {name!r}: {question}`python -m "
                "experiments.report --list-sections` lists them."
            )
