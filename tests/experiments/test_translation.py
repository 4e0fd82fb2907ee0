"""The translation program: what it writes, batches of several shapes, BLEU, resuming."""

import contextlib
import io
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from resumed_runs import read_results, require_resumable_to_the_bit
from sacrebleu import corpus_bleu

import gossipjax as gx
from experiments import plots, translation
from experiments.models.layers import draw_dropout_seeds
from experiments.models.transformer import Size
from experiments.training.trainer import Trainer

WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf"}
OPTIONS = ("--nodes", "2", "--placement", "vmap", "--bucket-lengths", "4", "8", "--epochs", "2")
OPTIONS += ("--tokens-per-batch", "64", "--vocabulary-size", "330", "--warmup-steps", "8")
OPTIONS += ("--eval-sentences", "4", "--beam", "2")
OF_A_RUN = ("--algorithm", "sgp", "--accumulate", "2", "--weight-decay", "0.1")
OF_A_RUN += ("--checkpoint-every", "100", "--log-every", "1", "--warmup-steps", "4")


def write_pairs(path, count, seed):
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        words = rng.choice(list(WORDS), rng.integers(1, 7)).tolist()
        lines.append(f"{' '.join(words)}\t{' '.join(WORDS[word] for word in words)}\n")
    path.write_text("".join(lines))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers")
    write_pairs(folder / "train.tsv", 200, 0)
    write_pairs(folder / "valid.tsv", 13, 1)
    write_pairs(folder / "test.tsv", 11, 2)
    return folder


@pytest.fixture(scope="module", autouse=True)
def small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(translation.SEQ2SEQ_SIZES, "mini", Size(1, 16, 2, 32))
        yield


def train(out, data_dir, *arguments):
    translation.main((*OPTIONS, "--data-dir", str(data_dir), "--out", str(out), *arguments))
    records = read_results(out)
    return [r for r in records if "algorithm" in r], [r for r in records if "step" in r]


def make_task(data_dir, **options):
    options = {"nodes": 2, "bucket_lengths": (4, 8), "vocabulary_size": 330} | options
    return translation.Translation(translation.TranslationOptions(data_dir=data_dir, **options))


class Finished(NamedTuple):
    """A run with SGP, of two epochs."""

    out: Path  # its folder
    run: dict[str, Any]  # its entry in `summary.json`
    lines: list[dict[str, Any]]  # of `metrics.jsonl`
    printed: str
    compiled: list[str]  # the programs that were compiled in timed steps


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data_dir):
    compiled = []
    is_timed = []

    def listen(event, duration_secs, **_):
        if is_timed and "backend_compile" in event:
            compiled.append(event)

    run_steps = Trainer.run_steps

    def timed_steps(self, state, batches):
        is_timed.append(True)
        result = run_steps(self, state, batches)
        is_timed.clear()
        return result

    jax.monitoring.register_event_duration_secs_listener(listen)
    out = tmp_path_factory.mktemp("finished") / "out"
    printed = io.TextIOWrapper(io.BytesIO(), "utf-8")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(Trainer, "run_steps", timed_steps)
        (run,), lines = train(out, data_dir, *OF_A_RUN)
    printed.seek(0)
    return Finished(out, run, lines, printed.read(), compiled)


def test_writes_losses_scores_and_samples(finished):
    run = finished.run
    assert not finished.compiled
    assert 0 <= run["test_bleu_average_model"] <= 100
    assert run["test_bleu_nodes"] is None
    assert run["bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp")
    assert len(run["valid_loss_nodes"]) == 2
    perplexity = np.exp(run["valid_loss_average_model"])
    assert run["valid_perplexity_average_model"] == pytest.approx(perplexity)
    losses = [line["loss"] for line in finished.lines if "loss" in line]
    assert losses[-1] < losses[0]
    evaluated = [line for line in finished.lines if "valid_bleu_average_model" in line]
    assert len(evaluated) == 2
    assert "test_bleu_average_model" in evaluated[-1]
    assert len(evaluated[0]["samples"]) == 3
    printed = finished.printed
    assert "200 training pairs (0 longer than 8 tokens left out), 13 for validation" in printed
    assert "reference: " in printed
    assert (finished.out / "valid_loss.png").exists()
    assert (finished.out / "tokenizer.json").exists()


def test_the_score_is_that_of_the_files(finished, data_dir):
    """As sacrebleu reads them: a sentence per line, of the whole test set."""
    folder = finished.out / "texts" / "sgp-one_peer_exponential-seed-0"
    hypotheses, references = (
        (folder / f"{name}.txt").read_text("utf-8").splitlines()
        for name in ("hypotheses", "references")
    )
    pairs = (data_dir / "test.tsv").read_text("utf-8").splitlines()
    assert references == [pair.partition("\t")[2] for pair in pairs]
    score = corpus_bleu(hypotheses, [references]).score
    assert finished.run["test_bleu_average_model"] == score


def test_a_resumed_run_ends_as_if_it_had_never_been_stopped(
    tmp_path, data_dir, finished, monkeypatch
):
    """With AdamW, dropout, batches of two shapes, and in the middle of an accumulation."""
    options = (*OPTIONS, "--data-dir", str(data_dir), *OF_A_RUN)
    monkeypatch.setattr(plots, "write_report", lambda *_: None)
    require_resumable_to_the_bit(translation.main, options, 5, tmp_path, finished.out)


def test_batches_of_nodes(data_dir):
    """Each shape is announced; what a process makes does not depend on the others, nor on start."""
    task = make_task(data_dir)
    nodes = gx.Nodes(2)

    def shapes(batches):
        return {tuple(array.shape for array in batch) for batch in batches}

    batches = list(itertools.islice(task.batches(nodes, 64, 0, 0), 40))
    assert shapes(batches) == shapes(task.make_shapes(nodes, 64))
    later = next(task.batches(nodes, 64, 0, 7))
    for array, expected in zip(later, batches[7], strict=True):
        np.testing.assert_array_equal(array, expected)
    seeds = np.concatenate([batch[2].ravel() for batch in batches])
    assert len(set(seeds.tolist())) == len(seeds)
    node = draw_dropout_seeds(0, 7, [1], len(later[2][1]))  # a process with this node only
    np.testing.assert_array_equal(node[0], later[2][1])
    for sources, targets, _ in batches:
        assert sources.shape == targets.shape
        assert sources.shape[1] * sources.shape[2] == 64


def test_cross_entropy_is_that_of_smoothed_labels():
    rng = np.random.default_rng(0)
    logits = jnp.array(rng.normal(size=(2, 3, 7)), jnp.float32)
    targets = jnp.array([[3, 2, 0], [5, 6, 2]])
    losses, is_token = translation.cross_entropy(logits, targets, 0.1)
    labels = optax.smooth_labels(jax.nn.one_hot(targets, 7), 0.1)
    expected = optax.softmax_cross_entropy(logits, labels)
    np.testing.assert_allclose(losses, np.where(targets != 0, expected, 0), rtol=1e-5)
    assert is_token.tolist() == [[True, True, False], [True, True, True]]
