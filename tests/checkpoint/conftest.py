"""Reads that fail are tried again without the pauses of a real disk."""

import pytest

from gossipjax.checkpoint import _store


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(_store, "RETRY_DELAYS", (0.01, 0.01, 0.01))
