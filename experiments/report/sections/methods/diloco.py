"""DiLoCo: a language model over workers that average rarely."""

import math
from collections.abc import Mapping
from functools import partial

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
from experiments.report.sections.curves import draw_curves, read_curves
from experiments.report.sections.samples import (
    Place,
    Sample,
    format_verdicts,
    list_seeds,
    read_sample,
    subtract,
)

WORKERS = 4
EVERY = 10
BATCH = 2  # sequences of 64 tokens
EPOCHS = 2
STEPS = 584  # of two epochs of the manual of Python 3.11; others have a few more or less
SINGLE_SPREAD = 0.02  # nats per token, of one seed
MAX_EXCESS = 0.05  # of a perplexity that is "about equal"
ALONE = "one worker"
LARGE_BATCH = f"{WORKERS}x batch (AllReduce)"
DILOCO = f"DiLoCo, {WORKERS} workers"
STREAMING = "Streaming DiLoCo, 4 fragments"
PLACES = {
    ALONE: Place("diloco-alone", "local"),
    LARGE_BATCH: Place("diloco-large-batch", "allreduce"),
    DILOCO: Place("diloco", "local"),
    STREAMING: Place("diloco-streaming", "local"),
}
PUBLISHED = {ALONE: 16.23, LARGE_BATCH: 15.30, DILOCO: 15.02}
"""Perplexity of the paper, Table 2: the same steps, C4, 8 workers, H = 500."""
PUBLISHED_EVERY = 500
AVERAGES_EVERY = {LARGE_BATCH: 1, DILOCO: EVERY, STREAMING: EVERY}
"""Steps from one average of a parameter to the next."""
NESTEROV = ("--outer-every", f"{EVERY}", "--outer-momentum", "0.9", "--outer-nesterov")
STREAMS = ("--outer-fragments", "4", "--outer-delay", "2", "--outer-mix", "0.5")
FIELDS = {ALONE: "test_loss_nodes"}
SOURCE = (
    'DiLoCo: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language '
    'Models", 2023, arXiv:2311.08105, Table 2; Streaming DiLoCo: Douillard et al., 2025, '
    "arXiv:2501.18512"
)


def list_runs(scale: Scale) -> list[Run]:
    """A call for each method; when quick, DiLoCo and one worker, with fewer steps."""
    epochs = 1 if scale.is_quick else EPOCHS
    factor = 2 if scale.is_quick else 1  # a larger batch has fewer steps
    common = ("--nodes", f"{WORKERS}", "--vocabulary-size", "1024", "--sequence-length", "64")
    common = (*common, "--epochs", f"{epochs}", "--batch-size-per-node", f"{factor * BATCH}")
    common = (*common, "--learning-rate", "1e-3", "--warmup-steps", f"{40 // factor}")
    common = (*common, "--log-every", f"{40 // factor**2}", *list_seeds(1))
    local = (*common, "--algorithm", "local")
    # A step of plain SGD with rate 1 from the anchor, by each node itself, changes nothing.
    alone = ("--outer-every", f"{EVERY}", "--outer-average", "none")
    runs = [
        Run("diloco-alone", "language", (*local, *alone)),
        Run("diloco", "language", (*local, *NESTEROV, "--outer-rate", "0.7")),
    ]
    if scale.is_quick:
        return runs
    streaming = (*local, *NESTEROV, "--outer-rate", "0.4", *STREAMS)
    return [
        *runs,
        Run("diloco-large-batch", "language", (*common, "--algorithm", "allreduce")),
        Run("diloco-streaming", "language", streaming),
    ]


def find(scale: Scale, results: Results) -> Findings:
    """Compares the perplexities after the same number of steps."""
    losses = {
        title: read_sample(results, place, FIELDS.get(title, "test_loss_average_model"))
        for title, place in PLACES.items()
    }
    gain = subtract(losses[ALONE], losses[DILOCO], SINGLE_SPREAD)
    excess = subtract(losses[DILOCO], losses[LARGE_BATCH], SINGLE_SPREAD)
    streaming = subtract(losses[STREAMING], losses[DILOCO], SINGLE_SPREAD)
    claims = [
        Claim(
            f"After the same steps, {WORKERS} workers of DiLoCo have a lower perplexity than one "
            "worker.",
            f"{PUBLISHED[DILOCO]} against {PUBLISHED[ALONE]}, 8 workers",
            describe_pair(losses, DILOCO, ALONE),
            gain.exceeds(0),
        ),
        Claim(
            f"DiLoCo's perplexity is at most {MAX_EXCESS:.0%} above that of a batch {WORKERS} "
            f"times larger at the same steps, with one average for {EVERY} of it.",
            f"{PUBLISHED[DILOCO]} against {PUBLISHED[LARGE_BATCH]:.2f}, 8 workers",
            describe_pair(losses, DILOCO, LARGE_BATCH),
            is_within(excess),
        ),
        Claim(
            f"Streaming DiLoCo's perplexity is at most {MAX_EXCESS:.0%} above DiLoCo's.",
            "about equal",
            describe_pair(losses, STREAMING, DILOCO),
            is_within(streaming),
        ),
    ]
    rows = [
        (
            title,
            f"{find_perplexity(losses[title]):.1f}",
            format_published(title),
            count_averages(results, title),
        )
        for title in PLACES
    ]
    table = Table(
        f"Perplexity on the test set after the same steps, H = {EVERY} (paper: {PUBLISHED_EVERY})",
        ("method", "here", "DiLoCo, Table 2", "averages of each parameter, counted"),
        tuple(rows),
        f"One worker: {WORKERS} that never average, each on its part of the texts; the mean of "
        "their losses. The others: the average model. The traffic is that of the averages: "
        f"{EVERY} times less with DiLoCo here, {PUBLISHED_EVERY} times less in the paper.",
    )
    curves = {
        title: [
            read_curves(results[place.run].folder, run, "loss") for run in results[place.run].runs
        ]
        for title, place in PLACES.items()
        if place.run in results
    }
    figure = Figure(
        "diloco",
        "Training loss of the workers' models, mean over the steps since the point before.",
        partial(draw_curves, curves, "loss, nats per token", "linear"),
    )
    return Findings(claims, compose(claims, scale), [table], [figure])


def find_perplexity(loss: Sample) -> Sample:
    """The perplexity of a loss in nats per token."""
    return loss._replace(values=tuple(math.exp(value) for value in loss.values))


def is_within(excess: Difference) -> bool | None:
    """Whether a loss is so little above another that the perplexity is about equal."""
    exceeds = excess.exceeds(math.log1p(MAX_EXCESS))
    return None if exceeds is None else not exceeds


def describe_pair(losses: Mapping[str, Sample], first: str, second: str) -> str:
    """Two perplexities."""
    samples = [find_perplexity(losses[title]) for title in (first, second)]
    return f"{samples[0]:.1f} against {samples[1]:.1f}"


def format_published(title: str) -> str:
    """The paper's perplexity, or a gap."""
    return f"{PUBLISHED[title]:.2f}" if title in PUBLISHED else "-"


def count_averages(results: Results, title: str) -> str:
    """How often the nodes average, from the settings, and the number of steps."""
    runs = results[PLACES[title].run].runs if PLACES[title].run in results else []
    if not runs:
        return "-"
    steps = runs[0]["steps"]
    return f"{steps // AVERAGES_EVERY[title] if title in AVERAGES_EVERY else 0} in {steps} steps"


def compose(claims: list[Claim], scale: Scale) -> str:
    """The sentence of the section."""
    titles = ["DiLoCo better than one worker at equal steps", f"DiLoCo near the {WORKERS}x batch"]
    titles.append("Streaming DiLoCo about equal")
    holds = {title: claim.holds for title, claim in zip(titles, claims, strict=True)}
    sentence = f"{format_verdicts(holds)}."
    if False in holds.values():
        sentence += (
            " The runs are short and start from random parameters, where the large batch learns "
            "with every step what DiLoCo learns with every outer step; the paper has 88,000 steps "
            "and starts from 24,000 of ordinary training."
        )
    if scale.is_quick:
        sentence += " The quick scale has a quarter of the steps, no larger batch and no streaming."
    return sentence


SECTION = Section(
    name="diloco",
    title="A language model whose workers average rarely",
    source=SOURCE,
    write_text=lambda _: (
        "The paper trains a Transformer on C4 over 8 workers that average every 500 steps, and "
        "compares with one worker and with a batch 8 times larger at the same number of steps. "
        "Here: a Transformer of 0.9 million parameters from random parameters on the reference "
        f"manual of Python, {WORKERS} workers of {BATCH} sequences of 64 tokens, {STEPS} steps, "
        f"AdamW at 1e-3 with a cosine, H = {EVERY}, the papers' outer rates (0.7; streaming 0.4) "
        "and momentum 0.9; nothing is tuned. One seed; the standard deviation of a seed is taken "
        f"as {SINGLE_SPREAD} nats. The traffic is counted from the settings, not measured."
    ),
    list_runs=list_runs,
    find=find,
)
