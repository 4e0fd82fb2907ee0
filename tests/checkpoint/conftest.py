"""A folder with two checkpoints, and reads that fail are tried again without a disk's pauses."""

import gc
import shutil
import time

import pytest

from gossipjax.checkpoint import Checkpoints, _store


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """Steps 1 and 2, of the states that the module makes."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, request.module.make_state(step), {"step": step})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to be damaged."""
    return shutil.copytree(saved, tmp_path / "copy")


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
