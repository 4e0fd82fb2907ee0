"""Bad command lines of the papers' workloads: translation, speech, language, presets, data."""

import functools
from collections.abc import Callable
from pathlib import Path

from bad_input.rows import Line

Write = Callable[[Path], object]
PAIRS = b"one\teins\ntwo\tzwei\nthree\tdrei\n" * 4


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def files(contents: dict[str, bytes] | None = None) -> Write:
    """Files by name."""
    return functools.partial(write_files, contents=contents or {})


def pairs(contents: dict[str, bytes] | None = None) -> Write:
    """The three files of a data set of pairs, of which some are others."""
    splits = ("train.tsv", "valid.tsv", "test.tsv")
    return files(dict.fromkeys(splits, PAIRS) | (contents or {}))


def texts(contents: dict[str, bytes] | None = None) -> Write:
    """The two files of a data set of texts, of which some are others, or more."""
    splits = {"train.txt": b"one two three\n" * 9, "test.txt": b"four\n"}
    return files(splits | (contents or {}))


TRANSLATION: list[tuple[str, str, Write]] = [
    (
        "--data-dir OUT",
        "no test.tsv or test.tsv.gz",
        files({"train.tsv": PAIRS, "valid.tsv": PAIRS}),
    ),
    ("--data-dir OUT", "train.tsv, line 1 must be a sentence", pairs({"train.tsv": b"one\n"})),
    ("--data-dir OUT --vocabulary-size 258", "--vocabulary-size must be >= 259", pairs()),
    (
        "--data-dir OUT --nodes 13",
        "an example of at most 128 tokens, got 12",
        pairs(),
    ),
]
SPEECH: list[tuple[str, str, Write]] = [
    ("", "--data-dir must be a folder that holds speech_languages.npz, got none", files()),
]
OF_FILES = "--dataset files --data-dir OUT"
LANGUAGE: list[tuple[str, str, Write]] = [
    ("--dataset files", "--data-dir must be a folder with files of texts", files()),
    ("--sequence-length 1025", "--sequence-length must be at most 1024", files()),
    (OF_FILES, "--data-dir must hold a file train*", files()),
    (f"{OF_FILES}", "the test texts of files must not be empty", texts({"test.txt": b"\n \n"})),
]
PRESET: list[tuple[str, str, str]] = [
    ("image", "--preset sgp19-mimi", "got 'sgp19-mimi': did you mean sgp19-mini"),
    ("image", "--preset rand20-mini", "must be a preset of experiments.image"),
]
PREPARE: list[tuple[str, str, Write]] = [
    ("cifar10", "--from must be the original files of cifar10, got none", files()),
    ("cifar10 --from OUT", "--from must be cifar-10-python.tar.gz", files()),
]
ROWS = [
    Line(program, f"{given} --placement vmap", message, write)
    for program, rows in (("translation", TRANSLATION), ("speech", SPEECH), ("language", LANGUAGE))
    for given, message, write in rows
]
ROWS += [Line(program, given, message) for program, given, message in PRESET]
ROWS += [Line("data", f"prepare {given}", message, write) for given, message, write in PREPARE]
