"""The cost model's figures beside the published ones. Modelled: nothing is measured here."""

from collections.abc import Sequence
from functools import partial

from matplotlib.figure import Figure as MatplotlibFigure

from experiments.report.section import (
    Claim,
    Figure,
    Findings,
    Results,
    Run,
    Scale,
    Section,
    Table,
)
from gossipjax.cost_model import published
from gossipjax.cost_model.published import Row

FIT_BOUND = 0.12
BOUND = 0.15
MAX_CELLS = 1
RING_SHARE = 0.5  # of the published factor over AllReduce
MARKERS = "os^vD*P<"
BANDWIDTHS = "Gbit/s"


def list_runs(scale: Scale) -> list[Run]:
    """Nothing: the model needs no run."""
    del scale
    return []


def find(scale: Scale, results: Results) -> Findings:
    """Predicted beside published figures."""
    del scale, results
    seconds = published.compare_sgp18_table2()
    hours = [
        published.compare_sgp19_table1(),
        published.compare_sgp19_table3(),
        published.compare_sgp19_table4(),
        published.compare_sgp19_table5(),
    ]
    fast = published.compare_sgp19_table2()
    slowmo = published.compare_slowmo_table2()
    diloco = published.compare_streaming_diloco_table4()
    what_if = published.compare_what_if()
    claims = [claim_errors(seconds, FIT_BOUND, "on which the network is fitted")]
    claims += [claim_errors(rows, BOUND, describe_fit(rows)) for rows in hours]
    claims.append(claim_errors(fast, BOUND, "InfiniBand, nominal: nothing is fitted"))
    on_ring = claim_errors(slowmo, BOUND, "its computation is fitted, not its network")
    claims += [on_ring, claim_cells(diloco), claim_ring(what_if, slowmo)]
    groups = [seconds, *hours, fast, slowmo]
    caption = (
        "Modelled over published figures; the dashed lines are 15 % away. Seconds per iteration, "
        "hours of training, and Gbit/s that a share of computation needs."
    )
    return Findings(
        claims=claims,
        sentence=describe(claims, on_ring, diloco, what_if),
        tables=[
            make_table("Seconds and hours", [row for rows in groups for row in rows]),
            make_cell_table(diloco),
            make_what_if_table(what_if),
        ],
        figures=[Figure("errors", caption, partial(draw_rows, [*groups, diloco]))],
    )


def claim_errors(rows: Sequence[Row], bound: float, how: str) -> Claim:
    """The claim that a table is predicted within a bound.

    >>> claim_errors([Row("Table 2", "SGP", 8, 1.1, 1.0, "s")], 0.12, "fitted").ours
    '+10.0 % to +10.0 %'
    """
    ours = format_range(rows)
    new = [row for row in rows if not row.is_fitted]
    if 0 < len(new) < len(rows):
        ours += f"; the {len(new)}: {format_range(new)}"
    return Claim(
        f"{rows[0].table}: all {len(rows)} figures within {bound:.0%}; {how}.",
        f"{min(row.published for row in rows):g} to {max(row.published for row in rows):g} "
        f"{rows[0].unit}",
        ours,
        max(abs(row.error) for row in rows) <= bound,
        is_modelled=True,
    )


def format_range(rows: Sequence[Row]) -> str:
    """The smallest and the largest error of some rows."""
    errors = [100 * row.error for row in rows]
    return f"{min(errors):+.1f} % to {max(errors):+.1f} %"


def describe_fit(rows: Sequence[Row]) -> str:
    """How many rows of a table follow from the fit, and how many are predicted."""
    new = sum(not row.is_fitted for row in rows)
    if not new:
        return "the iterations are those of the fit"
    return f"the iterations of {len(rows) - new} are those of the fit, {new} are predicted"


def claim_cells(rows: Sequence[Row]) -> Claim:
    """The claim that bandwidths land in the published cell or beside it."""
    cells = [abs(published.count_cells(row)) for row in rows]
    near = sum(count <= MAX_CELLS for count in cells)
    ours = f"{cells.count(0)} in the same cell, {near - cells.count(0)} in the next"
    far = len(cells) - near
    return Claim(
        f"{rows[0].table}: all {len(rows)} bandwidths in the same cell of its logarithmic grid, or "
        "the next; nothing is fitted.",
        f"{min(row.published for row in rows):g} to {max(row.published for row in rows):g} Gbit/s",
        ours + (f", {far} further away" if far else ""),
        far == 0,
        is_modelled=True,
    )


def claim_ring(rows: Sequence[Row], slowmo: Sequence[Row]) -> Claim:
    """The claim that most of the published factor over AllReduce is how its AllReduce works."""
    ring = rows[-1]
    seconds = {row.name: row.published for row in slowmo}
    on_ring = seconds["AllReduce"] / seconds["SGP"]
    return Claim(
        "Most of the factor over AllReduce is how its all-reduce works: with a ring, and no copies "
        "through hosts, the same network would give less than half of it.",
        f"{ring.published:.2f} at {ring.nodes} nodes, with a tree (SGP-18, Table 2); {on_ring:.2f} "
        "with a ring (SlowMo, Table 2)",
        f"{ring.predicted:.2f}",
        ring.predicted < RING_SHARE * ring.published,
        is_modelled=True,
    )


def make_table(title: str, rows: Sequence[Row]) -> Table:
    """Predicted and published, side by side."""
    cells = [
        (
            row.table,
            row.name,
            f"{row.nodes}",
            f"{row.predicted:.3g} {row.unit}",
            f"{row.published:.3g} {row.unit}",
            f"{100 * row.error:+.1f} %",
            "yes" if row.is_fitted else "no",
        )
        for row in rows
    ]
    columns = ("table", "method", "nodes", "modelled", "published", "difference", "fitted")
    note = (
        "Ours are modelled, none is measured. Fitted: the network is fitted on the seconds of this "
        "method at this number of nodes, or of both parts of a hybrid."
    )
    return Table(title, columns, tuple(cells), note)


def make_what_if_table(rows: Sequence[Row]) -> Table:
    """AllReduce over SGP for each kind of all-reduce."""
    return Table(
        f"AllReduce's seconds over SGP's at {rows[0].nodes} nodes, by the all-reduce",
        ("all-reduce", "modelled", "published"),
        tuple(
            (row.name, f"{row.predicted:.2f}", f"{row.published:.2f}" if row is rows[0] else "-")
            for row in rows
        ),
        "The paper measured the first only.",
    )


def make_cell_table(rows: Sequence[Row]) -> Table:
    """A row per model and method, with a cell for each share of the time that is computation."""
    names = list(dict.fromkeys(row.name.rpartition(", ")[0] for row in rows))
    shares = list(dict.fromkeys(row.name.rpartition(", ")[2] for row in rows))
    cells = []
    for name in names:
        of_name = [row for row in rows if row.name.rpartition(", ")[0] == name]
        values = [
            f"{row.predicted:.3g} / {row.published:.3g}"
            + ("" if published.count_cells(row) == 0 else f" ({published.count_cells(row):+d})")
            for row in of_name
        ]
        cells.append((name, *values))
    return Table(
        "Gbit/s for a share of the time that is computation, modelled / published",
        ("model, method", *shares),
        tuple(cells),
        "In brackets: by how many cells of the table's logarithmic grid they differ.",
    )


def draw_rows(groups: Sequence[Sequence[Row]], figure: MatplotlibFigure) -> None:
    """Draws predicted over published figures, both on logarithmic axes."""
    figure.set_size_inches(7.0, 5.5)
    axes = figure.add_subplot()
    for index, rows in enumerate(groups):
        axes.plot(
            [row.published for row in rows],
            [row.predicted for row in rows],
            linestyle="none",
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            markerfacecolor="none",
            label=f"{rows[0].table} ({rows[0].unit})",
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


def describe(
    claims: Sequence[Claim], on_ring: Claim, diloco: Sequence[Row], what_if: Sequence[Row]
) -> str:
    """What was found, in a few sentences."""
    held = [claim for claim in claims if claim.holds]
    missed = [claim.statement.partition(":")[0] for claim in claims if not claim.holds]
    text = f"{len(held)} of {len(claims)} statements hold"
    if missed:
        text += f"; beyond the bound is {', '.join(missed)}"
    if any("InfiniBand" in claim.statement for claim in claims if not claim.holds):
        text += " (the model knows InfiniBand's nominal bandwidth, and nothing that slows it)"
    exact = sum(published.count_cells(row) == 0 for row in diloco)
    text += f"; {exact} of {len(diloco)} bandwidths of Streaming DiLoCo land in the published cell."
    if on_ring.holds:
        text += (
            " The bandwidth of one paper's network serves another's, too; SlowMo's has no copies "
            "through hosts, and its computation is a third fitted number."
        )
    if claims[-1].holds:
        ring = what_if[-1]
        text += (
            f" The published factor of {ring.published:.2f} over AllReduce belongs to a slow "
            f"all-reduce: with a ring and without copies it would be {ring.predicted:.2f}."
        )
    return text


SECTION = Section(
    name="cost-model",
    title="The cost model beside the published times",
    source="SGP-18, Table 2; SGP-19, Tables 1 to 5; SlowMo, Table 2 (Wang et al. 2020, "
    "arXiv:1910.00643); Streaming DiLoCo, Table 4 (Douillard et al. 2025, arXiv:2501.18512)",
    write_text=lambda _: (
        "The papers measured seconds per iteration, hours of training, and (in a simulation) the "
        "bandwidth that a share of computation needs. The cost model has computation, bytes, "
        "bandwidth, a copy through the host, overlap and the kind of all-reduce. Its network is "
        "fitted on the 16 figures of SGP-18, Table 2, alone. Most hours of SGP-19 are those same "
        "iterations, times their number; two peers and overlap are not. Every figure of ours in "
        "this section is modelled."
    ),
    list_runs=list_runs,
    find=find,
)
