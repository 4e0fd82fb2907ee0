"""The language program: data, perplexity, and what its users may get wrong."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from report_files import read_run
from resumed_runs import TERMINATED, read_results, stop_after

import gossipjax as gx
from experiments import language, plots
from experiments.data.tokenizer import END_ID
from experiments.data.tokens import NO_TOKEN
from experiments.models.transformer import Size
from experiments.training.evaluation import Evaluator
from gossipjax.checkpoint import Checkpoints

TINY = Size(layers=1, width=16, heads=2, hidden=32)
RHYME = "One for sorrow, two for joy, three for a girl, four for a boy."


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A tiny model, and no plots."""
    monkeypatch.setitem(language.DECODER_SIZES, "nano", TINY)
    monkeypatch.setattr(plots, "write_report", lambda *_: None)


@pytest.fixture
def folder(tmp_path):
    """A folder of texts, each line with a number that no other has."""
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [f"{number} {RHYME}" for number in range(40)]
    (folder / "train.txt").write_text("\n".join(lines))
    (folder / "test.txt").write_text("\n".join(lines[:5]))
    return folder


def make_options(folder, **more):
    options: dict[str, Any] = {"vocabulary_size": 300, "sequence_length": 16, "nodes": 4}
    options |= {"batch_size_per_node": 2}
    return language.LanguageOptions(dataset="files", data_dir=folder, **(options | more))


def make_arguments(folder, *more):
    arguments = ["--dataset", "files", "--data-dir", str(folder), "--vocabulary-size", "300"]
    arguments += ["--sequence-length", "16", "--nodes", "4", "--batch-size-per-node", "2"]
    return [*arguments, "--placement", "vmap", "--algorithm", "sgp", *more]


def uniform(task):
    """The model that gives all tokens the same probability: an embedding of zeros."""
    return jax.tree.map(jnp.zeros_like, jax.jit(task.init, static_argnums=0)(0))


def test_the_perplexity_of_a_uniform_model_is_the_size_of_the_vocabulary(folder):
    task = language.LanguageModeling(make_options(folder))
    assert (task.test_tokens[-1] == NO_TOKEN).any(), "what fills the last sequence does not count"
    nodes = gx.Nodes(4)
    variables = nodes.replicate(uniform(task))
    evaluator = Evaluator(task, nodes)
    vocabulary = task.tokenizer.get_vocab_size()
    expected = pytest.approx(vocabulary, rel=1e-5)
    log = pytest.approx(math.log(vocabulary), rel=1e-5)
    for metrics, loss, perplexity in (
        (evaluator.evaluate_average(variables), log, expected),
        (evaluator.evaluate_nodes(variables), [log] * 4, [expected] * 4),
    ):
        assert [*metrics.values()] == [loss, perplexity]
    loss, _ = jax.jit(task.loss)(uniform(task), task.train_tokens[-2:])
    assert loss == pytest.approx(math.log(vocabulary), rel=1e-5)


def test_a_sequence_begins_as_a_text_does(folder):
    """The model is given an end token where it predicts the first token."""
    task = language.LanguageModeling(make_options(folder))
    variables = jax.jit(task.init, static_argnums=0)(0)
    tokens = task.train_tokens[:1]
    inputs = np.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=END_ID)
    logits = jax.jit(task.model.apply)(variables, inputs)
    losses, _ = jax.jit(task.losses)(variables, tokens)
    expected = -jax.nn.log_softmax(logits)[0, np.arange(16), tokens[0]]
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)


def test_learns_by_heart(tmp_path):
    (tmp_path / "train.txt").write_text(f"{RHYME}\n" * 64)
    (tmp_path / "test.txt").write_text(RHYME)
    arguments = make_arguments(tmp_path, "--epochs", "24", "--learning-rate", "0.04")
    arguments += ["--weight-decay", "0", "--warmup-steps", "4", "--remat"]
    arguments += ["--precision", "mixed_bfloat16"]
    arguments += ["--nodes", "2", "--batch-size-per-node", "4"]  # fewer rounds to compile
    language.main([*arguments, "--out", str(tmp_path / "out")])
    run = read_results(tmp_path / "out")[0]
    assert 1 <= run["test_perplexity_average_model"] < 2
    assert max(run["test_perplexity_nodes"]) < 2


def measure_share(stacked):
    """The part of a node's arrays that each of its devices has."""
    leaves = jax.tree.leaves(stacked)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return held / sum(leaf[0].nbytes for leaf in leaves)


def test_a_run_is_the_same_on_any_number_of_devices_per_node(tmp_path, monkeypatch):
    """It moves from 2 devices per node to 1, and is not disturbed by it."""
    (tmp_path / "train.txt").write_text(f"{RHYME}\n" * 48)
    (tmp_path / "test.txt").write_text(f"{RHYME}\n" * 5)
    arguments = make_arguments(tmp_path, "--nodes", "2", "--batch-size-per-node", "4")
    arguments += ["--warmup-steps", "0", "--epochs", "3", "--placement", "mesh"]
    arguments += ["--checkpoint-every", "100", "--log-every", "1"]
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
            assert other[name] == pytest.approx(line[name], abs=1e-5), (name, line["step"])
    (run,), (moved_run,) = summary["runs"], moved_summary["runs"]
    for name in ("test_loss_average_model", "test_loss_nodes", "consensus_distance"):
        assert moved_run[name] == pytest.approx(run[name], abs=1e-5)


def test_another_vocabulary_than_that_of_the_run_is_refused(folder, tmp_path):
    out = tmp_path / "out"
    (out / "checkpoints" / "run").mkdir(parents=True)
    task = language.LanguageModeling(make_options(folder, out=out))
    task.save(out)
    language.LanguageModeling(make_options(folder, out=out, resume=True))
    of_the_run: dict[str, Any] = {"tokenizer": out / "tokenizer.json", "vocabulary_size": None}
    language.LanguageModeling(make_options(folder, **of_the_run))
    (folder / "train.txt").write_text("other words, and other words again, in other texts")
    kept = make_options(folder, out=out, **of_the_run)
    assert language.LanguageModeling(kept).tokenizer.to_str() == task.tokenizer.to_str()
    for more in ({"out": out}, {"init_from": out / "checkpoints" / "run"}):
        with pytest.raises(ValueError, match=r"the tokenizer must be the saved run's"):
            language.LanguageModeling(make_options(folder, **more))
    language.LanguageModeling(make_options(folder, out=out, overwrite=True))
