"""The update and its copies: bytes counted in a text written by hand, and real programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from experiments.speed.compiled import hlo, targets
from experiments.speed.compiled.passes import MIN_PASSES, OPTIMIZER_ONLY, count_updates
from experiments.speed.local.step import plan_updates
from experiments.training.placement import place_nodes

UPDATES = list(MIN_PASSES)
ROOT = Path(__file__).resolve().parents[2]
SMALL = {"a": (64, 32), "b": (100,), "c": (8, 8, 8)}
VALUES = sum(int(np.prod(shape)) for shape in SMALL.values())

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
    assert [run["update"] for run in runs] == UPDATES
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


@pytest.mark.parametrize("placement", ["mesh", "vmap"])
def test_every_update_is_compared_with_both_copies(placement):
    plan = plan_updates(place_nodes(placement, 4), SMALL, 2)
    runs = [run for _, measure in plan.cases for run in measure()]
    assert [run["update"] for run in runs] == UPDATES
    for run in runs:
        assert run["seconds_p10"] <= run["seconds"] <= run["seconds_p90"]
        for copy in ("fresh_buffer", "in_place"):
            assert run[f"ratio_{copy}"] > 0
            assert run[f"copy_bytes_per_second_{copy}"] > 0
    assert plan.make_table(runs).row_count == len(UPDATES)


@pytest.mark.aot
def test_passes_on_a_gpu(tmp_path):
    """Packed in place: 10 passes for SGP, where concatenating all leaves took 15.6.

    1-OSGP computes all in 7 passes, and then concatenates the next message in 3.8 more.
    """
    if missing := targets.find_missing_packages("gpu"):
        pytest.skip(f"not installed: {', '.join(missing)}")
    command = [sys.executable, "-m", "experiments.speed", "compiled", "step"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert [round(run["passes"], 1) for run in runs] == [5.0, 10.0, 8.0, 9.1]
