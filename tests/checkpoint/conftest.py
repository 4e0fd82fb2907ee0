"""Reads that fail are tried again without the pauses of a real disk."""

import gc
import time

import pytest

from gossipjax.checkpoint import _store


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(_store, "RETRY_DELAYS", (0.01, 0.01, 0.01))


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Each failed read collects garbage, which would look at all that the tests have imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def ended_reads(request):
    """Reads by orbax that go on after they failed end in tests that ignore their complaints."""
    yield
    filters = [mark.args[0] for mark in request.node.iter_markers("filterwarnings")]
    if any("Unraisable" in text for text in filters):
        for _ in range(10):  # a busy machine needs them all
            time.sleep(0.1)
            gc.collect()
