"""RAND-20, Table 2: ring, randomized ring and delayed averages at 16, 32 and 64 learners."""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from experiments.presets.rand20 import METHODS, RAND_20, WORD_ERRORS
from experiments.report.differences import Difference
from experiments.report.section import (
    Claim,
    Figure,
    Findings,
    Results,
    Run,
    Scale,
    Section,
    Table,
)
from experiments.report.sections.curves import Panel, draw_panels, make_point
from experiments.report.sections.methods.calls import describe_seeds, format_count
from experiments.report.sections.samples import (
    Place,
    Sample,
    format_difference,
    format_verdicts,
    list_seeds,
    read_samples,
    subtract,
    subtract_differences,
)

FEWEST = 16
MOST = 64
SINGLE_SPREAD = 0.7  # points, of one seed
MAX_LOSS = 2.0  # points, of a method that keeps its accuracy: above the margin of one seed
FIELD = "test_window_accuracy_average_model"
ALL_REDUCE = "AllReduce"
RING = "D-PSGD on the ring"
AD, RAND, D1D = (METHODS[row][1] for row in ("ad", "rand", "d1d"))
ROWS = {RAND: "rand", AD: "ad", D1D: "d1d"}
AHEAD_OF_RAND = "D1D-PSGD ahead of the randomized ring"
AHEAD_OF_ALL_REDUCE = "D1D-PSGD ahead of AllReduce with the large batch"
NAMES = {
    ALL_REDUCE: "allreduce",
    RING: "dpsgd@ring",
    RAND: "rand-psgd",
    AD: "adpsgd@ring",
    D1D: "d1d-psgd",
}
"""Title -> the name on the command line."""


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
    """The total batches of a scale."""
    return (QUICK,) if scale.is_quick else (SMALL, LARGE)


def name_run(batch: Batch, learners: int) -> str:
    """The name of the run of all methods with a batch over so many learners."""
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
        places = {t: Place(run, NAMES[t].partition("@")[0]) for t in batch.titles}
        accuracies[learners] = read_samples(results, places, FIELD, factor=100)
    return accuracies


def find(scale: Scale, results: Results) -> Findings:
    """Compares what the methods lose from the fewest to the most learners."""
    small = read_accuracies(results, SMALL)
    large = read_accuracies(results, LARGE)
    losses = {SMALL: find_losses(small), LARGE: find_losses(large)}
    claims = {
        "the ring losing more than the randomized ring": judge_more(RING, RAND, small, SMALL),
        "AD-PSGD losing more than D1D-PSGD": judge_more(AD, D1D, small, SMALL),
        "the randomized ring ahead of the ring": judge_order(RAND, RING, small, SMALL),
        "D1D-PSGD ahead of AD-PSGD": judge_order(D1D, AD, small, SMALL),
        AHEAD_OF_RAND: judge_order(D1D, RAND, small, SMALL),
        "D1D-PSGD losing little": judge_kept(losses[SMALL]),
        "the ring losing more with the large batch": judge_more(RING, RAND, large, LARGE),
        "the randomized ring ahead with the large batch": judge_order(RAND, RING, large, LARGE),
        AHEAD_OF_ALL_REDUCE: judge_order(D1D, ALL_REDUCE, large, LARGE),
    }
    verdicts = {title: claim.holds for title, claim in claims.items()}
    found = "; ".join(
        f"with {batch.size:,} windows {format_losses(lost)}"
        for batch, lost in losses.items()
        if not all(math.isnan(loss.mean) for loss in lost.values())
    )
    sentence = f"Points lost from {FEWEST} to {MOST} learners: {found}. " if found else ""
    sentence += f"{format_verdicts(verdicts)}."
    age = subtract(small[FEWEST][RING], small[FEWEST][AD], SINGLE_SPREAD)
    if verdicts[AHEAD_OF_RAND] is False and not math.isnan(age.mean):
        sentence += (
            " D1D-PSGD's gradients are one step old, RAND-PSGD's are not; on the ring, "
            f"{FEWEST} learners, gradients of this age cost {age} points."
        )
    if verdicts[AHEAD_OF_ALL_REDUCE] is False:
        sentence += (
            f" With {LARGE.size:,} windows AllReduce learns at the rate {LARGE.rate}, where the "
            "paper's does not converge at its rate; larger rates were not run. D1D-PSGD averages "
            "as exactly, with gradients that are one step old."
        )
    if scale.is_quick:
        sentence += f" The quick scale has {FEWEST} learners and one batch only."
    tables = [make_table(read_accuracies(results, one), one) for one in list_batches(scale)]
    return Findings(list(claims.values()), sentence, tables, [draw(small, large)])


def find_losses(accuracies: Accuracies) -> dict[str, Difference]:
    """What each method loses from the fewest to the most learners, in points."""
    return {
        title: subtract(sample, accuracies[MOST][title], SINGLE_SPREAD)
        for title, sample in accuracies[FEWEST].items()
    }


def format_losses(losses: Mapping[str, Difference]) -> str:
    """What the methods lose, one after another."""
    return ", ".join(f"{title} {format_difference(loss)}" for title, loss in losses.items())


def list_word_errors(title: str) -> dict[int, tuple[float, float]]:
    """The paper's word error rates on SWB and CH by learners, in per cent."""
    pairs = {}
    for learners, figures in WORD_ERRORS[ROWS[title]].items():
        switchboard, call_home = figures.split("/")
        pairs[learners] = (float(switchboard), float(call_home))
    return pairs


def describe_published(title: str) -> str:
    """The paper's word error rate on SWB at the fewest and the most learners."""
    title = AD if title == RING else title
    errors = list_word_errors(title)
    return f"{title} {errors[FEWEST][0]} -> {errors[MOST][0]} % WER"


def judge_more(worse: str, better: str, accuracies: Accuracies, batch: Batch) -> Claim:
    """Whether a method loses more than another."""
    losses = find_losses(accuracies)
    pair = {title: losses[title] for title in (worse, better)}
    return Claim(
        f"With {batch.size:,} windows {worse} loses more from {FEWEST} to {MOST} learners than "
        f"{better}.",
        f"{describe_published(worse)}, {describe_published(better)}",
        f"{format_losses(pair)} points",
        subtract_differences(losses[worse], losses[better]).exceeds(0),
        is_modelled=AD in pair,
    )


def judge_order(better: str, worse: str, accuracies: Accuracies, batch: Batch) -> Claim:
    """Whether a method is ahead of another at the most learners."""
    first = accuracies[MOST][better]
    second = accuracies[MOST][worse]
    lead = subtract(first, second, SINGLE_SPREAD)
    if worse == ALL_REDUCE:
        paper = "S-PSGD does not converge with a large batch and an aggressive rate (section 4)"
    else:
        paper = f"{describe_published(better)}, {describe_published(worse)}"
    return Claim(
        f"With {batch.size:,} windows and {MOST} learners {better} is better than {worse}.",
        paper,
        f"{first:.1f} against {second:.1f} % of the windows ({format_difference(lead)} points)",
        lead.exceeds(0),
        is_modelled=AD in (better, worse),
    )


def judge_kept(losses: Mapping[str, Difference]) -> Claim:
    """Whether D1D-PSGD keeps its accuracy."""
    return Claim(
        f"With {SMALL.size} windows {D1D} loses at most {MAX_LOSS:g} points from {FEWEST} to "
        f"{MOST} learners.",
        describe_published(D1D),
        f"loses {format_difference(losses[D1D])} points",
        losses[D1D].is_at_most(MAX_LOSS),
    )


def make_table(accuracies: Accuracies, batch: Batch) -> Table:
    """Accuracies beside the paper's word error rates."""
    rows = []
    for title in batch.titles:
        published = WORD_ERRORS[ROWS[title]] if title in ROWS else {}
        pairs = [(f"{accuracies[n][title]:.1f}", published.get(n, "-")) for n in batch.learners]
        rows.append((title, *(text for pair in pairs for text in pair)))
    columns = [(f"{n} learners: here, %", "paper, WER SWB/CH, %") for n in batch.learners]
    return Table(
        f"Accuracy of windows by the average model, {batch.size:,} windows in all",
        ("method", *(text for pair in columns for text in pair)),
        tuple(rows),
        "An accuracy falls where an error rate rises. The paper's are of 8,192 windows in all. "
        "Learners with gradients that are one step old: AD-PSGD, on average, and D1D-PSGD.",
    )


def draw(small: Accuracies, large: Accuracies) -> Figure:
    """Accuracy over learners here, and word error rates in the paper."""
    panels = []
    for accuracies, batch in ((small, SMALL), (large, LARGE)):
        lines = {
            title: [make_point(by_title.get(title, Sample())) for by_title in accuracies.values()]
            for title in NAMES
        }
        ticks = [f"{learners}" for learners in batch.learners]
        name = f"here, {batch.size:,} windows"
        panels.append(Panel(name, "learners", "accuracy of windows, %", ticks, lines))
    ticks = [f"{learners}" for learners in SMALL.learners]
    errors = {title: list_word_errors(title) if title in ROWS else {} for title in NAMES}
    published = {
        title: [(found.get(n, (math.nan,))[0], 0.0) for n in SMALL.learners]
        for title, found in errors.items()
    }
    name = "RAND-20, Table 2"
    panels.append(Panel(name, "learners", "word error rate on SWB, %", ticks, published))
    return Figure(
        "rand20",
        "Accuracy as the same batch is divided over more learners, and the paper's error rates.",
        partial(draw_panels, panels),
    )


def write_text(scale: Scale) -> str:
    """What the paper did, and what is done at a scale; without the data, the paper's part."""
    text = (
        "The paper trains an LSTM for speech (SWB2000) with a total batch of 8,192 windows over "
        "16, 32 and 64 learners, and compares AD-PSGD on the ring, a ring in random order (RAND) "
        "and an average of all models whose gradients are one step old (D1D)."
    )
    runs = list_runs(scale)
    if not runs:
        return text
    sizes = "; ".join(
        f"{batch.size:,} windows over {join_numbers(batch.learners)} learners at the rate "
        f"{batch.rate}, {format_count(batch.epochs, 'epoch')}"
        for batch in list_batches(scale)
    )
    return (
        f"{text} Here: one bidirectional LSTM layer of 2 x 16 cells that names the language of "
        "windows of 21 frames (6,798 captions in 8 languages), Nesterov momentum, a cosine; "
        f"{sizes}; {describe_seeds(runs[0])}, whose standard deviation is taken as "
        f"{SINGLE_SPREAD} points. RAND-PSGD runs in lockstep here, so that it is compared with "
        "D-PSGD in lockstep on the ring, which the paper's table does not have: its ring is that "
        "of AD-PSGD. AD-PSGD is simulated, with gradients that are one step old on average, as "
        "old as those of D1D-PSGD, with which it is compared; real AD-PSGD has smaller delays."
    )


def join_numbers(numbers: tuple[int, ...]) -> str:
    """Numbers in words' order.

    >>> join_numbers((16,)), join_numbers((16, 32, 64))
    ('16', '16, 32 and 64')
    """
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


SECTION = Section(
    name="rand20",
    title="Ring, randomized ring and delayed averages over many learners",
    source=f"RAND-20, Table 2: {RAND_20.reference}",
    write_text=write_text,
    list_runs=list_runs,
    find=find,
    needs=("speech",),
)
