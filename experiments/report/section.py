"""What a section of the report is: its runs, and the claims that it judges by them.

A claim is data, in `sections.toml`: rows, each an estimate with its limits, and bounds that all of
them must keep. `judge` is the only function that says whether a claim holds.
"""

import dataclasses
import math
import statistics
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib.figure import Figure as MatplotlibFigure
from scipy import stats

from experiments.results import Record
from experiments.runner import Result, Run, Status

TEXTS = tomllib.loads(Path(__file__).with_name("sections.toml").read_text("utf-8"))
Verdict = Literal["agrees", "agrees in part", "disagrees", "not judged"]
CONFIDENCE = 0.9  # that the true value is above the lower limit; and as much for the upper one
MAX_ROWS = 8  # of exact figures that a claim lists one by one
GAPS: Mapping[Status, str] = {
    "diverged": "diverged",
    "failed": "failed",
    "missing": "-",
    "finished": "-",
}
"""What a table shows instead of a figure, by how the run ended."""

Results = Mapping[str, Result]
"""The name of a run -> how it ended."""
Figures = Mapping[str, Any]
"""Name -> a sample, an estimate, or all rows of a claim."""


DATA = ("fashion_mnist", "speech", "translation")
"""The fields of `Scale` that are folders."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the runs are, and where their data are."""

    is_quick: bool = False  # whether the whole report must end within ten minutes on two cores
    # the folder of the four files of Fashion-MNIST; None: 5,000 MNIST digits, which are installed,
    # take its place
    fashion_mnist: Path | None = None
    # the folder of `speech_languages.npz`; None leaves out what needs it
    speech: Path | None = None
    # the folder of the pairs of sentences; None leaves out what needs them
    translation: Path | None = None


class Estimate(NamedTuple):
    """A number, and the limits between which the true one is; not a number if a run is missing.

    >>> f"{exact(1.0):.1f}, {Estimate(1.0, 0.5, 1.5):.1f}, {Estimate(1.0, 0.5, 2.0):.1f}"
    '1.0, 1.0 ± 0.5, 1.0 (0.5 to 2.0)'
    >>> f"{Estimate(5.0, 4.7, 5.3) - Estimate(1.0, 0.6, 1.4):.1f}"
    '4.0 ± 0.5'
    """

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        if math.isnan(self.value):
            return "-"
        value = format(self.value, spec)
        if self.low == self.high:
            return value
        plain = spec.lstrip("+")
        margin = self.high - self.value
        if math.isclose(margin, self.value - self.low, rel_tol=1e-6):
            return f"{value} ± {margin:{plain}}"
        return f"{value} ({self.low:{plain}} to {self.high:{plain}})"

    def __sub__(self, other: "Estimate") -> "Estimate":
        """The difference from an estimate of other runs."""
        value = self.value - other.value
        below = math.hypot(self.value - self.low, other.high - other.value)
        above = math.hypot(self.high - self.value, other.value - other.low)
        return Estimate(value, value - below, value + above)

    def halve(self) -> "Estimate":
        """Returns half of it with its limits."""
        return Estimate(*(number / 2 for number in self))


MISSING = Estimate(math.nan, math.nan, math.nan)


def exact(value: float) -> Estimate:
    """Returns a number that has no error."""
    return Estimate(value, value, value)


def compare(first: Sequence[float], second: Sequence[float], single_spread: float) -> Estimate:
    """Returns the difference of two means over seeds, with the limits of Welch's test.

    Where a sample has one seed, its standard deviation is taken as `single_spread`.

    >>> f"{compare([90.0, 90.2, 90.1], [89.0, 89.2, 89.4], 0.5):.2f}"
    '0.90 ± 0.21'
    >>> f"{compare([90.0], [89.0], 0.5):.2f}"
    '1.00 ± 0.91'
    """
    if not first or not second:
        return MISSING
    difference = statistics.fmean(first) - statistics.fmean(second)
    if min(len(first), len(second)) == 1:
        count = 1 / len(first) + 1 / len(second)
        margin = float(stats.norm.ppf(CONFIDENCE)) * single_spread * count**0.5
        return Estimate(difference, difference - margin, difference + margin)
    if statistics.variance(first) == statistics.variance(second) == 0:
        return exact(difference)
    with warnings.catch_warnings():  # where all seeds of one sample are equal
        warnings.simplefilter("ignore", RuntimeWarning)
        test = stats.ttest_ind(first, second, equal_var=False)
    limits = test.confidence_interval(2 * CONFIDENCE - 1)  # two-sided
    return Estimate(difference, float(limits.low), float(limits.high))


class Sample(NamedTuple):
    """The values of a method: one for each seed, none if its run has not finished.

    >>> f"{Sample((1.0, 2.0)):.1f} {Sample((3.0,)):.2f} {Sample((), 'diverged'):.1f}"
    '1.5 ± 0.7 3.00 diverged'
    >>> f"{Sample((3.0,), single_spread=1.0) - Sample((2.0,)):.1f}"
    '1.0 ± 1.8'
    """

    values: tuple[float, ...] = ()  # of the seeds
    status: Status = "finished"  # how the run ended
    # standard deviation of a seed, for differences where there is one seed
    single_spread: float = 0.0

    def __format__(self, spec: str) -> str:
        if not self.values:
            return GAPS[self.status]
        mean = format(self.mean, spec)
        return f"{mean} ± {format(self.spread, spec)}" if len(self.values) > 1 else mean

    def __sub__(self, other: "Sample") -> Estimate:
        """The difference of the means, with its limits."""
        return compare(self.values, other.values, self.single_spread)

    @property
    def mean(self) -> float:
        """The mean over the seeds; not a number without values."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds; 0 of a single one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def to_perplexity(self) -> "Sample":
        """Returns `exp` of losses in nats per token."""
        return self._replace(values=tuple(math.exp(value) for value in self.values))


def read_records(results: Results, name: str) -> list[Record]:
    """Returns the entries of `summary.json` of a run; none if it has not finished."""
    return results[name].runs if name in results else []


class Place(NamedTuple):
    """Where the values of a method are: a run, and the entries of its `summary.json`.

    A topology of None is any.
    """

    run: str
    algorithm: str
    topology: str | None = None

    def find_runs(self, results: Results) -> list[Record]:
        """Returns the entries, one of each seed; none if the run has not finished."""
        return [
            run
            for run in read_records(results, self.run)
            if run["algorithm"] == self.algorithm and self.topology in (None, run["topology"])
        ]


def read_sample(
    results: Results, place: Place, field: str, factor: float = 1.0, single_spread: float = 0.0
) -> Sample:
    """Reads a field of every seed of a method, times `factor`; of a list, the mean of it."""
    status = results.get(place.run, Result(status="missing")).status
    found = [run[field] for run in place.find_runs(results) if run.get(field) is not None]
    values = tuple(factor * statistics.fmean(x if isinstance(x, list) else [x]) for x in found)
    return Sample(values, status, single_spread)


class Claim(NamedTuple):
    """A statement of the paper: all rows are between two bounds."""

    statement: str  # a sentence that is true or false, with the bounds
    paper: str  # the paper's figures
    # title -> what was measured, with its limits; empty if a run is missing
    rows: Mapping[str, Estimate]
    at_least: float = -math.inf  # the bounds; without any, rows are shown and not judged
    at_most: float = math.inf
    spec: str = "+.2f"  # how rows are formatted
    is_modelled: bool = False  # whether rows are of a model or a simulation, not of a measurement
    if_not: str = ""  # what is known of the cause, shown where the claim does not hold

    @property
    def ours(self) -> str:
        """The rows as text.

        >>> Claim("", "", {"4 nodes": Estimate(0.25, -0.25, 0.75)}).ours
        '4 nodes +0.25 ± 0.50'
        """
        rows = self.rows
        if len(rows) > MAX_ROWS and all(row.low == row.high for row in rows.values()):
            values = [row.value for row in rows.values()]
            lowest, highest = (format(value, self.spec) for value in (min(values), max(values)))
            return f"{lowest} to {highest} in {len(rows)} rows"
        texts = [f"{title} {row:{self.spec}}".strip() for title, row in rows.items()]
        return "; ".join(texts) or "-"


def judge(claim: Claim) -> bool | None:
    """Returns whether a claim holds; None if the limits of a row, or a missing run, leave it open.

    A row keeps a bound if all between its limits does, and misses it if nothing does.

    >>> rows = {"a": Estimate(1.2, 0.9, 1.5), "b": Estimate(0.5, 0.4, 0.6)}
    >>> [judge(Claim("", "", rows, at_least=bound)) for bound in (0.3, 0.5, 0.7)]
    [True, None, False]
    """
    low, high = claim.at_least, claim.at_most
    if math.isinf(low) and math.isinf(high):
        return None
    rows = claim.rows.values()
    if any(row.low > high or row.high < low for row in rows):
        return False
    return True if rows and all(low <= row.low and row.high <= high for row in rows) else None


def read_claims(
    name: str,
    figures: Figures,
    numbers: Mapping[str, object] | None = None,
    group: str = "claims",
) -> list[Claim]:
    """Returns the claims of a section in `sections.toml`, with its figures and numbers."""
    entries = TEXTS[name].get(group, ())
    return [make_claim(entry, figures, numbers or {}) for entry in entries]


def make_claim(entry: Record, figures: Figures, numbers: Mapping[str, object]) -> Claim:
    """Returns a claim of `sections.toml`; a figure that is missing leaves a gap.

    >>> figures = {"sgp": exact(3.0), "ring": exact(1.0)}
    >>> entry = {"statement": "So it is.", "rows": {"less": ["sgp", "ring"]}, "within": "{bound}"}
    >>> claim = make_claim(entry, figures, {"bound": 2})
    >>> claim.ours, claim.at_least, claim.at_most, judge(claim)
    ('less +2.00', -2.0, 2.0, True)
    """

    def fill(field: str, default: str = "-") -> str:
        return " ".join(f"{entry.get(field, default)}".split()).format_map(numbers)

    def find(term: Any) -> Any:
        if isinstance(term, str):
            return figures.get(term.format_map(numbers), Sample())
        first, second = map(find, term)
        return first - second

    rows = entry["rows"]
    if isinstance(rows, str):
        rows = figures[rows]
    else:
        rows = {title.format_map(numbers): find(term) for title, term in rows.items()}
    low = float(fill("at_least", "-inf"))
    high = float(fill("at_most", "inf"))
    if "within" in entry:
        low = float(fill("near", "0")) - float(fill("within"))
        high = float(fill("near", "0")) + float(fill("within"))
    return Claim(
        fill("statement"),
        fill("paper"),
        rows,
        low,
        high,
        entry.get("spec", "+.2f"),
        entry.get("is_modelled", False),
        fill("if_not", ""),
    )


class Table(NamedTuple):
    """A table: a title, columns with units, rows of as many texts, and a note below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def read_table(
    name: str, rows: Sequence[Sequence[str]], number: int = 0, **numbers: object
) -> Table:
    """Returns a table of a section in `sections.toml` with these rows, which is filled in."""
    entry = TEXTS[name]["tables"][number]
    note = " ".join(entry.get("note", "").split()).format_map(numbers)
    columns = [column if isinstance(column, str) else column[0] for column in entry["columns"]]
    return Table(entry["title"], columns, rows, note)


def tabulate(name: str, records: Sequence[Record], gap: str) -> Table:
    """Returns the first table of a section with a row for each record; without any, of gaps.

    Columns in `sections.toml` have a title, a field, and the format of it; None is shown as `-`.
    """
    columns = TEXTS[name]["tables"][0]["columns"]
    rows = [
        ["-" if x[field] is None else format(x[field], spec) for _, field, spec in columns]
        for x in records
    ]
    return read_table(name, rows or [[gap] * len(columns)])


class Figure(NamedTuple):
    """A figure: the name of its files, a caption, and what draws into an empty figure."""

    name: str
    caption: str
    draw: Callable[[MatplotlibFigure], None]


class Findings(NamedTuple):
    """What a section finds in its runs."""

    claims: Sequence[Claim]
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()

    def drop_bounds(self) -> "Findings":
        """Returns the same claims, of which none is judged."""
        return self._replace(
            claims=[claim._replace(at_least=-math.inf, at_most=math.inf) for claim in self.claims]
        )

    @property
    def verdict(self) -> Verdict:
        """Whether the claims hold: all that can be judged, some of them, or none.

        Where fewer than half can be judged, nothing is said of all.

        >>> rows = {"a": Estimate(1.0, 1.0, 1.0)}
        >>> holds, fails = (Claim("", "", rows, at_least=bound) for bound in (0.0, 2.0))
        >>> [Findings([holds, *rest]).verdict for rest in ([], [fails], [Claim("", "", {})] * 2)]
        ['agrees', 'agrees in part', 'agrees in part']
        >>> Findings([fails]).verdict, Findings([fails, *[Claim("", "", {})] * 2]).verdict
        ('disagrees', 'not judged')
        """
        verdicts = list(map(judge, self.claims))
        judged = [holds for holds in verdicts if holds is not None]
        are_most = 2 * len(judged) >= len(verdicts)
        if True in judged:
            return "agrees" if are_most and False not in judged else "agrees in part"
        return "disagrees" if judged and are_most else "not judged"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the report: a table or figure of a paper, or a question."""

    name: str  # by which `--section` chooses it
    title: str  # its heading
    # paper and table, `SGP-19, Table 1 and Figure 1`; with authors, year and arXiv number if it is
    # the paper's only section
    source: str
    # what the paper did, and what is done here; names in braces are keys of `find_numbers`
    text: str
    # what must be run at a scale; nothing if data that it needs are not there
    list_runs: Callable[[Scale], Sequence[Run]]
    # reads the runs; those that failed or are missing leave gaps, never errors
    find: Callable[[Scale, Results], Findings]
    # the numbers of the text at a scale
    find_numbers: Callable[[Scale], Mapping[str, object]] = lambda _: {}
    # the fields of `Scale` without which there is nothing to find
    needs: tuple[Literal["speech", "translation"], ...] = ()
    # whether the small runs of the quick scale can be judged, too
    judges_when_quick: bool = False

    def judges(self, scale: Scale) -> bool:
        """Whether the section can tell a broken method from a right one at this scale."""
        return self.judges_when_quick or not scale.is_quick

    @property
    def place(self) -> str:
        """The source without authors and title of the paper."""
        return self.source.partition(": ")[0]

    def write_text(self, scale: Scale) -> str:
        """Returns the text with the numbers of a scale."""
        return " ".join(self.text.format_map(self.find_numbers(scale)).split())


def read_section(name: str, **fields: Any) -> Section:
    """Returns a section whose title, source, text and numbers are in `sections.toml`."""
    entry = TEXTS[name]
    texts = {key: " ".join(entry[key].split()) for key in ("title", "source", "text")}

    def find_numbers(scale: Scale) -> Mapping[str, object]:
        return entry.get("numbers", {}).get("quick" if scale.is_quick else "full", {})

    fields = {"find_numbers": find_numbers} | fields
    return Section(name=name, **texts, **fields)
