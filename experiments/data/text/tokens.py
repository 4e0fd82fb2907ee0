"""Texts for a language model: read from files or TensorFlow Datasets, and packed as tokens."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.data.local import (
    DataError,
    MissingDataError,
    find_folder,
    find_prepared,
    open_splits,
    read_examples,
)
from experiments.data.text.lines import read_lines, require_once
from experiments.data.tokenizer import join_documents

PYTHON_DOCS = "python_docs"
FILES = "files"
TEXT_FEATURE = "text"
"""Of most sets of TensorFlow Datasets, the feature that holds the text."""
SUFFIXES = (".txt", ".tsv", ".txt.gz", ".tsv.gz")
NO_TOKEN = -1
"""Fills up the last row of packed tokens."""

TEST_EVERY = 10  # of the texts of the Python reference, one in ten is for the test

TEST_SPLITS = ("test", "validation")  # of TensorFlow Datasets, the first of them that there is

Split = Literal["train", "test"]


def read_texts(
    name: str,
    data_dir: Path | None,
    split: Split,
    column: int | None = None,
    feature: str = TEXT_FEATURE,
) -> Iterator[str]:
    """Yields the texts of a data set, one after the other; they are not empty.

    - `python_docs`: the reference manual that is part of Python (`pydoc_data`), about 0.7 MB of
      English and code. Each topic is a text; every tenth text is for the test.
    - `files`: those of `find_files`, in the order of their names. Each line is a text.
    - any other: a text set of TensorFlow Datasets that is prepared in `data_dir` (in array_record,
      the format that can be read without TensorFlow), such as `lm1b`. Each example is a text. If it
      has no test split, the validation split is used.

    Args:
        name: of the data set.
        data_dir: the folder; for TensorFlow Datasets, None is `$TFDS_DATA_DIR` or
            `~/tensorflow_datasets`.
        split: the part of the data set.
        column: of tab-separated files, the column that holds the text; the first is 1. None takes
            the whole line.
        feature: of TensorFlow Datasets, the feature that holds the text.

    Raises:
        MissingDataError: if there are no such files, or no such data set.
        DataError: if a file is not text in UTF-8, is cut short, has too few columns, is there twice
            (gzipped and not), an example cannot be read, or there are no texts.
    """
    if name == PYTHON_DOCS:
        texts = _read_python_docs(split)
    elif name == FILES:
        texts = _read_files(find_files(data_dir, split), column)
    else:
        texts = _read_prepared(name, data_dir, split, feature)
    texts = (text for text in texts if text.strip())
    first = next(texts, None)
    if first is None:
        raise DataError(
            f"the {split} texts of {name} must not be empty, got none with a letter: give another "
            "data set."
        )
    yield first
    yield from texts


def find_files(folder: Path | None, split: Split) -> list[Path]:
    """Returns the files of a split, sorted: such as train.tsv.gz.

    They are those in the folder whose names start with that of the split and end with .txt or .tsv,
    gzipped or not.

    Raises:
        MissingDataError: if there is no folder, or no such file in it.
        DataError: if one of them is there twice, gzipped and not.
    """
    endings = ", ".join(SUFFIXES)
    if folder is None:
        raise MissingDataError(
            f"--data-dir must be a folder with files of texts, such as train.txt and test.txt "
            f"(names that start with train or test and end with {endings}), got none."
        )
    paths = sorted(folder.glob(f"{split}*")) if folder.is_dir() else []
    paths = [path for path in paths if path.name.endswith(SUFFIXES)]
    if not paths:
        raise MissingDataError(
            f"no {split} texts in {folder}: --data-dir must hold a file {split}*, which ends with "
            f"{endings}, got a folder without: give another."
        )
    require_once(paths)
    return paths


def pack(documents: Iterable[np.ndarray], length: int) -> np.ndarray:
    """Writes documents one after the other, each with `END_ID` at its end, into rows of tokens.

    Read row by row, these are the tokens of the documents: none is left out, none occurs twice. A
    document may begin in one row and end in a later one.

    Args:
        documents: ids of tokens, each `[tokens]`.
        length: tokens of a row, T.

    Returns:
        Ids, int32 `[rows, T]`. The last row is filled up with `NO_TOKEN`.

    >>> pack([np.array([7, 8, 9]), np.array([5])], length=4)
    array([[ 7,  8,  9,  2],
           [ 5,  2, -1, -1]], dtype=int32)
    """
    stream, _ = join_documents(documents)
    rows = -(-len(stream) // length)
    filling = (0, rows * length - len(stream))
    return np.pad(stream, filling, constant_values=NO_TOKEN).reshape(rows, length)


def _read_python_docs(split: Split) -> Iterator[str]:
    from pydoc_data.topics import topics  # here, because it is large

    texts = dict.fromkeys(topics[topic] for topic in sorted(topics))  # some topics share a text
    for number, text in enumerate(texts):
        if (number % TEST_EVERY == 0) == (split == "test"):
            yield text


def _read_files(paths: list[Path], column: int | None) -> Iterator[str]:
    for path in paths:
        for number, line in enumerate(read_lines(path), start=1):
            yield line if column is None else _take_column(line, column, path, number)


def _take_column(line: str, column: int, path: Path, number: int) -> str:
    columns = line.split("\t")
    if len(columns) < column:
        raise DataError(
            f"{path}, line {number}, must have {column} or more columns with tabs between them, as "
            f"--column {column} asks, got {len(columns)}: correct the line, or choose another "
            "column."
        )
    return columns[column - 1]


def _read_prepared(name: str, data_dir: Path | None, split: Split, feature: str) -> Iterator[str]:
    folder = find_folder(data_dir)
    version_dir = find_prepared(name, folder)
    if (folder / name / "dataset_info.json").is_file():  # the name has the version
        version_dir = folder / name
    if version_dir is None:
        raise MissingDataError(
            f"no data set {name} in {folder}: --data-dir must be a folder of TensorFlow Datasets "
            f"in which it is prepared, got one without. Prepare it there with file_format="
            f'"array_record", or choose --dataset {FILES} for text files.'
        )
    (source,) = open_splits(version_dir, ("train",))
    chosen: str = split
    if split == "test":
        splits = source.dataset_info.splits
        chosen = next((other for other in TEST_SPLITS if other in splits), "")
        if not chosen:
            raise DataError(
                f"{version_dir} must have a split {' or '.join(TEST_SPLITS)}, got "
                f"{', '.join(splits)}: choose another --dataset."
            )
        (source,) = open_splits(version_dir, (chosen,))

    def take_text(example: dict[str, Any]) -> str:
        text = example.get(feature)
        if not isinstance(text, bytes | str):
            raise DataError(
                f"--text-feature must be a feature of {name} that holds a text, got {feature}; the "
                f"features are {', '.join(example)}."
            )
        return text.decode("utf-8") if isinstance(text, bytes) else text

    return read_examples(source, f"{chosen} in {version_dir}", take_text)
