"""Which algorithm for this model, this network and this many nodes: a table, and a choice.

    python -m experiments.plan --parameters 25.6M --compute 0.228 --bandwidth 10gbit --nodes 32

The times are those of `gossipjax.cost_model`: modelled, not measured. The choice is the method of
gossipjax with the least time for what AllReduce learns in an iteration. For that the plan assumes
what an inexact or late average costs: 5 % more examples per doubling of the steps after which all
nodes have what one has learned (`--late-price`). README.md in the folder above has the formula.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console

from experiments import results
from experiments.plan.candidates import Candidate, list_candidates
from experiments.plan.choice import Plan, Situation, make_plan
from experiments.plan.measure import measure_step, measure_stream
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
    parameters = options.parameters
    compute = options.compute
    bandwidth = options.bandwidth
    if options.needs_step:
        step = measure_step(options.model or DEFAULT_MODEL, options.examples)
        console.print(step.description, soft_wrap=True)
        parameters = f"{step.parameters}" if parameters is None else parameters
        compute = f"{step.seconds}" if compute is None else compute
    if options.needs_stream:
        stream = measure_stream()
        console.print(stream.description, soft_wrap=True)
        bandwidth = f"{stream.bandwidth}B/s"
    return dataclasses.replace(options, parameters=parameters, compute=compute, bandwidth=bandwidth)


def make_plan_of(options: Options) -> Plan:
    """The plan of options that give all quantities."""
    situation = Situation(
        make_workload(options),
        make_network(options),
        options.nodes,
        parse_slowness(options.slowness, "--slowness"),
        options.late_price,
    )
    return make_plan(situation, list_candidates_of(options, options.nodes))


def list_candidates_of(options: Options, nodes: int) -> list[Candidate]:
    """The methods for a number of nodes, in the forms of the options."""
    return list_candidates(nodes, options.wire, options.allreduce, options.outer_every)


def print_plan(plan: Plan, console: Console) -> None:
    """Prints the table, the choice and its reason."""
    console.print(make_table(plan))
    console.print(describe_reason(plan), highlight=False)


def write_files(plan: Plan, options: Options, out: Path) -> None:
    """Writes `summary.json` and the plots."""
    results.write_summary(
        out,
        dataclasses.asdict(options),
        {},
        [row.make_record() for row in plan.rows],
        choice=plan.chosen.make_record(),
        reasons=[dataclasses.asdict(plan.reason)],
    )
    plot_seconds_over_bandwidth(plan, out / "seconds_over_bandwidth.png")
    if options.nodes > 1 and isinstance(plan.chosen.situation.network.fabric, Star):

        def list_for(nodes: int) -> list[Candidate]:
            return list_candidates_of(options, nodes)

        plot_seconds_over_nodes(plan, list_for, out / "seconds_over_nodes.png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, plans, and reports."""
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    out = None
    with exit_on_error(lambda: out):
        options = tyro.cli(
            tyro.conf.FlagCreatePairsOff[Options],
            prog="python -m experiments.plan",
            description="Chooses an algorithm for a model, a network and a number of nodes.",
            args=arguments,
        )
        require_effects(options)
        console = Console()
        if options.measure:
            options = add_measured(options, console)
        plan = make_plan_of(options)
        print_plan(plan, console)
        if options.out is not None:
            out = results.create_run_dir("plan", options.out, options.overwrite)
            write_files(plan, options, out)
            console.print(f"Results: {out}", soft_wrap=True)


if __name__ == "__main__":
    main()
