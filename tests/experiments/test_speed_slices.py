"""Train steps over several TPU slices: the reader on texts written by hand, and absent chips."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gossipjax as gx
from experiments.speed.compiled import hlo, slices, targets
from experiments.speed.compiled.hlo import Message, count_overlapped, parse_module
from experiments.speed.compiled.slices import (
    count_sent,
    find_crossing,
    list_pairs,
    read_crossings,
)

ROOT = Path(__file__).resolve().parents[2]
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
    if missing := targets.find_missing_packages("tpu"):
        pytest.skip(f"not installed: {', '.join(missing)}")
    nodes = ["32", "4"] if topology == "random_ring" else ["32", "4", "2"]
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "experiments.speed",
        "compiled",
        "slices",
        "--chips",
        "v5e:4x4",
    ]
    command += ["--layers", "4", "--topology", topology, "--nodes", *nodes, "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = json.loads((out / "summary.json").read_text())["runs"]
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
    if missing := targets.find_missing_packages("tpu"):
        pytest.skip(f"not installed: {', '.join(missing)}")
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "experiments.speed",
        "compiled",
        "scaling",
        "--chips",
        "v5e:4x4",
    ]
    command += ["v5e:16x16", "--topology", "one_peer_exponential", "exponential", "--layers", "2"]
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    runs = json.loads((out / "summary.json").read_text())["runs"]
    growth = [run["growth"] for run in runs if run["nodes"] == 256]
    assert len(growth) == 4
    assert max(growth) < 1
    messages = {(run["nodes"], run["topology"]): run["collectives_per_round"] for run in runs}
    assert messages[256, "one_peer_exponential"] == 1
    assert messages[256, "exponential"] == 8
