"""The table of a plan, and its reason."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from experiments.plan.choice import Plan, Row, Situation

MEGA = 1e6
DEFAULT_GRAPH = "@one_peer_exponential"
SLOWER = 1.05  # than if all nodes were equally fast


def make_table(plan: Plan, shows_all: bool = False) -> Table:
    """A row per method, or for the best of each kind, the cheapest first, within 80 columns."""
    rest = "" if shows_all else "The best of each kind; --all shows the others. "
    table = Table(
        title=describe_situation(plan.chosen.situation),
        caption="Modelled, not measured. Times AllReduce: how many times as fast as AllReduce a "
        "run gets to one loss, with the examples that late or inexact averages cost, an "
        f"assumption. (): not in gossipjax. {rest}summary.json in --out has all figures.",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("method", overflow="fold", min_width=34)
    for header in ("s per\nstep", "times\nAllReduce", "MB sent\nper step"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column(" bound by", no_wrap=True)
    kinds = set()
    for row in plan.rows:
        is_chosen = row is plan.chosen
        is_shown = shows_all or is_chosen or row.candidate.name == "allreduce"
        if is_shown or _find_kind(row) not in kinds:
            table.add_row(*_format_row(row, plan), style="bold" if is_chosen else "")
        kinds.add(_find_kind(row))
    return table


def _find_kind(row: Row) -> tuple[bool, ...]:
    """Whether a method waits for nobody, sends to peers, sends rarely, and is late."""
    method = row.candidate.method
    to_peers = any(exchange.schedule is not None for exchange in method.exchanges)
    is_rare = all(exchange.every > 1 for exchange in method.exchanges)
    return method.is_asynchronous, to_peers, is_rare, method.staleness > 0


def _describe_order(row: Row) -> str:
    """The label, with the order of SGP and D-PSGD, by default as in their papers."""
    label = row.candidate.label
    is_early = any(exchange.is_early for exchange in row.candidate.method.exchanges)
    order = "combine while adapting" if is_early else "adapt, then combine"
    return f"{label}, {order}" if label.startswith(("sgp", "dpsgd")) else label


def _format_row(row: Row, plan: Plan) -> list[str]:
    label = _describe_order(row).replace(DEFAULT_GRAPH, "")
    bound = "the exchange" if row.prediction.exposed_seconds else "computation"
    if not row.is_together:
        bound = "late messages"
    elif row.seconds > SLOWER * row.prediction.seconds:
        bound = "slow nodes"
    return [
        label if row.candidate.is_here else f"({label})",
        f"{row.seconds:.3g}",
        f"{plan.reason.allreduce_seconds / row.priced_seconds:.2f}",
        f"{row.prediction.sent_bytes / MEGA:,.4g}",
        f" {bound}",
    ]


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
        f"Choice: {_describe_order(plan.chosen)}: {reason.cause}. {reason.seconds:.3g} s a step, "
        f"AllReduce {reason.allreduce_seconds:.3g} s; counted, the gain over AllReduce is "
        f"{reason.gain:+.0%}."
    ]
    if reason.bucketed_seconds is not None:
        lines.append(
            f"Other libraries all-reduce during the backward pass: {reason.bucketed_seconds:.3g} s "
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
