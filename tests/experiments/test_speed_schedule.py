"""Compiled schedules: the reader on texts written by hand, and the program for chips not here.

The tests marked `aot` compile for TPUs and GPUs, each where its compiler is installed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import optax
import pytest

import gossipjax as gx
from experiments import schedule_targets, speed_schedule
from experiments.methods import Setting, method
from experiments.schedule_text import Compiled, Message, read

ROOT = Path(__file__).parent.parent

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
  %start = (u16[10]{0}, u16[10]{0}, u32[], u32[]) collective-permute-start(%w), channel_id=1
  %fusion.1 = f32[4,4]{1,0} fusion(%x, %x), kind=kOutput, calls=%product
  %loop = (f32[4,4]{1,0}, f32[4,4]{1,0}) while(%fusion.1), condition=%never, body=%body
  %done = u16[10]{0} collective-permute-done(%start)
  %other = f32[4,4]{1,0} custom-call(%x), custom_call_target="AllocateBuffer"
  %mean = (f32[4,4]{1,0}, bf16[2]{0}) all-reduce(%x, %y), channel_id=2, to_apply=%add
  %y = bf16[2]{0} constant({1, 2})
  ROOT %last = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_reads_messages_and_products():
    assert read(OVERLAPPED) == Compiled(
        messages=[
            Message("collective-permute", "u16", 20),
            Message("all-reduce", "bf16+f32", 68),
        ],
        products=4,
        before=1,
        between=2,
    )


def test_a_collective_that_blocks_hides_nothing():
    text = OVERLAPPED.replace("collective-permute-start", "collective-permute")
    assert read(text).between == 0
    assert read(text).messages[0] == Message("collective-permute", "u16", 20)


def test_only_a_schedule_is_read():
    with pytest.raises(ValueError, match="scheduled module"):
        read(OVERLAPPED.replace("is_scheduled=true, ", ""))


@pytest.mark.parametrize(
    ("name", "wire", "count", "size"),
    [
        ("sgp", "full", 1, 4 * 101),
        ("sgp@two_peer_exponential", "full", 2, 4 * 101),
        ("sgp", "bfloat16", 1, 2 * 102),
        ("dpsgd", "full", 2, 4 * 100),
        ("dpsgd@bipartite_exponential", "full", 1, 4 * 100),
        ("1-osgp", "full", 1, 4 * 101),
        ("2-osgp", "full", 1, 4 * 51),
        ("1-osgp", "bfloat16", 1, 2 * 103),
    ],
)
def test_what_the_schedule_says(name, wire, count, size):
    how = method(name, Setting(nodes=8), optax.sgd(0.1))
    for step in how.schedule.canonical_steps(how.lookback):
        said = speed_schedule.expected(how, wire, 100, step)
        assert [m.bytes for m in said] == [size] * count
        assert {m.opcode for m in said} == {"collective-permute"}


def test_a_message_of_overlap_2_is_that_of_the_step_that_sent_it():
    """Rounds of one and of two peers by turns: pieces travel one and two steps after."""
    matrices = gx.topology.piecewise(
        {0: gx.topology.ring(4), 1: gx.topology.one_peer_exponential(4)}
    ).matrices(2)
    rounds = gx.topology.from_matrices(matrices)
    how = method("2-osgp", Setting(nodes=4), optax.sgd(0.1))._replace(schedule=rounds.every(2))
    counts = [len(speed_schedule.expected(how, "full", 9, step)) for step in range(1, 5)]
    assert counts == [2, 2, 1, 1]


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(schedule_targets, "missing", lambda kind: [f"{kind}-compiler"])
    with pytest.raises(ValueError, match=r"gpu-compiler not installed(.|\n)*jax-cuda12-plugin=="):
        schedule_targets.chosen(("gpu",))
    with pytest.raises(ValueError, match=r'any target(.|\n)*pip install "jax\[tpu\]=='):
        schedule_targets.chosen(())


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="--layers is at least 1, not 0"):
        speed_schedule.Options(layers=0)


@pytest.fixture(scope="module", params=["tpu", "gpu"])
def compiled(request, tmp_path_factory):
    """The program's exit status and `summary.json`, of a small model."""
    if absent := schedule_targets.missing(request.param):
        pytest.skip(f"not installed: {', '.join(absent)}")
    out = tmp_path_factory.mktemp("schedule") / "out"
    sizes = ["--layers", "6", "--width", "512", "--batch", "32"]
    command = [sys.executable, "-m", "experiments.speed_schedule", "--target", request.param]
    ran = subprocess.run(
        [*command, *sizes, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads((out / "summary.json").read_text())["runs"]


@pytest.mark.aot
def test_programs_exchange_what_their_schedules_say(compiled):
    assert len(compiled) % len(speed_schedule.CASES) == 0
    for run in compiled:
        assert run["as_the_schedule_says"]
        assert run["messages"] == run["messages_of_the_schedule"]
        assert run["matrix_products"] == 3 * 6 - 1  # no gradient of the inputs


@pytest.mark.aot
def test_overlap_hides_the_exchange_behind_the_products(compiled):
    """Where little is computed beside a large message; else XLA may start it later on GPUs.

    On 64 TPU chips XLA lets most permutations block, by where the nodes lie.
    """
    found = [run for run in compiled if run["algorithm"] == "1-osgp" and run["wire"] == "full"]
    eight = [run for run in found if run["target"].startswith("8 ")]
    assert eight
    for run in eight:
        assert run["share_of_matrix_products_in_between"] >= 0.95
    for run in compiled:
        if run["algorithm"] == "sgp":
            assert run["matrix_products_in_between"] == 0
