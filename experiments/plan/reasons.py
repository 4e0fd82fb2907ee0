"""Why a method is chosen, in sentences."""

from collections.abc import Sequence

from experiments.plan.quantities import format_seconds
from experiments.plan.rows import OLD_GRADIENT, Row

MIN_GAIN = 0.1  # of priced time: the model's own error is of this size, so less is no gain
MIN_NOTABLE = 0.01  # relative difference that a reason mentions
NUM_RUNNERS_UP = 2
ROUNDING = 1e-9  # relative
MAX_PLAIN_RATIO = 1000.0  # beyond it a ratio has three digits

EVIDENCE = {
    "async": "SGP-19, Table 4, 16 nodes: AD-PSGD, which waits for nobody either, has 75.5 %, "
    "AllReduce 76.3 %.",
    "d1d": "RAND-20, speech, batch 8192: D1D-PSGD has a word error rate of 7.5 % (SWB) and 13.3 % "
    "(CH) with 64 learners, one learner 7.5 % and 13.0 %.",
    "rand-psgd": "RAND-20, speech, batch 8192: RAND-PSGD has a word error rate of 7.8 % (SWB) and "
    "13.4 % (CH) with 64 learners, one learner 7.5 % and 13.0 %.",
    "osgp": "SGP-19, Table 4, 16 nodes: 1-OSGP has 75.7 %, SGP 75.9 %, AllReduce 76.3 %.",
    "slowmo": "SlowMo, Table 1, 32 nodes: SGP with SlowMo has 75.73 %, AllReduce 76.00 %.",
    "diloco": "DiLoCo, 8 workers, every 500 steps, pre-trained: perplexity 15.02, 15.30 with a "
    "batch 8 times as large.",
    "local": "SlowMo, Table 1, 32 nodes: Local SGD has 69.94 %, with SlowMo 73.24 %, AllReduce "
    "76.00 %.",
    "dpsgd": "SGP-19, Table 1: D-PSGD has 75.9 % at 16 nodes and 74.4 % at 32, AllReduce 76.3 % "
    "and 76.2 %.",
    "two_peer": "SGP-19, Table 3: SGP with two peers has 76.2 % at 16 nodes and 75.7 % at 32, "
    "AllReduce 76.3 % and 76.2 %.",
    "sgp": "SGP-19, Table 1, ResNet-50 on ImageNet, 90 epochs: SGP has 75.9 % at 16 nodes and "
    "75.0 % at 32, AllReduce 76.3 % and 76.2 %; after 270 epochs (Table 5) SGP has 77.1 % at 32.",
}
"""Part of a name -> what others measured of the quality; the first that fits counts."""


def find_all_reduce(rows: Sequence[Row]) -> Row | None:
    """AllReduce in the form whose time is least; None if it is not among the rows."""
    found = [row for row in rows if row.candidate.name == "allreduce"]
    return min(found, key=lambda row: row.priced_seconds, default=None)


def list_reasons(chosen: Row, rows: Sequence[Row], checked: Sequence[Row]) -> list[str]:
    """Why this row, in sentences.

    Args:
      chosen: the choice.
      rows: all, the cheapest first.
      checked: those that were simulated to check the choice.
    """
    if chosen.candidate.name == "single":
        return ["One node has nobody to exchange with: train without any of this."]
    exact = find_all_reduce(rows)
    assert exact is not None
    reasons = [_describe_time(chosen)]
    if chosen is exact:
        reasons.append(_compare_with_gossip(exact, rows))
    else:
        reasons += [_compare_with_exact(chosen, exact), _describe_price(chosen)]
    if not chosen.situation.is_even:
        reasons.append(_describe_slowness(chosen, exact))
    reasons += _mention_buckets(chosen, rows)
    others = [row for row in rows if row is not chosen and row.candidate.is_here]
    reasons.append(_describe_runners_up(others[:NUM_RUNNERS_UP]))
    reasons += [_find_evidence(chosen)]
    reasons.append(_describe_check(checked))
    return list(filter(None, reasons))


def _describe_time(row: Row) -> str:
    prediction = row.prediction
    busy = prediction.exchange_seconds
    hidden = busy - prediction.exposed_seconds
    hidden = hidden if hidden > ROUNDING * busy else 0.0
    sentence = (
        f"{row.candidate.label} takes {format_seconds(row.seconds)} per iteration. The computation "
        f"takes {format_seconds(prediction.compute_seconds)}; the exchange keeps a link busy for "
        f"{format_seconds(busy)}, of which {format_seconds(hidden)} are hidden behind the "
        "computation"
    )
    is_waiting = any(exchange.awaits != "nobody" for exchange in row.candidate.method.exchanges)
    if is_waiting and busy and not prediction.exposed_seconds:
        margin = prediction.compute_seconds / busy
        sentence += f", and would be on links up to {margin:.2g} times as slow"
    return f"{sentence}."


def _compare_with_exact(chosen: Row, exact: Row) -> str:
    ratio = exact.seconds / chosen.seconds
    times = f"{ratio:.2f}" if ratio < MAX_PLAIN_RATIO else f"{ratio:.3g}"
    return f"{_name_exact(exact)} takes {format_seconds(exact.seconds)}, {times} times as long."


def _name_exact(exact: Row) -> str:
    """AllReduce, with the form of its messages unless it is float32."""
    wire = exact.candidate.wire
    return "AllReduce" if wire == "float32" else f"AllReduce ({wire})"


def _describe_price(row: Row) -> str:
    unit = "step" if row.lateness == 1 else "steps"
    old = OLD_GRADIENT * row.candidate.gradient_age
    age = f", of which {old:g} stand for gradients of an older model" if old else ""
    return (
        f"What a node has learned needs {row.lateness:.3g} {unit} to reach the others{age}. The "
        f"plan counts this as {row.price - 1:.0%} more examples (assumed, not measured: "
        f"{row.situation.late_price:g} per doubling), so {format_seconds(row.priced_seconds)} for "
        "what AllReduce learns in an iteration."
    )


def _compare_with_gossip(exact: Row, rows: Sequence[Row]) -> str:
    others = [
        row for row in rows if row.candidate.is_here and row.candidate.name != exact.candidate.name
    ]
    best = others[0]  # by priced seconds
    if exact.seconds < best.seconds * (1 + MIN_NOTABLE):
        return "AllReduce is better here: its average is exact, and nothing is notably faster."
    gain = exact.seconds / best.priced_seconds - 1
    return (
        f"AllReduce is better here: its average is exact. {best.candidate.label} takes "
        f"{format_seconds(best.seconds)}, but with the {best.price - 1:.0%} more examples at which "
        f"the plan counts its inexact or late average it gains {gain:+.0%}, and less than "
        f"{MIN_GAIN:.0%} is within the error of the model."
    )


def _describe_slowness(chosen: Row, exact: Row) -> str:
    slowness = chosen.situation.slowness
    kind = f"{slowness.factor:g}x" if slowness.kind == "constant" else slowness.kind
    without = chosen.prediction.seconds
    return (
        f"Slow nodes ({kind}) raise its time from {format_seconds(without)} to "
        f"{format_seconds(chosen.seconds)}; that of {_name_exact(exact)}, which waits for the "
        f"slowest in every step, from {format_seconds(exact.prediction.seconds)} to "
        f"{format_seconds(exact.seconds)}."
    )


def _mention_buckets(chosen: Row, rows: Sequence[Row]) -> list[str]:
    found = [row for row in rows if row.candidate.name.endswith("buckets")]
    buckets = min(found, key=lambda row: row.seconds)
    if buckets.seconds > chosen.priced_seconds * (1 + MIN_GAIN):
        return []
    name = buckets.candidate.label.replace("allreduce", "all-reduce")
    return [
        f"Compare before you decide: an {name} beside the backward pass, which gx.allreduce does "
        "not do and other libraries do, would "
        f"take {format_seconds(buckets.seconds)} if the overlap is perfect."
    ]


def _describe_runners_up(rows: Sequence[Row]) -> str:
    listed = [
        f"{row.candidate.label} ({format_seconds(row.seconds)}, counted as "
        f"{format_seconds(row.priced_seconds)})"
        for row in rows
    ]
    return f"Next: {', '.join(listed)}." if listed else ""


def _find_evidence(row: Row) -> str:
    found = [text for part, text in EVIDENCE.items() if part in row.candidate.name]
    return f"Measured by others: {found[0]}" if found else ""


def _describe_check(rows: Sequence[Row]) -> str:
    listed = []
    for row in rows:
        assert row.simulation is not None
        difference = row.simulation.seconds / row.prediction.seconds - 1
        formula = f"{round(difference, 3) + 0.0:+.1%} to the formula"  # + 0.0: no -0.0
        if not row.situation.is_even:
            formula = f"{format_seconds(row.prediction.seconds)} if no node were slow"
        seconds = format_seconds(row.simulation.seconds)
        listed.append(f"{row.candidate.label} {seconds} ({formula})")
    return f"Simulated, event by event: {', '.join(listed)}."
