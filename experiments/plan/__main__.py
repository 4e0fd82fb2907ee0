"""Which algorithm for this model, this network and this many nodes: a table, and a choice.

    python -m experiments.plan --parameters 25.6M --compute 0.228 --bandwidth 10gbit --nodes 32

The times are those of `gossipjax.cost_model`: modelled, not measured. The choice is the method of
gossipjax with the least time for what AllReduce learns in an iteration. For that the plan assumes
what an inexact or late average costs: 5 % more examples per doubling of the steps after which all
nodes have what one has learned (`--late-price`). docs/guides/experiments.md has the formula.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from experiments import results
from experiments.options import parse_arguments
from experiments.plan.candidates import Candidate, list_candidates
from experiments.plan.choice import Plan, Situation, make_plan
from experiments.plan.measure import STEPS, measure_step, measure_stream
from experiments.plan.options import (
    DEFAULT_MODEL,
    Options,
    make_network,
    make_workload,
    require_effects,
)
from experiments.plan.report import (
    describe_reason,
    make_table,
    plot_seconds_over_bandwidth,
    plot_seconds_over_nodes,
)
from experiments.program import exit_on_error
from gossipjax.cost_model import Star, parse_slowness


def add_measured(options: Options, console: Console) -> Options:
    """Fills in what is not given from this machine, and says what was measured."""
    changes = {}
    if options.needs_step:
        model = options.model or DEFAULT_MODEL
        step = measure_step(model, options.examples)
        console.print(
            f"Measured here: {step.seconds:.4g} s for a step (gradient and SGD with momentum) of "
            f"{model}, {step.parameters:,} parameters, {options.examples} random examples, on "
            f"{step.device}, the median of {STEPS}.",
            soft_wrap=True,
        )
        changes["parameters"] = options.parameters or f"{step.parameters}"
        changes["compute"] = options.compute or f"{step.seconds}"
    if options.needs_stream:
        bandwidth = measure_stream()
        console.print(
            f"Measured here: {bandwidth / 1e9:.3g} GB/s in a TCP stream between two processes over "
            "the loopback, which is no network: give --bandwidth for a real one.",
            soft_wrap=True,
        )
        changes["bandwidth"] = f"{bandwidth}B/s"
    return dataclasses.replace(options, **changes)


def write_files(
    plan: Plan, options: Options, out: Path, list_for: Callable[[int], list[Candidate]]
) -> None:
    """Writes `summary.json` and the plots; `list_for` makes the methods for a number of nodes."""
    results.write_summary(
        out,
        dataclasses.asdict(options),
        {},
        [row.make_record() for row in plan.rows],
        choice=plan.chosen.make_record(),
        reasons=[plan.reason.make_record()],
    )
    plot_seconds_over_bandwidth(plan, out / "seconds_over_bandwidth.png")
    if options.nodes > 1 and isinstance(plan.chosen.situation.network.fabric, Star):
        plot_seconds_over_nodes(plan, list_for, out / "seconds_over_nodes.png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, plans, and reports."""
    out = None
    with exit_on_error(lambda: out):
        options = parse_arguments(
            Options,
            "experiments.plan",
            arguments,
        )
        require_effects(options)
        console = Console()
        if options.measure:
            options = add_measured(options, console)

        def list_for(nodes: int) -> list[Candidate]:
            return list_candidates(nodes, options.wire, options.allreduce, options.outer_every)

        situation = Situation(
            make_workload(options),
            make_network(options),
            options.nodes,
            parse_slowness(options.slowness, "--slowness"),
            options.late_price,
            options.steps,
        )
        plan = make_plan(situation, list_for(options.nodes))
        console.print(make_table(plan))
        console.print(describe_reason(plan), highlight=False)
        if options.out is not None:
            out = results.create_run_dir("plan", options.out, options.overwrite)
            write_files(plan, options, out, list_for)
            console.print(f"Results: {out}", soft_wrap=True)


if __name__ == "__main__":
    main()
