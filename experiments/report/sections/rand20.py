"""RAND-20, Table 2: ring, randomized ring and delayed averages at 16, 32 and 64 learners."""

from collections.abc import Mapping
from typing import NamedTuple

from experiments.presets.rand20 import WORD_ERRORS
from experiments.report.section import (
    Findings,
    Results,
    Sample,
    Scale,
    Table,
    read_claims,
    read_sample,
    read_section,
)
from experiments.report.tuning import Tuned, claim_best, list_tuned
from experiments.runner import Run

FEWEST = 16
MOST = 64
SPREAD = 0.7  # points, of one seed
FIELD = "test_window_accuracy_average_model"
ALL_REDUCE = "AllReduce"
RING = "D-PSGD on the ring"
AD = "AD-PSGD on the ring"
RAND = "RAND-PSGD"
D1D = "D1D-PSGD"
EXACT = "D-PSGD, all to all"
NAMES = {
    ALL_REDUCE: "allreduce",
    RING: "dpsgd@ring",
    RAND: "rand-psgd",
    AD: "adpsgd@ring",
    D1D: "d1d-psgd",
    EXACT: "dpsgd@complete",  # gradients as D1D-PSGD's, at models of which a step is its own
}
"""Title -> the name on the command line."""
PAPER = {AD: WORD_ERRORS["ad"], RAND: WORD_ERRORS["rand"], D1D: WORD_ERRORS["d1d"]}


class Batch(NamedTuple):
    """A total batch, and what is run with it."""

    size: int  # windows of a step over all learners
    learners: tuple[int, ...]  # how many there are; the rates are chosen with the first
    rates: Mapping[str, float]  # title of a method -> its learning rate, without momentum
    epochs: int  # of a run

    def tune(self, title: str, scale: Scale) -> Tuned:
        """Returns a method at its rate over the fewest learners."""
        fewest = self.learners[0]
        call = (self.name_run(title, fewest), "speech", self.list_options(fewest, scale))
        return Tuned(*call, NAMES[title], self.rates[title], FIELD)

    def tune_all(self, scale: Scale) -> dict[str, Tuned]:
        """Returns all methods, by title."""
        return {title: self.tune(title, scale) for title in self.rates}

    def list_options(self, learners: int, scale: Scale) -> tuple[str, ...]:
        """Returns the options that all methods share."""
        options = f"""--layers 1 --cells 16 --projection 16 --placement vmap --log-every 1000
        --optimizer sgd --epochs {self.epochs} --nodes {learners}
        --batch-size-per-node {self.size // learners}"""
        return ("--data-dir", f"{scale.speech}", *options.split())

    def name_run(self, title: str, learners: int) -> str:
        """Returns the name of a run over more learners."""
        return f"rand20-{self.size}-{learners}-{NAMES[title].replace('@', '-')}"

    def list_runs(self, scale: Scale) -> list[Run]:
        """Returns the calls: three rates over the fewest learners, the rate over the others."""
        runs = list_tuned(self.tune_all(scale).values(), scale.is_quick)
        for learners in self.learners[1:]:
            for title, rate in self.rates.items():
                options = ("--algorithm", NAMES[title], "--learning-rate", f"{rate:g}", *SEEDS)
                arguments = (*self.list_options(learners, scale), *options)
                runs.append(Run(self.name_run(title, learners), "speech", arguments))
        return runs


SEEDS = ("--seed", "0", "1", "2")
SMALL = Batch(512, (FEWEST, MOST), {RING: 1.6, RAND: 1.6, AD: 1.6, D1D: 1.6}, 3)
LARGE = Batch(2048, (MOST, FEWEST), {ALL_REDUCE: 1.6, D1D: 1.6, EXACT: 1.6}, 3)
BATCHES = (SMALL, LARGE)
QUICK = SMALL._replace(learners=(FEWEST,), epochs=1)


def list_batches(scale: Scale) -> tuple[Batch, ...]:
    """Returns the total batches of a scale."""
    return (QUICK,) if scale.is_quick else BATCHES


def list_runs(scale: Scale) -> list[Run]:
    """The calls of both batches; none without the recordings."""
    if scale.speech is None:
        return []
    return [run for batch in list_batches(scale) for run in batch.list_runs(scale)]


def read_accuracies(results: Results, batch: Batch, scale: Scale) -> dict[str, Sample]:
    """Reads accuracies of windows in per cent, by `WINDOWS LEARNERS NAME`."""
    accuracies = {}
    for title, tuned in batch.tune_all(scale).items():
        for learners in batch.learners:
            place = tuned.find_place()
            if learners != batch.learners[0]:
                place = place._replace(run=batch.name_run(title, learners))
            sample = read_sample(results, place, FIELD, 100, SPREAD)
            accuracies[f"{batch.size} {learners} {NAMES[title]}"] = sample
    return accuracies


def find(scale: Scale, results: Results) -> Findings:
    """Compares what the methods lose from the fewest to the most learners."""
    ours = read_accuracies(results, SMALL, scale) | read_accuracies(results, LARGE, scale)
    at_most = {title: ours[f"2048 {MOST} {NAMES[title]}"] for title in LARGE.rates}
    behind, exact = (at_most[ALL_REDUCE] - at_most[title] for title in (D1D, EXACT))
    age = ours[f"512 {FEWEST} {NAMES[RING]}"] - ours[f"512 {FEWEST} {NAMES[AD]}"]
    figures = ours | {"half": {"": behind.halve() - exact}}
    claims = [
        *read_claims("rand20", figures, {"age": age}),
        *(claim_best(batch.tune_all(scale), results, 1, "+.4f") for batch in BATCHES),
    ]
    return Findings(claims, [tabulate(ours, batch) for batch in list_batches(scale)])


def tabulate(accuracies: Mapping[str, Sample], batch: Batch) -> Table:
    """Returns accuracies beside the paper's word error rates."""
    rows = []
    for title in batch.rates:
        published = PAPER.get(title, {})
        cells = []
        for n in batch.learners:
            sample = accuracies[f"{batch.size} {n} {NAMES[title]}"]
            cells += [f"{sample:.1f}", published.get(n, "-")]
        rows.append((title, *cells))
    columns = [(f"{n} learners: here, %", "paper, WER SWB/CH, %") for n in batch.learners]
    return Table(
        f"Accuracy of windows by the average model, {batch.size:,} windows in all",
        ("method", *(text for pair in columns for text in pair)),
        rows,
        "An accuracy falls where an error rate rises. The paper's are of 8,192 windows in all. "
        "Learners with gradients that are one step old: AD-PSGD, on average, and D1D-PSGD.",
    )


SECTION = read_section(
    name="rand20",
    list_runs=list_runs,
    find=find,
    needs=("speech",),
)
