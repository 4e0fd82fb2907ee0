"""Recorded utterances: log-mel frames in a file, read as windows with deltas and double deltas."""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from experiments.data.local import DataError, MissingDataError

DATASET = "speech_languages"
SPLITS = ("train", "valid", "test")
ARRAYS = ("frames", "lengths", "labels", "split", "languages")
EXTRA_ARRAYS = ("frame_features", "utterance_features")  # that a file may have
LEVELS_PER_UNIT = 12.0
ZERO_LEVEL = 128.0
NEIGHBOURS = 2
"""Frames before and after a frame of which its delta is the slope."""


class Utterances(NamedTuple):
    """U utterances, one after the other: S frames in all, of which one has F log-mel channels."""

    frames: np.ndarray  # uint8 `[S, F]`, 12 * log-mel + 128
    lengths: np.ndarray  # int64 `[U]`, the frames of each utterance; their sum is S
    labels: np.ndarray  # int32 `[U]`, the class of each, from 0 to `len(classes) - 1`
    classes: Sequence[str]
    frame_features: np.ndarray  # float32 `[S, A]`, such as fMLLR
    utterance_features: np.ndarray  # float32 `[U, C]`, such as i-vectors


class Windows:
    """The windows of some utterances: each is cut into windows of T frames that do not overlap.

    The frames of an utterance after its last whole window are not used.
    """

    def __init__(self, utterances: Utterances, length: int):
        self.utterances = utterances
        self.length = length
        self.counts = utterances.lengths // length  # `[U]`, the windows of each utterance
        self.first_windows = np.cumsum(self.counts) - self.counts  # `[U]`, the first of them
        self.utterance = np.repeat(np.arange(len(self.counts)), self.counts)  # `[W]`
        extra = utterances.frame_features.shape[1] + utterances.utterance_features.shape[1]
        self.num_features = 3 * utterances.frames.shape[1] + extra  # of a frame
        self._first_frames = np.cumsum(utterances.lengths) - utterances.lengths

    def __len__(self) -> int:
        return len(self.utterance)

    @property
    def num_too_short(self) -> int:
        """Number of utterances that are shorter than a window."""
        return int((self.counts == 0).sum())

    @property
    def labels(self) -> np.ndarray:
        """The class of each window, int32 `[W]`."""
        return self.utterances.labels[self.utterance]

    def list_windows(self, utterances: np.ndarray) -> np.ndarray:
        """Returns the windows of some utterances, int `[windows]`."""
        return np.flatnonzero(np.isin(self.utterance, utterances))

    def read(self, windows: np.ndarray) -> np.ndarray:
        """Returns the features of some windows, `[...]` -> float32 `[..., T, features]`.

        A frame has, in RAND-PSGD's order, `frame_features` and `utterance_features`, if the file
        has them, then log-mel, its deltas (see `compute_deltas`) and the deltas of the deltas. An
        utterance is continued at both ends by its first and its last frame.
        """
        utterance = self.utterance[windows]
        start = self._first_frames[utterance]
        start = start + (windows - self.first_windows[utterance]) * self.length
        first = self._first_frames[utterance][..., None]
        last = first + self.utterances.lengths[utterance][..., None] - 1
        margin = 2 * NEIGHBOURS
        context = start[..., None] + np.arange(-margin, self.length + margin)
        inside = np.clip(context, first, last)

        static = self.utterances.frames[inside].astype(np.float32)
        static = (static - np.float32(ZERO_LEVEL)) / np.float32(LEVELS_PER_UNIT)
        deltas = compute_deltas(static)
        # Frames beyond the ends get the deltas of the ends, before these are differenced.
        offsets = inside - context[..., :1] - NEIGHBOURS
        deltas = np.take_along_axis(deltas, offsets[..., NEIGHBOURS:-NEIGHBOURS, None], axis=-2)
        frames = inside[..., margin:-margin]
        repeated = np.broadcast_to(utterance[..., None], frames.shape)
        features = [
            self.utterances.frame_features[frames],
            self.utterances.utterance_features[repeated],
            static[..., margin:-margin, :],
            deltas[..., NEIGHBOURS:-NEIGHBOURS, :],
            compute_deltas(deltas),
        ]
        return np.concatenate(features, axis=-1)


def compute_deltas(frames: np.ndarray) -> np.ndarray:
    """Returns the slopes of features over time, `[..., T, F]` -> `[..., T - 4, F]`.

    The slope at t is of the line of least squares through the frames from t - 2 to t + 2,
    `sum_n n * (x[t + n] - x[t - n]) / (2 * sum_n n^2)` over n = 1, 2.

    >>> compute_deltas(np.arange(7.0)[:, None] * 3).ravel()
    array([3., 3., 3.])
    """
    length = frames.shape[-2] - 2 * NEIGHBOURS
    total = np.zeros_like(frames[..., :length, :])
    for n in range(1, NEIGHBOURS + 1):
        later = frames[..., NEIGHBOURS + n : NEIGHBOURS + n + length, :]
        earlier = frames[..., NEIGHBOURS - n : NEIGHBOURS - n + length, :]
        total += n * (later - earlier)
    return total / (2 * sum(n * n for n in range(1, NEIGHBOURS + 1)))


def load_utterances(
    name: str, data_dir: Path | None, split: Literal["train", "valid", "test"]
) -> Utterances:
    """Loads one split of the file NAME.npz in a folder.

    Its arrays are `frames`, uint8 `[S, F]`; `lengths` `[U]`; `labels` `[U]`, an index into
    `languages`, the names of the classes; and `split` `[U]`: 0 train, 1 valid, 2 test. It may have
    `frame_features` `[S, A]` and `utterance_features` `[U, C]` too.
    """
    if data_dir is None:
        raise MissingDataError(f"--data-dir must be a folder that holds {name}.npz, got none.")
    path = data_dir.expanduser() / f"{name}.npz"
    if not path.is_file():
        raise MissingDataError(
            f"no {path.name} in {data_dir}: --data-dir must hold that file, got a folder without: "
            "give another, or another --dataset."
        )
    arrays = _read_arrays(path)
    _require_consistent(arrays, path)
    chosen = arrays["split"] == SPLITS.index(split)
    if not chosen.any():
        raise DataError(f"{path} must have utterances of the split {split}, got none.")
    lengths = arrays["lengths"].astype(np.int64)
    frames_chosen = np.repeat(chosen, lengths)
    return Utterances(
        frames=arrays["frames"][frames_chosen],
        lengths=lengths[chosen],
        labels=arrays["labels"][chosen].astype(np.int32),
        classes=[str(language) for language in arrays["languages"]],
        frame_features=arrays["frame_features"][frames_chosen].astype(np.float32),
        utterance_features=arrays["utterance_features"][chosen].astype(np.float32),
    )


def _read_arrays(path: Path) -> dict[str, Any]:
    try:
        if not zipfile.is_zipfile(path):  # NumPy would read other formats too
            raise zipfile.BadZipFile("it is no zip file")
        with np.load(path) as file:
            arrays = {name: file[name] for name in (*ARRAYS, *EXTRA_ARRAYS) if name in file}
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path} must be a file of NumPy arrays, got one that is corrupt or cut short: "
            f"{error}; fetch it again."
        ) from error
    if missing := [name for name in ARRAYS if name not in arrays]:
        raise DataError(
            f"{path} must have the arrays {', '.join(ARRAYS)}, got none named "
            f"{', '.join(missing)}: fetch it again."
        )
    arrays.setdefault("frame_features", np.zeros((*arrays["frames"].shape[:1], 0)))
    arrays.setdefault("utterance_features", np.zeros((*arrays["lengths"].shape[:1], 0)))
    return arrays


def _require_consistent(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Raises `DataError` unless the arrays belong together."""
    lengths = arrays["lengths"]
    sizes = dict.fromkeys(("frames", "frame_features"), lengths.sum(dtype=np.int64))
    sizes |= dict.fromkeys(("labels", "split", "utterance_features"), len(lengths))
    for name, size in sizes.items():
        count = len(arrays[name])
        _require(count == size, path, f"{size:,} {name}, as its lengths say", count)
    dtype = arrays["frames"].dtype
    _require(dtype == np.uint8, path, "frames of type uint8", dtype)
    classes = len(arrays["languages"])
    outside = arrays["labels"][(arrays["labels"] < 0) | (arrays["labels"] >= classes)]
    _require(not outside.size, path, f"labels from 0 to {classes - 1}", outside[:1])


def _require(is_right: bool | np.bool_, path: Path, expected: str, value: Any) -> None:
    if not is_right:
        raise DataError(f"{path} must have {expected}, got {value}: correct it, or fetch it again.")
