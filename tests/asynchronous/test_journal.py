"""Journals: cut off, full disks, and an account of what is left after many deaths."""

from fractions import Fraction

import numpy as np
import pytest

import gossipjax.asynchronous as ga
from gossipjax.asynchronous._journal import Journal, read_journal
from gossipjax.asynchronous._messages import Identity, Mass


def mass(w, exponent=0):
    return Mass((np.ones(2),), w, exponent)


def begin(path, life="a", **options):
    journal = Journal(path, **options)
    journal.begin_life(Identity(0, life, "host:1"))
    return journal


def test_a_line_that_was_cut_off_is_removed_when_the_journal_goes_on(tmp_path):
    path = tmp_path / "0.jsonl"
    journal = begin(path)
    journal.add("found", "a", 0, None)
    journal.close()
    with path.open("a") as file:
        file.write('{"event": "share", "life": "a", "pee')
    assert [line["event"] for line in read_journal(path)] == ["life", "found"]
    begin(path, "b").close()
    assert [line["life"] for line in read_journal(path)] == ["a", "a", "b"]


class FullFile:
    """A file on a disk that has no room for some of the writes."""

    def __init__(self, file):
        self.file = file
        self.is_full = False

    def write(self, data):
        if self.is_full:
            raise OSError(28, "No space left on device")
        return self.file.write(data)

    def close(self):
        self.file.close()


def test_lines_that_are_missing_are_counted(tmp_path, monkeypatch):
    path = tmp_path / "0.jsonl"
    journal = begin(path)
    file = FullFile(journal._file)
    monkeypatch.setattr(journal, "_file", file)
    file.is_full = True
    with pytest.warns(UserWarning, match="cannot be written: .*No space left"):
        journal.add("found", "a", 0, None)
    journal.add("begin", "a", 0, mass(1.0))  # says nothing more
    file.is_full = False
    journal.add("end", "a", 0, None)
    journal.close()
    with pytest.raises(ValueError, match=r"got none of 2 lines before line 2.*disk was full"):
        ga.account([path])


def test_the_account_of_a_weight_far_below_what_a_float_holds(tmp_path):
    path = tmp_path / "0.jsonl"
    journal = begin(path)
    journal.add("found", "a", 0, None)
    for step in range(3000):
        journal.add("give up", "a", 0, mass(0.5, -step))
    journal.add("begin", "a", 0, mass(1.0, -3000))
    journal.close()
    account = ga.account([path])
    assert account.living == {0: Fraction(1, 2**3000)}
    assert account.dead == 1 - Fraction(1, 2**3000)
    assert account.difference == 0
