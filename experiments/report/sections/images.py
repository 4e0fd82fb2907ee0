"""SlowMo, Table 1, and RelaySGD, Table 2: a perceptron on images over 16 nodes."""

import functools
from typing import NamedTuple

from experiments.presets import relaysgd, slowmo
from experiments.report.section import (
    Findings,
    Place,
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

FIELD = "test_accuracy_average_model"
BATCH = 32  # of a node
DIGITS_EPOCHS = 12  # of 5,000 digits for one of the 60,000 images of Fashion-MNIST
PARAMETERS = 118_282


class Images(NamedTuple):
    """What is trained: also the numbers of a section's text."""

    data: str  # the title of the data set
    images: int  # of the training set
    nodes: int  # of a run
    epochs: int
    seeds: int

    @property
    def numbers(self) -> dict[str, object]:
        """The numbers of a text, with the steps of a run."""
        steps = round(self.images * self.epochs / (self.nodes * BATCH))
        return {**self._asdict(), "batch": BATCH, "steps": steps, "parameters": PARAMETERS}


def find_images(scale: Scale, epochs: int, seeds: int) -> Images:
    """Returns the sizes: `epochs` of Fashion-MNIST, or as many steps on digits."""
    if scale.is_quick:
        return Images("5,000 of the digits of MNIST", 4_000, 8, 8, 1)
    if scale.fashion_mnist is None:
        return Images("5,000 of the digits of MNIST", 4_000, 16, DIGITS_EPOCHS * epochs, seeds)
    return Images("Fashion-MNIST", 60_000, 16, epochs, seeds)


def list_data(scale: Scale) -> tuple[str, ...]:
    """Returns the options of the data set and the model."""
    if scale.fashion_mnist is None or scale.is_quick:
        return ("--dataset", "mnist5k", "--model", "mlp")
    folder = f"{scale.fashion_mnist}"
    return ("--dataset", "fashion_mnist", "--data-dir", folder, "--model", "mlp")


def list_seeds(count: int) -> tuple[str, ...]:
    """Returns the option of some seeds, from 0 on."""
    return ("--seed", *map(str, range(count)))


def list_arguments(scale: Scale, images: Images, *others: str) -> tuple[str, ...]:
    """Returns the options of `experiments.image`; one device is faster for a perceptron."""
    options = f"""--nodes {images.nodes} --batch-size-per-node {BATCH} --placement vmap
    --log-every 1000 --epochs {images.epochs}"""
    return (*list_data(scale), *options.split(), *others, *list_seeds(images.seeds))


# SlowMo

RATE = "0.05"
SLOWMO_SPREAD = 0.3  # points, of one seed
EVERY = slowmo.EVERY
ALL_REDUCE = "AllReduce"
SLOWMO = {  # title -> where it is, and the paper's accuracy in per cent
    ALL_REDUCE: (Place("slowmo-baselines", "allreduce"), 76.0),
    "SGP": (Place("slowmo-baselines", "sgp"), 75.15),
    "SGP, with SlowMo": (Place("slowmo-sgp", "sgp"), 75.73),
    "1-OSGP": (Place("slowmo-baselines", "1-osgp"), 74.96),
    "1-OSGP, with SlowMo": (Place("slowmo-sgp", "1-osgp"), 75.54),
    "Local SGD": (Place("slowmo-local-baseline", "local"), 69.94),
    "Local SGD, with SlowMo": (Place("slowmo-local", "local"), 73.24),
}


find_slowmo_sizes = functools.partial(find_images, epochs=4, seeds=3)


def list_slowmo_runs(scale: Scale) -> list[Run]:
    """Four calls, two when quick: Local SGD alone."""
    common = list_arguments(scale, find_slowmo_sizes(scale), "--learning-rate", RATE)
    momentum = f"--outer-momentum {slowmo.SLOW_MOMENTUM['outer_momentum']} --outer-reset"
    local = f"--algorithm local --outer-every {EVERY['local']}"
    calls = {
        "slowmo-baselines": "--algorithm allreduce sgp 1-osgp",
        "slowmo-sgp": f"--algorithm sgp 1-osgp --outer-every {EVERY['sgp']} {momentum}",
        "slowmo-local-baseline": local,
        "slowmo-local": f"{local} {momentum}",
    }
    runs = [Run(name, "image", (*common, *options.split())) for name, options in calls.items()]
    return runs[2:] if scale.is_quick else runs


def find_slowmo(scale: Scale, results: Results) -> Findings:
    """Compares every baseline with and without SlowMo."""
    del scale
    ours = {
        title: read_sample(results, place, FIELD, 100, SLOWMO_SPREAD)
        for title, (place, _) in SLOWMO.items()
    }
    published = {title: accuracy for title, (_, accuracy) in SLOWMO.items()}
    rivals = [title for title in ours if title != ALL_REDUCE]
    leads = {}
    if all(ours[title].values for title in rivals):
        best = max(rivals, key=lambda title: ours[title].mean)
        leads[f"than {best}"] = ours[ALL_REDUCE] - ours[best]
    claims = []
    for title in ("SGP", "1-OSGP", "Local SGD"):
        numbers = {
            "title": title,
            "gain": published[f"{title}, with SlowMo"] - published[title],
            "behind": ours[ALL_REDUCE] - ours[title],
            "published": published[ALL_REDUCE] - published[title],
        }
        claims += read_claims("slowmo", ours, numbers, "gains")
    claims += read_claims("slowmo", ours | {"leads": leads})
    rows = [(title, f"{ours[title]:.2f}", f"{published[title]:.2f}") for title in SLOWMO]
    return Findings(claims, [read_table("slowmo", rows)])


SLOWMO_SECTION = read_section(
    name="slowmo",
    find_numbers=lambda scale: (
        find_slowmo_sizes(scale).numbers | EVERY | {"rate": RATE, "chosen": slowmo.CHOSEN}
    ),
    list_runs=list_slowmo_runs,
    find=find_slowmo,
)

# RelaySGD

ALPHAS = (1, 0.1, 0.01)
QUICK_RATE = 0.1
RELAY_SPREAD = 1.0  # points, of one seed
RATES = {  # without momentum: row of the paper's table -> a rate for each alpha
    "ar": (0.4, 0.4, 0.2),
    "dpsgd": (0.4, 0.2, 0.2),
    "sgp": (0.2, 0.2, 0.2),
    "d2": (0.2, 0.1, 0.1),
    "relay-chain": (0.4, 0.4, 0.4),
    "relay-tree": (0.4, 0.4, 0.4),
}
MIDDLE = 0.1  # the alpha of the rows with momentum; that of D-PSGD is not in the paper's table
MOMENTUM_RATES = {"ar": 0.1, "dpsgd": 0.05, "qg": 0.1, "sgp": 0.1, "relay-chain": 0.2}
LONG = 4  # times the epochs
LONG_ROWS = ("ar", "sgp", "relay-chain")
TITLES = {row: title for row, (_, title) in relaysgd.METHODS.items()}


find_relay_sizes = functools.partial(find_images, epochs=3, seeds=3)


def tune_relaysgd(scale: Scale) -> dict[str, Tuned]:
    """Returns each method at its rate, by `ROW ALPHA`, or `momentum ROW` at the middle alpha.

    When quick, the first three rows at the outer alphas, at one rate.
    """
    common = list_arguments(scale, find_relay_sizes(scale))[: -len(list_seeds(3))]

    def make(row: str, alpha: float, rate: float, optimizer: str, kind: str = "") -> Tuned:
        chosen = f"--optimizer {optimizer} --dirichlet-alpha {float(alpha)}"
        chosen += " --momentum quasi-global" * (row == "qg")
        options = (*common, *chosen.split())
        algorithm = relaysgd.METHODS[row][0]
        rate = QUICK_RATE if scale.is_quick else rate
        return Tuned(f"relaysgd-{alpha:g}-{kind}{row}", "image", options, algorithm, rate, FIELD)

    chosen = (0, 2) if scale.is_quick else range(len(ALPHAS))
    methods = {
        f"{row} {ALPHAS[i]:g}": make(row, ALPHAS[i], RATES[row][i], "sgd")
        for i in chosen
        for row in (list(RATES)[:3] if scale.is_quick else RATES)
    }
    if scale.is_quick:
        return methods
    return methods | {
        f"momentum {row}": make(row, MIDDLE, rate, "nesterov", "momentum-")
        for row, rate in MOMENTUM_RATES.items()
    }


def lengthen_relaysgd(methods: dict[str, Tuned]) -> dict[str, Tuned]:
    """Returns some rows with momentum in more epochs, by `long ROW`; none when quick."""
    rows = [row for row in LONG_ROWS if f"momentum {row}" in methods]
    return {f"long {row}": methods[f"momentum {row}"].lengthen(LONG) for row in rows}


def list_relay_runs(scale: Scale) -> list[Run]:
    """Three rates of each row, and the rate of those in more epochs; when quick, one of each."""
    methods = tune_relaysgd(scale)
    runs = list_tuned(methods.values(), scale.is_quick)
    return [*runs, *(x.make_run(1.0, x.seeds) for x in lengthen_relaysgd(methods).values())]


def find_relaysgd(scale: Scale, results: Results) -> Findings:
    """Compares what every method loses from even to uneven data.

    AllReduce itself loses where nodes with few images repeat them: no exchange can mend that.
    """
    methods = tune_relaysgd(scale)
    ours = read_tuned(methods | lengthen_relaysgd(methods), results, 100, RELAY_SPREAD)
    titled = {}
    for name, method in methods.items():
        kind, rest = name.split()
        is_plain = kind != "momentum"
        setting = f"{rest}, sgd" if is_plain else f"{MIDDLE:g}, nesterov"
        titled[f"{TITLES[kind if is_plain else rest]}, {setting}"] = method
    claims = [*read_claims("relaysgd", ours), claim_best(titled, results, 1, "+.4f")]
    plain_rows = []
    for row in RATES:
        cells = []
        rates = []
        for alpha in ALPHAS:
            name = f"{row} {alpha:g}"
            published = relaysgd.RESULTS[row, "sgd"][alpha][1]
            cells += [f"{ours.get(name, Sample()):.1f}", published]
            rates.append(f"{methods[name].rate:g}" if name in methods else "-")
        plain_rows.append((TITLES[row], *cells, ", ".join(rates)))
    momentum_rows = []
    for row in MOMENTUM_RATES:
        published = relaysgd.RESULTS.get((row, "nesterov"), {}).get(MIDDLE, (0.0, "-"))[1]
        sample = ours.get(f"momentum {row}", Sample())
        momentum_rows.append((TITLES[row], f"{sample:.1f}", published))
    notes = {"two_rounds": relaysgd.TWO_ROUNDS, "lazy": relaysgd.LAZY}
    notes |= {"one_tree": relaysgd.ONE_TREE}
    tables = [
        read_table("relaysgd", plain_rows, 0, **notes),
        read_table("relaysgd", momentum_rows, 1),
    ]
    return Findings(claims, tables)


RELAYSGD_SECTION = read_section(
    name="relaysgd",
    find_numbers=lambda scale: find_relay_sizes(scale).numbers | {"quick_rate": QUICK_RATE},
    list_runs=list_relay_runs,
    find=find_relaysgd,
)
