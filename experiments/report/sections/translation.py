"""SGP-19, section 6.2: Adam-SGP and AllReduce on translation."""

from collections.abc import Mapping
from functools import partial

from experiments.presets.sgp19 import BLEU, SGP_19
from experiments.report.drawing import draw_curves, read_curves
from experiments.report.estimates import Place, Sample, read_sample
from experiments.report.section import Claim, Figure, Findings, Results, Scale, Section, Table
from experiments.report.sections.images import list_seeds
from experiments.runner import Run

TOKENS = 240  # of a node
RATES = ("2e-3", "4e-3")
SINGLE_SPREAD = 0.02  # nats per token, of one seed
BLEU_SPREAD = 0.3  # of one seed
MIN_BLEU = 3.0  # of either, below which a difference of 0.5 says nothing
MAX_LOSS = 0.05  # nats by which Adam-SGP may be behind
MAX_BLEU = 0.5  # BLEU by which Adam-SGP may be behind
ALL_REDUCE = "AllReduce-Adam"
SGP = "Adam-SGP, one peer"
ALGORITHMS = {ALL_REDUCE: "allreduce", SGP: "sgp"}
BEST = "the rate of two with the lower validation loss for each"

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
    del scale
    losses = read_rates(results, "valid_loss_average_model")
    scores = read_rates(results, "test_bleu_average_model")
    same = dict.fromkeys(ALGORITHMS, RATES[0])
    best = choose_rates(losses)
    claims = [
        judge_loss(losses, same, f"the rate {RATES[0]}")._replace(
            if_not="A guess at the cause: Adam on a node is given noisier gradients, of a fourth "
            f"of the batch, and makes smaller steps; a node has {TOKENS} tokens here, up to 50,000 "
            "in the paper. Higher rates were not run."
        ),
        judge_loss(losses, best, BEST),
        judge_bleu(scores, same, f"the rate {RATES[0]}"),
        judge_bleu(scores, best, BEST),
    ]
    rows = []
    for title in ALGORITHMS:
        for rate in RATES:
            loss = losses[title][rate]
            values = (f"{loss:.3f}", f"{loss.to_perplexity():.1f}", f"{scores[title][rate]:.1f}")
            rows.append((title, rate, *values, BLEU["sgp" if title == SGP else "ar"]))
    table = Table(
        "The average model after the same updates",
        (
            *("method", "rate", "validation loss, nats per token", "perplexity"),
            *("BLEU on the test set", "SGP-19 section 6.2, BLEU"),
        ),
        rows,
        "BLEU by sacrebleu of translations that are built greedily; the paper's beam is 4.",
    )
    curves = {
        f"{title}, {rate}": read_curves(results, Place(f"translation-{rate}", algorithm), "loss")
        for title, algorithm in ALGORITHMS.items()
        for rate in RATES
    }
    figure = Figure(
        "translation",
        "Training loss of the nodes' models, with label smoothing, mean over 25 steps.",
        partial(draw_curves, {"": curves}, "loss, nats per token", "linear"),
    )
    return Findings(claims, [table], [figure])


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
    """Returns the rate of each method with the lower validation loss; None if a run is missing.

    BLEU is compared at these rates, too: a choice by BLEU of the test set would flatter it.
    """
    if any(not loss.values for by_rate in losses.values() for loss in by_rate.values()):
        return None
    return {
        title: min(by_rate, key=lambda rate: by_rate[rate].mean)
        for title, by_rate in losses.items()
    }


def judge_loss(losses: Samples, rates: Mapping[str, str] | None, where: str) -> Claim:
    """Returns the claim that Adam-SGP's loss is not above AllReduce's.

    Args:
      losses: of every method and rate.
      rates: of each method; None leaves the claim open.
      where: what the rates are, for the statement.
    """
    rows = {}
    if rates is not None:
        ours, others = (losses[title][rates[title]] for title in (SGP, ALL_REDUCE))
        title = f"rates {rates[SGP]} and {rates[ALL_REDUCE]}:"
        rows[title] = ours.minus(others, SINGLE_SPREAD)
    return Claim(
        f"After the same updates at {where}, the validation loss of Adam-SGP is at most "
        f"{MAX_LOSS} nats above AllReduce's.",
        "its BLEU is 0.6 better, at one recipe",
        rows,
        at_most=MAX_LOSS,
        spec="+.3f",
    )


def judge_bleu(scores: Samples, rates: Mapping[str, str] | None, where: str) -> Claim:
    """Returns the claim that Adam-SGP's BLEU is not below AllReduce's, as `judge_loss` does.

    It has no bound where both are too low to be compared.
    """
    rows = {}
    bound = MAX_BLEU
    if rates is not None:
        ours, others = (scores[title][rates[title]] for title in (SGP, ALL_REDUCE))
        title = f"rates {rates[SGP]} and {rates[ALL_REDUCE]}:"
        rows[title] = others.minus(ours, BLEU_SPREAD)
        if max(ours.mean, others.mean) < MIN_BLEU:
            bound = float("inf")
    return Claim(
        f"After the same updates at {where}, BLEU of Adam-SGP is at most {MAX_BLEU} below "
        f"AllReduce's; not judged where both are below {MIN_BLEU:g}.",
        "26.4 against 25.8 after about 14,000 updates",
        rows,
        at_most=bound,
    )


SECTION = Section(
    name="translation",
    title="Adam-SGP on translation",
    source=f"SGP-19, section 6.2: {SGP_19.reference}",
    text="""
    The paper trains a Transformer on WMT'16 English-German over 8 nodes with Adam, and compares SGP
    and AllReduce in BLEU after the same number of updates and after the same time. Here: a
    Transformer of 0.9 million parameters without its embedding on 4 nodes of {tokens} tokens,
    package descriptions and messages of a game of at most 20 tokens, one epoch (387 updates), Adam
    with a cosine at {rates}, one seed, whose standard deviation is taken as {spread} nats and
    {bleu_spread} BLEU. The better rate of each method is that of the lower validation loss. Time is
    not measured here.
    """,
    find_numbers=lambda scale: {
        "tokens": TOKENS,
        "rates": RATES[0] if scale.is_quick else " and ".join(RATES),
        "spread": SINGLE_SPREAD,
        "bleu_spread": BLEU_SPREAD,
    },
    list_runs=list_runs,
    find=find,
    needs=("translation",),
)
