"""Which algorithm for this model, this network and this many nodes: a table, and a choice.

    python -m experiments.plan --parameters 25.6M --compute 0.228 --bandwidth 10gbit --nodes 32

`gossipjax.cost_model` gives the times: modelled, not measured. The choice is the method of
gossipjax with the least time for what AllReduce learns in an iteration. For that the plan assumes
what an inexact or late average costs: 5 % more examples per doubling of the steps after which all
nodes have what one has learned (`--late-price`). docs/guides/experiments.md has the formula.
"""

import dataclasses
from collections.abc import Sequence

from rich.console import Console

from experiments import results
from experiments.options import parse_arguments
from experiments.plan.candidates import list_candidates
from experiments.plan.choice import Situation, make_plan
from experiments.plan.options import PlanOptions, make_network, make_workload
from experiments.plan.report import describe_reason, make_table
from experiments.program import exit_on_error
from gossipjax.cost_model import parse_slowness


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, plans, and reports."""
    out = None
    with exit_on_error(lambda: out):
        options = parse_arguments(PlanOptions, "experiments.plan", arguments)
        console = Console()
        situation = Situation(
            make_workload(options),
            make_network(options),
            options.nodes,
            parse_slowness(options.slowness, "--slowness"),
            options.late_price,
            options.steps,
        )
        candidates = list_candidates(
            options.nodes, options.wire, options.allreduce, options.outer_every
        )
        plan = make_plan(situation, candidates)
        console.print(make_table(plan, options.all))
        console.print(describe_reason(plan), highlight=False)
        if options.out is not None:
            out = results.create_run_dir("plan", options.out, options.overwrite)
            results.write_summary(
                out,
                dataclasses.asdict(options),
                {},
                [row.make_record() for row in plan.rows],
                choice=plan.chosen.make_record(),
                reasons=[plan.reason.make_record()],
            )
            console.print(f"Results: {out}", soft_wrap=True)


if __name__ == "__main__":
    main()
