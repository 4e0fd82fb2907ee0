"""RelaySGD, Table 2: unevenly divided data."""

from collections.abc import Mapping
from functools import partial

from experiments.presets.relaysgd import METHODS, RELAYSGD, RESULTS
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
from experiments.report.sections.later.curves import Panel, draw_panels, make_point
from experiments.report.sections.later.samples import (
    Place,
    Sample,
    format_difference,
    format_verdicts,
    join_all,
    list_image_arguments,
    list_seeds,
    read_samples,
    subtract,
)

EPOCHS = 3
ALPHAS = (1, 0.1, 0.01)
MIDDLE = 0.1  # the alpha of the rows with momentum
RATE = 0.1
MOMENTUM_RATE = 0.05
MAX_ROBUST_LOSS = 3.0  # points that a robust method may lose: the paper's lose up to 2.8
MIN_FALL = 10.0  # points: the paper's D-PSGD and D2 fall by more than 30
SINGLE_SPREAD = 1.0  # points, of one seed
FIELD = "test_accuracy_average_model"
RING = "dpsgd-adapt-then-combine"
PLAIN = {  # row of the paper's table -> group of runs, algorithm, topology
    "ar": ("gossip", "allreduce", None),
    "dpsgd": ("gossip", RING, "ring"),
    "sgp": ("gossip", "sgp", None),
    "d2": ("corrected", "d2", "ring"),
    "relay-chain": ("corrected", "relay", "chain"),
    "relay-tree": ("corrected", "relay", "tree"),
}
ALL_REDUCE, DPSGD, SGP, D2, CHAIN, TREE = (METHODS[row][1] for row in PLAIN)
QUASI_GLOBAL = METHODS["qg"][1]
LOCAL_MOMENTUM = "relaysgd-0.1-momentum"
MOMENTUM = {
    ALL_REDUCE: Place(LOCAL_MOMENTUM, "allreduce"),
    DPSGD: Place(LOCAL_MOMENTUM, RING),
    QUASI_GLOBAL: Place("relaysgd-0.1-quasi-global", RING),
    SGP: Place(LOCAL_MOMENTUM, "sgp"),
    CHAIN: Place(LOCAL_MOMENTUM, "relay"),
}
ROW_OF = {title: row for row, (_, title) in METHODS.items()}

Accuracies = Mapping[float, Mapping[str, Sample]]
"""Alpha -> title -> accuracy, in per cent."""


def name_run(group: str, alpha: float) -> str:
    """The name of a run."""
    return f"relaysgd-{alpha:g}-{group}"


def list_places(alpha: float) -> dict[str, Place]:
    """Where the values without momentum are."""
    return {
        METHODS[row][1]: Place(name_run(group, alpha), algorithm, topology)
        for row, (group, algorithm, topology) in PLAIN.items()
    }


def list_runs(scale: Scale) -> list[Run]:
    """A call for each alpha and group of methods; when quick, gossip at the outer two alphas."""
    common = (*list_image_arguments(scale, EPOCHS), *list_seeds(1 if scale.is_quick else 2))
    plain = (*common, "--optimizer", "sgd", "--learning-rate", f"{RATE}")
    ring = f"{RING}@ring"
    gossip = ("--algorithm", "allreduce", ring, "sgp")
    corrected = ("--algorithm", "d2", "relay@chain", "relay@tree")
    alphas = (ALPHAS[0], ALPHAS[-1]) if scale.is_quick else ALPHAS
    runs = []
    for alpha in alphas:
        division = ("--dirichlet-alpha", f"{float(alpha)}")
        runs.append(Run(name_run("gossip", alpha), "image", (*plain, *gossip, *division)))
        if not scale.is_quick:
            runs.append(Run(name_run("corrected", alpha), "image", (*plain, *corrected, *division)))
    if scale.is_quick:
        return runs
    momentum = (*common, "--learning-rate", f"{MOMENTUM_RATE}", "--dirichlet-alpha", f"{MIDDLE}")
    methods = ("--algorithm", "allreduce", ring, "sgp", "relay@chain")
    quasi_global = ("--algorithm", ring, "--momentum", "quasi-global")
    return [
        *runs,
        Run(LOCAL_MOMENTUM, "image", (*momentum, *methods)),
        Run("relaysgd-0.1-quasi-global", "image", (*momentum, *quasi_global)),
    ]


def find(scale: Scale, results: Results) -> Findings:
    """Compares what every method loses from even to uneven data."""
    plain = {
        alpha: read_samples(results, list_places(alpha), FIELD, factor=100) for alpha in ALPHAS
    }
    momentum = read_samples(results, MOMENTUM, FIELD, factor=100)
    losses = {
        title: subtract(plain[ALPHAS[0]][title], plain[ALPHAS[-1]][title], SINGLE_SPREAD)
        for title in plain[ALPHAS[0]]
    }
    claims = {
        "D-PSGD falling": judge_fall(DPSGD, losses),
        "D2 falling": judge_fall(D2, losses),
        "SGP holding": judge_robust((SGP,), losses),
        "RelaySGD holding": judge_robust((CHAIN, TREE), losses),
        "D-PSGD losing more than SGP and RelaySGD": judge_most(losses),
        "quasi-global momentum being better": judge_quasi_global(momentum),
        "SGP and RelaySGD with momentum near AllReduce": judge_momentum(momentum),
    }
    sentence = format_verdicts({title: claim.holds for title, claim in claims.items()})
    found = ", ".join(f"{title} {format_difference(loss)}" for title, loss in losses.items())
    sentence = f"From Dirichlet 1 to 0.01 the methods lose, in points: {found}. {sentence}."
    if claims["D2 falling"].holds is False:
        sentence += (
            " D2 removes the difference between nodes exactly where the problem is smooth, as a "
            "perceptron on these images nearly is; the paper's VGG is harder."
        )
    if claims["SGP and RelaySGD with momentum near AllReduce"].holds is False:
        sentence += (
            " One rate for all is small for RelaySGD, whose models hear of one another up to 15 "
            "steps late on a chain: the authors give it rates several times those of SGP."
        )
    if scale.is_quick:
        sentence += " The quick scale has no corrected methods and no momentum."
    tables = [make_table(plain), make_momentum_table(momentum)]
    return Findings(list(claims.values()), sentence, tables, [make_figure(plain)])


def list_published(title: str, optimizer: str = "sgd") -> dict[float, float]:
    """The paper's accuracies by alpha, in per cent; none of a row that it does not have."""
    rows = RESULTS.get((ROW_OF[title], optimizer), {})
    return {alpha: float(accuracy) for alpha, (_, accuracy) in rows.items()}


def describe_published_loss(title: str) -> str:
    """What a method loses in the paper."""
    published = list_published(title)
    return f"{published[1]} -> {published[0.01]} %"


def judge_fall(title: str, losses: Mapping[str, Difference]) -> Claim:
    """Whether a method falls by much."""
    return Claim(
        f"{title} loses more than {MIN_FALL:g} points from Dirichlet 1 to 0.01, without momentum.",
        describe_published_loss(title),
        f"loses {format_difference(losses[title])} points",
        losses[title].exceeds(MIN_FALL),
    )


def judge_robust(titles: tuple[str, ...], losses: Mapping[str, Difference]) -> Claim:
    """Whether methods lose little."""
    verdicts = [losses[title].exceeds(MAX_ROBUST_LOSS) for title in titles]
    holds = join_all([None if verdict is None else not verdict for verdict in verdicts])
    return Claim(
        f"{' and '.join(titles)}: at most {MAX_ROBUST_LOSS:g} points lost from Dirichlet 1 to "
        "0.01, without momentum.",
        "; ".join(describe_published_loss(title) for title in titles),
        "; ".join(f"loses {format_difference(losses[title])} points" for title in titles),
        holds,
    )


def judge_most(losses: Mapping[str, Difference]) -> Claim:
    """Whether D-PSGD loses more than the robust methods do."""
    verdicts = []
    for title in (SGP, CHAIN, TREE):
        margin = (losses[DPSGD].margin ** 2 + losses[title].margin ** 2) ** 0.5
        difference = Difference(losses[DPSGD].mean - losses[title].mean, margin)
        verdicts.append(difference.exceeds(0))
    titles = (DPSGD, SGP, CHAIN, TREE)
    return Claim(
        "D-PSGD on the ring loses more from Dirichlet 1 to 0.01 than SGP and RelaySGD.",
        "; ".join(f"{title}: {describe_published_loss(title)}" for title in titles),
        "; ".join(f"{title} loses {format_difference(losses[title])}" for title in titles),
        join_all(verdicts),
    )


def judge_quasi_global(momentum: Mapping[str, Sample]) -> Claim:
    """Whether quasi-global momentum is better than local momentum on the ring."""
    gain = subtract(momentum[QUASI_GLOBAL], momentum[DPSGD], SINGLE_SPREAD)
    return Claim(
        "On the ring at Dirichlet 0.1, quasi-global momentum is better than local momentum.",
        "QG 84.8 %, without a figure for local momentum; 1 to 20 points in Lin et al. 2021",
        f"{momentum[QUASI_GLOBAL]:.1f} against {momentum[DPSGD]:.1f} % "
        f"({format_difference(gain)} points)",
        gain.exceeds(0),
    )


def judge_momentum(momentum: Mapping[str, Sample]) -> Claim:
    """Whether the robust methods are near AllReduce with momentum, too."""
    verdicts = []
    for title in (SGP, CHAIN):
        gap = subtract(momentum[ALL_REDUCE], momentum[title], SINGLE_SPREAD)
        exceeds = gap.exceeds(MAX_ROBUST_LOSS)
        verdicts.append(None if exceeds is None else not exceeds)
    titles = (ALL_REDUCE, SGP, CHAIN)
    published = [list_published(title, "nesterov")[MIDDLE] for title in titles]
    return Claim(
        f"With momentum at Dirichlet 0.1, SGP and RelaySGD on a chain are at most "
        f"{MAX_ROBUST_LOSS:g} points below AllReduce.",
        ", ".join(f"{title} {figure}" for title, figure in zip(titles, published, strict=True)),
        ", ".join(f"{title} {momentum[title]:.1f}" for title in titles),
        join_all(verdicts),
    )


def make_table(plain: Accuracies) -> Table:
    """Accuracies without momentum."""
    rows = []
    for title in plain[ALPHAS[0]]:
        published = list_published(title)
        pairs = [(f"{plain[alpha][title]:.1f}", f"{published[alpha]}") for alpha in ALPHAS]
        rows.append((title, *(text for pair in pairs for text in pair)))
    columns = [(f"alpha {alpha:g}: here, %", "paper, %") for alpha in ALPHAS]
    return Table(
        "Top-1 accuracy of the average model, without momentum",
        ("method", *(text for pair in columns for text in pair)),
        tuple(rows),
        "Mean ± standard deviation over the seeds. AllReduce's data are divided evenly in the "
        "paper. D2 runs here on (W + I) / 2 of the ring.",
    )


def make_momentum_table(momentum: Mapping[str, Sample]) -> Table:
    """Accuracies with momentum."""
    rows = [
        (title, f"{sample:.1f}", f"{list_published(title, 'nesterov').get(MIDDLE, '-')}")
        for title, sample in momentum.items()
    ]
    columns = ("method", "here, %", "RelaySGD Table 2, %")
    return Table("With momentum, Dirichlet 0.1", columns, tuple(rows))


def make_figure(plain: Accuracies) -> Figure:
    """Accuracy over alpha, here and in the paper."""
    titles = list(plain[ALPHAS[0]])
    ours = {title: [make_point(plain[alpha][title]) for alpha in ALPHAS] for title in titles}
    published = {
        title: [(list_published(title)[alpha], 0.0) for alpha in ALPHAS] for title in titles
    }
    ticks = [f"{alpha:g}" for alpha in ALPHAS]
    label = "alpha of Dirichlet: even to uneven"
    panels = [
        Panel("here", label, "top-1, %", ticks, ours),
        Panel("RelaySGD, Table 2", label, "top-1, %", ticks, published),
    ]
    caption = "Accuracy without momentum as the data get more uneven, here and in the paper."
    return Figure("relaysgd", caption, partial(draw_panels, panels))


SECTION = Section(
    name="relaysgd",
    title="Uneven data",
    source=f"RelaySGD, Table 2: {RELAYSGD.reference}",
    text=(
        "The paper divides CIFAR-10 over 16 nodes, the classes by Dirichlet(alpha), and trains "
        "VGG-11 with rates tuned for each method and alpha. Here: a perceptron of 106,000 "
        "parameters on Fashion-MNIST over 16 nodes of 32 images, "
        f"{EPOCHS} epochs, two seeds, one rate for all methods, {RATE} without momentum and "
        f"{MOMENTUM_RATE} with it, with a cosine; nothing is tuned. Bounds in points are in the "
        "statements, which hold if a one-sided 90 % bound of the difference says so."
    ),
    list_runs=list_runs,
    find=find,
)
