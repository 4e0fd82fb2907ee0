"""Large messages in pieces, over a fake link whose connections break."""

import random
import time
from collections import Counter

import pytest

from gossipjax.asynchronous._messages import MessageError
from gossipjax.asynchronous._transfer import WINDOW, Transfers

PATIENCE = 1.0
MAX_BYTES = 1 << 24


class Link:
    """Two processes and what is on its way between them, in order; `now` is a fake clock."""

    def __init__(self, monkeypatch, sizes=2):
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.on_way = []
        self.sent_bytes = Counter()  # of pieces, by who is to get them
        self.whole = {f"host:{number + 1}": [] for number in range(sizes)}
        self.ends = {
            address: Transfers(address, PATIENCE, MAX_BYTES, self.send) for address in self.whole
        }

    def send(self, address, frames, is_bulk):
        self.on_way.append((address, [bytes(frame) for frame in frames]))
        self.sent_bytes[address] += sum(map(len, frames[1:]))
        return True

    def deliver(self):
        address, frames = self.on_way.pop(0)
        arrived = self.ends[address].receive(frames, self.now)
        assert arrived is not None
        heard, message = arrived
        assert heard in (None, *self.ends)
        if message is not None:
            self.whole[address].append([bytes(frame) for frame in message])

    def run(self, rng, break_rate=0.0):
        for _ in range(100_000):
            queues = [queue for end in self.ends.values() for queue in end._queues.values()]
            if not self.on_way and not any(queue.streams for queue in queues):
                return
            self.now += 0.01
            if self.on_way and rng.random() < break_rate:
                self.on_way.clear()  # a connection broke
            elif self.on_way:
                self.deliver()
            for end in self.ends.values():
                end.tick(self.now)
        raise AssertionError("pieces without end")


def make_message(rng, sizes):
    return [b"header", *(rng.randbytes(size) for size in sizes)]


@pytest.mark.parametrize("break_rate", [0.0, 0.3])
def test_messages_arrive_whole_once_and_in_order(monkeypatch, break_rate):
    rng = random.Random(1)
    link = Link(monkeypatch)
    one, two = link.ends
    messages = [make_message(rng, sizes) for sizes in ([200_000, 3], [1], [0, 300_001, 64], [])]
    for number, message in enumerate(messages):
        link.ends[one].put(two, one, (two, "share", number), message)
        link.ends[two].put(one, two, (one, "share", number), message)
        link.ends[one].put(two, one, (two, "share", number), message)  # it is on its way already
    link.run(rng, break_rate)
    for address in link.whole:
        found = [[frames[0].rstrip(b" "), *frames[1:]] for frames in link.whole[address]]
        assert found == messages
    sent = link.sent_bytes[two]
    total = sum(len(frame) for frames in link.whole[two] for frame in frames)
    assert sent == total if not break_rate else sent >= total


def test_pieces_are_small_where_the_link_is_slow(monkeypatch):
    """On a link of 400 kB/s a piece takes a twentieth of the patience, and few are on their way."""
    rng = random.Random(2)
    link = Link(monkeypatch)
    one, two = link.ends
    link.ends[one].put(two, one, (two, "share", 0), make_message(rng, [3_000_000]))
    sizes = []
    while link.on_way:
        address, frames = link.on_way[0]
        if address == two:
            sizes.append(sum(map(len, frames[1:])))
            link.now += sizes[-1] / 400_000
            waiting = sum(len(f) for to, fs in link.on_way if to == two for f in fs[1:])
            assert waiting <= (WINDOW + 1) * max(sizes)
        link.deliver()
    assert 15_000 < sizes[-2] < 30_000
    assert len(link.whole[two]) == 1


def test_nothing_is_sent_twice_while_it_is_on_its_way(monkeypatch):
    """A link that needs eight times the patience for a message that is 4 pieces long."""
    rng = random.Random(3)
    link = Link(monkeypatch)
    one, two = link.ends
    link.ends[one].put(two, one, (two, "share", 0), make_message(rng, [250_000]))
    while link.on_way:
        for _ in range(20):
            link.now += 0.04  # less than the patience for each piece
            link.ends[one].tick(link.now)
        link.deliver()
    assert len(link.whole[two]) == 1
    assert link.sent_bytes[two] == 250_064


def test_few_large_messages_arrive_at_a_time(monkeypatch):
    """Memory has an end: the others wait until there is room."""
    monkeypatch.setattr("gossipjax.asynchronous._transfer.MIN_ROOM", 500_000)
    rng = random.Random(4)
    link = Link(monkeypatch, 5)
    first, *others = link.ends
    for address in others:
        link.ends[address].put(first, address, (first, "share", 0), make_message(rng, [300_000]))
    most = 0
    for _ in range(10_000):
        link.now += 0.01
        if link.on_way:
            link.deliver()
        buffers = [arrival.buffer for arrival in link.ends[first]._arrivals.values()]
        most = max(most, sum(len(buffer) for buffer in buffers if buffer is not None))
        for end in link.ends.values():
            end.tick(link.now)
        if len(link.whole[first]) == 4:
            break
    assert len(link.whole[first]) == 4
    assert most <= 500_000


@pytest.mark.parametrize(
    "frame",
    [
        b'P["any text", "p", 1, 0, [3]]',
        b'P["a:1", "p", 1, 0, [-3]]',
        b'P["a:1", "p", 1, 0, [999999999999]]',
        b'A["a:1", "p"]',
        b"A" + b"[" * 100_000,
    ],
)
def test_what_is_no_piece_is_refused(monkeypatch, frame):
    link = Link(monkeypatch)
    with pytest.raises(MessageError):
        link.ends["host:1"].receive([frame, b"123"], 0.0)
