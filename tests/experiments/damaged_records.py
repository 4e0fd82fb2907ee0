"""Records that are corrupt, made of right ones."""

from typing import Any

import pytest

from experiments.data.local import SplitReader


class BrokenSource:
    """Examples of text as TFDS gives them, of which one cannot be read."""

    def __init__(self, examples: list[Any], broken: int):
        self._examples = examples
        self._broken = broken

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        if index == self._broken:
            raise RuntimeError("cut short")
        return self._examples[index]


class FakeSource:
    """Examples as TFDS gives them, of which some are corrupt."""

    def __init__(self, source: Any, corrupt: set[int]):
        self._source = source
        self._corrupt = corrupt

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        record = dict(self._source[index])
        if index in self._corrupt:
            record["image"] = record["image"][:60]
        return record


def damage(monkeypatch: pytest.MonkeyPatch, corrupt: set[int]) -> None:
    """Makes the images with these numbers corrupt, in all splits."""
    make = SplitReader.__init__

    def make_damaged(self: SplitReader, source: Any, *arguments: Any) -> None:
        make(self, FakeSource(source, corrupt), *arguments)

    monkeypatch.setattr(SplitReader, "__init__", make_damaged)
