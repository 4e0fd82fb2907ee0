"""What all processes do together, asked in one; tests/checkpoint/worker.py asks it in two."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from modes import make_mesh

from gossipjax import processes

MESHES = {
    "nodes": make_mesh(4),
    "nodes and local": make_mesh(4, 2),
    "local and nodes": Mesh(np.array(jax.devices()).reshape(2, 4), ("local", "nodes")),
}


def test_one_process_holds_all_nodes():
    for mesh in (None, *MESHES.values()):
        assert processes.local_nodes(mesh, 4) == [0, 1, 2, 3]


class Device:
    """Of a process of its own."""

    def __init__(self, number):
        self.id = self.process_index = number


def test_nodes_of_other_processes(monkeypatch):
    """A node is local where a process has any of its devices."""
    mesh = MESHES["nodes and local"]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert processes.local_nodes(mesh, 4) == []
    mesh = Mesh(np.array([Device(0), Device(1)]), ("nodes",))
    assert processes.local_nodes(mesh, 4) == [2, 3]  # two on each device


class TestSharedFolder:
    def test_is_made(self, tmp_path):
        folder = tmp_path / "a" / "b"
        processes.require_shared_folder(folder)
        processes.require_shared_folder(folder)
        assert list(folder.iterdir()) == []

    def test_is_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "folder"):
            with pytest.raises(OSError, match=f"got {path}: .*Give a folder on a shared disk"):
                processes.require_shared_folder(path)
