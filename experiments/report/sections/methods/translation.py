"""SGP-19, section 6.2: Adam-SGP and AllReduce on translation."""

import math
from collections.abc import Mapping
from functools import partial

from experiments.presets.sgp19 import BLEU, SGP_19
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
    format_difference,
    format_verdicts,
    list_seeds,
    read_sample,
    subtract,
    to_perplexities,
)

TOKENS = 240  # of a node
UPDATES = 387  # of an epoch of sentences of at most 20 tokens
RATES = ("2e-3", "4e-3")
SINGLE_SPREAD = 0.02  # nats per token, of one seed
BLEU_SPREAD = 0.3  # of one seed
TOO_LOW = "both too low to compare"
MIN_BLEU = 3.0  # of either, below which a difference of 0.5 says nothing
MAX_LOSS = 0.05  # nats by which Adam-SGP may be behind
MAX_BLEU = 0.5  # BLEU by which Adam-SGP may be behind
ALL_REDUCE = "AllReduce-Adam"
SGP = "Adam-SGP, one peer"
ALGORITHMS = {ALL_REDUCE: "allreduce", SGP: "sgp"}
SAME = f"the rate {RATES[0]}"
BEST = "the rate of two with the lower validation loss for each"
LOSS_AT_SAME = "Adam-SGP's loss as low as AllReduce's at the same rate"
BLEU_AT_SAME = "its BLEU as high at the same rate"
VALID_LOSS = "valid_loss_average_model"
TEST_BLEU = "test_bleu_average_model"

Samples = Mapping[str, Mapping[str, Sample]]
"""Method -> rate -> a sample."""


def list_runs(scale: Scale) -> list[Run]:
    """A call for each rate, of both methods; none without the pairs of sentences."""
    if scale.translation is None:
        return []
    size = ("--nodes", "4", "--vocabulary-size", "2000", "--bucket-lengths", "20")
    size = (*size, "--tokens-per-batch", f"{TOKENS}", "--dropout", "0", "--lr-schedule", "cosine")
    size = (*size, "--warmup-steps", "100", "--beam", "1", "--eval-sentences", "1")
    epochs = ("--epochs", "1", "--log-every", "25")
    data = ("--data-dir", f"{scale.translation}", "--algorithm", *ALGORITHMS.values())
    common = (*data, *size, *epochs, *list_seeds(1))
    rates = RATES[:1] if scale.is_quick else RATES
    return [
        Run(f"translation-{rate}", "translation", (*common, "--learning-rate", rate))
        for rate in rates
    ]


def find(scale: Scale, results: Results) -> Findings:
    """Compares losses and BLEU after the same number of updates."""
    losses = read_rates(results, VALID_LOSS)
    scores = read_rates(results, TEST_BLEU)
    same = dict.fromkeys(ALGORITHMS, RATES[0])
    best = choose_rates(losses)
    claims = {
        LOSS_AT_SAME: judge_loss(losses, same, SAME),
        "as low at the better of two rates": judge_loss(losses, best, BEST),
        BLEU_AT_SAME: judge_bleu(scores, same, SAME),
        "as high at the better rates": judge_bleu(scores, best, BEST),
    }
    verdicts = {title: claim.holds for title, claim in claims.items()}
    sentence = f"{format_verdicts(verdicts)}."
    if claims[LOSS_AT_SAME].holds is False:
        sentence += describe_rates(losses)
    if TOO_LOW in claims[BLEU_AT_SAME].ours:
        sentence += f" After so few updates BLEU, below {MIN_BLEU:g}, says nothing yet."
    rows = []
    for title in ALGORITHMS:
        for rate in RATES:
            loss = losses[title][rate]
            perplexity = to_perplexities(loss)
            values = (f"{loss:.3f}", f"{perplexity:.1f}", f"{scores[title][rate]:.1f}")
            rows.append((title, rate, *values, BLEU["sgp" if title == SGP else "ar"]))
    table = Table(
        "The average model after the same updates",
        (
            *("method", "rate", "validation loss, nats per token", "perplexity"),
            *("BLEU on the test set", "SGP-19 section 6.2, BLEU"),
        ),
        tuple(rows),
        "BLEU by sacrebleu of translations that are built greedily; the paper's beam is 4.",
    )
    curves = {
        f"{title}, {rate}": [
            read_curves(result.folder, run, "loss")
            for run in result.runs
            if run["algorithm"] == algorithm
        ]
        for title, algorithm in ALGORITHMS.items()
        for rate in RATES
        if (result := results.get(f"translation-{rate}")) is not None
    }
    figure = Figure(
        "translation",
        "Training loss of the nodes' models, with label smoothing, mean over 25 steps.",
        partial(draw_curves, curves, "loss, nats per token", "linear"),
    )
    return Findings(list(claims.values()), sentence, [table], [figure])


def read_rates(results: Results, field: str) -> Samples:
    """Reads a field for every method and rate."""
    return {
        title: {
            rate: read_sample(results, Place(f"translation-{rate}", algorithm), field)
            for rate in RATES
        }
        for title, algorithm in ALGORITHMS.items()
    }


def choose_rates(losses: Samples) -> dict[str, str] | None:
    """The rate of each method with the lower validation loss; None if a run of either is missing.

    BLEU is compared at these rates, too: a choice by BLEU of the test set would flatter it.
    """
    if any(not loss.values for by_rate in losses.values() for loss in by_rate.values()):
        return None
    return {
        title: min(by_rate, key=lambda rate: by_rate[rate].mean)
        for title, by_rate in losses.items()
    }


def describe_rates(losses: Samples) -> str:
    """What the higher rate gives to each method, and a guess at the cause."""
    gains = {
        title: subtract(by_rate[RATES[0]], by_rate[RATES[1]], SINGLE_SPREAD)
        for title, by_rate in losses.items()
    }
    text = ""
    if not any(math.isnan(gain.mean) for gain in gains.values()):
        found = ", ".join(f"{title} {gain.mean:+.2f}" for title, gain in gains.items())
        text = (
            f" From {RATES[0]} to {RATES[1]} the rate gains, in nats: {found}. Higher rates were "
            "not run."
        )
    return (
        f"{text} A guess at the cause: Adam on a node is given noisier gradients, of a fourth of "
        f"the batch, and makes smaller steps; a node has {TOKENS} tokens here, up to 50,000 in the "
        "paper."
    )


def judge_loss(losses: Samples, rates: Mapping[str, str] | None, where: str) -> Claim:
    """Whether Adam-SGP's loss is not above AllReduce's.

    Args:
      losses: of every method and rate.
      rates: that of each method; None leaves it open.
      where: what the rates are, for the statement.
    """
    statement = (
        f"After the same updates at {where}, the validation loss of Adam-SGP is at most "
        f"{MAX_LOSS} nats above AllReduce's."
    )
    paper = "its BLEU is 0.6 better, at one recipe"
    if rates is None:
        return Claim(statement, paper, "-", None)
    first = losses[SGP][rates[SGP]]
    second = losses[ALL_REDUCE][rates[ALL_REDUCE]]
    excess = subtract(first, second, SINGLE_SPREAD)
    ours = f"{first:.3f} against {second:.3f} nats ({format_difference(excess)}); "
    ours += f"rates {rates[SGP]} and {rates[ALL_REDUCE]}"
    return Claim(statement, paper, ours, excess.is_at_most(MAX_LOSS))


def judge_bleu(scores: Samples, rates: Mapping[str, str] | None, where: str) -> Claim:
    """Whether Adam-SGP's BLEU is not below AllReduce's; for the arguments see `judge_loss`."""
    statement = (
        f"After the same updates at {where}, BLEU of Adam-SGP is at most {MAX_BLEU} below "
        "AllReduce's."
    )
    paper = "26.4 against 25.8 after about 14,000 updates"
    if rates is None:
        return Claim(statement, paper, "-", None)
    first = scores[SGP][rates[SGP]]
    second = scores[ALL_REDUCE][rates[ALL_REDUCE]]
    ours = f"{first:.1f} against {second:.1f}; rates {rates[SGP]} and {rates[ALL_REDUCE]}"
    if first.values and second.values and max(first.mean, second.mean) < MIN_BLEU:
        return Claim(statement, paper, f"{ours}: {TOO_LOW}", None)
    return Claim(statement, paper, ours, subtract(second, first, BLEU_SPREAD).is_at_most(MAX_BLEU))


def write_text(scale: Scale) -> str:
    """What the paper did, and what is done at a scale; without the data, the paper's part."""
    text = (
        "The paper trains a Transformer on WMT'16 English-German over 8 nodes with Adam, and "
        "compares SGP and AllReduce in BLEU after the same number of updates and after the same "
        "time."
    )
    runs = list_runs(scale)
    if not runs:
        return text
    run = runs[0]
    (length,) = read_option(run, "--bucket-lengths")
    rates = " and ".join(rate for run in runs for rate in read_option(run, "--learning-rate"))
    return (
        f"{text} Here: a Transformer of 0.9 million parameters without its embedding on "
        f"{read_number(run, '--nodes')} nodes of {TOKENS} tokens, package descriptions and "
        f"messages of a game of at most {length} tokens, {describe_epochs(run)} ({UPDATES} "
        f"updates), Adam with a cosine at {rates}, {describe_seeds(run)}, whose standard deviation "
        f"is taken as {SINGLE_SPREAD} nats and {BLEU_SPREAD} BLEU. The better rate of each method "
        "is that of the lower validation loss. Time is not measured here."
    )


SECTION = Section(
    name="translation",
    title="Adam-SGP on translation",
    source=f"SGP-19, section 6.2: {SGP_19.reference}",
    write_text=write_text,
    list_runs=list_runs,
    find=find,
    needs=("translation",),
)
