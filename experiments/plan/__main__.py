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
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from experiments import results
from experiments.options.checks import Check, NonNegativeFloat, PositiveInt, check_fields
from experiments.options.paths import OptionalPath
from experiments.plan.candidates import Candidate, Kind, Wire, list_candidates
from experiments.plan.choice import LATE_PRICE, Plan, Situation, make_plan
from experiments.plan.measure import ModelName, measure_machine
from experiments.plan.quantities import parse_bandwidth, parse_count, parse_seconds
from experiments.plan.report import make_table, plot_seconds_over_bandwidth, plot_seconds_over_nodes
from experiments.program import exit_on_error
from gossipjax.cost_model import Islands, Network, Star, Torus, Workload, networks, parse_slowness

if TYPE_CHECKING:
    NetworkName = str
else:
    NetworkName = tyro.extras.literal_type_from_choices(tuple(networks.ALL))

MAX_NODES = 4096
Nodes = Annotated[PositiveInt, Check(f"at most {MAX_NODES}", lambda value: value <= MAX_NODES)]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the plan."""

    nodes: Nodes = 32
    """Number of nodes."""
    parameters: str | None = None
    """Parameters of the model, as 25.6M or 1B; 25.6M, a ResNet-50, if not given."""
    compute: str | None = None
    """Computation of a node's step without exchange, in seconds or as 228ms; 0.228, of SGP's
    servers of 8 V100, if not given."""
    examples: PositiveInt = 256
    """Examples of a node's step."""
    bandwidth: str | None = None
    """Of a node's link, each way, as 10gbit, 200mbit or 450GB/s."""
    latency: str = "0"
    """Of a message, in seconds or as 50us."""
    network: NetworkName | None = None
    """A network that others measured, in place of --bandwidth, --latency and --fabric."""
    fabric: Literal["star", "torus", "islands"] = "star"
    """star: a switch, without congestion. torus: links to neighbours only. islands: servers with
    faster links inside."""
    torus: str | None = None
    """Nodes along each dimension, as 16x16."""
    island_size: PositiveInt | None = None
    """Nodes of an island."""
    island_bandwidth: str | None = None
    """Of a node's link inside its island, as 450GB/s."""
    allreduce: Kind = "ring"
    """The algorithm of all-reduces; two-level needs islands."""
    slowness: str = "none"
    """As in experiments.speed stragglers. none; a factor, as 2x: of one node; random: each step of
    each node takes 1, 2 or 4 times as long; lognormal: exp(0.5 g) times."""
    wire: tuple[Wire, ...] = ("float32",)
    """One or several forms of the messages of gossip; asynchronous SGP has the first two."""
    outer_every: PositiveInt = 100
    """Steps between the outer steps of DiLoCo."""
    late_price: NonNegativeFloat = LATE_PRICE
    """Assumed: more examples, as a fraction, per doubling of the steps after which all nodes have
    what one has learned."""
    measure: bool = False
    """Take parameters and computation from a model on this machine, and the bandwidth from a TCP
    stream over its loopback, unless they are given."""
    model: ModelName = "small_cnn"
    """The model of --measure."""
    out: OptionalPath = None
    """Folder for summary.json and plots; without it nothing is written."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.wire or len(set(self.wire)) < len(self.wire):
            raise ValueError(f"--wire must be one or several different forms, got {self.wire}.")
        self._require_network()
        parse_slowness(self.slowness)
        make_workload(self)
        if self.bandwidth is not None or self.network is not None:
            make_network(self)

    def _require_network(self) -> None:
        if self.network is not None and self.bandwidth is not None:
            raise ValueError(
                f"--bandwidth must be left out beside --network, got {self.bandwidth} and "
                f"{self.network}: give one of them."
            )
        if self.network is None and self.bandwidth is None and not self.measure:
            raise ValueError(
                "--bandwidth must be given, as 10gbit, got none: give it, or --network, or "
                "--measure, which takes it from this machine."
            )
        needed = {"torus": ("torus",), "islands": ("island_size", "island_bandwidth")}
        for fabric, names in needed.items():
            for name in names:
                option = f"--{name.replace('_', '-')}"
                if (getattr(self, name) is None) == (self.fabric == fabric):
                    raise ValueError(
                        f"{option} must be given with --fabric {fabric}, and with no other, got "
                        f"{getattr(self, name)} with {self.fabric}: give both or none."
                    )
        if self.allreduce == "two-level" and self.fabric != "islands":
            raise ValueError(
                f"--fabric must be islands for --allreduce two-level, got {self.fabric}: give "
                "--fabric islands --island-size 8 --island-bandwidth 450GB/s, or another one."
            )


def make_workload(options: Options) -> Workload:
    """The model and the computation of the options."""
    return Workload(
        parameters=parse_count(options.parameters or "25.6M", "--parameters"),
        compute_seconds=parse_seconds(options.compute or "0.228", "--compute"),
        examples=options.examples,
    )


def make_network(options: Options) -> Network:
    """The links of the options; their fabric must fit the number of nodes."""
    if options.network is not None:
        network = networks.ALL[options.network]
    else:
        network = Network(
            parse_bandwidth(options.bandwidth or "", "--bandwidth"),
            parse_seconds(options.latency, "--latency", is_zero_allowed=True),
            make_fabric(options),
        )
    network.message_seconds([(i + 1) % options.nodes for i in range(options.nodes)], 1.0)
    return network


def make_fabric(options: Options) -> Star | Torus | Islands:
    """How the links are joined."""
    if options.fabric == "torus":
        assert options.torus is not None
        extents = options.torus.lower().split("x")
        if not all(extent.isdecimal() for extent in extents):
            raise ValueError(
                f"--torus must be nodes along each dimension, as 16x16, got {options.torus!r}."
            )
        return Torus(tuple(map(int, extents)))
    if options.fabric == "islands":
        assert options.island_size is not None
        bandwidth = parse_bandwidth(options.island_bandwidth or "", "--island-bandwidth")
        return Islands(options.island_size, bandwidth)
    return Star()


def add_measured(options: Options, console: Console) -> Options:
    """Fills in what is not given from this machine, and says what was measured."""
    measured = measure_machine(options.model, options.examples)
    console.print(measured.description, soft_wrap=True)
    bandwidth = options.bandwidth
    if bandwidth is None and options.network is None:
        bandwidth = f"{measured.bandwidth}B/s"
    return dataclasses.replace(
        options,
        parameters=options.parameters or f"{measured.parameters}",
        compute=options.compute or f"{measured.compute_seconds}",
        bandwidth=bandwidth,
    )


def make_plan_of(options: Options) -> Plan:
    """The plan of options that give all quantities."""
    situation = Situation(
        make_workload(options),
        make_network(options),
        options.nodes,
        parse_slowness(options.slowness),
        options.late_price,
    )
    return make_plan(situation, list_candidates_of(options, options.nodes))


def list_candidates_of(options: Options, nodes: int) -> list[Candidate]:
    """The methods for a number of nodes, in the forms of the options."""
    return list_candidates(nodes, options.wire, options.allreduce, options.outer_every)


def print_plan(plan: Plan, console: Console) -> None:
    """Prints the table, the choice and its reasons."""
    console.print(make_table(plan))
    console.print(f"Choice: [bold]{plan.chosen.candidate.label}[/bold]")
    for reason in plan.reasons:
        console.print(f"- {reason}", highlight=False)


def write_files(plan: Plan, options: Options, out: Path) -> None:
    """Writes `summary.json` and the plots."""
    results.write_summary(
        out,
        dataclasses.asdict(options),
        {},
        [row.make_record() for row in plan.rows],
        choice=plan.chosen.make_record(),
        reasons=plan.reasons,
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
