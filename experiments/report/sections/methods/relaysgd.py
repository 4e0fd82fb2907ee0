"""RelaySGD, Table 2: unevenly divided data."""

from collections.abc import Mapping
from functools import partial

from experiments.compare.named import LOCAL_MOMENTUM_RATES, SMALLER_RATES
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
from experiments.report.sections.curves import Panel, draw_panels, make_point
from experiments.report.sections.samples import (
    Place,
    Sample,
    format_difference,
    format_verdicts,
    join_all,
    list_image_arguments,
    list_seeds,
    read_samples,
    subtract,
    subtract_differences,
)

EPOCHS = 3
ALPHAS = (1, 0.1, 0.01)
MIDDLE = 0.1  # the alpha of the rows with momentum
QUICK_RATE = 0.1
MAX_ROBUST_LOSS = 3.0  # points that a robust method may lose: the paper's lose up to 2.8
MIN_FALL = 10.0  # points: the paper's D-PSGD and D2 fall by more than 30
SINGLE_SPREAD = 1.0  # points, of one seed
FIELD = "test_accuracy_average_model"
PLAIN = ("ar", "dpsgd", "sgp", "d2", "relay-chain", "relay-tree")
QUICK = ("ar", "dpsgd", "sgp")
MOMENTUM = ("ar", "dpsgd", "qg", "sgp", "relay-chain")
"""Rows of the paper's table; that of D-PSGD with local momentum is not in it."""
ALL_REDUCE, DPSGD, SGP, D2, CHAIN, TREE = (METHODS[row][1] for row in PLAIN)
QUASI_GLOBAL = METHODS["qg"][1]
ROW_OF = {title: row for row, (_, title) in METHODS.items()}

Accuracies = Mapping[float, Mapping[str, Sample]]
"""Alpha -> title -> accuracy, in per cent."""


def find_rate(row: str, alpha: float, scale: Scale) -> float:
    """The rate without momentum: the authors', smaller where `experiments.compare` has it so."""
    if scale.is_quick:
        return QUICK_RATE
    return RESULTS[row, "sgd"][alpha][0] * SMALLER_RATES.get(row, 1.0)


def find_momentum_rate(row: str) -> float:
    """The rate with momentum at the middle alpha."""
    if row == "dpsgd":
        return LOCAL_MOMENTUM_RATES[MIDDLE][0]
    return RESULTS[row, "nesterov"][MIDDLE][0] * SMALLER_RATES.get(row, 1.0)


def make_place(row: str, run: str) -> Place:
    """Where the values of a row are."""
    name = METHODS[row][0]
    algorithm, _, topology = name.partition("@")
    return Place(run, algorithm, topology or None)


def list_places(alpha: float, scale: Scale) -> dict[str, Place]:
    """Where the values without momentum are: methods of one rate are in one run."""
    return {
        METHODS[row][1]: make_place(row, f"relaysgd-{alpha:g}-{find_rate(row, alpha, scale):g}")
        for row in PLAIN
    }


def list_momentum_places() -> dict[str, Place]:
    """Where the values with momentum are."""
    places = {}
    for row in MOMENTUM:
        kind = "quasi-global" if row == "qg" else "momentum"
        run = f"relaysgd-{MIDDLE:g}-{kind}-{find_momentum_rate(row):g}"
        places[METHODS[row][1]] = make_place(row, run)
    return places


def list_runs(scale: Scale) -> list[Run]:
    """A call for each alpha and rate; when quick, the first three methods at the outer alphas."""
    common = (*list_image_arguments(scale, EPOCHS), *list_seeds(1 if scale.is_quick else 2))
    calls: dict[str, tuple[str, ...]] = {}
    names: dict[str, list[str]] = {}
    for alpha in (ALPHAS[0], ALPHAS[-1]) if scale.is_quick else ALPHAS:
        places = list_places(alpha, scale)
        for row in QUICK if scale.is_quick else PLAIN:
            run = places[METHODS[row][1]].run
            rate = ("--learning-rate", f"{find_rate(row, alpha, scale):g}")
            division = ("--dirichlet-alpha", f"{float(alpha)}")
            calls[run] = (*common, "--optimizer", "sgd", *rate, *division)
            names.setdefault(run, []).append(METHODS[row][0])
    momentum = {} if scale.is_quick else list_momentum_places()
    for row in MOMENTUM if momentum else ():
        run = momentum[METHODS[row][1]].run
        rate = ("--learning-rate", f"{find_momentum_rate(row):g}")
        kind = ("--momentum", "quasi-global") if row == "qg" else ()
        calls[run] = (*common, *rate, "--dirichlet-alpha", f"{MIDDLE}", *kind)
        names.setdefault(run, []).append(METHODS[row][0])
    return [
        Run(name, "image", (*arguments, "--algorithm", *names[name]))
        for name, arguments in calls.items()
    ]


def find(scale: Scale, results: Results) -> Findings:
    """Compares what every method loses from even to uneven data."""
    plain = {
        alpha: read_samples(results, list_places(alpha, scale), FIELD, factor=100)
        for alpha in ALPHAS
    }
    momentum = read_samples(results, list_momentum_places(), FIELD, factor=100)
    totals = find_losses(plain)
    # AllReduce itself loses where nodes with few images repeat them: no exchange can mend that.
    losses = {
        title: subtract_differences(total, totals[ALL_REDUCE])
        for title, total in totals.items()
        if title != ALL_REDUCE
    }
    claims = {
        "D-PSGD falling": judge_fall(DPSGD, losses),
        "D2 falling": judge_fall(D2, losses),
        "SGP holding": judge_robust((SGP,), losses),
        "RelaySGD holding": judge_robust((CHAIN, TREE), losses),
        "D-PSGD losing more than SGP and RelaySGD": judge_most(totals),
        "quasi-global momentum being better": judge_quasi_global(momentum),
        "SGP and RelaySGD with momentum near AllReduce": judge_momentum(momentum),
    }
    sentence = format_verdicts({title: claim.holds for title, claim in claims.items()})
    found = ", ".join(f"{title} {format_difference(loss)}" for title, loss in losses.items())
    sentence = f"Points lost from Dirichlet 1 to 0.01 beyond AllReduce: {found}. {sentence}."
    if claims["D-PSGD falling"].holds is False:
        sentence += (
            " A perceptron and a few epochs separate the methods less than 200 epochs of VGG-11 do."
        )
    if claims["D2 falling"].holds is False:
        sentence += (
            " D2 removes the difference between nodes exactly where the problem is smooth, as a "
            "perceptron on these images nearly is; the paper's VGG is harder."
        )
    if claims["RelaySGD holding"].holds is False:
        sentence += (
            " The authors' rates fall with alpha, on the tree to a fourth, and few epochs at a "
            "smaller rate learn less: a part of what RelaySGD loses is that."
        )
    if scale.is_quick:
        sentence += " The quick scale has no corrected methods and no momentum."
    tables = [make_table(plain), make_momentum_table(momentum)]
    return Findings(list(claims.values()), sentence, tables, [make_figure(plain)])


def find_losses(plain: Accuracies) -> dict[str, Difference]:
    """What each method loses from the first alpha to the last, in points."""
    return {
        title: subtract(plain[ALPHAS[0]][title], plain[ALPHAS[-1]][title], SINGLE_SPREAD)
        for title in plain[ALPHAS[0]]
    }


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
        f"{title} loses more than {MIN_FALL:g} points from Dirichlet 1 to 0.01 beyond AllReduce, "
        "without momentum.",
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
        "0.01 beyond AllReduce, without momentum.",
        "; ".join(describe_published_loss(title) for title in titles),
        "; ".join(f"loses {format_difference(losses[title])} points" for title in titles),
        holds,
    )


def judge_most(losses: Mapping[str, Difference]) -> Claim:
    """Whether D-PSGD loses more than the robust methods do."""
    verdicts = [
        subtract_differences(losses[DPSGD], losses[title]).exceeds(0)
        for title in (SGP, CHAIN, TREE)
    ]
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
    write_text=lambda _: (
        "The paper divides CIFAR-10 over 16 nodes, the classes by Dirichlet(alpha), and trains "
        "VGG-11 with rates tuned for each method and alpha. Here: a perceptron of 106,000 "
        "parameters on Fashion-MNIST over 16 nodes of 32 images, "
        f"{EPOCHS} epochs, two seeds, a cosine, and the rates of `experiments.compare --grid "
        "relaysgd-table2-mini`: the authors', but half of them for D-PSGD and a quarter for "
        "RelaySGD. AllReduce is given the same uneven data here and evenly divided ones in the "
        "paper, so that what a method loses is counted beyond AllReduce. Bounds in points are in "
        "the statements, which hold if a one-sided 90 % bound of the difference says so."
    ),
    list_runs=list_runs,
    find=find,
)
