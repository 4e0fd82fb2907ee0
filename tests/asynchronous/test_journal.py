"""Journals: cut off, full disks, and an account of what is left after many deaths."""

import threading
import time
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import optax
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


class BadDisk:
    """A file on a disk that has no room for some of the writes, or takes nothing until it thaws."""

    def __init__(self, file, is_full=False):
        self.file = file
        self.is_full = is_full
        self.thaws = threading.Event()

    def write(self, data):
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.thaws.wait()
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def write_two(journal):
    journal.add("found", "a", 0, None)
    journal.add("begin", "a", 0, mass(1.0))
    assert journal.has_written(10)


def test_lines_that_are_missing_are_counted(tmp_path, monkeypatch):
    path = tmp_path / "0.jsonl"
    journal = begin(path)
    assert journal.has_written(10)
    disk = BadDisk(journal._file, is_full=True)
    monkeypatch.setattr(journal, "_file", disk)
    with pytest.warns(UserWarning, match="cannot be written: .*No space left") as warned:
        write_two(journal)
    assert len(warned) == 1
    disk.is_full = False
    disk.thaws.set()
    journal.add("end", "a", 0, None)
    journal.close()
    with pytest.raises(ValueError, match=r"got none of 2 lines before line 2.*disk was full"):
        ga.account([path])


def gradients(z):
    return z - 1.0, None


def test_while_a_disk_freezes_nodes_go_on_and_nothing_leaves_that_is_not_written(
    tmp_path, monkeypatch
):
    """Longer than the patience, although steps follow."""
    paths = [tmp_path / "run[1].jsonl", tmp_path / "run[2].jsonl"]
    options = {"algorithm": ga.sgp(), "patience": 1.0}
    tx, params = optax.sgd(0.1), jnp.zeros(3)
    with (
        ga.join(tx, params, journal=paths[0], **options) as a,
        ga.join(tx, params, address=a.address, place=1, journal=paths[1], **options) as b,
    ):
        for node in (a, b):
            node.step(gradients)
        lives = {node._participant.life for node in (a, b)}
        disk = BadDisk(a._journal._file)
        monkeypatch.setattr(a._journal, "_file", disk)
        received = []
        for number in range(30):
            for node in (a, b):
                node.step(gradients)
            time.sleep(0.1)
            if number > 5:  # what was on its way has come
                received.append(b._participant.members.peers[a._participant.life].applied)
        assert {node._participant.life for node in (a, b)} == lives
        assert len(set(received)) == 1
        disk.thaws.set()
        for _ in range(10):
            a.step(gradients)
            time.sleep(0.05)
        assert b._participant.members.peers[a._participant.life].applied > received[0]
        b.leave()
    assert abs(ga.account(paths).difference) < 1e-12


def test_lines_that_wait_have_an_end_and_so_has_closing(tmp_path, monkeypatch):
    monkeypatch.setattr("gossipjax.asynchronous._journal.MAX_WAITING", 5)
    path = tmp_path / "0.jsonl"
    journal = begin(path)
    assert journal.has_written(10)
    disk = BadDisk(journal._file)
    monkeypatch.setattr(journal, "_file", disk)
    journal.add("end", "a", 0, None)
    while not journal._lines.empty():  # that is being written
        time.sleep(0.001)
    for step in range(5):
        journal.add("end", "a", step, None)
    with pytest.warns(UserWarning, match="cannot be written: it takes nothing"):
        journal.add("end", "a", 6, None)
    assert not journal.has_written(0.01)
    with pytest.warns(UserWarning, match="lacks its last 6 lines so far"):
        journal.close(0.1)
    disk.thaws.set()
    assert journal.has_written(10)
    with pytest.raises(ValueError, match=r"got none of 1 lines before line 3"):
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
