"""DiLoCo: a language model over workers that average rarely."""

import math
from collections.abc import Mapping
from functools import partial

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
from experiments.report.sections.methods.calls import (
    describe_epochs,
    describe_seeds,
    read_number,
    read_option,
)
from experiments.report.sections.samples import (
    Place,
    Sample,
    format_verdicts,
    list_seeds,
    read_sample,
    subtract,
    to_perplexities,
)

WORKERS = 4
EVERY = 10
BATCH = 2  # sequences of 64 tokens
EPOCHS = 2
SINGLE_SPREAD = 0.02  # nats per token, of one seed
MAX_EXCESS = 0.05  # of a perplexity that is "about equal"
MAX_LOG_EXCESS = math.log1p(MAX_EXCESS)  # nats
ALONE = "one worker"
LARGE_BATCH = f"{WORKERS}x batch (AllReduce)"
NEAR_LARGE_BATCH = f"DiLoCo near the {WORKERS}x batch"
DILOCO = f"DiLoCo, {WORKERS} workers"
STREAMING = "Streaming DiLoCo, 4 fragments"
PLACES = {
    ALONE: Place("diloco-alone", "local"),
    LARGE_BATCH: Place("diloco-large-batch", "allreduce"),
    DILOCO: Place("diloco", "local"),
    STREAMING: Place("diloco-streaming", "local"),
}
PUBLISHED = {ALONE: 16.23, LARGE_BATCH: 15.30, DILOCO: 15.02}
"""Perplexity of the paper, Table 2: the same steps, C4, H = 500."""
PUBLISHED_SIZES = {ALONE: "one worker", LARGE_BATCH: "8x batch", DILOCO: "8 workers"}
"""What the paper's rows are, where ours has other sizes."""
PUBLISHED_EVERY = 500
AVERAGES_EVERY = {LARGE_BATCH: 1, DILOCO: EVERY, STREAMING: EVERY}
"""Steps from one average of a parameter to the next."""
NESTEROV = ("--outer-every", f"{EVERY}", "--outer-momentum", "0.9", "--outer-nesterov")
STREAMING_RATE = "0.4"
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
    streaming = (*local, *NESTEROV, "--outer-rate", STREAMING_RATE, *STREAMS)
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
    claims = {
        "DiLoCo better than one worker at equal steps": Claim(
            f"After the same steps, {WORKERS} workers of DiLoCo have a lower perplexity than one "
            "worker.",
            f"{format_published(DILOCO)} against {format_published(ALONE)}",
            describe_pair(losses, DILOCO, ALONE),
            gain.exceeds(0),
        ),
        NEAR_LARGE_BATCH: Claim(
            f"DiLoCo's perplexity is at most {MAX_EXCESS:.0%} above that of a batch {WORKERS} "
            f"times larger at the same steps, with one average for {EVERY} of it.",
            f"{format_published(DILOCO)} against {format_published(LARGE_BATCH)}",
            describe_pair(losses, DILOCO, LARGE_BATCH),
            excess.is_at_most(MAX_LOG_EXCESS),
        ),
        "Streaming DiLoCo not worse than DiLoCo": Claim(
            f"Streaming DiLoCo's perplexity is at most {MAX_EXCESS:.0%} above DiLoCo's.",
            "about equal",
            describe_pair(losses, STREAMING, DILOCO),
            streaming.is_at_most(MAX_LOG_EXCESS),
        ),
    }
    rows = [
        (
            title,
            f"{to_perplexities(losses[title]):.1f}",
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
    verdicts = {title: claim.holds for title, claim in claims.items()}
    sentence = f"{format_verdicts(verdicts)}."
    if verdicts[NEAR_LARGE_BATCH] is False:
        sentence += (
            f" Why DiLoCo is behind the {WORKERS}x batch was not measured. A guess: the runs are "
            "short and start from random parameters; the paper has 88,000 steps and starts from "
            "24,000 of ordinary training."
        )
    if streaming.exceeds(-MAX_LOG_EXCESS) is False:
        sentence += (
            f" Streaming DiLoCo is {1 - math.exp(streaming.mean):.0%} below DiLoCo, where its "
            "paper has them about equal."
        )
    if scale.is_quick:
        sentence += " The quick scale has no larger batch and no streaming."
    return Findings(list(claims.values()), sentence, [table], [figure])


def describe_pair(losses: Mapping[str, Sample], first: str, second: str) -> str:
    """Two perplexities."""
    samples = [to_perplexities(losses[title]) for title in (first, second)]
    return f"{samples[0]:.1f} against {samples[1]:.1f}"


def format_published(title: str) -> str:
    """The paper's perplexity and its sizes, or a gap."""
    return f"{PUBLISHED[title]:.2f} ({PUBLISHED_SIZES[title]})" if title in PUBLISHED else "-"


def count_averages(results: Results, title: str) -> str:
    """How often the nodes average, from the settings, and the number of steps."""
    runs = results[PLACES[title].run].runs if PLACES[title].run in results else []
    if not runs:
        return "-"
    steps = runs[0]["steps"]
    return f"{steps // AVERAGES_EVERY[title] if title in AVERAGES_EVERY else 0} in {steps} steps"


def write_text(scale: Scale) -> str:
    """What the paper did, and what is done at a scale."""
    run = next(run for run in list_runs(scale) if run.name == PLACES[DILOCO].run)
    batch = read_number(run, "--batch-size-per-node")
    length = read_number(run, "--sequence-length")
    (rate,) = read_option(run, "--learning-rate")
    (outer_rate,) = read_option(run, "--outer-rate")
    streaming = "" if scale.is_quick else f"; streaming {STREAMING_RATE}"
    return (
        "The paper trains a Transformer on C4 over 8 workers that average every "
        f"{PUBLISHED_EVERY} steps, and compares with one worker and with a batch 8 times larger "
        "at the same number of steps. Here: a Transformer of 0.9 million parameters from random "
        f"parameters on the reference manual of Python, {WORKERS} workers of {batch} sequences of "
        f"{length} tokens, {describe_epochs(run)}, AdamW at {rate} with a cosine, H = {EVERY}, the "
        f"papers' outer rates ({outer_rate}{streaming}) and momentum 0.9; nothing is tuned. There "
        f"is {describe_seeds(run)}, whose standard deviation is taken as {SINGLE_SPREAD} nats. The "
        "traffic is counted from the settings, not measured."
    )


SECTION = Section(
    name="diloco",
    title="A language model whose workers average rarely",
    source=SOURCE,
    write_text=write_text,
    list_runs=list_runs,
    find=find,
)
