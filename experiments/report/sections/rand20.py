"""RAND-20, Table 2: ring, randomized ring and delayed averages at 16, 32 and 64 learners."""

from collections.abc import Mapping
from typing import NamedTuple

from experiments.presets.rand20 import WORD_ERRORS
from experiments.report.section import (
    Claim,
    Estimate,
    Findings,
    Results,
    Sample,
    Scale,
    Table,
    read_sample,
    read_section,
)
from experiments.report.tuning import Tuned, claim_best
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
WORD_ERROR = {  # from 16 to 64 learners on SWB; the only ring of the paper is that of AD-PSGD
    ALL_REDUCE: "-",
    RING: "AD-PSGD on the ring 7.6 -> 8.1 %",
    AD: "AD-PSGD on the ring 7.6 -> 8.1 %",
    RAND: "RAND-PSGD 7.6 -> 7.8 %",
    D1D: "D1D-PSGD 7.4 -> 7.5 %",
}


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
        tuned = self.tune_all(scale).values()
        runs = [run for method in tuned for run in method.list_runs(scale.is_quick)]
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

Accuracies = Mapping[int, Mapping[str, Sample]]
"""Learners -> title -> accuracy of windows, in per cent."""


def list_batches(scale: Scale) -> tuple[Batch, ...]:
    """Returns the total batches of a scale."""
    return (QUICK,) if scale.is_quick else BATCHES


def list_runs(scale: Scale) -> list[Run]:
    """The calls of both batches; none without the recordings."""
    if scale.speech is None:
        return []
    return [run for batch in list_batches(scale) for run in batch.list_runs(scale)]


def read_accuracies(results: Results, batch: Batch, scale: Scale) -> Accuracies:
    """Reads what a batch gave, for each number of learners and each method."""
    accuracies: dict[int, dict[str, Sample]] = {n: {} for n in batch.learners}
    for title, tuned in batch.tune_all(scale).items():
        place = tuned.find_place()
        for learners in batch.learners:
            if learners != batch.learners[0]:
                place = place._replace(run=batch.name_run(title, learners))
            accuracies[learners][title] = read_sample(results, place, FIELD, 100, SPREAD)
    return accuracies


def find(scale: Scale, results: Results) -> Findings:
    """Compares what the methods lose from the fewest to the most learners."""
    small = read_accuracies(results, SMALL, scale)
    large = read_accuracies(results, LARGE, scale)
    age = small[FEWEST][RING] - small[FEWEST][AD]
    behind = large[MOST][ALL_REDUCE] - large[MOST][EXACT]
    own = (
        "The delay is not the cause. A learner computes its gradient at a model that contains a "
        "step of its own few windows, and no average takes this step away. D-PSGD all to all has "
        "such models and no delay, and shows most of the loss: see the two claims on it."
    )
    claims = [
        claim_more("512", RING, RAND, small),
        claim_more("512", AD, D1D, small)._replace(is_modelled=True),
        claim_order("512", RAND, RING, small),
        claim_order("512", D1D, AD, small)._replace(is_modelled=True),
        claim_order("512", D1D, RAND, small)._replace(
            if_not="The gradients of D1D-PSGD are one step old, and those of RAND-PSGD are not. On "
            f"the ring of 16 learners, gradients of this age cost {age:+.2f} points."
        ),
        Claim(
            "With 512 windows D1D-PSGD loses at most 2 points from 16 to 64 learners.",
            f"WER: {WORD_ERROR[D1D]}",
            {"": find_loss(D1D, small)},
            at_most=2.0,  # above the margin of one seed
            if_not=own,
        ),
        claim_order("2,048", D1D, ALL_REDUCE, large)._replace(
            paper="S-PSGD does not converge with a large batch and an aggressive rate (section 4)",
            if_not="At its best rate AllReduce learns with 2,048 windows, too. In the paper "
            "AllReduce does not converge at the rate of the other methods.",
        ),
        Claim(
            "With 2,048 windows and 64 learners D-PSGD all to all, which has no delay, is at least "
            "half as far behind AllReduce as D1D-PSGD.",
            "-",
            {"": (large[MOST][ALL_REDUCE] - large[MOST][D1D]).halve() - behind},
            at_most=0.0,
        ),
        Claim(
            "With 2,048 windows D-PSGD all to all loses more than AllReduce from 16 to 64 "
            "learners, when each learner sees a quarter as many windows.",
            "-",
            {"": find_loss(EXACT, large) - find_loss(ALL_REDUCE, large)},
            at_least=0.0,
        ),
        *(claim_best(batch.tune_all(scale), results, 1, "+.4f") for batch in BATCHES),
    ]
    tables = [
        tabulate(read_accuracies(results, batch, scale), batch) for batch in list_batches(scale)
    ]
    return Findings(claims, tables)


def find_loss(title: str, accuracies: Accuracies) -> Estimate:
    """Returns what a method loses from the fewest to the most learners, in points."""
    return accuracies[FEWEST][title] - accuracies[MOST][title]


def claim_more(windows: str, worse: str, better: str, accuracies: Accuracies) -> Claim:
    """Returns the claim that a method loses more than another."""
    return Claim(
        f"With {windows} windows {worse} loses more from 16 to 64 learners than {better}.",
        f"WER: {WORD_ERROR[worse]}, {WORD_ERROR[better]}",
        {"": find_loss(worse, accuracies) - find_loss(better, accuracies)},
        at_least=0.0,
    )


def claim_order(windows: str, better: str, worse: str, accuracies: Accuracies) -> Claim:
    """Returns the claim that a method is ahead of another at the most learners."""
    return Claim(
        f"With {windows} windows and 64 learners {better} is better than {worse}.",
        f"WER: {WORD_ERROR[better]}, {WORD_ERROR[worse]}",
        {"": accuracies[MOST][better] - accuracies[MOST][worse]},
        at_least=0.0,
    )


def tabulate(accuracies: Accuracies, batch: Batch) -> Table:
    """Returns accuracies beside the paper's word error rates."""
    rows = []
    for title in batch.rates:
        published = PAPER.get(title, {})
        pairs = [(f"{accuracies[n][title]:.1f}", published.get(n, "-")) for n in batch.learners]
        rows.append((title, *(text for pair in pairs for text in pair)))
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
    find_numbers=lambda scale: {
        "batches": "512 windows over 16 learners, 1 epoch, one seed"
        if scale.is_quick
        else "512 windows over 16 and 64 learners, and 2,048 windows over 64, 3 epochs, 3 seeds"
    },
    list_runs=list_runs,
    find=find,
    needs=("speech",),
)
