"""`gx.prefetch`: the next inputs are made beside the step."""

import threading
import time

import pytest

from gossipjax import prefetch


def test_input_is_made_before_it_is_asked_for():
    made = []

    def items():
        for i in range(5):
            made.append((i, threading.current_thread().name))
            yield i

    prefetched = prefetch(items(), count=2)
    assert next(prefetched) == 0
    deadline = time.monotonic() + 10
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [i for i, _ in made] == [0, 1, 2]  # the one that was taken, and two
    assert all(name.startswith("prefetch") for _, name in made)
    assert list(prefetched) == [1, 2, 3, 4]


def test_an_error_in_the_input_is_raised_where_it_is_asked_for():
    def items():
        yield 1
        raise OSError("the disk is gone")

    prefetched = prefetch(items())
    assert next(prefetched) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(prefetched)
