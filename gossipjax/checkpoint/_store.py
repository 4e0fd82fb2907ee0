"""Reads one checkpoint from disk: its manifest, and by orbax its arrays."""

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
    held_nodes,
    held_parts,
    is_encoded,
    is_on_all_processes,
    leaf_specs,
    require_same_specs,
    require_types_of_devices,
)
from gossipjax.nodes.arguments import is_function
from gossipjax.processes import all_processes, gather_texts, is_key

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        "gossipjax.checkpoint.Checkpoints needs orbax: pip install orbax-checkpoint."
    ) from error

TEMPORARY_SUFFIX = ocp.utils.TMP_DIR_SUFFIX  # in the name of a checkpoint that is being written
MANIFEST_FILE = Path("manifest", "metadata")  # orbax's name for the file in a checkpoint's folder
READ_BYTES = 2**20
RETRY_DELAYS = (0.1, 0.5, 2.0)  # seconds to wait before a failed read is tried again
# A missing file, or a folder instead of a file, is damage and not a failure of the disk.
NOT_OF_THE_DISK = (None, FileNotFoundError, IsADirectoryError, NotADirectoryError)


class DamagedError(Exception):
    """A checkpoint that is incomplete, has another checksum or is not of this format."""


class Restored(NamedTuple):
    """What `Checkpoints.restore` returns: the step, the state, and the metadata saved with it.

    >>> Restored(step=3, state={"w": 1.0}, metadata={"seed": 0}).metadata["seed"]
    0
    """

    step: int
    state: Any
    metadata: dict[str, Any]


class Manifest(NamedTuple):
    """The contents of a checkpoint's manifest file."""

    step: int  # also the name of its folder
    leaves: list[list[Any]]  # `[path, shape, type]` of every array
    checksum: int  # of the arrays, or of the part in this folder
    metadata: dict[str, Any]  # the metadata of the user
    # Of a folder that is not shared: the `nodes` of its process, the `checksums` of the parts of
    # all processes, and whether it `is_first`: whether no checkpoint was complete before it.
    part: dict[str, Any] | None = None


def make_manifest(
    step: int,
    state: Any,
    leaves: list[Any],
    metadata: dict[str, Any],
    former: list[int] | None,
) -> dict[str, Any]:
    """Makes the manifest of a state as it is written: a JSON text and its checksum.

    `former` are the steps that were complete before, if each process has its own folder.
    """
    part = None
    if former is None:
        number = checksum(leaves)
    else:
        number = checksum(held_parts(leaves))
        checksums = [int(text) for text in gather_texts(str(number))]
        part = {"nodes": held_nodes(leaves), "checksums": checksums, "is_first": not former}
    manifest = Manifest(step, leaf_specs(state), number, metadata, part)
    text = json.dumps(manifest._asdict())
    return {"json": text, "checksum": zlib.crc32(text.encode())}


def parse_manifest(content: bytes) -> Manifest:
    """Reads a manifest from the `content` of its file."""
    try:
        written = json.loads(content)
        text = written["json"]
        if zlib.crc32(text.encode()) != written["checksum"]:
            raise DamagedError("its manifest has another checksum")
        fields = json.loads(text)
        fields.pop("chain", None)  # a description of the chain, which gossipjax 0.4 wrote
        manifest = Manifest(**fields)
        match manifest:
            case Manifest(int(), list(specs), int(), dict()) if all(
                [*map(type, spec)] == [str, list, str] for spec in specs
            ):
                match manifest.part:
                    case None | {"nodes": [*_], "checksums": [*_], "is_first": bool()}:
                        return manifest
        raise TypeError("it has fields of other types")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"its manifest is not one: {first_line(error)}") from error


def require_metadata(metadata: Any, name: str = "metadata") -> dict[str, Any]:
    """Returns `metadata`; raises `ValueError` with the key of what JSON cannot express."""
    if not isinstance(metadata, dict):
        raise ValueError(f"{name} must be a dict, got {reprlib.repr(metadata)}.")
    for key, value in metadata.items():
        path = f"{name}[{key!r}]"
        if is_dict := isinstance(value, dict) or path == "metadata['settings']":
            require_metadata(value, path)
        try:
            json.dumps({key: None if is_dict else value})
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path} must be what JSON can hold, got {reprlib.repr(value)}: {error}. Save "
                "numbers, texts, lists and dicts of them."
            ) from error
    return metadata


def local_steps(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in `folder`, as this process sees them."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def agree_on_steps(folder: Path, shared: bool) -> tuple[list[int], set[int]]:
    """Returns the steps of complete checkpoints, and the processes whose folder is empty.

    If folders are not shared, a checkpoint is complete if each process has its part, and all
    manifests name the same checksums. A process whose folder is empty has lost its parts. But if
    the other folders contain only a first checkpoint, the job may have ended before it was
    complete, and nothing counts.
    """
    if shared:  # the steps that process 0 sees
        return json.loads(gather_texts(json.dumps(local_steps(folder)))[0]), set()
    offers = [dict(json.loads(text)) for text in gather_texts(json.dumps(_own_parts(folder)))]
    lost = {process for process, offer in enumerate(offers) if not offer}
    offers = [offer for offer in offers if offer]
    parts = [part for offer in offers for part in offer.values()]
    if not offers or (lost and all(part and part["is_first"] for part in parts)):
        return [], set()
    steps = [
        step
        for step in offers[0]
        if all(step in offer for offer in offers)
        # A damaged manifest names no checksums. Its step is skipped when it is read.
        and len({str(offer[step]["checksums"]) for offer in offers if offer[step]}) <= 1
    ]
    if not steps:
        found = "; ".join(str([*offer]) for offer in offers)
        raise OSError(
            f"the folders must have a checkpoint of one run and step in common, got steps {found}: "
            "they are of several runs, or of other processes. Give each process the folder that it "
            "wrote, or an empty one."
        )
    return steps, lost


def _own_parts(folder: Path) -> list[tuple[int, dict[str, Any] | None]]:
    """Returns the steps in `folder`, and each manifest's entry for this part; None if damaged."""
    found = []
    for step in local_steps(folder):
        try:
            part = parse_manifest((folder / str(step) / MANIFEST_FILE).read_bytes()).part
            found.append((step, part or {"checksums": [], "is_first": False}))
        except (DamagedError, OSError):
            found.append((step, None))
    return found


def on_each_folder(action: Callable[[], None], shared: bool) -> None:
    """Calls `action` in process 0 if all processes share the folder, else in each process.

    If a disk refuses the action, all processes raise `OSError`.
    """
    failure = None
    if jax.process_index() == 0 or not shared:
        try:
            action()
        except OSError as error:
            failure = error
    if not all_processes(failure is None):
        raise OSError(first_line(failure)) from failure


def remove(path: Path) -> None:
    """Removes a folder, a file or a link, if it exists. The target of a link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def rename(folder: Path, steps: list[int], suffix: str) -> None:
    """Renames existing checkpoints to `STEP.suffix`, and replaces what has that name."""
    for step in sorted({*steps} & {*local_steps(folder)}):
        target = folder / f"{step}.{suffix}"
        remove(target)
        (folder / str(step)).rename(target)


def remove_unfinished(folder: Path) -> None:
    """Removes what an interrupted write has left in the folder."""
    for unfinished in folder.glob(f"*{TEMPORARY_SUFFIX}*"):
        with contextlib.suppress(OSError):
            remove(unfinished)


def clear_way(folder: Path, step: int) -> None:
    """Clears the way for orbax to write this step; raises `OSError` if orbax could not begin.

    If orbax itself failed in process 0, the other processes would wait for it for 300 s.
    """
    # Otherwise a later resume would take the newest checkpoint of the abandoned run.
    rename(folder, [other for other in local_steps(folder) if other >= step], "superseded")
    path = folder / str(step)
    if path.is_symlink() or path.exists():  # a file, or a link that leads nowhere
        target = folder / f"{step}.superseded"
        remove(target)
        path.rename(target)
    probe = folder / f"{step}{TEMPORARY_SUFFIX}"
    remove(probe)
    for name in ("state", "manifest"):
        (probe / name).mkdir(parents=True)
        (probe / name / "probe").touch()
    shutil.rmtree(probe)


def read_checkpoint(folder: Path, step: int, like: Any, shared: bool, lost: set[int]) -> Restored:
    """Reads one checkpoint in the form of `like`.

    Processes in `lost` have lost their part, and get the arrays of `like`.
    """
    folder = folder / str(step)
    is_lost = jax.process_index() in lost
    manifest = _read_manifest(folder, lost)
    if (manifest.part is None) != shared:
        raise ValueError(
            f"shared must be {manifest.part is None}, as in the run that saved {folder}, got "
            f"{shared}: restore it with the processes of that run."
        )
    like = like(manifest.metadata) if is_function(like) else like
    name = f"the checkpoint of step {step}"
    specs = leaf_specs(like)
    require_same_specs(manifest.leaves, specs, name)
    require_types_of_devices(like, name)
    leaves, structure = jax.tree.flatten(like)
    if manifest.part is not None:
        _require_own_nodes(manifest.part["nodes"], like, is_lost, folder)
    read = _read_together(
        lambda: by_number(leaves) if is_lost else _read_arrays(folder, by_number(leaves)), folder
    )
    restored = [_match(read.get(str(i)), leaf) for i, leaf in enumerate(leaves)]
    state = jax.tree.unflatten(structure, restored)
    if not all_processes(leaf_specs(state) == specs):
        raise DamagedError("its arrays have other types")
    restored = meshes.on_auto_axes(restored)
    number = checksum(restored if manifest.part is None else held_parts(restored))
    if not all_processes(is_lost or number == manifest.checksum):
        raise DamagedError("its arrays have another checksum")
    return Restored(step, state, manifest.metadata)


def _require_own_nodes(saved: list[int], like: Any, is_lost: bool, folder: Path) -> None:
    """Raises `ValueError` unless each process is to read the nodes that it wrote."""
    leaves = jax.tree.leaves(like)
    nodes = held_nodes(leaves) if all(map(is_on_all_processes, leaves)) else None
    if not all_processes(nodes is not None and (is_lost or nodes == saved)):
        raise ValueError(
            "a checkpoint in folders that are not shared must be restored by the processes and "
            f"nodes that saved it, in their order, got {folder} with nodes {saved} for "
            f"{'other nodes' if nodes is None else f'nodes {nodes}'} of process "
            f"{jax.process_index()}, or such a difference in another process. Start as that run, "
            "each process with its folder; other nodes need a folder that all share."
        )


def _read_manifest(folder: Path, lost: set[int]) -> Manifest:
    """Reads the manifest in `folder`; a process that has lost its own gets another's."""

    def read() -> Manifest | None:
        if jax.process_index() in lost:
            return None
        manifest = parse_manifest((folder / MANIFEST_FILE).read_bytes())
        if str(manifest.step) != folder.name:
            raise DamagedError(f"it is the checkpoint of step {manifest.step}")
        return manifest

    manifest = _read_together(read, folder)
    if lost:
        texts = gather_texts("" if manifest is None else json.dumps(manifest._asdict()))
        manifest = manifest or Manifest(**json.loads(next(filter(None, texts))))
    return manifest


def _read_arrays(folder: Path, like: dict[str, Any]) -> dict[str, Any]:
    """Reads the arrays of the checkpoint in `folder`, with the shardings of `like`."""
    stored = {name: _as_stored(leaf) for name, leaf in like.items()}
    args = ocp.args.PyTreeRestore(item=stored, restore_args=jax.tree.map(_restore_args, stored))
    process_id = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process_id, active_processes={process_id}
    )

    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
        arrays = reader.restore(folder / "state", args=args)
    return {name: _as_saved(array, like[name]) for name, array in arrays.items()}


def _read_together(read: Callable[[], Any], folder: Path) -> Any:
    """Calls `read` in each process; all processes raise if one of them cannot read."""
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
    """Calls `read`; returns its result, or else a `DamagedError` or the reason of the failure."""
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
        with warnings.catch_warnings():  # about coroutines that orbax did not await after a failure
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()
        # After the first of two failures, the disk may have recovered.
        if kinds.count(None) == 2:
            return None, DamagedError(description)
        if delay is not None:
            time.sleep(delay)
    if kinds[-1] in NOT_OF_THE_DISK and folder.is_dir():
        return None, DamagedError(description)
    return None, OSError(description)


def _find_reason(error: Exception, folder: Path) -> tuple[type[BaseException] | None, str]:
    """Finds which failure of disk or memory stopped a read (None if none did), and describes it.

    TensorStore raises `ValueError` for all failures, so this reads the files again.
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
    """Returns shape and sharding of `leaf`, with the type in which files store it."""
    if not is_encoded(leaf):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    return jax.ShapeDtypeStruct(leaf.shape, np.uint8, sharding=sharding)


def _as_saved(array: Any, like: Any) -> Any:
    """Returns an array that was read from files in the type of `like`."""
    if is_key(like) and not is_key(array):  # the folder is not shared
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(jnp.empty((), like.dtype)))
    return decode(array, like.dtype) if is_encoded(like) else array


def _restore_args(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None and is_key(leaf):  # NumPy has no type for keys
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


def _match(array: Any, leaf: Any) -> Any:
    """Returns a restored array as `leaf` was: a number, an empty array, or an array."""
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
