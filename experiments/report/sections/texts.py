"""DiLoCo, and SGP-19, section 6.2: Transformers on texts and translations."""

import math
from collections.abc import Mapping
from functools import partial

from experiments.presets.sgp19 import BLEU
from experiments.report.drawing import draw_curves, read_curves
from experiments.report.section import (
    Claim,
    Estimate,
    Figure,
    Findings,
    Place,
    Results,
    Sample,
    Scale,
    Table,
    read_sample,
    read_section,
)
from experiments.runner import Result, Run

LOSS_SPREAD = 0.02  # nats per token, of one seed

# DiLoCo

ABOUT_EQUAL = math.log1p(0.05)  # nats: 5 % of a perplexity
ALONE = "one worker"
LARGE_BATCH = "4x batch (AllReduce)"
DILOCO = "DiLoCo, 4 workers"
STREAMING = "Streaming DiLoCo, 4 fragments"
ROWS = {  # run, algorithm, the paper's perplexity in Table 2, steps between averages
    ALONE: (Place("diloco-alone", "local"), "16.23 (one worker)", math.inf),
    LARGE_BATCH: (Place("diloco-large-batch", "allreduce"), "15.30 (8x batch)", 1),
    DILOCO: (Place("diloco", "local"), "15.02 (8 workers)", 10),
    STREAMING: (Place("diloco-streaming", "local"), "-", 10),
}


def list_diloco_runs(scale: Scale) -> list[Run]:
    """A call for each method; when quick, DiLoCo and one worker, with fewer steps."""
    factor = 2 if scale.is_quick else 1  # a larger batch has fewer steps
    common = f"""--nodes 4 --vocabulary-size 1024 --sequence-length 64
    --epochs {2 // factor} --batch-size-per-node {2 * factor}
    --learning-rate 1e-3 --warmup-steps {40 // factor} --log-every {40 // factor**2} --seed 0"""
    local = "--algorithm local --outer-every 10"
    nesterov = f"{local} --outer-momentum 0.9 --outer-nesterov --outer-rate"
    calls = {
        # A step of plain SGD with rate 1 from the anchor, by each node itself, changes nothing.
        "diloco-alone": f"{local} --outer-average none",
        "diloco": f"{nesterov} 0.7",
        "diloco-large-batch": "--algorithm allreduce",
        "diloco-streaming": f"{nesterov} 0.4 --outer-fragments 4 --outer-delay 2 --outer-mix 0.5",
    }
    runs = [
        Run(name, "language", tuple(f"{common} {options}".split()))
        for name, options in calls.items()
    ]
    return runs[:2] if scale.is_quick else runs


def find_diloco(scale: Scale, results: Results) -> Findings:
    """Compares the perplexities after the same number of steps."""
    del scale
    losses = {}
    cells = []
    for title, (place, published, every) in ROWS.items():
        field = "test_loss_nodes" if title == ALONE else "test_loss_average_model"
        losses[title] = read_sample(results, place, field, single_spread=LOSS_SPREAD)
        runs = results.get(place.run, Result(status="missing")).runs
        averages = f"{int(runs[0]['steps'] // every)} in {runs[0]['steps']} steps" if runs else "-"
        cells.append((title, f"{losses[title].to_perplexity():.1f}", published, averages))
    claims = [
        Claim(
            "After the same steps, 4 workers of DiLoCo have a lower perplexity than one worker.",
            "perplexity 15.02 (8 workers) against 16.23 (one worker)",
            {"nats": losses[DILOCO] - losses[ALONE]},
            at_most=0.0,
        ),
        Claim(
            "DiLoCo's perplexity is at most 5 % above that of a batch 4 times larger at the same "
            "steps, with one average for 10 of it.",
            "perplexity 15.02 (8 workers) against 15.30 (8x batch)",
            {"nats": losses[DILOCO] - losses[LARGE_BATCH]},
            at_most=ABOUT_EQUAL,
            if_not="Why DiLoCo is behind the 4x batch was not measured. A guess: the runs are "
            "short and start from random parameters; the paper has 88,000 steps and starts from "
            "24,000 of ordinary training.",
        ),
        Claim(
            "Streaming DiLoCo's perplexity is at most 5 % above DiLoCo's.",
            "about equal",
            {"nats": losses[STREAMING] - losses[DILOCO]},
            at_most=ABOUT_EQUAL,
        ),
    ]
    table = Table(
        "Perplexity on the test set after the same steps, H = 10 (paper: 500)",
        ("method", "here", "DiLoCo, Table 2", "averages of each parameter, counted"),
        cells,
        "One worker: 4 that never average, each on its part of the texts; the mean of their "
        "losses. The others: the average model. The traffic is that of the averages: 10 times less "
        "with DiLoCo here, 500 times less in the paper.",
    )
    curves = {title: read_curves(results, place, "loss") for title, (place, *_) in ROWS.items()}
    figure = Figure(
        "diloco",
        "Training loss of the workers' models, mean over the steps since the point before.",
        partial(draw_curves, {"": curves}, "loss, nats per token", "linear"),
    )
    return Findings(claims, [table], [figure])


DILOCO_SECTION = read_section(
    name="diloco",
    find_numbers=lambda scale: (
        {"batch": 4, "epochs": 1} if scale.is_quick else {"batch": 2, "epochs": 2}
    ),
    list_runs=list_diloco_runs,
    find=find_diloco,
)

# Translation

RATES = ("2e-3", "4e-3")
BLEU_SPREAD = 0.3  # of one seed
MIN_BLEU = 3.0  # of either, below which a difference of 0.5 says nothing
ALL_REDUCE = "AllReduce-Adam"
SGP = "Adam-SGP, one peer"
ALGORITHMS = {ALL_REDUCE: "allreduce", SGP: "sgp"}

Samples = Mapping[str, Mapping[str, Sample]]
"""Method -> rate -> a sample."""


def list_translation_runs(scale: Scale) -> list[Run]:
    """A call for each rate, of both methods; none without the pairs of sentences."""
    if scale.translation is None:
        return []
    options = """--nodes 4 --vocabulary-size 2000 --bucket-lengths 20 --tokens-per-batch 240
    --dropout 0 --lr-schedule cosine --warmup-steps 100 --beam 1 --eval-sentences 1 --epochs 1
    --log-every 25 --seed 0 --learning-rate"""
    common = ("--data-dir", f"{scale.translation}", "--algorithm", *ALGORITHMS.values())
    return [
        Run(f"translation-{rate}", "translation", (*common, *options.split(), rate))
        for rate in (RATES[:1] if scale.is_quick else RATES)
    ]


def find_translation(scale: Scale, results: Results) -> Findings:
    """Compares losses and BLEU after the same number of updates."""
    del scale
    losses = read_rates(results, "valid_loss_average_model", LOSS_SPREAD)
    scores = read_rates(results, "test_bleu_average_model", BLEU_SPREAD)
    same = dict.fromkeys(ALGORITHMS, RATES[0])
    # BLEU is compared at these rates, too: a choice by BLEU of the test set would flatter it.
    best = None
    if all(loss.values for by_rate in losses.values() for loss in by_rate.values()):
        best = {
            title: min(by_rate, key=lambda rate: by_rate[rate].mean)
            for title, by_rate in losses.items()
        }
    places = (
        ("2e-3", same),
        ("of two with the lower validation loss for each", best),
    )
    guess = (
        "A guess at the cause: Adam on a node is given noisier gradients, of a fourth of the "
        "batch, and makes smaller steps; a node has 240 tokens here, up to 50,000 in the paper. "
        "Higher rates were not run."
    )
    claims = [
        Claim(
            f"After the same updates at the rate {where}, the validation loss of Adam-SGP is at "
            "most 0.05 nats above AllReduce's.",
            "its BLEU is 0.6 better, at one recipe",
            subtract(losses, rates, SGP, ALL_REDUCE),
            at_most=0.05,
            spec="+.3f",
            if_not=guess if rates is same else "",
        )
        for where, rates in places
    ]
    for where, rates in places:
        chosen = [] if rates is None else [scores[title][rates[title]].mean for title in rates]
        is_too_bad = bool(chosen) and max(chosen) < MIN_BLEU
        claims.append(
            Claim(
                f"After the same updates at the rate {where}, BLEU of Adam-SGP is at most 0.5 "
                "below AllReduce's; not judged where both are below 3.",
                "26.4 against 25.8 after about 14,000 updates",
                subtract(scores, rates, ALL_REDUCE, SGP),
                at_most=math.inf if is_too_bad else 0.5,
            )
        )
    cells = []
    for title in ALGORITHMS:
        for rate in RATES:
            loss = losses[title][rate]
            values = (f"{loss:.3f}", f"{loss.to_perplexity():.1f}", f"{scores[title][rate]:.1f}")
            cells.append((title, rate, *values, BLEU["sgp" if title == SGP else "ar"]))
    columns = ("method", "rate", "validation loss, nats per token", "perplexity")
    table = Table(
        "The average model after the same updates",
        (*columns, "BLEU on the test set", "SGP-19 section 6.2, BLEU"),
        cells,
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


def read_rates(results: Results, field: str, spread: float) -> Samples:
    """Reads a field for every method and rate."""
    return {
        title: {
            rate: read_sample(
                results, Place(f"translation-{rate}", algorithm), field, single_spread=spread
            )
            for rate in RATES
        }
        for title, algorithm in ALGORITHMS.items()
    }


def subtract(
    samples: Samples, rates: Mapping[str, str] | None, first: str, second: str
) -> dict[str, Estimate]:
    """Returns the difference of two methods at their rates; none without rates."""
    if rates is None:
        return {}
    difference = samples[first][rates[first]] - samples[second][rates[second]]
    return {f"rates {rates[SGP]} and {rates[ALL_REDUCE]}:": difference}


TRANSLATION_SECTION = read_section(
    name="translation",
    find_numbers=lambda scale: {"rates": RATES[0] if scale.is_quick else " and ".join(RATES)},
    list_runs=list_translation_runs,
    find=find_translation,
    needs=("translation",),
)
