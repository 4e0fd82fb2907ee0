"""A folder with two checkpoints, and reads that fail are tried again without a disk's pauses."""

import resource
import shutil

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
    return shutil.copytree(saved, tmp_path / "copy", ignore=shutil.ignore_patterns(".lock"))


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(_store, "RETRY_DELAYS", (0.01, 0.01, 0.01))


@pytest.fixture
def limit_files():
    """Sets the size of files, in bytes, at which a write fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
