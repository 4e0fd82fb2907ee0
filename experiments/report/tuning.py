"""Learning rates by one rule: the rate of a method is the best of half, once and twice of it.

It is judged with the first seed. The report makes all three runs, so that a reader sees that the
rate is no end of its bracket, and how much it matters.
"""

from collections.abc import Mapping
from typing import NamedTuple

from experiments.report.section import Claim, Estimate, Place, Results, Sample, exact, read_sample
from experiments.runner import Run

FACTORS = (0.5, 1.0, 2.0)


class Tuned(NamedTuple):
    """A method at its rate, and the runs that show that it is the best."""

    name: str  # with which the names of its runs begin
    program: str
    options: tuple[str, ...]  # without rate, seeds and algorithm
    algorithm: str  # on the command line: `sgp@ring`
    rate: float
    field: str  # of the summary, by which rates are compared
    seeds: int = 3  # of the rate; the others have the first

    def name_run(self, factor: float = 1.0) -> str:
        """Returns the name of the run at a multiple of the rate."""
        return f"{self.name}-{factor * self.rate:g}"

    def list_runs(self, is_quick: bool = False) -> list[Run]:
        """Returns a call for each rate; for the rate and the first seed alone if quick."""
        if is_quick:
            return [self.make_run(1.0, 1)]
        return [self.make_run(f, self.seeds if f == 1.0 else 1) for f in FACTORS]

    def make_run(self, factor: float, seeds: int) -> Run:
        """Returns the call at a multiple of the rate, with so many seeds from 0 on."""
        chosen = ("--algorithm", self.algorithm, "--learning-rate", f"{factor * self.rate:g}")
        arguments = (*self.options, *chosen, "--seed", *map(str, range(seeds)))
        return Run(self.name_run(factor), self.program, arguments)

    def lengthen(self, times: int) -> "Tuned":
        """Returns the method in more epochs: whether it is steps that lack."""
        at = self.options.index("--epochs") + 1
        epochs = f"{times * int(self.options[at])}"
        options = (*self.options[:at], epochs, *self.options[at + 1 :])
        return self._replace(name=f"{self.name}-long", options=options)

    def find_place(self, factor: float = 1.0) -> Place:
        """Returns where the figures are."""
        algorithm, _, topology = self.algorithm.partition("@")
        return Place(self.name_run(factor), algorithm, topology or None)

    def read(self, results: Results, factor: float = 1.0, single_spread: float = 0.0) -> Sample:
        """Reads the field, times `factor`, of every seed at the rate."""
        return read_sample(results, self.find_place(), self.field, factor, single_spread)


def claim_best(methods: Mapping[str, Tuned], results: Results, sign: int, spec: str) -> Claim:
    """Returns the claim that no method is better at half or twice its rate.

    `methods` are by title; `sign` is 1 where a larger field is better, -1 where a smaller one is.
    """
    rows: dict[str, Estimate] = {}
    for title, method in methods.items():
        tries = [read_sample(results, method.find_place(f), method.field).values for f in FACTORS]
        half, once, twice = (values[:1] for values in tries)  # of the first seed, if it finished
        if once and (half or twice):  # what diverged is worse
            rows[title] = exact(min(sign * (once[0] - value) for value in half + twice))
    return Claim(
        "Each method has its best rate: with the first seed, half and twice this rate are worse, "
        "or diverge.",
        "tuned (the papers' rates are for other tasks)",
        rows,
        at_least=0.0,
        spec=spec,
    )
