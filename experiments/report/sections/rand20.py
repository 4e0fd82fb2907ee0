"""RAND-20, Table 2: ring, randomized ring and delayed averages at 16, 32 and 64 learners."""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from experiments.presets.rand20 import METHODS, RAND_20, WORD_ERRORS
from experiments.report.drawing import Panel, draw_panels
from experiments.report.estimates import Estimate, Place, Sample, read_samples
from experiments.report.section import Claim, Figure, Findings, Results, Scale, Section, Table
from experiments.report.sections.images import list_seeds
from experiments.runner import Run

FEWEST = 16
MOST = 64
SINGLE_SPREAD = 0.7  # points, of one seed
MAX_LOSS = 2.0  # points, of a method that keeps its accuracy: above the margin of one seed
ALL_REDUCE = "AllReduce"
RING = "D-PSGD on the ring"
AD, RAND, D1D = (METHODS[row][1] for row in ("ad", "rand", "d1d"))
ROWS = {RAND: "rand", AD: "ad", D1D: "d1d"}
NAMES = {
    ALL_REDUCE: "allreduce",
    RING: "dpsgd@ring",
    RAND: "rand-psgd",
    AD: "adpsgd@ring",
    D1D: "d1d-psgd",
}
"""Title -> the name on the command line."""
WORD_ERROR = {  # title -> learners -> the paper's word error rate on SWB, in per cent
    title: {n: float(pair.partition("/")[0]) for n, pair in WORD_ERRORS[row].items()}
    for title, row in ROWS.items()
}


class Batch(NamedTuple):
    """A total batch, and what is run with it.

    Attributes:
      size: windows of a step over all learners.
      learners: how many there are.
      titles: of the methods.
      rate: the learning rate.
      epochs: of a run.
    """

    size: int
    learners: tuple[int, ...]
    titles: tuple[str, ...]
    rate: str
    epochs: int


SMALL = Batch(512, (FEWEST, 32, MOST), (RING, RAND, AD, D1D), "0.2", 3)
LARGE = Batch(2048, (FEWEST, MOST), (ALL_REDUCE, RING, RAND, D1D), "0.4", 6)
QUICK = SMALL._replace(learners=(FEWEST,), epochs=1)

Accuracies = Mapping[int, Mapping[str, Sample]]
"""Learners -> title -> accuracy of windows, in per cent."""


def list_batches(scale: Scale) -> tuple[Batch, ...]:
    """Returns the total batches of a scale."""
    return (QUICK,) if scale.is_quick else (SMALL, LARGE)


def name_run(batch: Batch, learners: int) -> str:
    """Returns the name of the run of all methods with a batch."""
    return f"rand20-{learners}-{batch.size}"


def list_runs(scale: Scale) -> list[Run]:
    """A call for each batch and number of learners; none without the recordings."""
    if scale.speech is None:
        return []
    size = ("--layers", "1", "--cells", "16", "--projection", "16", "--placement", "vmap")
    common = ("--data-dir", f"{scale.speech}", *size, "--log-every", "1000", *list_seeds(1))
    return [
        Run(
            name_run(batch, learners),
            "speech",
            (
                *common,
                *("--learning-rate", batch.rate, "--epochs", f"{batch.epochs}"),
                *("--nodes", f"{learners}", "--batch-size-per-node", f"{batch.size // learners}"),
                *("--algorithm", *(NAMES[title] for title in batch.titles)),
            ),
        )
        for batch in list_batches(scale)
        for learners in batch.learners
    ]


def read_accuracies(results: Results, batch: Batch) -> Accuracies:
    """Reads what a batch gave, for each number of learners and each method."""
    accuracies = {}
    for learners in batch.learners:
        run = name_run(batch, learners)
        places = {title: Place(run, NAMES[title].partition("@")[0]) for title in batch.titles}
        field = "test_window_accuracy_average_model"
        accuracies[learners] = read_samples(results, places, field, factor=100)
    return accuracies


def find(scale: Scale, results: Results) -> Findings:
    """Compares what the methods lose from the fewest to the most learners."""
    small = read_accuracies(results, SMALL)
    large = read_accuracies(results, LARGE)
    age = small[FEWEST][RING].minus(small[FEWEST][AD], SINGLE_SPREAD)
    claims = [
        judge_more(RING, RAND, small, SMALL),
        judge_more(AD, D1D, small, SMALL),
        judge_order(RAND, RING, small, SMALL),
        judge_order(D1D, AD, small, SMALL),
        judge_order(D1D, RAND, small, SMALL)._replace(
            if_not="D1D-PSGD's gradients are one step old, RAND-PSGD's are not; on the ring, "
            f"{FEWEST} learners, gradients of this age cost {age:+.2f} points."
        ),
        Claim(
            f"With {SMALL.size} windows {D1D} loses at most {MAX_LOSS:g} points from {FEWEST} to "
            f"{MOST} learners.",
            describe_published(D1D),
            {"": find_loss(D1D, small)},
            at_most=MAX_LOSS,
        ),
        judge_more(RING, RAND, large, LARGE),
        judge_order(RAND, RING, large, LARGE),
        judge_order(D1D, ALL_REDUCE, large, LARGE)._replace(
            paper="S-PSGD does not converge with a large batch and an aggressive rate (section 4)",
            if_not=f"With {LARGE.size:,} windows AllReduce learns at the rate {LARGE.rate}, where "
            "the paper's does not converge at its rate; larger rates were not run. D1D-PSGD "
            "averages as exactly, with gradients that are one step old.",
        ),
    ]
    tables = [tabulate(read_accuracies(results, batch), batch) for batch in list_batches(scale)]
    figure = Figure(
        "rand20",
        "Accuracy as the same batch is divided over more learners, and the paper's error rates.",
        partial(draw_panels, make_panels(small, large)),
    )
    return Findings(claims, tables, [figure])


def find_loss(title: str, accuracies: Accuracies) -> Estimate:
    """Returns what a method loses from the fewest to the most learners, in points."""
    return accuracies[FEWEST][title].minus(accuracies[MOST][title], SINGLE_SPREAD)


def describe_published(*titles: str) -> str:
    """Returns the paper's word error rates; its only ring is that of AD-PSGD."""
    rows = {AD if title == RING else title: None for title in titles if title != ALL_REDUCE}
    errors = {title: WORD_ERROR[title] for title in rows}
    return ", ".join(f"{title} {x[FEWEST]} -> {x[MOST]} % WER" for title, x in errors.items())


def judge_more(worse: str, better: str, accuracies: Accuracies, batch: Batch) -> Claim:
    """Returns the claim that a method loses more than another."""
    more = find_loss(worse, accuracies).minus(find_loss(better, accuracies))
    return Claim(
        f"With {batch.size:,} windows {worse} loses more from {FEWEST} to {MOST} learners than "
        f"{better}.",
        describe_published(worse, better),
        {"": more},
        at_least=0.0,
        is_modelled=AD in (worse, better),
    )


def judge_order(better: str, worse: str, accuracies: Accuracies, batch: Batch) -> Claim:
    """Returns the claim that a method is ahead of another at the most learners."""
    lead = accuracies[MOST][better].minus(accuracies[MOST][worse], SINGLE_SPREAD)
    return Claim(
        f"With {batch.size:,} windows and {MOST} learners {better} is better than {worse}.",
        describe_published(better, worse),
        {"": lead},
        at_least=0.0,
        is_modelled=AD in (better, worse),
    )


def tabulate(accuracies: Accuracies, batch: Batch) -> Table:
    """Returns accuracies beside the paper's word error rates."""
    rows = []
    for title in batch.titles:
        published = WORD_ERRORS[ROWS[title]] if title in ROWS else {}
        pairs = [(f"{accuracies[n][title]:.1f}", published.get(n, "-")) for n in batch.learners]
        rows.append((title, *(text for pair in pairs for text in pair)))
    columns = [(f"{n} learners: here, %", "paper, WER SWB/CH, %") for n in batch.learners]
    return Table(
        f"Accuracy of windows by the average model, {batch.size:,} windows in all",
        ("method", *(text for pair in columns for text in pair)),
        rows,
        "An accuracy falls where an error rate rises. The paper's are of 8,192 windows in all. "
        "Learners with gradients that are one step old: AD-PSGD, on average, and D1D-PSGD.",
    )


def make_panels(small: Accuracies, large: Accuracies) -> list[Panel]:
    """Returns accuracy over learners here, and word error rates in the paper."""
    panels = []
    for accuracies, batch in ((small, SMALL), (large, LARGE)):
        lines = {
            title: [samples.get(title, Sample()) for samples in accuracies.values()]
            for title in NAMES
        }
        ticks = [f"{learners}" for learners in batch.learners]
        name = f"here, {batch.size:,} windows"
        panels.append(Panel(name, "learners", "accuracy of windows, %", ticks, lines))
    paper = {
        title: [Sample((WORD_ERROR.get(title, {}).get(n, math.nan),)) for n in SMALL.learners]
        for title in NAMES
    }
    ticks = [f"{learners}" for learners in SMALL.learners]
    label = "word error rate on SWB, %"
    return [*panels, Panel("RAND-20, Table 2", "learners", label, ticks, paper)]


SECTION = Section(
    name="rand20",
    title="Ring, randomized ring and delayed averages over many learners",
    source=f"RAND-20, Table 2: {RAND_20.reference}",
    text="""
    The paper trains an LSTM for speech (SWB2000) with a total batch of 8,192 windows over 16, 32
    and 64 learners, and compares AD-PSGD on the ring, a ring in random order (RAND) and an average
    of all models whose gradients are one step old (D1D). Here: one bidirectional LSTM layer of 2 x
    16 cells that names the language of windows of 21 frames (6,798 captions in 8 languages),
    Nesterov momentum, a cosine; {batches}; one seed, whose standard deviation is taken as {spread}
    points. RAND-PSGD runs in lockstep here, so that it is compared with D-PSGD in lockstep on the
    ring, which the paper's table does not have: its ring is that of AD-PSGD. AD-PSGD is simulated,
    with gradients that are one step old on average, as old as those of D1D-PSGD, with which it is
    compared; real AD-PSGD has smaller delays.
    """,
    find_numbers=lambda scale: {
        "spread": SINGLE_SPREAD,
        "batches": "; ".join(
            f"{batch.size:,} windows over {', '.join(map(str, batch.learners))} learners at the "
            f"rate {batch.rate}, {batch.epochs} epoch(s)"
            for batch in list_batches(scale)
        ),
    },
    list_runs=list_runs,
    find=find,
    needs=("speech",),
)
