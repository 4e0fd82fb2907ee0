"""Compiled train steps: the readers on texts written by hand, and programs for absent chips.

The tests marked `aot` compile for TPUs and GPUs, each where its compiler is installed.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from test_speed_readme import read_fields

import gossipjax as gx
from experiments.models import decoder
from experiments.models.transformer import Size
from experiments.speed.__main__ import main
from experiments.speed.compiled import hlo, islands, slices, targets
from experiments.speed.compiled.components import SCHEDULES, find_round_components
from experiments.speed.compiled.hlo import Message, count_overlapped, parse_module
from experiments.speed.compiled.passes import MIN_PASSES, OPTIMIZER_ONLY, count_updates
from experiments.speed.compiled.schedule import (
    CASES,
    STREAMING_DILOCO,
    describe_permutations,
    expect_average,
    expect_messages,
    make_case,
)
from experiments.speed.compiled.slices import (
    count_sent,
    find_crossing,
    list_pairs,
    read_crossings,
)
from experiments.speed.compiled.targets import MlpSpec, lower_step
from experiments.training import placement
from experiments.training.methods import MethodOptions, make_method, make_schedule

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"a": (64, 32), "b": (100,), "c": (8, 8, 8)}
VALUES = sum(int(np.prod(shape)) for shape in SMALL.values())
TINY = Size(layers=1, width=32, heads=2, hidden=64)


def run_check(check, kind, out, *arguments):
    """Runs a check in a process, for chips whose compiler must be here; returns its `runs`."""
    if missing := targets.find_missing_packages(kind):
        pytest.skip(f"not installed: {', '.join(missing)}")
    command = [sys.executable, "-m", "experiments.speed", "compiled", check, *arguments]
    done = subprocess.run(
        [*command, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((out / "summary.json").read_text())["runs"]


OVERLAPPED = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4,4]{1,0})->f32[4,4]{1,0}}

%product (p.0: f32[4,4], p.1: f32[4,4]) -> f32[4,4] {
  %p.0 = f32[4,4]{1,0:T(8,128)} parameter(0)
  %p.1 = f32[4,4]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,4]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (s: (f32[4,4], f32[4,4])) -> (f32[4,4], f32[4,4]) {
  %s = (f32[4,4]{1,0}, /*index=1*/f32[4,4]{1,0}) parameter(0)
  %a = f32[4,4]{1,0} get-tuple-element(%s), index=0
  %c = f32[4,4]{1,0} convolution(%a, %a), dim_labels=bf_io->bf
  ROOT %t = (f32[4,4]{1,0}, f32[4,4]{1,0}) tuple(%c, %c)
}

ENTRY %main (x: f32[4,4], w: u16[10]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %w = u16[10]{0:T(1024)S(1)} parameter(1)
  %gemm.0 = (f32[4,4]{1,0}, s8[9]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"
  %start = (u16[10]{0}, u16[10]{0}, u32[], u32[]) collective-permute-start(%w), channel_id=1, \
source_target_pairs={{0,1},{1,0},{2,2}}
  %fusion.1 = f32[4,4]{1,0} fusion(%x, %x), kind=kOutput, calls=%product
  %loop = (f32[4,4]{1,0}, f32[4,4]{1,0}) while(%fusion.1), condition=%never, body=%body
  %done = u16[10]{0} collective-permute-done(%start)
  %other = f32[4,4]{1,0} custom-call(%x), custom_call_target="AllocateBuffer"
  %mean = (f32[4,4]{1,0}, bf16[2]{0}) all-reduce(%x, %y), channel_id=2, to_apply=%add
  %y = bf16[2]{0} constant({1, 2})
  ROOT %last = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_reads_messages_and_matmuls():
    module = hlo.parse_module(OVERLAPPED)
    assert hlo.list_messages(module) == [
        Message("collective-permute", "u16", 20),
        Message("all-reduce", "bf16+f32", 68),
    ]
    assert hlo.count_matmuls(module) == 4
    assert hlo.count_matmuls_before(module) == 1
    assert hlo.count_overlapped(module) == 2
    assert hlo.list_permutations(module) == [[(0, 1), (1, 0), (2, 2)]]


def test_a_collective_that_blocks_hides_nothing():
    module = hlo.parse_module(OVERLAPPED.replace("collective-permute-start", "collective-permute"))
    assert hlo.count_overlapped(module) == 0
    assert hlo.list_messages(module)[0] == Message("collective-permute", "u16", 20)


def test_only_a_scheduled_module_is_read():
    with pytest.raises(ValueError, match="scheduled module"):
        hlo.parse_module(OVERLAPPED.replace("is_scheduled=true, ", ""))


@pytest.mark.parametrize(
    ("name", "wire", "count", "size"),
    [
        ("sgp", "float32", 1, 4 * 101),
        ("sgp@two_peer_exponential", "float32", 2, 4 * 101),
        ("sgp", "bfloat16", 1, 2 * 102),
        ("sgp-cwa", "float32", 1, 4 * 101),
        ("sgp-cwa", "bfloat16", 1, 2 * 102),
        ("dpsgd", "float32", 2, 4 * 100),
        ("dpsgd@bipartite_exponential", "float32", 1, 4 * 100),
        ("1-osgp", "float32", 1, 4 * 101),
        ("1-osgp", "bfloat16", 1, 2 * 102),
    ],
)
def test_the_schedule_says_which_messages_to_expect(name, wire, count, size):
    state = make_method(name, MethodOptions(nodes=8), optax.sgd(0.1)).state()
    assert state is not None
    for step in gx.canonical_steps(state):
        expected = expect_messages(state, wire, [25] * 4, step)
        assert [message.bytes for message in expected] == [size] * count
        assert {message.opcode for message in expected} == {"collective-permute"}


@pytest.mark.parametrize(("name", "wire"), CASES)
def test_programs_for_this_machine_exchange_what_is_expected(name, wire):
    mlp = MlpSpec(layers=2, width=3, batch=5)
    method, steps = make_case(name, wire, 4, mlp.layers)
    step = steps[-1]
    mesh = Mesh(np.array(jax.devices()[:4]), ("nodes",))
    compiled = lower_step(method.transform, mlp, mesh, step).compile()
    module = hlo.parse_module(compiled.as_text())
    messages = hlo.list_messages(module)
    if name == "allreduce":  # XLA on CPU reduces every array of the model separately
        messages = [Message("all-reduce", "f32", sum(message.bytes for message in messages))]
    expected = expect_messages(method.state(), wire, mlp.layer_sizes, step)
    if name == STREAMING_DILOCO:
        expected = expect_average(step, mlp, 4, "cpu")
    assert messages == expected
    assert hlo.count_matmuls(module) == 3 * 2 - 1


def test_a_message_of_overlap_2_is_that_of_the_step_that_sent_it():
    """Rounds of one and of two peers by turns: pieces travel one and two steps after."""
    matrices = gx.topology.piecewise(
        {0: gx.topology.ring(4), 1: gx.topology.one_peer_exponential(4)}
    ).matrices(2)
    rounds = gx.topology.from_matrices(matrices)
    method = make_method("2-osgp", MethodOptions(nodes=4), optax.sgd(0.1))
    state = dataclasses.replace(method, gossip=gx.osgp(rounds, overlap=2)).state()
    messages = [expect_messages(state, "float32", [9, 9], step) for step in range(1, 5)]
    bytes_ = [[message.bytes for message in sent] for sent in messages]
    assert bytes_ == [[40, 40], [36, 36], [40], [36]]


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets, "find_missing_packages", lambda kind: [f"{kind}-compiler"])
    with pytest.raises(ValueError, match=r"no gpu-compiler\.(.|\n)*jax-cuda12-plugin=="):
        targets.choose_targets(("gpu",))
    with pytest.raises(ValueError, match=r'any target(.|\n)*pip install "jax\[tpu\]=='):
        targets.choose_targets(())


@pytest.mark.parametrize(
    ("edges", "expected", "self_edges", "fillers"),
    [
        ([(0, 1), (1, 2), (2, 3)], [[4]], 0, 0),
        ([(0, 1), (1, 2), (2, 3), (3, 0)], [[4]], 0, 1),
        ([(0, 1), (1, 0), (2, 3), (3, 3)], [[2, 2]], 1, 0),
    ],
)
def test_edges_that_carry_no_message_are_counted(edges, expected, self_edges, fillers):
    chain = make_schedule("chain", 4).rounds[0]
    fields = describe_permutations([edges], chain)
    assert fields["components"] == expected
    assert fields["expected_components"] == [[4], [4]]
    assert (fields["self_edges"], fields["fillers"]) == (self_edges, fillers)


@pytest.mark.parametrize("nodes", [4, 6, 8, 12])
def test_a_shift_has_as_many_components_as_divide_it(nodes):
    for round_, hop in zip(gx.topology.complete_cycle(nodes).rounds, range(1, nodes), strict=True):
        count = math.gcd(nodes, hop)
        assert find_round_components(round_) == [[nodes // count] * count]


def test_the_components_of_every_topology(tmp_path):
    arguments = ["--components", "--nodes", "6", "8", "--out", str(tmp_path / "out")]
    main(["compiled", "schedule", *arguments])
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    by_name = {(run["topology"], run["nodes"]): run for run in runs}
    assert {name for name, _ in by_name} == set(SCHEDULES)
    assert ("hypercube", 6) not in by_name
    assert by_name["bipartite_exponential", 8]["kinds"] == ["4x2"]
    assert by_name["one_peer_exponential", 8]["kinds"] == ["1x8", "2x4", "4x2"]
    assert by_name["complete", 8]["kinds"] == ["all-reduce"]
    assert by_name["star", 6]["idle"] == 4
    table = (tmp_path / "out" / "components.md").read_text()
    assert "| hypercube | not possible | 4x2 |" in table
    documented = (ROOT / "docs" / "guides" / "topologies.md").read_text()
    assert read_column(table, 3) == read_column(documented, 2)  # of 8 nodes


def read_column(text, number):
    """A column of a table of components, by topology."""
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    return {row[1]: row[number] for row in rows if row[1:] and row[1] in SCHEDULES}


@pytest.fixture(scope="module", params=["tpu", "gpu"])
def runs(request, tmp_path_factory):
    """The list `runs` that the program writes for a small model."""
    sizes = ["--layers", "6", "--width", "512", "--batch-size-per-node", "32"]
    out = tmp_path_factory.mktemp("schedule") / "out"
    return run_check("schedule", request.param, out, "--target", request.param, *sizes)


@pytest.mark.aot
def test_programs_exchange_what_their_schedules_say(runs):
    assert len(runs) % len(CASES) == 0
    for run in runs:
        assert run["matches_schedule"]
        assert run["self_edges"] == run["fillers"] == 0
        assert run["components"] == run["expected_components"]
        assert run["messages"] == run["expected_messages"]
        assert run["matmuls"] == 3 * 6 - 1  # no gradient of the inputs


@pytest.mark.aot
def test_overlap_hides_the_exchange_behind_the_matmuls(runs):
    """With little computation and a large message; with more, XLA on GPUs may start it later.

    On 64 TPU chips XLA lets most permutations block, depending on the positions of the nodes.
    """
    on_eight_chips = [run for run in runs if run["target"].startswith("8 ")]
    # Streaming DiLoCo's message is of one layer: XLA for GPUs starts it when the rest hides it.
    for algorithm, least in (("1-osgp", 0.95), ("sgp-cwa", 0.95), (STREAMING_DILOCO, 0.5)):
        (run,) = (
            run
            for run in on_eight_chips
            if (run["algorithm"], run["wire"]) == (algorithm, "float32")
        )
        assert run["fraction_overlapped"] >= least
    for run in runs:
        if run["algorithm"] == "sgp":
            assert run["matmuls_overlapped"] == 0


PROGRAM = """\
HloModule jit_step, is_scheduled=true, num_partitions=2

%of_slice_0 (p.0: f32[8]) -> f32[8] {
  %p.0 = f32[8]{0} parameter(0)
  ROOT %permute.0 = f32[8]{0} collective-permute(%p.0), source_target_pairs={{0,1}}
}

%of_slice_1 (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %copy = f32[8]{0} copy(%p.1)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %token = token[] after-all()
  %send = (f32[8]{0}, u32[], token[]) send(%x, %token), frontend_attributes={TARGET}
  %recv = (f32[8]{0}, u32[], token[]) recv(%token), frontend_attributes={TARGET}
  %dot.0 = f32[8]{0} dot(%x, %x), lhs_contracting_dims={0}
  %send-done = token[] send-done(%send), channel_id=2
  %dot.1 = f32[8]{0} dot(%x, %x), lhs_contracting_dims={0}
  %recv-done = (f32[8]{0}, token[]) recv-done(%recv), channel_id=1
  %branch = f32[8]{0} conditional(%x, %x, %x), branch_computations={%of_slice_0, %of_slice_1}
  %mean = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
  ROOT %dot.2 = f32[8]{0} dot(%x, %x), lhs_contracting_dims={0}
}
"""
PAIRS = "_xla_megascale_target={{100000->200000},{200001->100001}},_xla_megascale_transfer_type="
SUM = '_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0,4:5}"'


def make_module(target):
    return parse_module(PROGRAM.replace("TARGET", target))


def test_reads_what_leaves_a_slice():
    (crossing,) = read_crossings(make_module(PAIRS))
    assert crossing == (frozenset({(100000, 200000), (200001, 100001)}), 32)
    (total,) = read_crossings(make_module(SUM))
    chips = (0, 4, 5)
    there = {(100000 + chip, 200000 + chip) for chip in chips}
    assert total.pairs == there | {(b, a) for a, b in there}
    with pytest.raises(ValueError, match="must name its devices"):
        read_crossings(make_module("_xla_megascale_target=all"))


def test_counts_what_stays_and_what_runs_beside_it():
    module = make_module(PAIRS)
    assert count_sent(module, slices.GOSSIP) == 32  # slice 1 has no such pair
    assert count_sent(module, slices.INSIDE_A_NODE) == 32
    assert count_overlapped(module, slices.BETWEEN) == 2
    assert count_overlapped(module, slices.GOSSIP) == 0
    counts = (hlo.count_matmuls(module), hlo.count_matmuls_before(module), count_overlapped(module))
    assert counts == (3, 0, 2)
    messages = hlo.list_messages(module)
    assert Message("send", "f32", 32) in messages
    assert "recv" not in {message.opcode for message in messages}


def make_devices(chips, count):
    """Chips of `count` slices, as they are listed for the compiler."""
    return [
        SimpleNamespace(platform="tpu", slice_index=s, process_index=s, id=(s + 1) * 100000 + chip)
        for s in range(count)
        for chip in range(chips)
    ]


@pytest.mark.parametrize("nodes", [16, 8, 4, 2])
def test_only_far_hops_leave_a_slice(nodes):
    """Of 2^k neighbours to the right, 2^k cross each border; of flipped bits, the highest."""
    grid = np.array(make_devices(8, 2)).reshape(nodes, -1)
    for hop, round_ in enumerate(gx.topology.one_peer_exponential(nodes).rounds):
        crossing = find_crossing(list_pairs(round_, grid))
        assert len(crossing) == 2 * 2**hop * (16 // nodes)
    for bit, round_ in enumerate(gx.topology.base_graph(nodes).rounds):
        crossing = find_crossing(list_pairs(round_, grid))
        assert len(crossing) == (16 if 2**bit == nodes // 2 else 0)
        assert {abs(a - b) for a, b in crossing} <= {100000}


@pytest.mark.parametrize(
    ("nodes", "topology", "message"),
    [
        (3, "ring", "--nodes must be a multiple of 2 slices that divides 16 chips, got 3"),
        (32, "ring", "got 32: give 2"),
        (4, "circle", "no topology is named 'circle'"),
    ],
)
def test_nodes_that_cannot_be(nodes, topology, message):
    options = slices.Options(topology=topology)
    with pytest.raises(ValueError, match=message):
        slices.require_nodes(nodes, options, 16)


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["one_peer_exponential", "base_graph", "random_ring"])
def test_messages_cross_where_the_schedule_says_so(topology, tmp_path):
    """On 2 slices of 4 x 4 chips; a node of several chips gathers what arrives, and no more."""
    nodes = ["32", "4"] if topology == "random_ring" else ["32", "4", "2"]
    sizes = ["--chips", "v5e:4x4", "--layers", "4", "--nodes", *nodes]
    runs = run_check("slices", "tpu", tmp_path / "out", "--topology", topology, *sizes)
    assert {run["nodes"] for run in runs} == set(map(int, nodes))
    for run in runs:
        assert run["matches_schedule"]
        if run["dcn_bytes_per_chip"]:
            assert run["matmuls_beside_dcn"] > 0.9 * run["matmuls"]
        if run["chips_per_node"] > 1:
            assert run["inner_bytes_per_chip"] < 1.1 * (1 + 2 / 8) * run["model_bytes"]


@pytest.mark.aot
def test_programs_grow_by_n_log_n_at_most(tmp_path):
    """Of 16 and 256 chips, with one round and with all of them."""
    topologies = ["--topology", "one_peer_exponential", "exponential"]
    sizes = ["--chips", "v5e:4x4", "v5e:16x16", "--layers", "2"]
    runs = run_check("scaling", "tpu", tmp_path / "out", *topologies, *sizes)
    growth = [run["growth"] for run in runs if run["nodes"] == 256]
    assert len(growth) == 4
    assert max(growth) < 1
    messages = {(run["nodes"], run["topology"]): run["collectives_per_round"] for run in runs}
    assert messages[256, "one_peer_exponential"] == 1
    assert messages[256, "exponential"] == 8


FUSED = """\
HloModule jit_step, is_scheduled=true

%two_slices (p.0: f32[100], p.1: f32[10]) -> (f32[10], f32[20]) {
  %p.0 = f32[100]{0} parameter(0)
  %p.1 = f32[10]{0} parameter(1)
  %flat = f32[10,10]{1,0} bitcast(%p.0)
  %double = f32[10,10]{1,0} add(%flat, %flat)
  %row = f32[1,10]{1,0} slice(%double), slice={[0:1], [0:10]}
  %first = f32[10]{0} bitcast(%row)
  %sum = f32[10]{0} add(%first, %p.1)
  %rows = f32[2,10]{1,0} slice(%flat), slice={[1:3], [0:10]}
  %second = f32[20]{0} bitcast(%rows)
  ROOT %out = (f32[10]{0}, f32[20]{0}) tuple(%sum, %second)
}

%in_place (p.0: f32[100], p.1: f32[10]) -> f32[100] {
  %p.0 = f32[100]{0} parameter(0)
  %p.1 = f32[10]{0} parameter(1)
  %zero = s32[] constant(0)
  ROOT %put = f32[100]{0} dynamic-update-slice(%p.0, %p.1, %zero)
}

%called (p.0: f32[100]) -> f32[100] {
  %p.0 = f32[100]{0} parameter(0)
  ROOT %negated = f32[100]{0} negate(%p.0)
}

ENTRY %main (x: f32[100], y: f32[10]) -> f32[100] {
  %x = f32[100]{0} parameter(0)
  %y = f32[10]{0} parameter(1)
  %buffer = f32[100]{0} custom-call(), custom_call_target="AllocateBuffer"
  %slices = (f32[10]{0}, f32[20]{0}) fusion(%x, %y), kind=kLoop, calls=%two_slices
  %first = f32[10]{0} get-tuple-element(%slices), index=0
  %put = f32[100]{0} fusion(%buffer, %first), kind=kLoop, calls=%in_place
  %start = (f32[100]{0}, f32[100]{0}) collective-permute-start(%put), channel_id=1
  %done = f32[100]{0} collective-permute-done(%start)
  %copy = f32[100]{0} copy(%done)
  ROOT %call = f32[100]{0} call(%copy), to_apply=%called
}
"""


def test_bytes_are_those_of_the_slices():
    assert hlo.count_traffic(hlo.parse_module(FUSED)) == {
        # Two slices of 10 and 20 values, and y; two results. Then 10 values into their place.
        "fusion": 4 * (10 + 20 + 10 + 10 + 20) + 4 * (10 + 10),
        "collective-permute": 800,
        "copy": 800,
        "negate": 800,
    }


def test_nothing_moves_fewer_bytes_than_it_must():
    """Every update makes at least the passes of its lower bound, on this backend."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("nodes",))
    runs = count_updates(SMALL, mesh, "here")
    assert [run["update"] for run in runs] == list(MIN_PASSES)
    assert {run["update"]: run["min_passes"] for run in runs} == {
        OPTIMIZER_ONLY: 5,
        "sgp": 8,
        "sgp-cwa": 8,
        "1-osgp": 7,
    }
    for run in runs:
        assert run["ratio_passes"] == run["passes"] / run["min_passes"] >= 1
        assert run["min_passes"] <= run["passes"] < 25
        assert run["wire_passes"] == pytest.approx(
            0 if run["update"] == OPTIMIZER_ONLY else 2, rel=2 / VALUES
        )


@pytest.mark.aot
def test_passes_on_a_gpu(tmp_path):
    """Packed in place: 10 passes for SGP, where concatenating all leaves took 15.6.

    1-OSGP computes all in 7 passes, and then concatenates the next message in 3.8 more.
    """
    runs = run_check("step", "gpu", tmp_path / "out")
    assert [round(run["passes"], 1) for run in runs] == [5.0, 10.0, 8.0, 9.0]


PERMUTES = """HloModule step, is_scheduled=true

ENTRY %main (p: f32[100]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  %inside = f32[100]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
  %between = f32[100]{0} collective-permute(%p), source_target_pairs={{0,2},{2,0},{1,3}}
  ROOT %gathered = f32[200]{0} all-gather(%between), replica_groups={{0,1},{2,3}}
}
"""


def test_messages_between_nodes_are_told_from_those_inside():
    traffic = islands.read_traffic([parse_module(PERMUTES)] * 2, devices_per_node=2)
    assert (traffic["messages"], traffic["sent_bytes"]) == (1, 400)
    assert {op: kind["count"] for op, kind in traffic["inside"].items()} == {
        "all-gather": 1,
        "collective-permute": 1,
    }
    assert islands.total_bytes(traffic["inside"]) == 800


def test_each_device_sends_its_part_and_nothing_more_is_gathered(tmp_path, monkeypatch):
    monkeypatch.setitem(decoder.DECODER_SIZES, "nano", TINY)
    monkeypatch.setattr(placement, "request_cpu_devices", lambda count: None)
    options = islands.Options(
        nodes=4, vocabulary_size=64, sequence_length=8, batch_size_per_node=4, steps=3, out=tmp_path
    )
    islands.measure_islands(options)
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    whole, replicated, fsdp, alone = runs
    assert read_fields("islands") <= {name for run in runs for name in run}
    assert [run["form"] for run in runs] == ["one device", "replicated", "FSDP", "FSDP, local"]
    weight = 4  # bytes
    assert [run["messages"] for run in runs] == [1, 1, 1, 0]
    assert whole["sent_bytes"] == whole["model_bytes"] + weight
    assert fsdp["sent_bytes"] == fsdp["model_bytes"] / 2 + weight
    assert fsdp["extra_bytes"] == alone["sent_bytes"] == 0
    assert fsdp["argument_bytes"] < 0.6 * replicated["argument_bytes"]
    for run in (replicated, fsdp):
        assert run["loss_difference"] == pytest.approx(0, abs=1e-5)
