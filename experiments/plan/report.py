"""The table of a plan, and its reason."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.plan.choice import Plan, Row, Situation

MEGA = 1e6
MAX_PLAIN = 1e8  # beyond it a number in the table has three digits


def make_table(plan: Plan) -> Table:
    """A row per method, the cheapest first."""
    table = Table(
        title=describe_situation(plan.chosen.situation),
        caption="Modelled, not measured. counted: seconds for what AllReduce learns in a step, "
        "assumed. sigma: of the first log2(N) steps, 0 is an exact average, - if busy links leave "
        "exchanges out. late: steps until what a node has learned is at all others. MB: of a node, "
        "sent per step; kept beside the usual. (): not in gossipjax. !: messages take more than "
        "a hundredth of the run.",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("method", overflow="fold", min_width=16)
    headers = ("s per\nstep", "coun-\nted", "examples\nper s", "effi-\nciency", "MB\nsent")
    for header in (*headers, "sig-\nma", "stale\nsteps", "\nlate", "MB\nkept"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in plan.rows:
        table.add_row(*_format_row(row), style="bold" if row is plan.chosen else "")
    return table


def _format_row(row: Row) -> list[str]:
    label = row.candidate.label
    record = row.make_record()
    return [
        (label if row.candidate.is_here else f"({label})") + " !" * (not row.is_together),
        f"{row.seconds:.3g}",
        f"{row.priced_seconds:.3g}",
        _format_large(record["examples_per_second"]),
        f"{record['efficiency']:.0%}",
        f"{record['sent_bytes'] / MEGA:,.4g}",
        "-" if row.sigma is None else f"{row.sigma:.2f}",
        f"{row.staleness:.3g}",
        f"{row.lateness:.3g}",
        _format_large(record["kept_bytes"] / MEGA),
    ]


def _format_large(value: float) -> str:
    return f"{value:,.0f}" if value < MAX_PLAIN else f"{value:.3g}"


def describe_situation(situation: Situation) -> str:
    """What the plan is for, in a line."""
    network = situation.network
    slowness = situation.slowness
    slow = "" if situation.is_even else f", slowness: {slowness.kind}"
    if slowness.kind == "constant":
        slow = f", one {slowness.factor:g}x slow"
    return (
        f"{situation.nodes} node(s){slow}, {situation.workload.model_bytes / MEGA:,.4g} MB of "
        f"parameters, {situation.workload.compute_seconds:g} s of computation, "
        f"{network.name or f'{8 * network.bandwidth / 1e9:.4g} Gbit/s'}"
    )


def describe_reason(plan: Plan) -> str:
    """The choice and its reason, in two or three lines."""
    reason = plan.reason
    lines = [
        f"Choice: {plan.chosen.candidate.label}: {reason.cause}. {reason.seconds:.3g} s a step, "
        f"AllReduce {reason.allreduce_seconds:.3g} s; counted, the gain over AllReduce is "
        f"{reason.gain:+.0%}."
    ]
    if reason.bucketed_seconds is not None:
        lines.append(
            f"Other libraries all-reduce beside the backward pass: {reason.bucketed_seconds:.3g} s "
            f"if the overlap is perfect, the choice {plan.chosen.priced_seconds:.3g} s, counted."
        )
    if reason.evidence is not None:
        lines.append(f"Its measured quality: {reason.evidence}.")
    if reason.untried is not None:
        row = reason.untried
        lines.append(
            f"Cheaper, {row.seconds:.3g} s a step, but nobody has measured its quality: "
            f"{row.candidate.label}."
        )
    if reason.apart is not None:
        row = reason.apart
        lines.append(
            f"No training together: {row.candidate.label}, of which a message takes "
            f"{row.staleness * row.seconds:.3g} s, {row.staleness:.3g} of "
            f"{row.situation.steps:,} steps."
        )
    return "\n".join(lines)
