"""Reading of a whole checkpoint: its manifest, then its arrays, checked against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax

from gossipjax import meshes
from gossipjax.checkpoint._leaves import (
    checksum,
    leaf_specs,
    require_same_specs,
    require_types_of_devices,
)
from gossipjax.checkpoint._store import DamagedError, by_number, match, read_arrays, read_manifest
from gossipjax.processes import all_processes


class Restored(NamedTuple):
    """Result of `Checkpoints.restore`: the step, the state, and the metadata saved with it."""

    step: int
    state: Any
    metadata: dict[str, Any]


def read_checkpoint(folder: Path, step: int, like: Any) -> Restored:
    """Reads one checkpoint of a folder in the form of `like`; see `Checkpoints.restore`.

    Raises:
      DamagedError: if it is incomplete, has another checksum, is of another step or not of this
        format.
      OSError: if the disk did not give it, after retries.
      ValueError: if it has other leaves than `like`.
    """
    with meshes.unset_mesh():
        return _read_checkpoint(folder / str(step), step, like)


def _read_checkpoint(folder: Path, step: int, like: Any) -> Restored:
    manifest = read_manifest(folder)
    like = like(manifest.metadata) if callable(like) else like
    name = f"the checkpoint of step {step}"
    require_same_specs(manifest.leaves, leaf_specs(like), name)
    require_types_of_devices(like, name)
    leaves, structure = jax.tree.flatten(like)
    read = read_arrays(folder, by_number(leaves))
    restored = [match(read.get(str(i)), leaf) for i, leaf in enumerate(leaves)]
    state = jax.tree.unflatten(structure, restored)
    if not all_processes(leaf_specs(state) == manifest.leaves):
        raise DamagedError("its arrays have other types")
    if checksum(meshes.on_auto_axes(restored)) != manifest.checksum:
        raise DamagedError("its arrays have another checksum")
    return Restored(step, state, manifest.metadata)


def require_readable_folder(folder: Path) -> None:
    """Raises `OSError` unless all processes see the folder."""
    if not all_processes(folder.is_dir()):
        raise OSError(
            f"the folder must be one that all processes can read, got {folder}: "
            f"{'another process does not see it' if folder.is_dir() else 'there is no such folder'}"
            ". Give the folder that a run gave to Checkpoints."
        )
