"""SlowMo, Table 1: slow momentum around SGP, overlap SGP and Local SGD."""

import math
from collections.abc import Mapping
from functools import partial

from experiments.presets.slowmo import (
    BASELINES,
    CHOSEN,
    EVERY,
    SLOW_MOMENTUM,
    SLOWMO,
    WITH_SLOWMO,
)
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
from experiments.report.sections.curves import Panel, draw_bars, make_point
from experiments.report.sections.methods.calls import describe_images
from experiments.report.sections.samples import (
    Place,
    Sample,
    find_best,
    format_difference,
    format_verdicts,
    join_all,
    list_image_arguments,
    list_seeds,
    read_samples,
    subtract,
    subtract_differences,
)

EPOCHS = 4
RATE = "0.05"
SINGLE_SPREAD = 0.3  # points, of one seed
TITLES = {"sgp": "SGP", "osgp": "1-OSGP", "local": "Local SGD"}
FIELD = "test_accuracy_average_model"
ALL_REDUCE = "AllReduce"
LOCAL = TITLES["local"]
LOCAL_MOST = "Local SGD gaining the most"
SLOW_OPTIONS = ("--outer-momentum", f"{SLOW_MOMENTUM['outer_momentum']}", "--outer-reset")
PLACES = {
    ALL_REDUCE: Place("slowmo-baselines", "allreduce"),
    "SGP": Place("slowmo-baselines", "sgp"),
    "SGP, with SlowMo": Place("slowmo-sgp", "sgp"),
    "1-OSGP": Place("slowmo-baselines", "1-osgp"),
    "1-OSGP, with SlowMo": Place("slowmo-sgp", "1-osgp"),
    LOCAL: Place("slowmo-local-baseline", "local"),
    "Local SGD, with SlowMo": Place("slowmo-local", "local"),
}


def list_published() -> dict[str, float]:
    """The paper's accuracies, in per cent, by the titles of the table."""
    published = {ALL_REDUCE: BASELINES["ar"][3]["top-1"]}
    for row, title in TITLES.items():
        published[title] = BASELINES[row][3]["top-1"]
        published[with_slowmo(title)] = WITH_SLOWMO[row]["top-1"]
    return {title: float(figure.rstrip("%")) for title, figure in published.items()}


def with_slowmo(title: str) -> str:
    """The title of a method with SlowMo around it."""
    return f"{title}, with SlowMo"


def list_runs(scale: Scale) -> list[Run]:
    """Four calls, two when quick: Local SGD alone."""
    seeds = list_seeds(1 if scale.is_quick else 3)
    common = (*list_image_arguments(scale, EPOCHS), "--learning-rate", RATE, *seeds)
    slow = ("--outer-every", f"{EVERY['sgp']}", *SLOW_OPTIONS)
    local = ("--algorithm", "local", "--outer-every", f"{EVERY['local']}")
    runs = [
        Run("slowmo-local-baseline", "image", (*common, *local)),
        Run("slowmo-local", "image", (*common, *local, *SLOW_OPTIONS)),
    ]
    if scale.is_quick:
        return runs
    return [
        Run("slowmo-baselines", "image", (*common, "--algorithm", "allreduce", "sgp", "1-osgp")),
        Run("slowmo-sgp", "image", (*common, "--algorithm", "sgp", "1-osgp", *slow)),
        *runs,
    ]


def find(scale: Scale, results: Results) -> Findings:
    """Compares every baseline with and without SlowMo."""
    samples = read_samples(results, PLACES, FIELD, factor=100)
    published = list_published()
    gains = {
        title: subtract(samples[with_slowmo(title)], samples[title], SINGLE_SPREAD)
        for title in TITLES.values()
    }
    claims = {
        f"a gain for {title}": Claim(
            f"SlowMo improves {title}.",
            f"{published[title]:.2f} -> {published[with_slowmo(title)]:.2f} %",
            f"{samples[title]:.2f} -> {samples[with_slowmo(title)]:.2f} % "
            f"({format_difference(gain)} points)",
            gain.exceeds(0),
        )
        for title, gain in gains.items()
    }
    claims[LOCAL_MOST] = judge_local_gain(gains, published)
    claims["AllReduce on top"] = judge_all_reduce(samples, published)
    rows = [(title, f"{samples[title]:.2f}", f"{published[title]:.2f}") for title in PLACES]
    table = Table(
        "Top-1 accuracy of the average model, with and without SlowMo",
        ("method", "here, %", "SlowMo Table 1, %"),
        tuple(rows),
        "Mean ± standard deviation over the seeds. The paper's are ImageNet, ResNet-50, 32 nodes.",
    )
    panels = [
        Panel("here", "top-1, %", "", ("",), {t: [make_point(s)] for t, s in samples.items()}),
        Panel("SlowMo, Table 1", "top-1, %", "", ("",), {t: [(published[t], 0)] for t in samples}),
    ]
    figure = Figure(
        "slowmo",
        "Accuracy with and without SlowMo; bars are one standard deviation.",
        partial(draw_bars, panels),
    )
    verdicts = {title: claim.holds for title, claim in claims.items()}
    found = ", ".join(f"{title} {format_difference(gain)}" for title, gain in gains.items())
    sentence = f"SlowMo gains, in points: {found}. {format_verdicts(verdicts)}."
    for title in TITLES.values():
        is_behind = title == LOCAL and verdicts[LOCAL_MOST] is False
        if verdicts[f"a gain for {title}"] is False or is_behind:
            sentence += describe_room(title, samples, published)
    if scale.is_quick:
        sentence += " The quick scale has Local SGD alone."
    return Findings(list(claims.values()), sentence, [table], [figure])


def judge_local_gain(gains: Mapping[str, Difference], published: Mapping[str, float]) -> Claim:
    """Whether Local SGD gains more than the two others."""
    local = gains[LOCAL]
    holds = join_all(
        [subtract_differences(local, gains[title]).exceeds(0) for title in ("SGP", "1-OSGP")]
    )
    paper = [published[with_slowmo(title)] - published[title] for title in gains]
    return Claim(
        "Local SGD gains the most of the three.",
        ", ".join(f"{title} {gain:+.2f}" for title, gain in zip(gains, paper, strict=True)),
        ", ".join(f"{title} {format_difference(gain)}" for title, gain in gains.items()),
        holds,
    )


def judge_all_reduce(samples: Mapping[str, Sample], published: Mapping[str, float]) -> Claim:
    """Whether AllReduce is above the best of the others."""
    others = {title: sample for title, sample in samples.items() if title != ALL_REDUCE}
    best = find_best(others)
    statement = "AllReduce is above all others, with SlowMo, too."
    paper = f"{published[ALL_REDUCE]:.2f} against {max(map(published.__getitem__, others)):.2f} %"
    if best is None:
        return Claim(statement, paper, f"{samples[ALL_REDUCE]:.2f} %", None)
    lead = subtract(samples[ALL_REDUCE], samples[best], SINGLE_SPREAD)
    ours = (
        f"{samples[ALL_REDUCE]:.2f} against {samples[best]:.2f} % ({best}; "
        f"{format_difference(lead)} points)"
    )
    return Claim(statement, paper, ours, lead.exceeds(0))


def describe_room(title: str, samples: Mapping[str, Sample], published: Mapping[str, float]) -> str:
    """How far a method without SlowMo is below AllReduce: what there is to win back."""
    gap = subtract(samples[ALL_REDUCE], samples[title], SINGLE_SPREAD)
    if math.isnan(gap.mean):
        return ""
    return (
        f" Without SlowMo {title} is {gap.mean:.2f} points below AllReduce here, "
        f"{published[ALL_REDUCE] - published[title]:.2f} in the paper: as much as there is to win "
        "back."
    )


def write_text(scale: Scale) -> str:
    """What the paper did, and what is done at a scale."""
    runs = list_runs(scale)
    methods = "Local SGD alone" if scale.is_quick else "the same methods and periods"
    return (
        "The paper trains ResNet-50 on ImageNet over 32 nodes, and puts slow momentum around SGP, "
        f"overlap SGP (every {EVERY['sgp']} steps) and Local SGD (every {EVERY['local']}). Here: "
        f"{describe_images(runs[0])}, Nesterov momentum, rate {RATE} with a cosine; {methods}, "
        f"local momentum set to 0 at each outer step. {CHOSEN} A statement holds if a one-sided "
        "90 % bound of the difference says so."
    )


SECTION = Section(
    name="slowmo",
    title="Slow momentum around gossip and local steps",
    source=f"SlowMo, Table 1: {SLOWMO.reference}",
    write_text=write_text,
    list_runs=list_runs,
    find=find,
)
