"""The speech program: features, windows, accuracies, and what its users may get wrong."""

from typing import Any

import jax
import numpy as np
import pytest
from resumed_runs import read_results

import gossipjax as gx
from experiments import plots, speech
from experiments.data import DataError
from experiments.data.speech import Windows, load_utterances
from experiments.models.acoustic import ACOUSTIC_SIZES, AcousticSize
from experiments.training.evaluation import Evaluator

CHANNELS = 4
CLASSES = 3


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """A tiny model, and no plots."""
    monkeypatch.setitem(ACOUSTIC_SIZES, "mini", AcousticSize(layers=1, cells=8, projection=8))
    monkeypatch.setattr(plots, "write_report", lambda *_: None)


def make_arrays(utterances=36):
    """Utterances whose classes can be told apart: each is loud in one of the channels."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 16, utterances).astype(np.int32)
    lengths[0] = 15
    lengths[3] = 3
    labels = (np.arange(utterances) % CLASSES).astype(np.int8)
    frames = rng.integers(60, 120, (lengths.sum(), CHANNELS)).astype(np.uint8)
    frames[np.arange(len(frames)), np.repeat(labels, lengths)] += 100
    return {
        "frame_features": rng.normal(size=(len(frames), 2)),
        "utterance_features": rng.normal(size=(utterances, 3)),
        "frames": frames,
        "lengths": lengths,
        "labels": labels,
        "split": np.where(np.arange(utterances) % 4 == 3, 2, 0).astype(np.int8),
        "languages": np.array(["be", "bg", "ca"]),
    }


def write(folder, arrays):
    np.savez(folder / "tiny.npz", **arrays)
    return folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    return write(tmp_path / "data", make_arrays())


def make_options(folder, **more):
    options: dict[str, Any] = {"frames_per_window": 5, "nodes": 4, "batch_size_per_node": 2}
    return speech.SpeechOptions(dataset="tiny", data_dir=folder, **(options | more))


def make_arguments(folder, *more):
    arguments = ["--dataset", "tiny", "--data-dir", str(folder), "--frames-per-window", "5"]
    arguments += ["--nodes", "4", "--batch-size-per-node", "2", "--placement", "vmap"]
    return [*arguments, "--algorithm", "sgp", *more]


def differentiate(frames):
    """The deltas of a whole utterance `[T, F]`, frame by frame."""
    last = len(frames) - 1
    deltas = np.zeros_like(frames)
    for t in range(len(frames)):
        for n in (1, 2):
            deltas[t] += n * (frames[min(t + n, last)] - frames[max(t - n, 0)]) / 10
    return deltas


def test_features_are_those_of_the_formula(folder):
    utterances = load_utterances("tiny", folder, "train")
    windows = Windows(utterances, 5)
    features = windows.read(np.arange(len(windows)))
    assert features.dtype == np.float32
    assert features.shape == (len(windows), 5, windows.num_features)
    assert windows.num_features == 2 + 3 + 3 * CHANNELS
    ends = np.cumsum(utterances.lengths)
    number = 0
    for utterance, end in enumerate(ends):
        length = utterances.lengths[utterance]
        static = (utterances.frames[end - length : end].astype(np.float64) - 128) / 12
        deltas = differentiate(static)
        of_frames = utterances.frame_features[end - length : end]
        of_all = np.tile(utterances.utterance_features[utterance], (length, 1))
        parts = [of_frames, of_all, static, deltas, differentiate(deltas)]
        whole = np.concatenate(parts, axis=1)
        for start in range(0, length - 4, 5):
            np.testing.assert_allclose(features[number], whole[start : start + 5], atol=1e-5)
            assert windows.utterance[number] == utterance
            assert windows.labels[number] == utterances.labels[utterance]
            number += 1
    assert number == len(windows)


def test_the_windows_of_an_utterance_are_on_one_node(folder):
    task = speech.SpeechClassification(make_options(folder))
    for alpha in (None, 0.5):
        task.options = make_options(folder, dirichlet_alpha=alpha)
        shards = task.split_windows(4, seed=0)
        assert sorted(np.concatenate(shards).tolist()) == list(range(task.num_examples))
        owners = [set(task.train.utterance[shard].tolist()) for shard in shards]
        assert sum(map(len, owners)) == len(set.union(*owners))


def test_accuracies_are_those_of_a_loop_over_the_utterances(folder):
    """Short utterances have no window: they do not count."""
    task = speech.SpeechClassification(make_options(folder))
    variables = jax.jit(task.init, static_argnums=0)(0)
    features = task.test.read(np.arange(len(task.test)))
    logits = jax.jit(task.model.apply)(variables, features)
    scores_of_windows = np.asarray(jax.nn.log_softmax(logits)).mean(axis=1)
    right_windows = []
    right_utterances = []
    for utterance in range(len(task.test.counts)):
        windows = np.flatnonzero(task.test.utterance == utterance)
        if not len(windows):
            continue
        scores = scores_of_windows[windows]
        label = task.test.utterances.labels[utterance]
        right_windows += (scores.argmax(axis=1) == label).tolist()
        right_utterances.append(scores.sum(axis=0).argmax() == label)
    assert 0 < len(right_utterances) < len(task.test.counts)
    nodes = gx.Nodes(4)
    average = Evaluator(task, nodes).evaluate_average(nodes.replicate(variables))
    assert average == {
        "test_window_accuracy_average_model": pytest.approx(np.mean(right_windows)),
        "test_utterance_accuracy_average_model": pytest.approx(np.mean(right_utterances)),
    }


def test_learns(folder, tmp_path):
    arguments = make_arguments(folder, "--epochs", "12", "--optimizer", "adam")
    arguments += ["--learning-rate", "0.05"]
    arguments += ["--nodes", "2", "--batch-size-per-node", "4"]  # fewer rounds to compile
    speech.main([*arguments, "--out", str(tmp_path / "out")])
    run = read_results(tmp_path / "out")[0]
    assert run["test_utterance_accuracy_average_model"] == 1
    assert min(run["test_window_accuracy_nodes"]) > 0.9


def test_arrays_that_do_not_belong_together(tmp_path):
    for changes, message in (
        ({"labels": np.zeros(35, int)}, "36 labels, as its lengths say, got 35"),
        ({"labels": np.full(36, 9)}, "labels from 0 to"),
        ({"frames": np.zeros((9, 4))}, "9|as its lengths say"),
        ({"languages": np.array(["a", None], object)}, "is corrupt"),
    ):
        write(tmp_path, make_arrays() | changes)
        with pytest.raises(DataError, match=message):
            load_utterances("tiny", tmp_path, "test")
    path = write(tmp_path, make_arrays()) / "tiny.npz"
    path.write_bytes(path.read_bytes()[:500])  # cut short
    with pytest.raises(DataError, match="corrupt"):
        load_utterances("tiny", tmp_path, "train")
