"""One checkpoint on disk: its manifest, and its arrays, written and read by orbax."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import reprlib
import shutil
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from gossipjax import meshes
from gossipjax.checkpoint._leaves import (
    checksum,
    decode,
    encode,
    is_encoded,
    is_key,
    leaf_specs,
    require_same_specs,
    require_types_of_devices,
)
from gossipjax.processes import all_processes, barrier, broadcast_text
from gossipjax.spmd.arguments import is_function

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        "gossipjax.checkpoint.Checkpoints needs orbax: pip install orbax-checkpoint."
    ) from error

TEMPORARY_SUFFIX = ocp.utils.TMP_DIR_SUFFIX  # of a checkpoint that is being written
MANIFEST_FILE = Path("manifest", "metadata")  # in the folder of a checkpoint, as orbax names it
STEPS_PER_TEXT = 40
READ_BYTES = 2**20
RETRY_DELAYS = (0.1, 0.5, 2.0)  # seconds before a read that failed is tried again
# No file where one must be, or a folder in its place, is damage, and no failure of the disk.
NOT_OF_THE_DISK = (None, FileNotFoundError, IsADirectoryError, NotADirectoryError)


class DamagedError(Exception):
    """A checkpoint that is incomplete, has another checksum or is not of this format."""


class Restored(NamedTuple):
    """Result of `Checkpoints.restore`: the step, the state, and the metadata saved with it.

    >>> Restored(step=3, state={"w": 1.0}, metadata={"seed": 0}).metadata["seed"]
    0
    """

    step: int
    state: Any
    metadata: dict[str, Any]


class Manifest(NamedTuple):
    """What a checkpoint says of itself."""

    step: int  # the name of its folder, too
    leaves: list[list[Any]]  # `[path, shape, type]` of every array
    checksum: int  # of the arrays
    metadata: dict[str, Any]  # of the user
    chain: dict[str, str]  # settings of the run's chain, if `resume` was given one


def make_manifest(
    step: int, state: Any, leaves: list[Any], metadata: dict[str, Any], chain: dict[str, str]
) -> dict[str, Any]:
    """Returns the manifest of a state as it is written: a JSON text and its checksum."""
    manifest = Manifest(step, leaf_specs(state), checksum(leaves), metadata, chain)
    text = json.dumps(manifest._asdict())
    return {"json": text, "checksum": zlib.crc32(text.encode())}


def parse_manifest(content: bytes) -> Manifest:
    """Returns the manifest that was written as `content`."""
    try:
        written = json.loads(content)
        text = written["json"]
        if zlib.crc32(text.encode()) != written["checksum"]:
            raise DamagedError("its manifest has another checksum")
        manifest = Manifest(**{"chain": {}, **json.loads(text)})
        match manifest:
            case Manifest(int(), list(specs), int(), dict(), dict()) if all(map(_is_spec, specs)):
                return manifest
        raise TypeError("it has fields of other types")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"its manifest is not one: {first_line(error)}") from error


def _is_spec(spec: Any) -> bool:
    match spec:
        case [str(), list(), str()]:
            return True
    return False


def require_metadata(metadata: Any) -> dict[str, Any]:
    """Returns `metadata`; raises `ValueError` if JSON lacks any of it."""
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata must be a dict, got {reprlib.repr(metadata)}.")
    try:
        json.dumps(metadata)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metadata must be what JSON can hold, got {reprlib.repr(metadata)}: {error}."
        ) from error
    return metadata


def local_steps(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in `folder`, as this process sees them."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def list_steps(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in `folder`, as process 0 sees them."""
    steps = local_steps(folder)
    if jax.process_count() == 1:
        return steps
    count = int(broadcast_text(str(len(steps))))
    chunks = [
        broadcast_text(" ".join(map(str, steps[i : i + STEPS_PER_TEXT])))
        for i in range(0, count, STEPS_PER_TEXT)
    ]
    return [int(text) for chunk in chunks for text in chunk.split()]


def on_main_process(action: Callable[[], None]) -> None:
    """Calls `action` in process 0. Where the disk refuses it, all processes raise `OSError`."""
    failure = None
    if jax.process_index() == 0:
        try:
            action()
        except OSError as error:
            failure = error
    if not all_processes(failure is None):
        raise OSError(first_line(failure)) from failure


def remove(path: Path) -> None:
    """Removes a folder, a file or a link, if it is there. What a link leads to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def rename(folder: Path, steps: list[int], suffix: str) -> None:
    """Renames checkpoints to `STEP.suffix`, in place of what has that name."""
    for step in steps:
        target = folder / f"{step}.{suffix}"
        remove(target)
        (folder / str(step)).rename(target)


def remove_unfinished(folder: Path) -> None:
    """Removes what an interrupted write left."""
    if jax.process_index() == 0:
        for unfinished in folder.glob(f"*{TEMPORARY_SUFFIX}*"):
            with contextlib.suppress(OSError):
                remove(unfinished)
    barrier()


def clear_way(folder: Path, step: int) -> None:
    """Raises `OSError` if orbax could not begin to write this step; nothing is then in its way.

    Where orbax itself found that out in process 0, the others would wait for it for 300 s.
    """
    path = folder / str(step)
    if path.is_symlink() or path.exists():  # a file, or a link that leads nowhere
        rename(folder, [step], "superseded")
    probe = folder / f"{step}{TEMPORARY_SUFFIX}"
    remove(probe)
    for name in ("state", "manifest"):
        (probe / name).mkdir(parents=True)
        (probe / name / "probe").touch()
    shutil.rmtree(probe)


def make_writer(timeout: int) -> ocp.AsyncCheckpointer:
    """Returns orbax's writer of checkpoints; all processes write together."""
    # With names, barriers go through JAX's coordinator: they have a time-out, unlike a collective.
    together = ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())), barrier_sync_key_prefix="gossipjax"
    )
    # Folders that threads make keep other threads waiting for 300 s if they cannot be made, and the
    # process does not end before these.
    options = ocp.AsyncOptions(timeout_secs=timeout, create_directories_asynchronously=False)
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(
            multiprocessing_options=together, async_options=options
        ),
        state=ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=together),
        manifest=ocp.JsonCheckpointHandler(multiprocessing_options=together),
    )
    return ocp.AsyncCheckpointer(handler, async_options=options, multiprocessing_options=together)


def write(writer: ocp.AsyncCheckpointer, path: Path, arrays: dict[str, Any], manifest: Any) -> None:
    """Begins to write a checkpoint of arrays by number and a JSON manifest."""
    arrays = {name: encode(leaf) for name, leaf in arrays.items()}
    items = ocp.args.Composite(
        state=ocp.args.PyTreeSave(arrays), manifest=ocp.args.JsonSave(manifest)
    )
    writer.save(path, args=items)


def read_checkpoint(folder: Path, step: int, like: Any) -> tuple[Restored, dict[str, str]]:
    """Reads one checkpoint in the form of `like`, and the settings of the chain that was saved."""
    with meshes.unset_mesh():
        return _read_checkpoint(folder / str(step), step, like)


def _read_checkpoint(folder: Path, step: int, like: Any) -> tuple[Restored, dict[str, str]]:
    manifest = _read_manifest(folder)
    like = like(manifest.metadata) if is_function(like) else like
    name = f"the checkpoint of step {step}"
    require_same_specs(manifest.leaves, leaf_specs(like), name)
    require_types_of_devices(like, name)
    leaves, structure = jax.tree.flatten(like)
    read = _read_arrays(folder, by_number(leaves))
    restored = [_match(read.get(str(i)), leaf) for i, leaf in enumerate(leaves)]
    state = jax.tree.unflatten(structure, restored)
    if not all_processes(leaf_specs(state) == manifest.leaves):
        raise DamagedError("its arrays have other types")
    if checksum(meshes.on_auto_axes(restored)) != manifest.checksum:
        raise DamagedError("its arrays have another checksum")
    return Restored(step, state, manifest.metadata), manifest.chain


def _read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of the checkpoint in `folder`, on each process."""

    def read() -> Manifest:
        manifest = parse_manifest((folder / MANIFEST_FILE).read_bytes())
        if str(manifest.step) != folder.name:
            raise DamagedError(f"it is the checkpoint of step {manifest.step}")
        return manifest

    return _read_together(read, folder)


def _read_arrays(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Reads the arrays of the checkpoint in `folder`, with the shardings of `like`."""
    stored = {name: _as_stored(leaf) for name, leaf in like.items()}
    args = ocp.args.PyTreeRestore(item=stored, restore_args=jax.tree.map(_restore_args, stored))
    process_id = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process_id, active_processes={process_id}
    )

    def read() -> dict[str, Any]:
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
            return reader.restore(folder / "state", args=args)

    arrays = _read_together(read, folder)
    return {
        name: decode(array, like[name].dtype) if is_encoded(like[name]) else array
        for name, array in arrays.items()
    }


def _read_together(read: Callable[[], Any], folder: Path) -> Any:
    """Each process reads a part of the checkpoint in `folder`; all raise if one of them cannot."""
    item, error = _read_with_retries(read, folder)
    if all_processes(error is None):
        return item
    is_damaged = error is None or isinstance(error, DamagedError)
    if error is None:
        error = DamagedError("another process cannot read it")
    if all_processes(is_damaged):
        raise error
    raise OSError(
        f"the checkpoint {folder} cannot be read ({first_line(error)}), at least by one process. "
        "Nothing was changed: it may be complete. Mend the disk and try again, or rename the "
        "folder to use an older one."
    ) from error


def _read_with_retries(read: Callable[[], Any], folder: Path) -> tuple[Any, Exception | None]:
    """What `read` returns, and None; or None, and `DamagedError` or the reason why not."""
    # Kinds of all failures, None: the content. Not the errors: they keep orbax's coroutines alive.
    kinds: list[type[BaseException] | None] = []
    description = ""
    for delay in (*RETRY_DELAYS, None):
        try:
            return read(), None
        except DamagedError as error:
            return None, error
        except Exception as error:
            kind, description = _find_reason(error, folder)
            kinds.append(kind)
        with warnings.catch_warnings():  # of coroutines that orbax, having failed, did not await
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()
        # The first of two failures may stem from a disk that has recovered since.
        if kinds.count(None) == 2:
            return None, DamagedError(description)
        if delay is not None:
            time.sleep(delay)
    if kinds[-1] in NOT_OF_THE_DISK and folder.is_dir():
        return None, DamagedError(description)
    return None, OSError(description)


def _find_reason(error: Exception, folder: Path) -> tuple[type[BaseException] | None, str]:
    """The kind of failure of disk or memory that stopped a read, None if none did; and in words.

    TensorStore raises `ValueError` for all failures, so the files are read again to know better.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError | MemoryError | jax.errors.JaxRuntimeError):
            return type(cause), first_line(cause)
        cause = cause.__cause__
    try:
        for path in folder.rglob("*"):
            if not path.is_dir():
                with path.open("rb") as file:
                    while file.read(READ_BYTES):
                        pass
    except OSError as reason:
        return type(reason), first_line(reason)
    return None, f"not in its format: {first_line(error)}"


def by_number(leaves: list[Any]) -> dict[str, Any]:
    """Returns the leaves by number, without empty ones, which orbax does not write."""
    return {str(i): leaf for i, leaf in enumerate(leaves) if np.size(leaf)}


def _as_stored(leaf: Any) -> Any:
    """Returns a leaf as files have it: shape and sharding of `leaf`, in a type that they know."""
    if not is_encoded(leaf):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, np.uint8, sharding=sharding)


def _restore_args(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None and is_key(leaf):  # which NumPy does not know
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


def _match(array: Any, leaf: Any) -> Any:
    """Returns a restored array in the form of `leaf`: a number, an empty array, or as it is."""
    if isinstance(leaf, int | float):
        return type(leaf)(array)
    is_free = isinstance(leaf, jax.Array) and not leaf.committed
    if array is not None:
        return _uncommit(array) if is_free else array
    empty = np.zeros(leaf.shape, leaf.dtype)
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        return empty
    return jnp.asarray(empty) if is_free else jax.device_put(empty, sharding)


def _uncommit(array: jax.Array) -> jax.Array:
    """A copy that is not bound to its device, for programs compiled for such arrays."""
    if is_key(array):
        data = _uncommit(jax.random.key_data(array))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    return jax.device_put(np.asarray(array))


def first_line(error: BaseException | None) -> str:
    text = "by another process" if error is None else str(error).strip() or type(error).__name__
    return text.splitlines()[0][:500]
