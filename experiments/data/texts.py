"""Texts and pairs of sentences: from files, from TensorFlow Datasets, from Python's manual."""

import gzip
import itertools
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.data.local import (
    DataError,
    MissingDataError,
    SplitReader,
    find_folder,
    find_prepared,
    open_splits,
)

PYTHON_DOCS = "python_docs"
FILES = "files"
TEXT_FEATURE = "text"  # of sets of TensorFlow Datasets
SUFFIXES = (".txt", ".tsv", ".txt.gz", ".tsv.gz")
TEST_EVERY = 10  # of the texts of the Python reference, one in ten is for the test
TEST_SPLITS = ("test", "validation")  # of TensorFlow Datasets, the first of them that there is

PAIR_SPLITS = ("train", "valid", "test")
WMT16 = "wmt16_translate/de-en"
WMT16_SPLITS = ("train", "validation", "test")
MAX_SHOWN = 60  # characters of a wrong line in a message

Split = Literal["train", "test"]


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file in UTF-8, plain or (.gz) gzipped, which end with a newline only.

    A byte-order mark is no part of the first line. Raises `DataError` for a line that is not UTF-8,
    and if the file is corrupt or cut short.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}, line {number}, must be text in UTF-8, got {error.reason} at "
                        f"byte {error.start}: correct the line, or convert the file."
                    ) from error
                if text:  # not a file of nothing but a byte-order mark
                    yield text.rstrip("\r\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is corrupt or cut short: {error}; fetch it again.") from error


def require_once(paths: Iterable[Path]) -> None:
    """Raises `DataError` if a file is there twice, plain and gzipped."""
    paths = sorted(paths)
    for path in paths:
        other = path.with_name(f"{path.name}.gz")
        if other in paths:
            raise DataError(
                f"{path.parent} must hold each file of texts once, got both {path.name} and "
                f"{other.name}: remove one of them."
            )


def read_texts(name: str, data_dir: Path | None, split: Split) -> Iterator[str]:
    """Yields the texts of a data set, one after the other; they are not empty.

    - `python_docs`: the reference manual that is part of Python (`pydoc_data`), about 0.7 MB of
      English and code. Each topic is a text; every tenth text is for the test.
    - `files`: what `find_files` finds, in the order of the names. Each line is a text.
    - any other: a text set of TensorFlow Datasets that is prepared in `data_dir` (in array_record),
      such as `lm1b`. Each example is a text. If it has no test split, the validation split is used.

    There, a `data_dir` of None is `$TFDS_DATA_DIR` or `~/tensorflow_datasets`.
    """
    if name == PYTHON_DOCS:
        texts = _read_python_docs(split)
    elif name == FILES:
        texts = itertools.chain.from_iterable(map(read_lines, find_files(data_dir, split)))
    else:
        texts = _read_prepared_texts(name, data_dir, split)
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
    """Returns the files train* or test* of a folder, .txt or .tsv, gzipped or not; sorted."""
    endings = ", ".join(SUFFIXES)
    if folder is None:
        raise MissingDataError(
            f"--data-dir must be a folder with files of texts, train* and test*, which end with "
            f"{endings}, got none."
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


def _read_python_docs(split: Split) -> Iterator[str]:
    from pydoc_data.topics import topics  # here, because it is large

    texts = dict.fromkeys(topics[topic] for topic in sorted(topics))  # some topics share a text
    for number, text in enumerate(texts):
        if (number % TEST_EVERY == 0) == (split == "test"):
            yield text


def _read_prepared_texts(name: str, data_dir: Path | None, split: Split) -> Iterator[str]:
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
        text = example.get(TEXT_FEATURE)
        if not isinstance(text, bytes | str):
            raise DataError(
                f"{name} must have a feature {TEXT_FEATURE} that holds a text, got "
                f"{', '.join(example)}: choose another --dataset."
            )
        return text.decode("utf-8") if isinstance(text, bytes) else text

    return SplitReader(source, f"{chosen} in {version_dir}").read_all(take_text)


class Pairs(NamedTuple):
    """M sentences and their M translations."""

    sources: list[str]
    targets: list[str]


class PairSets(NamedTuple):
    """The three splits of a data set."""

    train: Pairs
    valid: Pairs
    test: Pairs


def load_pairs(name: str, data_dir: Path | None) -> PairSets:
    """Loads the sentence pairs of a data set.

    - `tsv`: the files train.tsv, valid.tsv and test.tsv in the folder, each plain or gzipped
      (.tsv.gz); a line is a sentence, a tab and its translation.
    - `wmt16_en_de`: English to German, `wmt16_translate/de-en`, prepared in the folder by
      TensorFlow Datasets in array_record. Pairs with an empty side, of which it has some, are left
      out.
    """
    folder = find_folder(data_dir)
    if name == "tsv":
        return PairSets(*(read_pairs(_find_pairs(folder, split)) for split in PAIR_SPLITS))
    if name == "wmt16_en_de":
        return _read_prepared_pairs(folder)
    raise DataError(f"the data set must be tsv or wmt16_en_de, got {name!r}.")


def read_pairs(path: Path) -> Pairs:
    """Reads a file of tab-separated pairs in UTF-8, plain or (.gz) gzipped."""
    pairs = []
    for number, line in enumerate(read_lines(path), start=1):
        parts = line.split("\t")
        if len(parts) != 2 or not all(map(str.strip, parts)):
            shown = repr(line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]} ...")
            raise DataError(
                f"{path}, line {number} must be a sentence, one tab and its translation, got "
                f"{len(parts) - 1} tabs in {shown}: correct the line, or remove it."
            )
        pairs.append(parts)
    if not pairs:
        raise DataError(f"{path} must hold one pair of sentences or more, got none.")
    return Pairs([source for source, _ in pairs], [target for _, target in pairs])


def _find_pairs(folder: Path, split: str) -> Path:
    names = (f"{split}.tsv", f"{split}.tsv.gz")
    paths = [path for name in names if (path := folder / name).is_file()]
    require_once(paths)
    if paths:
        return paths[0]
    raise MissingDataError(
        f"no {split}.tsv or {split}.tsv.gz in {folder}. --data-dir must hold train, valid and test "
        "files of tab-separated sentence pairs, got a folder without: give another."
    )


def _read_prepared_pairs(folder: Path) -> PairSets:
    version_dir = find_prepared(WMT16, folder)
    if version_dir is None:
        raise MissingDataError(
            f"no {WMT16} in {folder}. --data-dir must hold the set as prepared by TensorFlow "
            'Datasets with file_format="array_record", got a folder without: give another, or run '
            f"tfds build {WMT16} --file_format=array_record where there is a network."
        )
    sets = []
    for split, source in zip(WMT16_SPLITS, open_splits(version_dir, WMT16_SPLITS), strict=True):
        reader = SplitReader(source, f"{split} in {version_dir}")
        texts = reader.read_all(lambda pair: (pair["en"].decode(), pair["de"].decode()))
        kept = [pair for pair in texts if all(map(str.strip, pair))]
        sets.append(Pairs([source for source, _ in kept], [target for _, target in kept]))
    return PairSets(*sets)
