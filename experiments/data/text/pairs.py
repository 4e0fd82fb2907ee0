"""Pairs of sentences: tab-separated files, and WMT'16 as TensorFlow Datasets prepares it."""

from pathlib import Path
from typing import Any, NamedTuple

from experiments.data.local import (
    DataError,
    MissingDataError,
    find_folder,
    find_prepared,
    open_splits,
    read_examples,
)
from experiments.data.text.lines import read_lines, require_once

SPLITS = ("train", "valid", "test")
WMT16 = "wmt16_translate/de-en"
WMT16_SPLITS = ("train", "validation", "test")
MAX_SHOWN = 60  # characters of a wrong line in a message


class Pairs(NamedTuple):
    """M sentences and their translations.

    Attributes:
        sources: M texts.
        targets: their M translations.
    """

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
      TensorFlow Datasets in array_record, the format that can be read without TensorFlow. Pairs
      with an empty side, of which it has some, are left out.

    Args:
        name: `tsv` or `wmt16_en_de`.
        data_dir: the folder; None is that of TensorFlow Datasets (`$TFDS_DATA_DIR`, or
            `~/tensorflow_datasets`).

    Raises:
        MissingDataError: if the folder has no such data; a FileNotFoundError, too.
        DataError: for another name, a file that is not as above, or an example that cannot be read.
    """
    folder = find_folder(data_dir)
    if name == "tsv":
        return PairSets(*(read_pairs(_find_file(folder, split)) for split in SPLITS))
    if name == "wmt16_en_de":
        return _read_prepared(folder)
    raise DataError(f"the data set must be tsv or wmt16_en_de, got {name!r}.")


def read_pairs(path: Path) -> Pairs:
    """Reads a file of tab-separated pairs in UTF-8, plain or (.gz) gzipped.

    A byte-order mark at its start is no part of the first sentence.

    Raises:
        DataError: names the file and the number of a line that is not two texts around one tab, or
            not UTF-8; also if the file is empty, or cut short.
    """
    lines = enumerate(read_lines(path), 1)
    pairs = [_parse_line(line, f"{path}, line {number}") for number, line in lines]
    if not pairs:
        raise DataError(f"{path} must hold one pair of sentences or more, got none.")
    return Pairs([source for source, _ in pairs], [target for _, target in pairs])


def _parse_line(line: str, where: str) -> tuple[str, str]:
    parts = line.split("\t")
    if len(parts) != 2 or not all(map(str.strip, parts)):
        text = "\t".join(parts)
        shown = repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ...")
        raise DataError(
            f"{where} must be a sentence, one tab and its translation, got {len(parts) - 1} tabs "
            f"in {shown}: correct the line, or remove it."
        )
    return parts[0], parts[1]


def _find_file(folder: Path, split: str) -> Path:
    names = (f"{split}.tsv", f"{split}.tsv.gz")
    paths = [path for name in names if (path := folder / name).is_file()]
    require_once(paths)
    if paths:
        return paths[0]
    raise MissingDataError(
        f"no {split}.tsv or {split}.tsv.gz in {folder}. --data-dir must hold train, valid and test "
        "files of tab-separated sentence pairs, got a folder without: give another."
    )


def _read_prepared(folder: Path) -> PairSets:
    version_dir = find_prepared(WMT16, folder)
    if version_dir is None:
        raise MissingDataError(
            f"no {WMT16} in {folder}. --data-dir must hold the set as prepared by TensorFlow "
            'Datasets with file_format="array_record", got a folder without: give another, or run '
            f"tfds build {WMT16} --file_format=array_record where there is a network."
        )
    sources = open_splits(version_dir, WMT16_SPLITS)
    names = [f"{split} in {version_dir}" for split in WMT16_SPLITS]
    return PairSets(*map(_read_split, sources, names))


def _read_split(source: Any, name: str) -> Pairs:
    pairs = read_examples(source, name, lambda pair: (pair["en"].decode(), pair["de"].decode()))
    kept = [pair for pair in pairs if all(map(str.strip, pair))]
    return Pairs([source for source, _ in kept], [target for _, target in kept])
