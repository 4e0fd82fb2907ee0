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
from experiments.report.sections.samples import (
    Place,
    Sample,
    find_best,
    format_difference,
    format_verdicts,
    list_seeds,
    read_sample,
    subtract,
)

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
BEST = "the better of two rates for each"
VALID_LOSS = "valid_loss_average_model"
TEST_BLEU = "test_bleu_average_model"

Samples = Mapping[str, Mapping[str, Sample]]
"""Method -> rate -> a sample."""


def list_runs(scale: Scale) -> list[Run]:
    """A call for each rate, of both methods; none without the pairs of sentences."""
    if scale.translation is None:
        return []
    size = ("--nodes", "4", "--vocabulary-size", "2000", "--bucket-lengths", "20")
    size = (*size, "--tokens-per-batch", "240", "--dropout", "0", "--lr-schedule", "cosine")
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
    claims = {
        "the loss at the same rate": judge_loss(losses, same, SAME),
        "the loss at the better of two rates": judge_loss(losses, choose_rates(losses, -1), BEST),
        "BLEU at the same rate": judge_bleu(scores, same, SAME),
        "BLEU at the better of two rates": judge_bleu(scores, choose_rates(scores, 1), BEST),
    }
    sentence = format_verdicts({title: claim.holds for title, claim in claims.items()})
    sentence = f"Whether Adam-SGP is not behind AllReduce after the same updates: {sentence}."
    if claims["the loss at the same rate"].holds is False:
        sentence += (
            " Adam on a node is given gradients of a fourth of the batch, whose larger noise makes "
            "its steps smaller than those of Adam on the mean gradient: it needs a higher rate. "
            "A node has 240 tokens here and up to 50,000 in the paper, where that noise is small."
        )
    if claims["BLEU at the same rate"].ours.endswith(TOO_LOW):
        sentence += " After so few updates, BLEU says nothing yet."
    sentence += " Time is not measured here."
    rows = []
    for title in ALGORITHMS:
        for rate in RATES:
            loss = losses[title][rate]
            perplexity = loss._replace(values=tuple(math.exp(value) for value in loss.values))
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


def choose_rates(samples: Samples, sign: int) -> dict[str, str] | None:
    """The better rate of each method; None if a run of either is missing.

    Args:
      samples: of every method and rate.
      sign: 1 if a larger value is better, -1 if a smaller one is.
    """
    rates = {}
    for title, by_rate in samples.items():
        signed = {
            rate: sample._replace(values=tuple(sign * value for value in sample.values))
            for rate, sample in by_rate.items()
        }
        rates[title] = find_best(signed)
    return None if None in rates.values() else rates


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
    exceeds = excess.exceeds(MAX_LOSS)
    ours = f"{first:.3f} against {second:.3f} nats ({format_difference(excess)}); "
    ours += f"rates {rates[SGP]} and {rates[ALL_REDUCE]}"
    return Claim(statement, paper, ours, None if exceeds is None else not exceeds)


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
    exceeds = subtract(second, first, BLEU_SPREAD).exceeds(MAX_BLEU)
    return Claim(statement, paper, ours, None if exceeds is None else not exceeds)


SECTION = Section(
    name="translation",
    title="Adam-SGP on translation",
    source=f"SGP-19, section 6.2: {SGP_19.reference}",
    write_text=lambda _: (
        "The paper trains a Transformer on WMT'16 English-German over 8 nodes with Adam, and "
        "compares SGP and AllReduce in BLEU after the same number of updates and after the same "
        "time. Here: a Transformer of 0.9 million parameters without its embedding on 4 nodes of "
        "240 tokens, package descriptions and messages of a game of at most 20 tokens, "
        f"{UPDATES} updates, Adam with a cosine at two rates, one seed, whose standard deviation "
        f"is taken as {SINGLE_SPREAD} nats and {BLEU_SPREAD} BLEU. Time is not measured here: the "
        "cost model has a section."
    ),
    list_runs=list_runs,
    find=find,
    needs=("translation",),
)
