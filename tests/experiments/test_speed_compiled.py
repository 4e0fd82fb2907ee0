"""Compiled train steps: the readers on texts written by hand, and programs for absent chips.

The tests marked `aot` compile for TPUs and GPUs, each where its compiler is installed.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from experiments.speed.compiled import hlo, targets
from experiments.speed.compiled.hlo import Message
from experiments.speed.compiled.schedule import CASES, STREAMING_DILOCO, compile_program, make_case
from experiments.speed.compiled.targets import MlpSpec

ROOT = Path(__file__).resolve().parents[2]

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
    assert hlo.count_overlapped(module) == 2
    blocking = hlo.parse_module(OVERLAPPED.replace("permute-start", "permute"))
    assert hlo.count_overlapped(blocking) == 0
    assert hlo.list_messages(blocking)[0] == Message("collective-permute", "u16", 20)
    with pytest.raises(ValueError, match="scheduled module"):
        hlo.parse_module(OVERLAPPED.replace("is_scheduled=true, ", ""))


@pytest.mark.parametrize(("name", "wire"), CASES)
def test_programs_for_this_machine_send_what_their_schedules_say(name, wire):
    mlp = MlpSpec(layers=2, width=3, batch=5)
    method, steps = make_case(name, wire, 4, mlp.layers)
    mesh = Mesh(np.array(jax.devices()[:4]), ("nodes",))
    program = compile_program(method, mlp, mesh, steps[-1])
    assert program["matches_schedule"], program
    assert program["sent_bytes"] == program["expected_bytes"] > 0
    assert program["matmuls"] == 3 * 2 - 1


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets, "find_missing_packages", lambda kind: [f"{kind}-compiler"])
    with pytest.raises(ValueError, match=r"no gpu-compiler\.(.|\n)*jax-cuda12-plugin=="):
        targets.choose_targets(("gpu",))
    with pytest.raises(ValueError, match=r'any target(.|\n)*pip install "jax\[tpu\]=='):
        targets.choose_targets(())


@pytest.fixture(scope="module", params=["tpu", "gpu"])
def runs(request, tmp_path_factory):
    """The list `runs` that the program writes for a small model."""
    kind = request.param
    if missing := targets.find_missing_packages(kind):
        pytest.skip(f"not installed: {', '.join(missing)}")
    out = tmp_path_factory.mktemp("schedule") / "out"
    sizes = ["--layers", "6", "--width", "512", "--batch-size-per-node", "32"]
    command = [sys.executable, "-m", "experiments.speed", "schedule", "--target", kind]
    done = subprocess.run(
        [*command, *sizes, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((out / "summary.json").read_text())["runs"]


@pytest.mark.aot
def test_programs_exchange_what_their_schedules_say(runs):
    assert len(runs) % len(CASES) == 0
    for run in runs:
        assert run["matches_schedule"]
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


@pytest.fixture(scope="module")
def gpu_texts(tmp_path_factory):
    """Program -> the text of its optimized form for one H100, of nodes that it simulates."""
    if missing := targets.find_missing_packages("gpu"):
        pytest.skip(f"not installed: {', '.join(missing)}")
    out = tmp_path_factory.mktemp("texts")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("gpu_programs.py")), str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {path.stem: path.read_text() for path in out.iterdir()}


@pytest.mark.aot
@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8", "int4"])
def test_a_gpu_converts_nothing_to_eight_bits(gpu_texts, wire):
    """XLA made a conversion of words that saturates: all integers arrived as 255."""
    assert not re.findall(r"= [us]8\[[\d,]*\]\S* convert\(.*", gpu_texts[wire])


@pytest.mark.aot
@pytest.mark.parametrize(("wire", "bits"), [("bfloat16", (8, 7)), ("float16", (5, 10))])
def test_a_gpu_rounds_once_so_that_the_rest_stays_at_the_sender(gpu_texts, wire, bits):
    """XLA drops a conversion there and back, and with it the rest; it does not drop this."""
    rounded = "exponent_bits={}, mantissa_bits={}".format(*bits)
    assert gpu_texts[wire].count(rounded) == 1


@pytest.mark.aot
def test_a_gpu_has_no_convolution_of_groups_for_simulated_nodes(gpu_texts):
    assert not re.findall(r"__cudnn\$conv\w*|\w+_group_count=\d+", gpu_texts["cnn"])
    assert "__cublas$" in gpu_texts["cnn"] or "__triton" in gpu_texts["cnn"]


@pytest.mark.aot
@pytest.mark.parametrize("program", ["40 leaves", "random peers"])
def test_a_gpu_reads_and_writes_each_of_many_leaves_once(gpu_texts, program):
    """Parameters and updates are read, parameters written; and no fusion has many results."""
    model = 40 * 8 * 10_000 * 4
    traffic = hlo.count_traffic(hlo.parse_module(gpu_texts[program]))
    assert 3 <= sum(traffic.values()) / model < 3.3
    assert not re.findall(r"= \((?:f32\[8,10000\]\S* ?){2,}\S*\) fusion", gpu_texts[program])


@pytest.mark.aot
def test_diloco_on_the_host_needs_the_memory_of_adamw(gpu_texts):
    memory = json.loads(gpu_texts["memory"])
    assert memory["between"] <= 1.05 * memory["adamw"]
    assert memory["outer step"] <= memory["between, on the device"]
    assert memory["between, on the device"] > 1.4 * memory["adamw"]
    adamw, *steps = memory["scanned"].values()  # pieces of stacked leaves come and go, not these
    assert max(steps) <= 1.12 * adamw


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
