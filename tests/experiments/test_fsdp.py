"""Training programs whose nodes are several devices each, over which the model is sharded."""

import jax
import pytest
from report_files import read_run
from resumed_runs import TERMINATED, stop_after

from experiments import language, plots
from experiments.models.transformer import Size
from gossipjax.checkpoint import Checkpoints

TINY = Size(layers=1, width=16, heads=2, hidden=32)
RHYME = "One for sorrow, two for joy, three for a girl, four for a boy."
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A tiny model, and no plots."""
    monkeypatch.setitem(language.DECODER_SIZES, "nano", TINY)
    monkeypatch.setattr(plots, "write_report", lambda *_: None)


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "train.txt").write_text(f"{RHYME}\n" * 48)
    (tmp_path / "test.txt").write_text(f"{RHYME}\n" * 5)
    arguments = ["--dataset", "files", "--data-dir", str(tmp_path), "--vocabulary-size", "300"]
    arguments += ["--sequence-length", "16", "--nodes", "2", "--batch-size-per-node", "4"]
    return [*arguments, "--warmup-steps", "0", "--epochs", "3", "--placement", "mesh"]


def measure_share(stacked):
    """The part of a node's arrays that each of its devices has."""
    leaves = jax.tree.leaves(stacked)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return held / sum(leaf[0].nbytes for leaf in leaves)


def test_a_run_is_the_same_on_any_number_of_devices_per_node(arguments, tmp_path, monkeypatch):
    """It moves from 2 devices per node to 1, and is not disturbed by it."""
    arguments += ["--algorithm", "sgp", "--checkpoint-every", "100", "--log-every", "1"]
    language.main([*arguments, "--out", str(tmp_path / "once")])
    after = Checkpoints.after
    shares = {}

    def measure_after(self, state, last=False):
        shares.setdefault(state.step, measure_share(state.arrays))
        after(self, state, last)

    monkeypatch.setattr(Checkpoints, "after", measure_after)
    out = tmp_path / "moved"
    arguments += ["--out", str(out)]
    assert stop_after(2, lambda: language.main([*arguments, "--fsdp", "2"])) == TERMINATED
    language.main([*arguments, "--resume"])
    assert [shares[step] for step in (2, 6)] == pytest.approx([1 / 2, 1], rel=0.01)
    (summary, lines), (moved_summary, moved) = map(read_run, (tmp_path / "once", out))
    assert len(moved) == len(lines) > 5
    for line, other in zip(lines, moved, strict=True):
        for name in line.keys() & {"loss", "consensus_distance", "test_loss_average_model"}:
            assert other[name] == pytest.approx(line[name], abs=TOLERANCE), (name, line["step"])
    (run,), (moved_run,) = summary["runs"], moved_summary["runs"]
    for name in ("test_loss_average_model", "test_loss_nodes", "consensus_distance"):
        assert moved_run[name] == pytest.approx(run[name], abs=TOLERANCE)
