"""What RelaySGD's Table 2 says of uneven data, and whether it holds."""

from collections.abc import Mapping

from experiments.presets.relaysgd import METHODS, RESULTS
from experiments.report.differences import Difference
from experiments.report.section import Claim
from experiments.report.sections.samples import (
    Sample,
    format_difference,
    join_all,
    subtract,
    subtract_differences,
)

MIDDLE = 0.1  # the alpha of the rows with momentum
MAX_ROBUST_LOSS = 3.0  # points that a robust method may lose: the paper's lose up to 2.8
MIN_FALL = 10.0  # points: the paper's D-PSGD and D2 fall by more than 30
SINGLE_SPREAD = 1.0  # points, of one seed
PLAIN = ("ar", "dpsgd", "sgp", "d2", "relay-chain", "relay-tree")
ALL_REDUCE, DPSGD, SGP, D2, CHAIN, TREE = (METHODS[row][1] for row in PLAIN)
QUASI_GLOBAL = METHODS["qg"][1]
ROW_OF = {title: row for row, (_, title) in METHODS.items()}


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
    return Claim(
        f"{' and '.join(titles)}: at most {MAX_ROBUST_LOSS:g} points lost from Dirichlet 1 to "
        "0.01 beyond AllReduce, without momentum.",
        "; ".join(describe_published_loss(title) for title in titles),
        "; ".join(f"loses {format_difference(losses[title])} points" for title in titles),
        join_all([losses[title].is_at_most(MAX_ROBUST_LOSS) for title in titles]),
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
    verdicts = [
        subtract(momentum[ALL_REDUCE], momentum[title], SINGLE_SPREAD).is_at_most(MAX_ROBUST_LOSS)
        for title in (SGP, CHAIN)
    ]
    titles = (ALL_REDUCE, SGP, CHAIN)
    published = [list_published(title, "nesterov")[MIDDLE] for title in titles]
    return Claim(
        f"With momentum at Dirichlet 0.1, SGP and RelaySGD on a chain are at most "
        f"{MAX_ROBUST_LOSS:g} points below AllReduce.",
        ", ".join(f"{title} {figure}" for title, figure in zip(titles, published, strict=True)),
        ", ".join(f"{title} {momentum[title]:.1f}" for title in titles),
        join_all(verdicts),
    )
