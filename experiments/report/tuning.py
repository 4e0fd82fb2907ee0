"""Methods at their rates: each is the best of half, once and twice of it, with the first seed.

The report makes all three runs, so that a reader sees that the rate is no end of its bracket, and
how much it matters.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from experiments.report.section import Claim, Place, Results, Sample, exact, make_claim, read_sample
from experiments.runner import Run
from experiments.tuning import FACTORS

BEST = {
    "statement": "Each method has its best rate: with the first seed, half and twice this rate are "
    "worse, or diverge.",
    "paper": "tuned (the papers' rates are for other tasks)",
    "rows": "best",
    "at_least": 0.0,
}


class Tuned(NamedTuple):
    """A method at its rate, and the runs that show that it is the best."""

    name: str  # with which the names of its runs begin
    program: str
    options: tuple[str, ...]  # without rate, seeds and algorithm
    algorithm: str  # on the command line: `sgp@ring`
    rate: float
    field: str  # of the summary, by which rates are compared
    seeds: int = 3  # of the rate; the others have the first

    def list_runs(self, is_quick: bool = False) -> list[Run]:
        """Returns a call for each rate; for the rate and the first seed alone if quick."""
        if is_quick:
            return [self.make_run(1.0, 1)]
        return [self.make_run(f, self.seeds if f == 1.0 else 1) for f in FACTORS]

    def make_run(self, factor: float, seeds: int) -> Run:
        """Returns the call at a multiple of the rate, with so many seeds from 0 on."""
        chosen = ("--algorithm", self.algorithm, "--learning-rate", f"{factor * self.rate:g}")
        arguments = (*self.options, *chosen, "--seed", *map(str, range(seeds)))
        return Run(self.find_place(factor).run, self.program, arguments)

    def lengthen(self, times: int) -> "Tuned":
        """Returns the method in more epochs: whether it is steps that lack."""
        at = self.options.index("--epochs") + 1
        epochs = f"{times * int(self.options[at])}"
        options = (*self.options[:at], epochs, *self.options[at + 1 :])
        return self._replace(name=f"{self.name}-long", options=options)

    def find_place(self, factor: float = 1.0) -> Place:
        """Returns where the figures at a multiple of the rate are."""
        algorithm, _, topology = self.algorithm.partition("@")
        return Place(f"{self.name}-{factor * self.rate:g}", algorithm, topology or None)


def list_tuned(methods: Iterable[Tuned], is_quick: bool) -> list[Run]:
    """Returns the calls of several methods."""
    return [run for method in methods for run in method.list_runs(is_quick)]


def read_tuned(
    methods: Mapping[str, Tuned], results: Results, factor: float = 1.0, single_spread: float = 0.0
) -> dict[str, Sample]:
    """Reads the field, times `factor`, of every seed of methods at their rates."""
    return {
        title: read_sample(results, method.find_place(), method.field, factor, single_spread)
        for title, method in methods.items()
    }


def claim_best(methods: Mapping[str, Tuned], results: Results, sign: int, spec: str) -> Claim:
    """Returns the claim that no method is better at half or twice its rate.

    `methods` are by title; `sign` is 1 where a larger field is better, -1 where a smaller one is.
    """
    rows = {}
    for title, method in methods.items():
        tries = [read_sample(results, method.find_place(f), method.field).values for f in FACTORS]
        half, once, twice = (values[:1] for values in tries)  # of the first seed, if it finished
        if once and (half or twice):  # what diverged is worse
            rows[title] = exact(min(sign * (once[0] - value) for value in half + twice))
    return make_claim(BEST | {"spec": spec}, {"best": rows}, {})
