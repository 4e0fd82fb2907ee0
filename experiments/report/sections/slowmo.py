"""SlowMo, Table 1: slow momentum around SGP, overlap SGP and Local SGD."""

from functools import partial

from experiments.presets.slowmo import (
    BASELINES,
    CHOSEN,
    EVERY,
    SLOW_MOMENTUM,
    SLOWMO,
    WITH_SLOWMO,
)
from experiments.report.drawing import Pair, draw_pairs
from experiments.report.estimates import Place, read_samples
from experiments.report.section import Claim, Figure, Findings, Results, Scale, Section, Table
from experiments.report.sections.images import Images, find_images, list_arguments, list_seeds
from experiments.runner import Run

RATE = "0.05"
SINGLE_SPREAD = 0.3  # points, of one seed
TITLES = {"sgp": "SGP", "osgp": "1-OSGP", "local": "Local SGD"}
ALL_REDUCE = "AllReduce"
LOCAL = TITLES["local"]
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
FIGURES = {ALL_REDUCE: BASELINES["ar"][3]["top-1"]}
FIGURES |= {title: BASELINES[row][3]["top-1"] for row, title in TITLES.items()}
FIGURES |= {f"{title}, with SlowMo": WITH_SLOWMO[row]["top-1"] for row, title in TITLES.items()}
PUBLISHED = {title: float(figure.rstrip("%")) for title, figure in FIGURES.items()}


def find_sizes(scale: Scale) -> Images:
    """Returns what is trained."""
    return find_images(scale, epochs=4, seeds=3)


def list_runs(scale: Scale) -> list[Run]:
    """Four calls, two when quick: Local SGD alone."""
    images = find_sizes(scale)
    seeds = list_seeds(images.seeds)
    common = (*list_arguments(scale, images), "--learning-rate", RATE, *seeds)
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
    del scale
    ours = read_samples(results, PLACES, "test_accuracy_average_model", factor=100)
    gains = {
        title: ours[f"{title}, with SlowMo"].minus(ours[title], SINGLE_SPREAD)
        for title in TITLES.values()
    }
    paper_gains = {
        title: PUBLISHED[f"{title}, with SlowMo"] - PUBLISHED[title] for title in TITLES.values()
    }
    claims = [
        Claim(
            f"SlowMo improves {title}.",
            f"{paper_gains[title]:+.2f}",
            {"": gain},
            at_least=0.0,
            if_not=f"What there is to win back: without SlowMo {title} is, in points below "
            f"AllReduce, {ours[ALL_REDUCE].minus(ours[title], SINGLE_SPREAD):.2f} here, "
            f"{PUBLISHED[ALL_REDUCE] - PUBLISHED[title]:.2f} in the paper.",
        )
        for title, gain in gains.items()
    ]
    others = ("SGP", "1-OSGP")
    more = {f"than {title}": gains[LOCAL].minus(gains[title]) for title in others}
    paper = "; ".join(f"than {t} {paper_gains[LOCAL] - paper_gains[t]:+.2f}" for t in others)
    claims.append(Claim("Local SGD gains the most of the three.", paper, more, at_least=0.0))
    rivals = {title: sample for title, sample in ours.items() if title != ALL_REDUCE}
    leads = {}
    if all(sample.values for sample in rivals.values()):
        best = max(rivals, key=lambda title: rivals[title].mean)
        leads[f"than {best}"] = ours[ALL_REDUCE].minus(rivals[best], SINGLE_SPREAD)
    claims.append(
        Claim(
            "AllReduce is more accurate than the best of the others, with SlowMo, too.",
            f"{PUBLISHED[ALL_REDUCE] - max(PUBLISHED[title] for title in rivals):+.2f}",
            leads,
            at_least=0.0,
        )
    )
    table = Table(
        "Top-1 accuracy of the average model, with and without SlowMo",
        ("method", "here, %", "SlowMo Table 1, %"),
        [(title, f"{ours[title]:.2f}", f"{PUBLISHED[title]:.2f}") for title in PLACES],
        "Mean ± standard deviation over the seeds. The paper's are ImageNet, ResNet-50, 32 nodes.",
    )
    pair = Pair(("here", "SlowMo, Table 1"), ("top-1, %", "top-1, %"), ours, PUBLISHED)
    figure = Figure(
        "slowmo",
        "Accuracy with and without SlowMo; bars are one standard deviation.",
        partial(draw_pairs, [pair]),
    )
    return Findings(claims, [table], [figure])


SECTION = Section(
    name="slowmo",
    title="Slow momentum around gossip and local steps",
    source=f"SlowMo, Table 1: {SLOWMO.reference}",
    text="""
    The paper trains ResNet-50 on ImageNet over 32 nodes, and puts slow momentum around SGP, overlap
    SGP (every {sgp} steps) and Local SGD (every {local}). Here: a perceptron of {parameters:,}
    parameters on {data} over {nodes} nodes of {batch} images, {epochs} epochs ({steps} steps),
    {seeds} seed(s), Nesterov momentum, rate {rate} with a cosine, the same methods and periods,
    local momentum set to 0 at each outer step; the quick scale has Local SGD alone. {chosen}
    A statement holds if a one-sided 90 % bound of the difference says so.
    """,
    find_numbers=lambda scale: find_sizes(scale).numbers | EVERY | {"rate": RATE, "chosen": CHOSEN},
    list_runs=list_runs,
    find=find,
)
