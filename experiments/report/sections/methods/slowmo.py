"""SlowMo, Table 1: slow momentum around SGP, overlap SGP and Local SGD."""

from collections.abc import Mapping, Sequence
from functools import partial

from experiments.presets.slowmo import BASELINES, EVERY, SLOW_MOMENTUM, SLOWMO, WITH_SLOWMO
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
RATE = ("--learning-rate", "0.05")
SINGLE_SPREAD = 0.3  # points, of one seed
TITLES = {"sgp": "SGP", "osgp": "1-OSGP", "local": "Local SGD"}
FIELD = "test_accuracy_average_model"
ALL_REDUCE = "AllReduce"
SLOW_OPTIONS = ("--outer-momentum", f"{SLOW_MOMENTUM['outer_momentum']}", "--outer-reset")
PLACES = {
    ALL_REDUCE: Place("slowmo-baselines", "allreduce"),
    "SGP": Place("slowmo-baselines", "sgp"),
    "SGP, with SlowMo": Place("slowmo-sgp", "sgp"),
    "1-OSGP": Place("slowmo-baselines", "1-osgp"),
    "1-OSGP, with SlowMo": Place("slowmo-sgp", "1-osgp"),
    "Local SGD": Place("slowmo-local-baseline", "local"),
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
    common = (*list_image_arguments(scale, EPOCHS), *RATE, *seeds)
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
    claims = [
        Claim(
            f"SlowMo improves {title}.",
            f"{published[title]:.2f} -> {published[with_slowmo(title)]:.2f} %",
            f"{samples[title]:.2f} -> {samples[with_slowmo(title)]:.2f} % "
            f"({format_difference(gain)} points)",
            gain.exceeds(0),
        )
        for title, gain in gains.items()
    ]
    claims += [judge_local_gain(gains, published), judge_all_reduce(samples, published)]
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
    return Findings(claims, compose(gains, claims, scale), [table], [figure])


def judge_local_gain(gains: Mapping[str, Difference], published: Mapping[str, float]) -> Claim:
    """Whether Local SGD gains more than the two others."""
    local = gains["Local SGD"]
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


def compose(gains: Mapping[str, Difference], claims: Sequence[Claim], scale: Scale) -> str:
    """The sentence of the section."""
    titles = [*(f"a gain for {title}" for title in gains), "Local SGD gaining the most"]
    titles.append("AllReduce on top")
    verdicts = {title: claim.holds for title, claim in zip(titles, claims, strict=True)}
    found = ", ".join(f"{title} {format_difference(gain)}" for title, gain in gains.items())
    sentence = f"SlowMo gains, in points: {found}. {format_verdicts(verdicts)}."
    if scale.is_quick:
        return f"{sentence} The quick scale has Local SGD alone."
    if False in verdicts.values():
        sentence += (
            " One-peer gossip loses little on this small task, so that SlowMo has little to win "
            "back there; the paper's slow momentum is chosen for each row, ours is 0.5 in all."
        )
    return sentence


SECTION = Section(
    name="slowmo",
    title="Slow momentum around gossip and local steps",
    source=f"SlowMo, Table 1: {SLOWMO.reference}",
    write_text=lambda _: (
        "The paper trains ResNet-50 on ImageNet over 32 nodes, and puts slow momentum around SGP, "
        "overlap SGP (every 48 steps) and Local SGD (every 12). Here: a perceptron of 106,000 "
        "parameters on Fashion-MNIST over 16 nodes of 32 images, Nesterov momentum, rate 0.05 "
        "with a cosine, slow momentum 0.5, the same periods, local momentum set to 0 at each "
        f"outer step, {EPOCHS} epochs ({EPOCHS * 117} steps), three seeds. "
        "A statement holds if a one-sided 90 % bound of the difference says so."
    ),
    list_runs=list_runs,
    find=find,
)
