"""The measurement of models that are sharded inside their nodes."""

import json

import pytest
from test_speed_readme import read_fields

from experiments.models import decoder
from experiments.models.transformer import Size
from experiments.speed.compiled import islands
from experiments.speed.compiled.hlo import parse_module
from experiments.training import placement

TINY = Size(layers=1, width=32, heads=2, hidden=64)
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
