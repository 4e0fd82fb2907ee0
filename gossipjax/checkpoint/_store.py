"""Reading and writing of one checkpoint by orbax."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from gossipjax.checkpoint._leaves import is_key
from gossipjax.processes import all_processes

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        'gossipjax.checkpoint.Checkpoints needs orbax: pip install "gossipjax[checkpoint]".'
    ) from error

TEMPORARY_SUFFIX = ocp.utils.TMP_DIR_SUFFIX  # of a checkpoint that is being written


class DamagedError(Exception):
    """A checkpoint that cannot be read, or whose content has another checksum."""


def make_manager(folder: Path, max_to_keep: int, timeout: float) -> ocp.CheckpointManager:
    """Returns orbax's manager of a folder; all processes write together."""
    # With names, barriers go through JAX's coordinator: they have a time-out, unlike a collective.
    all_together = ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())), barrier_sync_key_prefix="gossipjax"
    )
    return ocp.CheckpointManager(
        folder,
        options=ocp.CheckpointManagerOptions(
            max_to_keep=max_to_keep,
            create=False,
            single_host_load_and_broadcast=True,
            async_options=ocp.AsyncOptions(timeout_secs=int(timeout)),
            multiprocessing_options=all_together,
        ),
        item_handlers={
            "state": ocp.PyTreeCheckpointHandler(
                use_compression=False, multiprocessing_options=all_together
            ),
            "manifest": ocp.JsonCheckpointHandler(multiprocessing_options=all_together),
        },
    )


def write(manager: ocp.CheckpointManager, step: int, arrays: dict[str, Any], manifest: Any) -> None:
    """Begins to write a checkpoint of arrays by number and a JSON manifest."""
    items = ocp.args.Composite(
        state=ocp.args.PyTreeSave(arrays), manifest=ocp.args.JsonSave(manifest)
    )
    manager.save(step, args=items, force=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest of the checkpoint in `folder`, on each process."""
    return _read_item(ocp.JsonCheckpointHandler, folder / "manifest", ocp.args.JsonRestore())


def read_arrays(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Reads the arrays of the checkpoint in `folder`, with the shardings of `like`."""
    args = ocp.args.PyTreeRestore(item=like, restore_args=jax.tree.map(_restore_args, like))
    return _read_item(ocp.PyTreeCheckpointHandler, folder / "state", args)


def _read_item(handler: Any, path: Path, args: Any) -> Any:
    """Each process reads an item; raises `DamagedError` if one of them cannot."""
    item = None
    problem = None
    process_id = jax.process_index()
    single_process = ocp.options.MultiprocessingOptions(
        primary_host=process_id, active_processes={process_id}
    )
    try:
        with ocp.Checkpointer(
            handler(multiprocessing_options=single_process), multiprocessing_options=single_process
        ) as reader:
            item = reader.restore(path, args=args)
    except Exception as error:
        problem = first_line(error)
    if problem is not None:
        with warnings.catch_warnings():  # of coroutines that orbax, having failed, did not await
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()
    if not all_processes(problem is None):
        raise DamagedError(problem or "another process cannot read it")
    return item


def by_number(leaves: list[Any]) -> dict[str, Any]:
    """Returns the leaves by number, without empty ones, which orbax does not write."""
    return {str(i): leaf for i, leaf in enumerate(leaves) if np.size(leaf)}


def _restore_args(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None and is_key(leaf):  # which NumPy does not know
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


def match(array: Any, leaf: Any) -> Any:
    """Returns a restored array in the form of `leaf`: a number, an empty array, or as it is."""
    if isinstance(leaf, int | float):
        return type(leaf)(array)
    if array is not None:
        return array
    empty = np.zeros(leaf.shape, leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    return empty if sharding is None else jax.device_put(empty, sharding)


def first_line(error: Exception | None) -> str:
    text = "by another process" if error is None else str(error).strip() or type(error).__name__
    return text.splitlines()[0][:500]
