"""The cost model's figures beside the published ones. Modelled: nothing is measured here."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure as MatplotlibFigure

from experiments.report import published
from experiments.report.published import Row
from experiments.report.section import (
    Claim,
    Figure,
    Findings,
    Results,
    Scale,
    Section,
    Table,
    exact,
    tabulate,
)

FIT_BOUND = 0.12
BOUND = 0.15
MARKERS = "os^vD*P<"
COLUMNS = {  # of the table -> field, format
    "table": ("table", ""),
    "method": ("name", ""),
    "nodes": ("nodes", ""),
    "modelled": ("predicted", ".3g"),
    "published": ("published", ".3g"),
    "unit": ("unit", ""),
    "difference": ("difference", "+.1%"),
    "fitted": ("fitted", ""),
}


def find(scale: Scale, results: Results) -> Findings:
    """Compares predicted with published figures."""
    del scale, results
    seconds = published.compare_sgp18()
    fast = published.compare_sgp19(2)
    slowmo = published.compare_slowmo()
    timed = [seconds, *(published.compare_sgp19(table) for table in (1, 3, 4, 5)), fast, slowmo]
    diloco = published.compare_streaming_diloco()
    what_if = published.compare_what_if()
    claims = []
    for rows in timed:
        bound = FIT_BOUND if rows is seconds else BOUND
        fitted = sum(row.is_fitted for row in rows)
        claims.append(
            Claim(
                f"{rows[0].table}: all {len(rows)} figures within {bound:.0%}; on {fitted} of them "
                "the network is fitted.",
                find_range(rows),
                {f"{row.name}, {row.nodes} nodes": exact(row.error) for row in rows},
                at_least=-bound,
                at_most=bound,
                spec="+.1%",
                is_modelled=True,
                if_not="The model knows InfiniBand's nominal bandwidth, and nothing that slows it."
                if rows is fast
                else "",
            )
        )
    ring = what_if[-1]
    claims += [
        Claim(
            "Streaming DiLoCo Table 4: all 75 bandwidths in the same cell of its logarithmic grid, "
            "or the next; nothing is fitted.",
            find_range(diloco),
            {row.name: exact(published.count_cells(row)) for row in diloco},
            at_least=-1,
            at_most=1,
            spec="+.0f",
            is_modelled=True,
        ),
        Claim(
            "Most of the factor over AllReduce is how its all-reduce works: with a ring, and no "
            "copies through hosts, the same network would give less than half of it.",
            "3.07 at 32 nodes, with a tree (SGP-18, Table 2); 1.38 with a ring (SlowMo, Table 2)",
            {"": exact(ring.predicted)},
            at_most=0.5 * ring.published,
            spec=".2f",
            is_modelled=True,
        ),
    ]
    tables = [
        tabulate(
            "Seconds and hours",
            COLUMNS,
            [
                row._asdict()
                | {"difference": row.error, "fitted": "yes" if row.is_fitted else "no"}
                for rows in timed
                for row in rows
            ],
            "-",
            "Ours are modelled, none is measured. Fitted: the network is fitted on the seconds of "
            "this method at this number of nodes, or of both parts of a hybrid.",
        ),
        tabulate_cells(diloco),
        Table(
            "AllReduce's seconds over SGP's at 32 nodes, by the all-reduce",
            ("all-reduce", "modelled", "published"),
            [
                (row.name, f"{row.predicted:.2f}", "-" if index else f"{row.published:.2f}")
                for index, row in enumerate(what_if)
            ],
            "The paper measured the first only.",
        ),
    ]
    figure = Figure(
        "errors",
        "Modelled over published figures; the dashed lines are 15 % away. Seconds per iteration, "
        "hours of training, and Gbit/s that a share of computation needs.",
        partial(draw_rows, [*timed, diloco]),
    )
    return Findings(claims, tables, [figure])


def find_range(rows: Sequence[Row]) -> str:
    """Returns the range of published figures."""
    figures = [row.published for row in rows]
    return f"{min(figures):g} to {max(figures):g} {rows[0].unit}"


def tabulate_cells(rows: Sequence[Row]) -> Table:
    """Returns a row per model and method, a column per share of the time that is computation."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        name, _, share = row.name.rpartition(", ")
        count = published.count_cells(row)
        text = f"{row.predicted:.3g} / {row.published:.3g}{f' ({count:+d})' if count else ''}"
        cells.setdefault(name, {})[share] = text
    return Table(
        "Gbit/s for a share of the time that is computation, modelled / published",
        ("model, method", *next(iter(cells.values()))),
        [(name, *texts.values()) for name, texts in cells.items()],
        "In brackets: by how many cells of the table's logarithmic grid they differ.",
    )


def draw_rows(groups: Sequence[Sequence[Row]], figure: MatplotlibFigure) -> None:
    """Draws predicted over published figures, both on logarithmic axes."""
    figure.set_size_inches(7.0, 5.5)
    axes = figure.add_subplot()
    look = {"linestyle": "none", "markersize": 5, "markerfacecolor": "none"}
    for rows, marker in zip(groups, MARKERS, strict=True):
        axes.plot(
            [row.published for row in rows],
            [row.predicted for row in rows],
            marker=marker,
            label=f"{rows[0].table} ({rows[0].unit})",
            **look,
        )
    values = [row.published for rows in groups for row in rows]
    ends = [min(values) / 2, 2 * max(values)]
    axes.plot(ends, ends, color="gray", linewidth=0.8)
    for factor in (1 - BOUND, 1 + BOUND):
        axes.plot(ends, [factor * end for end in ends], "--", color="gray", linewidth=0.6)
    axes.set(xscale="log", yscale="log", xlabel="published", ylabel="modelled")
    axes.set_title("Modelled and published seconds, hours and Gbit/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")


SECTION = Section(
    name="cost-model",
    title="The cost model beside the published times",
    source="SGP-18, Table 2; SGP-19, Tables 1 to 5; SlowMo, Table 2 (Wang et al. 2020, "
    "arXiv:1910.00643); Streaming DiLoCo, Table 4 (Douillard et al. 2025, arXiv:2501.18512)",
    text="""
    The papers measured seconds per iteration, hours of training, and (in a simulation) the
    bandwidth that a share of computation needs. The cost model has computation, bytes, bandwidth, a
    copy through the host, overlap and the kind of all-reduce. Its network is fitted on the 16
    figures of SGP-18, Table 2, alone; of SlowMo only the computation is fitted, and InfiniBand
    (SGP-19, Table 2) is nominal. Most hours of SGP-19 are those same iterations, times their
    number; two peers and overlap are not. Every figure of ours in this section is modelled.
    """,
    list_runs=lambda _: [],
    find=find,
)
