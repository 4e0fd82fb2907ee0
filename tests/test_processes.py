"""What all processes do together, asked in one; tests/checkpoint/worker.py asks it in two."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gossipjax import processes

DEVICES = np.array(jax.devices())
MESHES = {
    None: None,
    "nodes": Mesh(DEVICES[:4], ("nodes",)),
    "nodes and local": Mesh(DEVICES.reshape(4, 2), ("nodes", "local")),
    "local and nodes": Mesh(DEVICES.reshape(2, 4), ("local", "nodes")),
}
every_mesh = pytest.mark.parametrize("mesh", MESHES.values(), ids=map(str, MESHES))


def test_one_process_agrees_with_itself():
    assert processes.is_main_process()
    for flag in (True, False):
        assert processes.all_processes(flag) == flag
        assert processes.any_process(flag) == flag
        assert processes.processes_agree(flag)
    processes.barrier()
    assert processes.broadcast_text("a folder") == "a folder"


@every_mesh
def test_one_process_holds_all_nodes(mesh):
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


@every_mesh
def test_there_and_back(mesh):
    rows = {"a": np.arange(8.0, dtype=np.float32).reshape(4, 2), "b": np.arange(4), "none": None}
    stacked = processes.put(rows, mesh, 4)
    shared = processes.put_replicated(rows, mesh)
    for tree, spec in ((stacked, P("nodes")), (shared, P())):
        for leaf in jax.tree.leaves(tree):
            assert isinstance(leaf, jax.Array)
            assert mesh is None or leaf.sharding == NamedSharding(mesh, spec)
        host = processes.to_host(tree)
        assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(host))
        jax.tree.map(np.testing.assert_array_equal, host, rows)


def test_another_axis_name():
    mesh = Mesh(DEVICES[:2], ("servers",))
    assert processes.local_nodes(mesh, 2, "servers") == [0, 1]
    stacked = processes.put(jnp.arange(2), mesh, 2, "servers")
    assert stacked.sharding == NamedSharding(mesh, P("servers"))


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

    def test_cannot_be_written(self, tmp_path, monkeypatch):
        def refuse(*args, **kwargs):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "touch", refuse)  # root may write everywhere
        with pytest.raises(OSError, match="Permission denied"):
            processes.require_shared_folder(tmp_path)
