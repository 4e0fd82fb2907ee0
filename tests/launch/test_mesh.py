"""Meshes over the devices of one and of several processes."""

from types import SimpleNamespace

import jax
import pytest
from jax.sharding import AxisType

from gossipjax import launch
from gossipjax.launch import _mesh


@pytest.mark.parametrize(
    ("nodes", "axes", "shape"),
    [
        (None, {}, {"nodes": 8}),
        (4, {"fsdp": 2}, {"nodes": 4, "fsdp": 2}),
        (None, {"local": 2, "fsdp": 2}, {"nodes": 2, "local": 2, "fsdp": 2}),
    ],
)
def test_meshes_of_one_process(nodes, axes, shape):
    mesh = launch.mesh(nodes, **axes)
    assert list(mesh.shape.items()) == list(shape.items())
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh.devices.flatten().tolist() == jax.devices()[: mesh.size]


def fake_devices(counts: list[int]) -> list[SimpleNamespace]:
    """Devices, `counts[i]` of process i, in an order that mixes processes, as on some TPUs."""
    devices = [
        SimpleNamespace(process_index=i, id=k * len(counts) + i)
        for i, count in enumerate(counts)
        for k in range(count)
    ]
    return sorted(devices, key=lambda device: device.id)


@pytest.mark.parametrize(
    ("counts", "nodes", "local", "processes"),
    [
        ([4, 4], None, 2, [[0, 0], [0, 0], [1, 1], [1, 1]]),
        ([1, 1, 1, 1], 2, 2, [[0, 1], [2, 3]]),
        ([2, 2, 2], None, 1, [[0], [0], [1], [1], [2], [2]]),
    ],
)
def test_meshes_of_several_processes(counts, nodes, local, processes, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: fake_devices(counts))
    monkeypatch.setattr(_mesh, "Mesh", lambda devices, axes: SimpleNamespace(devices=devices))
    grid = launch.mesh(nodes, local=local).devices
    assert [[device.process_index for device in node] for node in grid] == processes
    named = launch.mesh(nodes, fsdp=local).devices
    assert [[device.id for device in node] for node in named] == [
        [device.id for device in node] for node in grid
    ]


def fake_slices(*counts: int) -> list[SimpleNamespace]:
    """TPUs, `counts[s]` of slice s, two a process; processes and ids do not tell the slice."""
    return [
        SimpleNamespace(
            platform="tpu", slice_index=s, process_index=len(counts) * i + s, id=2 * i + k
        )
        for i in range(max(counts) // 2)
        for k in range(2)
        for s, count in enumerate(counts)
        if 2 * i + k < count
    ]


@pytest.mark.parametrize(
    ("nodes", "inner", "slices"),
    [
        (None, 1, [[0]] * 8 + [[1]] * 8),
        (4, 4, [[0] * 4, [0] * 4, [1] * 4, [1] * 4]),
        (1, 16, [[0] * 8 + [1] * 8]),
    ],
)
def test_a_node_does_not_straddle_slices(nodes, inner, slices, monkeypatch):
    monkeypatch.setattr(_mesh, "Mesh", lambda devices, axes: SimpleNamespace(devices=devices))
    grid = launch.mesh(nodes, devices=fake_slices(8, 8), fsdp=inner).devices
    assert [[device.slice_index for device in node] for node in grid] == slices
    order = [(device.slice_index, device.process_index, device.id) for device in grid.flatten()]
    assert order == sorted(order)


def test_slices_that_cannot_be():
    with pytest.raises(ValueError, match=r"slices must have the same .* \{0: 8, 1: 4\}"):
        launch.mesh(devices=fake_slices(8, 4), local=4)
    with pytest.raises(ValueError, match=r"slices must .* got 2 nodes of 6 devices .*: 4, 2: 4\}"):
        launch.mesh(devices=fake_slices(4, 4, 4), local=6)


@pytest.mark.parametrize(
    ("nodes", "axes", "message"),
    [
        (
            4,
            {"fsdp": 2, "tensor": 2},
            r"nodes \* fsdp \* tensor must .* got .* = 16 and 8",
        ),
        (None, {"a": 4, "b": 4}, r"nodes \* a \* b must .* = 16 and 8 .*--local-devices 16"),
        (None, {"fsdp": 3}, r"got 2 \* 3 = 6 and 8 devices of 1 processes"),
    ],
)
def test_nodes_that_cannot_be_meshes(nodes, axes, message):
    with pytest.raises(ValueError, match=message):
        launch.mesh(nodes, **axes)


@pytest.mark.parametrize(
    ("counts", "nodes", "local", "message"),
    [
        ([4, 4], 4, None, r"nodes must be .* got 4 = 4 and 8 devices of 2 processes"),
        ([2, 2], 8, None, r"nodes must be .* got 8 .*--local-devices 4"),
        ([2, 2, 2], 2, 3, "processes must .* got 2 nodes of 3 devices"),
        ([2, 1], None, None, r"processes must have the same number .* \{0: 2, 1: 1\}"),
    ],
)
def test_meshes_of_several_processes_that_cannot_be(counts, nodes, local, message, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: fake_devices(counts))
    with pytest.raises(ValueError, match=message):
        launch.mesh(nodes, local=local)
