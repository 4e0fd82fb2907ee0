"""SparseLoCo over the steps between averages, and MuLoCo over the workers: a perceptron."""

from functools import partial

from experiments.report.drawing import Panel, draw_panels
from experiments.report.section import (
    Claim,
    Figure,
    Findings,
    Results,
    Sample,
    Scale,
    Table,
    read_section,
)
from experiments.report.sections.images import PARAMETERS, list_data
from experiments.report.tuning import Tuned, claim_best, tabulate_tries
from experiments.runner import Run

FIELD = "test_accuracy_nodes"  # runs end with an outer step: all have one model
SPREAD = 0.3  # points, of one seed
SEEDS = 3  # of what is tuned
TOTAL_BATCH = 400  # of all workers
STEPS_PER_EPOCH = {"fashion_mnist": 150, "mnist5k": 10}
ABSENT = "the paper's tables were not at hand"

# SparseLoCo

SPARSE_STEPS = 300  # a multiple of every H
SPARSE_WORKERS = 8
SPARSE = "SparseLoCo"
DENSE = "DiLoCo"
PLAIN = "DiLoCo without momentum"  # what SparseLoCo is if it sends all
OUTER = {  # title -> name of its runs, options
    SPARSE: ("sparseloco", "--outer-rate 0.8 --outer-wire top_k --outer-error-feedback 0.95"),
    DENSE: ("diloco-every", "--outer-rate 0.7 --outer-momentum 0.9 --outer-nesterov"),
    PLAIN: ("diloco-plain", "--outer-rate 0.8"),
}
RATES_BY_PERIOD = {  # H -> rate
    SPARSE: {5: 0.008, 15: 0.004, 50: 0.004, 100: 0.002},
    DENSE: {15: 0.004},
}
PERIODS = tuple(RATES_BY_PERIOD[SPARSE])
LONG = 4  # times the steps: whether it is averages that lack
LONGER = "SparseLoCo, longer"
LONG_PERIODS = (PERIODS[0], PERIODS[2])
QUICK_PERIODS = ((SPARSE, PERIODS[0]), (SPARSE, PERIODS[-1]))

# MuLoCo

WORKER_STEPS = 150
WORKER_EVERY = 15
WORKER_OUTER = "--outer-rate 0.7 --outer-momentum 0.8 --outer-nesterov"
ADAM = "DiLoCo (AdamW)"
MUON = "MuLoCo (Muon)"
INNER = {
    ADAM: ("diloco", "--optimizer adam"),
    MUON: ("muloco", "--optimizer muon --muon-momentum 0.9"),
}
RATES_BY_WORKERS = {  # workers -> rate
    ADAM: {1: 0.004, 2: 0.004, 4: 0.004, 8: 0.002, 16: 0.002},
    MUON: {1: 0.004, 2: 0.004, 4: 0.004, 8: 0.004, 16: 0.016},
}
WORKERS = tuple(RATES_BY_WORKERS[ADAM])
QUICK_WORKERS = 4


def make_options(scale: Scale, workers: int, steps: int, *others: str) -> tuple[str, ...]:
    """Returns the options of a run of local steps; the total batch is divided over the workers."""
    data = list_data(scale)
    options = f"""--nodes {workers} --batch-size-per-node {TOTAL_BATCH // workers}
    --placement vmap --log-every 1000 --epochs {steps // STEPS_PER_EPOCH[data[1]]}"""
    return (*data, *options.split(), *" ".join(others).split())


def tune_sparse(scale: Scale) -> dict[tuple[str, int], Tuned]:
    """Returns SparseLoCo and DiLoCo at their rates, by H; when quick, SparseLoCo at two H."""
    methods = {}
    for title, rates in RATES_BY_PERIOD.items():
        for every, rate in rates.items():
            if scale.is_quick and (title, every) not in QUICK_PERIODS:
                continue
            methods[title, every] = make_method(scale, title, every, rate)
    return methods


def make_method(scale: Scale, title: str, every: int, rate: float) -> Tuned:
    """Returns an outer optimizer of `OUTER` around AdamW."""
    name, outer = OUTER[title]
    options = make_options(
        scale, SPARSE_WORKERS, SPARSE_STEPS, f"--outer-every {every} {outer} --optimizer adam"
    )
    return Tuned(f"{name}-{every}", "image", options, "local", rate, FIELD, SEEDS)


def tune_workers(scale: Scale) -> dict[tuple[str, int], Tuned]:
    """Returns DiLoCo and MuLoCo at their rates, by the workers; when quick, over 4."""
    methods = {}
    for title, rates in RATES_BY_WORKERS.items():
        for workers, rate in rates.items():
            if scale.is_quick and workers != QUICK_WORKERS:
                continue
            name, inner = INNER[title]
            options = make_options(
                scale, workers, WORKER_STEPS, f"--outer-every {WORKER_EVERY}", WORKER_OUTER, inner
            )
            methods[title, workers] = Tuned(
                f"{name}-workers-{workers}", "image", options, "local", rate, FIELD, SEEDS
            )
    return methods


def list_causes(scale: Scale) -> dict[tuple[str, int], Tuned]:
    """Returns what shows causes, at the rates of SparseLoCo, by title and H; none when quick."""
    if scale.is_quick:
        return {}
    sparse = tune_sparse(scale)
    causes = {(LONGER, every): sparse[SPARSE, every].lengthen(LONG) for every in LONG_PERIODS}
    (every,) = RATES_BY_PERIOD[DENSE]
    rate = RATES_BY_PERIOD[SPARSE][every]
    return causes | {(PLAIN, every): make_method(scale, PLAIN, every, rate)}


def list_rare_runs(scale: Scale) -> list[Run]:
    """Three rates of what is tuned, one of the others; when quick, one of all."""
    methods = tune_sparse(scale) | tune_workers(scale)
    runs = [
        run
        for (title, setting), method in methods.items()
        for run in method.list_runs(scale.is_quick or not is_tuned(title, setting))
    ]
    return [*runs, *(x.make_run(1.0, x.seeds) for x in list_causes(scale).values())]


def is_tuned(title: str, setting: int) -> bool:
    """Whether a method is run at three rates: at any H, and over the fewest and most workers."""
    return title not in INNER or setting in (WORKERS[0], WORKERS[-1])


def find_rare(scale: Scale, results: Results) -> Findings:
    """Compares accuracies over H, and over the workers."""
    methods = tune_sparse(scale) | tune_workers(scale)
    tuned = {key: method for key, method in methods.items() if is_tuned(*key)}
    read = methods | list_causes(scale)
    samples = {key: method.read(results, 100, SPREAD) for key, method in read.items()}

    def find(title: str, setting: int) -> Sample:
        return samples.get((title, setting), Sample())

    few, middle, many = (find(SPARSE, every) for every in (*LONG_PERIODS, PERIODS[-1]))
    longer_few, longer_middle = (find(LONGER, every) for every in LONG_PERIODS)
    (every,) = RATES_BY_PERIOD[DENSE]
    most = WORKERS[-1]
    losses = {title: find(title, 1) - find(title, most) for title in INNER}
    claims = [
        Claim(
            f"SparseLoCo is less accurate with an average every {PERIODS[-1]} steps than every "
            f"{PERIODS[0]}.",
            f"its loss rises with H; {ABSENT}",
            {"": few - many},
            at_least=0.0,
        ),
        Claim(
            f"Slowly: SparseLoCo loses at most 2 points from H = {PERIODS[0]} to {PERIODS[2]}.",
            f"its loss rises slowly from H = 15 to 250; {ABSENT}",
            {"": few - middle},
            at_most=2.0,
            if_not=f"The cause is that {SPARSE_STEPS // PERIODS[2]} averages are few: with {LONG} "
            "times the steps, and averages, it loses less, as the claim below says.",
        ),
        Claim(
            f"With {LONG} times the steps it loses at most 2 points from H = {PERIODS[0]} to "
            f"{PERIODS[2]}.",
            f"its loss rises slowly from H = 15 to 250; {ABSENT}",
            {"": longer_few - longer_middle},
            at_most=2.0,
        ),
        Claim(
            "SparseLoCo, which sends a tenth of the values, is more accurate than DiLoCo at the "
            "same H.",
            "better at H = 15, 30, 50 and 100 (caption of a figure)",
            {f"H = {every}": find(SPARSE, every) - find(DENSE, every)},
            at_least=0.0,
            if_not="A part of it is DiLoCo's momentum, which SparseLoCo has not: without momentum "
            "what sends all is behind, too, as the claim below says.",
        ),
        Claim(
            f"{PLAIN}, which is SparseLoCo that sends all, is less accurate than DiLoCo.",
            "-",
            {f"H = {every}": find(DENSE, every) - find(PLAIN, every)},
            at_least=0.0,
        ),
        Claim(
            "MuLoCo is more accurate than DiLoCo over any number of workers.",
            "loss at one worker 3.120 against 3.142 (150M), 2.400 against 2.411 (914M), 2.122 "
            "against 2.136 (3.1B); better for any number of workers (abstract)",
            {
                f"{count} workers" if count > 1 else "1 worker": find(MUON, count)
                - find(ADAM, count)
                for count in WORKERS
            },
            at_least=0.0,
        ),
        Claim(
            f"DiLoCo loses accuracy from 1 to {most} workers.",
            "it degrades as the workers increase (abstract)",
            {"": losses[ADAM]},
            at_least=0.0,
        ),
        Claim(
            f"MuLoCo loses less than DiLoCo from 1 to {most} workers.",
            "over more than 2 workers it loses less against its data-parallel baseline (abstract)",
            {"": losses[ADAM] - losses[MUON]},
            at_least=0.0,
        ),
        claim_best(
            {f"{title}, {setting}": x for (title, setting), x in tuned.items()},
            results,
            1,
            "+.4f",
        ),
    ]
    tables = [
        Table(
            f"Top-1 accuracy of the average model over H, {SPARSE_WORKERS} workers",
            ("H", "averages in the run", f"{SPARSE}, %", f"{DENSE}, %"),
            [
                (
                    f"{every}",
                    f"{SPARSE_STEPS // every}",
                    f"{find(SPARSE, every):.2f}",
                    f"{find(DENSE, every):.2f}",
                )
                for every in PERIODS
            ],
            "Mean ± standard deviation over the seeds. Each average of SparseLoCo sends a tenth of "
            "the values of DiLoCo's, and where they belong. - was not run.",
        ),
        Table(
            f"Top-1 accuracy of the average model over the workers, H = {WORKER_EVERY}",
            ("workers", *(f"{title}, %" for title in INNER)),
            [(f"{count}", *(f"{find(title, count):.2f}" for title in INNER)) for count in WORKERS],
        ),
    ]
    if not scale.is_quick:
        tries = {
            f"{title}, {setting} workers" if title in INNER else f"{title}, H = {setting}": method
            for (title, setting), method in tuned.items()
        }
        tables.append(tabulate_tries(tries, results, "accuracy", ".4f"))
    panels = [
        Panel(
            f"{SPARSE_WORKERS} workers",
            "H, steps between averages",
            "top-1, %",
            PERIODS,
            {title: [find(title, every) for every in PERIODS] for title in (SPARSE, DENSE)},
        ),
        Panel(
            f"H = {WORKER_EVERY}",
            "workers",
            "top-1, %",
            WORKERS,
            {title: [find(title, count) for count in WORKERS] for title in INNER},
        ),
    ]
    figure = Figure(
        "rare",
        "Accuracy as averages get rarer, and as the workers get more; bars are one standard "
        "deviation.",
        partial(draw_panels, panels),
    )
    return Findings(claims, tables, [figure])


SECTION = read_section(
    name="rare",
    find_numbers=lambda scale: {
        "data": "Fashion-MNIST" if "fashion_mnist" in list_data(scale) else "5,000 digits of MNIST",
        "parameters": PARAMETERS,
        "total": TOTAL_BATCH,
        "sparse_workers": SPARSE_WORKERS,
        "sparse_steps": SPARSE_STEPS,
        "periods": ", ".join(map(str, PERIODS)),
        "worker_steps": WORKER_STEPS,
        "every": WORKER_EVERY,
        "seeds": "one seed" if scale.is_quick else f"{SEEDS} seeds",
    },
    list_runs=list_rare_runs,
    find=find_rare,
)
