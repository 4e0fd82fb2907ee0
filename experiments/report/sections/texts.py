"""DiLoCo, and SGP-19, section 6.2: Transformers on texts and translations."""

import math

from experiments.presets.sgp19 import BLEU
from experiments.report.section import (
    Findings,
    Results,
    Sample,
    Scale,
    read_claims,
    read_sample,
    read_section,
    read_table,
)
from experiments.report.tuning import Tuned, claim_best, list_tuned, read_tuned
from experiments.runner import Run

LOSS_SPREAD = 0.02  # nats per token, of one seed

# DiLoCo

ALONE = "one worker"
LARGE_BATCH = "4x batch (AllReduce)"
DILOCO = "DiLoCo, 4 workers"
STREAMING = "Streaming DiLoCo, 4 fragments"
EVERY_STEP = "averages after every step"
OUTER = "--outer-every 10"
NESTEROV = f"{OUTER} --outer-momentum 0.9 --outer-nesterov --outer-rate"
FRAGMENTS = "--outer-fragments 4 --outer-delay 2 --outer-mix 0.5"
METHODS = {  # name, algorithm, options, inner rate, Table 2's perplexity, steps between averages
    # A step of plain SGD with rate 1 from the anchor, by each node itself, changes nothing.
    ALONE: (
        *("diloco-alone", "local", f"{OUTER} --outer-average none", 1e-3),
        *("16.23 (one worker)", math.inf),
    ),
    LARGE_BATCH: ("diloco-large-batch", "allreduce", "", 2e-3, "15.30 (8x batch)", 1),
    DILOCO: ("diloco", "local", f"{NESTEROV} 0.7", 2.5e-4, "15.02 (8 workers)", 10),
    STREAMING: ("diloco-streaming", "local", f"{NESTEROV} 0.4 {FRAGMENTS}", 1e-3, "-", 10),
    EVERY_STEP: ("diloco-every-step", "local", "--outer-every 1 --outer-rate 1", 2e-3, "-", 1),
}


def tune_diloco(scale: Scale) -> dict[str, Tuned]:
    """Returns the methods at their rates; when quick, DiLoCo and one worker."""
    factor = 2 if scale.is_quick else 1  # a larger batch has fewer steps
    common = f"""--nodes 4 --vocabulary-size 1024 --sequence-length 64
    --epochs {2 // factor} --batch-size-per-node {2 * factor}
    --warmup-steps {40 // factor} --log-every {40 // factor**2}"""
    methods = {}
    for title in (ALONE, DILOCO) if scale.is_quick else METHODS:
        name, algorithm, options, rate, _, _ = METHODS[title]
        field = "test_loss_nodes" if title == ALONE else "test_loss_average_model"
        arguments = (*common.split(), *options.split())
        methods[title] = Tuned(name, "language", arguments, algorithm, rate, field)
    return methods


def find_diloco(scale: Scale, results: Results) -> Findings:
    """Compares the perplexities after the same number of steps."""
    methods = tune_diloco(scale)
    losses = dict.fromkeys(METHODS, Sample()) | read_tuned(methods, results, 1.0, LOSS_SPREAD)
    behind = losses[DILOCO] - losses[LARGE_BATCH]
    exactly = losses[EVERY_STEP] - losses[LARGE_BATCH]
    title = "half of DiLoCo's less that of averages after every step, nats"
    claims = read_claims("diloco", losses | {"half": {title: behind.halve() - exactly}})
    cells = []
    for title, (*_, published, every) in METHODS.items():
        runs = methods[title].find_place().find_runs(results) if title in methods else []
        averages = f"{int(runs[0]['steps'] // every)} in {runs[0]['steps']} steps" if runs else "-"
        cells.append((title, f"{losses[title].to_perplexity():.1f}", published, averages))
    claims.append(claim_best(methods, results, -1, "+.3f"))
    return Findings(claims, [read_table("diloco", cells)])


DILOCO_SECTION = read_section(
    name="diloco",
    list_runs=lambda scale: list_tuned(tune_diloco(scale).values(), scale.is_quick),
    find=find_diloco,
)

# Translation

BLEU_SPREAD = 0.3  # of one seed
MIN_BLEU = 3.0  # of either, below which a difference of 0.5 says nothing
TRANSLATORS = {"allreduce": "AllReduce-Adam", "sgp": "Adam-SGP, one peer"}
RATE = 4e-3  # of both


def tune_translation(scale: Scale) -> dict[str, Tuned]:
    """Returns both methods at their rates, which are compared by the validation loss."""
    options = """--nodes 4 --vocabulary-size 2000 --bucket-lengths 20 --tokens-per-batch 240
    --dropout 0 --lr-schedule cosine --warmup-steps 100 --beam 1 --eval-sentences 1 --epochs 1
    --log-every 25"""
    common = ("--data-dir", f"{scale.translation}", *options.split())
    call = ("translation", common)
    return {
        name: Tuned(f"translation-{name}", *call, name, RATE, "valid_loss_average_model")
        for name in TRANSLATORS
    }


def average_exactly(method: Tuned) -> Tuned:
    """Returns SGP over the complete graph: what it loses is not due to gossip."""
    return method._replace(name=f"{method.name}-complete", algorithm="sgp@complete")


def list_translation_runs(scale: Scale) -> list[Run]:
    """Three rates of both methods; none without the pairs of sentences."""
    if scale.translation is None:
        return []
    methods = tune_translation(scale)
    runs = list_tuned(methods.values(), scale.is_quick)
    return runs if scale.is_quick else [*runs, average_exactly(methods["sgp"]).make_run(1.0, 3)]


def find_translation(scale: Scale, results: Results) -> Findings:
    """Compares losses and BLEU after the same number of updates, each method at its rate."""
    methods = tune_translation(scale)
    exactly = {"exact": average_exactly(methods["sgp"])}
    losses = read_tuned(methods | exactly, results, 1.0, LOSS_SPREAD)
    scores = {
        name: read_sample(results, x.find_place(), "test_bleu_average_model", 1.0, BLEU_SPREAD)
        for name, x in methods.items()
    }
    is_too_bad = max(score.mean for score in scores.values()) < MIN_BLEU
    figures = {f"loss {name}": loss for name, loss in losses.items()}
    figures |= {f"BLEU {name}": score for name, score in scores.items()}
    claims = read_claims("translation", figures, {"bleu_bound": math.inf if is_too_bad else 0.5})
    titled = {TRANSLATORS[name]: method for name, method in methods.items()}
    claims.append(claim_best(titled, results, -1, "+.3f"))
    cells = []
    for name, title in TRANSLATORS.items():
        values = (f"{losses[name]:.3f}", f"{losses[name].to_perplexity():.1f}")
        published = BLEU["sgp" if name == "sgp" else "ar"]
        cells.append((title, f"{RATE:g}", *values, f"{scores[name]:.1f}", published))
    return Findings(claims, [read_table("translation", cells)])


TRANSLATION_SECTION = read_section(
    name="translation",
    list_runs=list_translation_runs,
    find=find_translation,
    needs=("translation",),
)
