"""Single Global Merging: a perceptron on uneven images, and exact averages early, late or once."""

from functools import partial

from experiments.report.drawing import Curve, draw_curves, read_curves
from experiments.report.section import (
    MISSING,
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
from experiments.report.sections.images import PARAMETERS, list_data, list_seeds
from experiments.runner import Run

NODES = 16
BATCH = 50  # of a node
STEPS = 225
EVERY = 16  # steps from one exchange to the next; the first and the last step have one
EXCHANGES = 1 + (STEPS - 1) // EVERY
WINDOW = 5  # exchanges, early or late, that are exact averages
RATE = 0.1
ALPHA = 0.1
SEEDS = 3
SPREAD = 2.0  # points, of one seed
EPOCHS_BY_DATA = {"fashion_mnist": 3, "mnist5k": 45}  # as many steps of either

NODES_FIELD = "test_accuracy_nodes"
AVERAGE_FIELD = "test_accuracy_average_model"
GOSSIP = "dpsgd-adapt-then-combine"
PAIRS = "random_pairs"
NEVER = "gossip of pairs, never merged"
ALONE = "no exchange at all"
EARLY = "merged early"
LATE = "merged late"
LAST = "merged once, at the end"
ALL = "merged at every exchange"
SCHEDULES = {  # title -> where it is, and its exact averages
    ALONE: (Place("merging-alone", "local"), 0),
    NEVER: (Place("merging", GOSSIP, PAIRS), 0),
    EARLY: (Place("merging", GOSSIP, f"complete/{PAIRS}"), WINDOW),
    LATE: (Place("merging-late", GOSSIP, f"{PAIRS}/complete"), WINDOW),
    LAST: (Place("merging-last", GOSSIP, f"{PAIRS}/complete"), 1),
    ALL: (Place("merging", GOSSIP, "complete"), EXCHANGES),
}
SHOWN = (NEVER, EARLY, LATE, LAST)  # over time
OTHER_STARTS = (
    "All nodes start from the same parameters, which is the cause: once, with other ones on each "
    "node and seed 0, their average had 16.9 % after these steps, the models 34.1 %."
)
NO_FIGURE = "its accuracies are in figures only, which were not at hand"


def find_switch(exchanges: int) -> str:
    """Returns the option of a hybrid that switches after so many exchanges."""
    return f"--switch-at {exchanges * EVERY / STEPS:.4f}"


def list_merging_runs(scale: Scale) -> list[Run]:
    """Four calls; when quick, what never merges and what merges once."""
    data = list_data(scale)
    options = f"""--nodes {NODES} --batch-size-per-node {BATCH} --placement vmap
    --log-every 1000 --epochs {EPOCHS_BY_DATA[data[1]]} --evaluate-nodes --dirichlet-alpha {ALPHA}
    --optimizer sgd --lr-schedule constant --learning-rate {RATE}"""
    common = (*data, *options.split(), *list_seeds(1 if scale.is_quick else SEEDS))
    rare = f"--local-steps {EVERY}"
    topologies = [place.topology for place, _ in SCHEDULES.values() if place.run == "merging"]
    names = [f"{GOSSIP}@{topology}" for topology in topologies[: 1 if scale.is_quick else None]]
    calls = {
        "merging": f"--algorithm {' '.join(names)} {rare} {find_switch(WINDOW)}",
        "merging-last": f"--algorithm {GOSSIP}@{PAIRS}/complete {rare} "
        f"{find_switch(EXCHANGES - 1)}",
        "merging-late": f"--algorithm {GOSSIP}@{PAIRS}/complete {rare} "
        f"{find_switch(EXCHANGES - WINDOW)}",
        "merging-alone": "--algorithm local",
    }
    runs = [Run(name, "image", (*common, *call.split())) for name, call in calls.items()]
    return runs[:2] if scale.is_quick else runs


def read_percent(results: Results, place: Place, field: str) -> list[Curve]:
    """Reads an accuracy at the end of each epoch, in %; of the nodes, the mean over them."""
    return [
        Curve(curve.steps, tuple(100 * value for value in curve.values))
        for curve in read_curves(results, place, field)
    ]


def compare_seeds(first: Sample, second: Sample) -> Estimate:
    """Returns the mean of the differences of the same seed, which has the same division of data."""
    if len(first.values) != len(second.values):
        return MISSING
    differences = tuple(x - y for x, y in zip(first.values, second.values, strict=True))
    zeros = (0.0,) * len(differences)
    return Sample(differences, single_spread=SPREAD) - Sample(zeros)


def compare_over_time(results: Results) -> dict[str, Estimate]:
    """What the average of models that are never merged is better by, in points, over the steps."""
    place, _ = SCHEDULES[NEVER]
    nodes, average = (read_percent(results, place, x) for x in (NODES_FIELD, AVERAGE_FIELD))
    rows = {}
    for index, step in enumerate(nodes[0].steps if nodes else ()):
        if 3 * step % STEPS == 0:
            samples = [
                Sample(tuple(x.values[index] for x in curves if index < len(x.values)))
                for curves in (average, nodes)
            ]
            rows[f"step {step:g}"] = compare_seeds(*samples)
    return rows


def find_merging(scale: Scale, results: Results) -> Findings:
    """Compares the nodes' models, and their average, over when exact averages happen."""
    del scale
    nodes, average = (
        {
            title: read_sample(results, place, field, 100, SPREAD)
            for title, (place, _) in SCHEDULES.items()
        }
        for field in (NODES_FIELD, AVERAGE_FIELD)
    )
    pairs = zip(nodes[LAST].values, nodes[NEVER].values, strict=False)
    twice = Sample(tuple(2 * last - never for last, never in pairs))
    claims = [
        Claim(
            "The counterfactual merge: at the end of each third of the run, the average of models "
            "that are never merged is at least 3 points more accurate than they are.",
            f"the average is much better; {NO_FIGURE}",
            compare_over_time(results),
            at_least=3.0,
            spec="+.1f",
        ),
        Claim(
            "One exact average at the last step makes the nodes' models at least 5 points more "
            "accurate, though they were never averaged before.",
            f"a significant improvement; {NO_FIGURE}",
            {"": compare_seeds(nodes[LAST], nodes[NEVER])},
            at_least=5.0,
            spec="+.1f",
        ),
        Claim(
            "One exact average at the end gains the nodes more than it leaves to one at every "
            "exchange.",
            f"close to a method with a server; {NO_FIGURE}",
            {"gained less left": compare_seeds(twice, nodes[ALL])},
            at_least=0.0,
            spec="+.1f",
        ),
        *(
            Claim(
                f"{WINDOW} exact averages at the end are worth more than {WINDOW} at the start, to "
                f"{owner}.",
                f"late is much better than early; {NO_FIGURE}",
                {"": compare_seeds(samples[LATE], samples[EARLY])},
                at_least=0.0,
                spec="+.1f",
            )
            for owner, samples in (("the nodes", nodes), ("their average", average))
        ),
        Claim(
            f"One exact average at the end is worth more to the nodes than {WINDOW} at the start.",
            f"late is much better than early; {NO_FIGURE}",
            {"": compare_seeds(nodes[LAST], nodes[EARLY])},
            at_least=0.0,
            spec="+.1f",
        ),
        Claim(
            "Rare gossip is what makes models that can be merged: the average is at least 5 points "
            "better than after no exchange at all.",
            "necessary",
            {"": compare_seeds(average[NEVER], average[ALONE])},
            at_least=5.0,
            spec="+.1f",
        ),
        Claim(
            "After no exchange at all, a merge is worthless: the average is no more accurate than "
            "the models.",
            "worthless",
            {"": compare_seeds(average[ALONE], nodes[ALONE])},
            at_most=0.0,
            spec="+.1f",
            if_not=OTHER_STARTS,
        ),
    ]
    cells = []
    for title, (_, merges) in SCHEDULES.items():
        counted = f"{merges} of {EXCHANGES}" if title != ALONE else "-"
        cells.append((title, counted, f"{nodes[title]:.1f}", f"{average[title]:.1f}"))
    table = Table(
        "Top-1 accuracy after the last step",
        ("schedule", "exchanges that are exact averages", "the nodes' models, %", "average, %"),
        cells,
        "Mean ± standard deviation over the seeds, of the mean over the nodes. Where the last "
        "exchange is an exact average, the nodes have the average model; elsewhere it is the "
        "counterfactual merge.",
    )
    panels = {
        title: {
            "the nodes' models": read_percent(results, SCHEDULES[title][0], NODES_FIELD),
            "their average": read_percent(results, SCHEDULES[title][0], AVERAGE_FIELD),
        }
        for title in SHOWN
    }
    figure = Figure(
        "merging",
        "Accuracy of the nodes' models, mean over the nodes, and of their average at the same "
        "step, at the end of each epoch; a line for each seed. At the last step alone an exchange "
        "has just been.",
        partial(draw_curves, panels, "top-1, %", "linear"),
    )
    return Findings(claims, [table], [figure])


SECTION = read_section(
    name="merging",
    find_numbers=lambda scale: {
        "data": "Fashion-MNIST" if "fashion_mnist" in list_data(scale) else "5,000 digits of MNIST",
        "parameters": PARAMETERS,
        "nodes": NODES,
        "batch": BATCH,
        "steps": STEPS,
        "every": EVERY,
        "exchanges": EXCHANGES,
        "window": WINDOW,
        "rate": RATE,
        "alpha": ALPHA,
        "seeds": "one seed" if scale.is_quick else f"{SEEDS} seeds",
    },
    list_runs=list_merging_runs,
    find=find_merging,
)
