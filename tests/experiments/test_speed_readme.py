"""The README of the benchmarks: its commands parse, and its fields are those of the files."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import gossipjax as gx
from experiments.speed.__main__ import COMMANDS, COMPILED, LOCAL
from experiments.speed.compiled import islands, scaling, schedule, slices
from experiments.speed.compiled.hlo import parse_module
from experiments.speed.compiled.targets import Target
from experiments.speed.harness import CheckOptions
from experiments.speed.local import compilation, gossip, messages, simulation, step
from experiments.speed.local import input as input_check
from experiments.speed.wire import rows, stragglers
from experiments.speed.wire.measure import summarize_configuration, summarize_row
from experiments.speed.wire.rows import make_row
from experiments.speed.wire.stragglers import add_ratios, summarize_run
from experiments.speed.wire.timed import ALL_LINKS, BUSY_HOSTS, COMPUTATION, SINGLE_LINK

README = (Path(step.__file__).parents[3] / "docs" / "evidence" / "speed.md").read_text()
OPTIONS = {
    "local input": input_check.Options,
    "compiled islands": islands.Options,
    "wire": rows.Options,
    "compiled scaling": scaling.Options,
    "compiled schedule": schedule.Options,
    "local compilation": compilation.Options,
    "local gossip": gossip.Options,
    "local messages": messages.Options,
    "local simulation": simulation.Options,
    "local step": step.Options,
    "compiled step": CheckOptions,
    "compiled slices": slices.Options,
    "stragglers": stragglers.Options,
}


def read_fields(section):
    """The names in the column "field" of the section's table."""
    text = README.split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[0][1:4]] == ["column", "field", "meaning"]
    return {name for row in rows[2:] for name in re.findall(r"\w+", row[2])}


def test_commands_and_options_exist():
    commands = re.findall(r"python -m experiments\.speed ((?:(?:compiled|local) )?\w+)(.*)", README)
    checks = {f"compiled {name}" for name in COMPILED} | {f"local {name}" for name in LOCAL}
    checks |= COMMANDS.keys() - {"compiled", "local"}
    assert {name for name, _ in commands} == checks == set(OPTIONS)
    for name, arguments in commands:
        fields = {f"--{field.replace('_', '-')}" for field in OPTIONS[name].__dataclass_fields__}
        assert set(re.findall(r"--[a-z-]+", arguments)) <= fields
    every_field = {field for options in OPTIONS.values() for field in options.__dataclass_fields__}
    for option in re.findall(r"`--([a-z-]+)", README):
        assert option == "help" or option.replace("-", "_") in every_field


def test_fields_of_wire():
    row = make_row("sgp", "float32", 2)
    names = (COMPUTATION, ALL_LINKS, SINGLE_LINK, BUSY_HOSTS, row.name)
    record = {
        "seconds": {name: [1.0, 2.0] for name in names},
        "cpu_seconds": {name: [0.5, 0.6] for name in names},
        "nic_bytes": {name: [3, 4] for name in names},
        "stream_bytes": 5,
        "parameters": 6,
        "examples": 7,
        "peak_memory_bytes": 8,
    }
    configuration = summarize_configuration(2, "1gbit", "slept", [record, record])
    run = summarize_row(row, configuration, [record, record])
    assert read_fields("wire") <= set(run)
    more = README.split("Objects in `runs` hold")[1].split("`left_out`")[0]
    expected = {"runs", "configurations", "bits_per_second", *run, *configuration}
    assert set(re.findall(r"`(\w+)`", more)) <= expected


def test_the_settings_of_the_allocator_are_those_of_the_launcher():
    settings = [f"{name}={value}" for name, value in gx.launch.MALLOC_ENVIRONMENT.items()]
    assert f"{' '.join(settings)} \\\n  python -m experiments.speed local step" in README


def test_fields_of_stragglers():
    record = {"start": 0.0, "ends": [1.0, 2.0], "losses": [1.0, 1.0], "loss": 1.0}
    records = [record | {"sent": 1, "kept": 0, "staleness": 1.0}] * 2
    options = stragglers.Options(2, steps=2, compute_seconds=1.0)
    run = summarize_run("async-sgp", "none", options, records)
    add_ratios([run])
    assert read_fields("stragglers") <= set(run)
    more = README.split("Objects in `runs` hold `nodes`, `steps`")[1].split("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", more)) <= set(run)


@pytest.mark.parametrize("name", ["sgp", "allreduce"])
def test_fields_of_schedule(name):
    mesh = Mesh(np.array(jax.devices()[:2]), ("nodes",))
    options = schedule.Options(layers=1, width=2, batch_size_per_node=1)
    target = Target("2 CPUs", "tpu", 2, "")
    lines = schedule.compile_case(name, "float32", target, options, mesh)
    (run,) = schedule.summarize(lines)
    assert read_fields("schedule") <= set(run)
    assert schedule.make_table([run]).row_count == 1


def test_fields_of_slices():
    chips = [SimpleNamespace(id=number, slice_index=number) for number in range(2)]
    program = "HloModule m, is_scheduled=true\n\nENTRY %main () -> f32[] {\n}\n"
    round_ = gx.topology.ring(2).rounds[0]
    run = slices.read_program(parse_module(program), round_, np.array(chips), 4)
    assert not run["matches_schedule"]
    run |= {"nodes": 2, "chips_per_node": 1, "round": 0}
    assert read_fields("slices") <= set(run)
    assert slices.make_table([run]).row_count == 1


def test_fields_of_scaling():
    names = "topology step nodes rounds collectives_per_round trace_seconds compile_seconds growth"
    run = dict.fromkeys((*names.split(), *scaling.SIZES), 1) | {"topology": "ring", "step": "s"}
    assert read_fields("scaling") == set(run)
    assert scaling.make_table([run]).row_count == 1
