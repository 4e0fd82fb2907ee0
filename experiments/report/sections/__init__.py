"""The sections of the report, in its order."""

from experiments.report import published
from experiments.report.section import Section
from experiments.report.sections import hours, images, rand20, scaling, sgp19, texts, theory, times

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (
        scaling.SECTION,
        hours.SECTION,
        theory.AVERAGING_SECTION,
        theory.RATES_SECTION,
        sgp19.SECTIONS["table1"],
        sgp19.SECTIONS["table3"],
        sgp19.SECTIONS["table4"],
        sgp19.SECTIONS["table5"],
        rand20.SECTION,
        images.RELAYSGD_SECTION,
        images.SLOWMO_SECTION,
        texts.DILOCO_SECTION,
        texts.TRANSLATION_SECTION,
        times.DPSGD17_SECTION,
        times.STEP_SECTION,
        times.STRAGGLER_SECTION,
        published.SECTION,
    )
}
