"""The files of checkpoints: which are complete, whether they are damaged, what they hold."""

from __future__ import annotations

import contextlib
import json
import os
import re
import reprlib
import time
import warnings
import zlib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import SingleDeviceSharding

from gossipjax.checkpoint._leaves import held_nodes, leaf_specs, require_same_specs, spans_processes
from gossipjax.nodes.arguments import is_function
from gossipjax.processes import all_processes, gather_arrays, gather_texts, is_key

try:
    import orbax.checkpoint as ocp
    import tensorstore
except ImportError as error:
    raise ImportError(
        "gossipjax.checkpoint.Checkpoints needs orbax: pip install orbax-checkpoint."
    ) from error

TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"  # see `temporary`
# A `pathlib.Path` is on a disk, all others are in a bucket, which has no locks, links or renames.
AnyPath = Path | epath.Path
MANIFEST_FILE = Path("manifest", "metadata")  # below the folder of a checkpoint, in a folder
NARROW = re.compile("float[48]|u?int[24]$")  # types of 8 bits and less, which NumPy has from JAX
READ_BYTES = 2**22
RETRY_DELAYS = (0.1, 0.5, 2.0)  # seconds to wait before a failed read is tried again
# A missing file, or a folder instead of a file, is damage and not a failure of the disk.
NOT_OF_THE_DISK = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class DamagedError(Exception):
    """A checkpoint that is incomplete, has other checksums or is not of this format."""


class Restored(NamedTuple):
    """Has what `Checkpoints.restore` returns: the step, the state, and the metadata saved with it.

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
    metadata: dict[str, Any]  # the metadata of the user
    # Of a folder that is not shared: the `nodes` of its process, those that it has `whole`, the
    # `save` that all processes made together, and whether it `is_first`: whether no checkpoint was
    # complete before it. None if one process has everything.
    part: dict[str, Any] | None = None
    # The CRC-32 of every file below `state`, by path. None if gossipjax 0.4 wrote the manifest: it
    # had another checksum.
    files: dict[str, int] | None = None

    def own_part(self) -> dict[str, Any]:
        """Returns `part` (all nodes, if it is None) with `size`, the number of all saved nodes."""
        size = next((shape[0] for _, shape, _ in self.leaves if shape), 0)
        nodes = [*range(size)]
        everything = {"save": "", "is_first": False, "nodes": nodes, "whole": nodes}
        # Parts that older versions wrote do not say which nodes are whole.
        return {"whole": [], "size": size, **(self.part or everything)}

    def to_json(self) -> str:
        """Returns the text of the manifest's file: the manifest as a text, and its checksum."""
        text = json.dumps(self._asdict())
        return json.dumps({"json": text, "checksum": zlib.crc32(text.encode())})


def parse_manifest(content: bytes) -> Manifest:
    """Reads a manifest from the `content` of its file; raises `DamagedError` if it cannot."""
    try:
        written = json.loads(content)
        text = written["json"]
        if zlib.crc32(text.encode()) != written["checksum"]:
            raise DamagedError("its manifest has another checksum")
        fields = json.loads(text)
        if "files" not in fields:  # of gossipjax 0.4
            fields.pop("chain", None)  # a description of the chain
            del fields["checksum"]  # of the arrays
            if part := fields.get("part"):  # it named the save by its checksums
                fields["part"] = part | {"save": str(part["checksums"])}
        elif not fields["files"]:
            raise TypeError("it names no files")
        return Manifest(**fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedError(f"its manifest is not one: {first_line(error)}") from error


def require_metadata(metadata: Any, name: str = "metadata") -> dict[str, Any]:
    """Returns `metadata`; raises `ValueError` if JSON cannot express it, and names the entry."""
    if not isinstance(metadata, dict):
        raise ValueError(f"{name} must be a dict, got {reprlib.repr(metadata)}.")
    for key, value in metadata.items():
        path = f"{name}[{key!r}]"
        is_dict = isinstance(value, dict)
        if is_dict or path == "metadata['settings']":  # the settings must be a dict
            require_metadata(value, path)
        try:
            json.dumps({key: None if is_dict else value})  # a dict's values have just been checked
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path} must be what JSON can hold, got {reprlib.repr(value)}: {error}. Save "
                "numbers, texts, lists and dicts of them."
            ) from error
    return metadata


class Folder:
    """A folder that all processes share, or one for each process; all make the same calls."""

    def __init__(self, path: AnyPath, shared: bool):
        self.path = path
        self.shared = shared

    def each(self, action: Callable[[], None]) -> None:
        """Calls `action` in process 0 if the folder is shared, else in each process.

        If the action fails, all processes raise `OSError` with the reason.
        """
        problem = ""
        if jax.process_index() == 0 or not self.shared:
            try:
                action()
            except Exception as error:  # a bucket does not only raise `OSError`
                problem = first_line(error)
        if problem := next(filter(None, gather_texts(problem)), ""):
            raise OSError(problem)

    def local_steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints that this process sees in its folder."""
        paths = [path for path in self.path.glob("[0-9]*") if path.is_dir()]
        names = [path.name for path in paths if not temporary(path).exists()]
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints that are complete in all processes."""
        return self.agree()[0]

    def agree(self) -> tuple[list[int], set[int]]:
        """Returns the steps of complete checkpoints, and the processes that have no part of them.

        If folders are not shared, each process has its part of each save. A save was complete if
        all of its nodes are in some folder, or if a process that has a part of it has begun a later
        save. The processes that have the newest complete save decide: a step counts if each of them
        has its part of the same save. All other processes are new, have lost their disk, or come
        back with an old save. But if a folder is empty and the others have only a part of a first
        checkpoint, the job may have ended during that save. No step counts then.
        """
        if self.shared:  # the steps that process 0 sees
            return json.loads(gather_texts(json.dumps(self.local_steps()))[0]), set()
        # For each process: step -> its part of the checkpoint of this step, None if it is damaged.
        offers = [dict(json.loads(text)) for text in gather_texts(json.dumps(self._own_parts()))]
        # Each save, as its step and its name -> the processes that have a part of it.
        holders: dict[tuple[int, str], set[int]] = {}
        found = [(i, step, part) for i, offer in enumerate(offers) for step, part in offer.items()]
        for process, step, part in sorted(found, key=lambda item: item[2] is None):
            # A damaged manifest names no save, so it counts as all saves of its step. `restore`
            # finds the damage, and takes an older step.
            same_step = [save for save in holders if save[0] == step] or [(step, "")]
            for save in [(step, part["save"])] if part else same_step:
                holders.setdefault(save, set()).add(process)

        def is_complete(save: tuple[int, str]) -> bool:
            """Says whether a save has all its nodes, or one of its processes saved again later."""
            step = save[0]
            parts = [offers[process][step] or {"whole": [], "size": 0} for process in holders[save]]
            nodes = {node for part in parts for node in part["whole"]}
            # A process begins a save when the one before it is complete.
            has_later_save = any(step < max(offers[process]) for process in holders[save])
            size = max(part["size"] for part in parts)  # 0 if all parts are damaged
            return has_later_save or 0 < size == len(nodes)

        complete = [*filter(is_complete, holders)]
        is_first_save = all(part and part["is_first"] for _, _, part in found)
        if not found or (not complete and is_first_save and not all(offers)):
            return [], set()
        newest = max(step for step, _ in complete or holders)
        newest_saves = [save for save in complete or holders if save[0] == newest]
        if len(newest_saves) > 1:
            steps = "; ".join(str([*offer]) for offer in offers)
            raise OSError(
                f"the folders must have checkpoints of one run, got several of step {newest}, of "
                f"several runs, in folders with steps {steps}. Give each process the folder that "
                "it wrote, or an empty one."
            )
        deciders = holders[newest_saves[0]]
        agreed = {step for (step, _), processes in holders.items() if processes >= deciders}
        return sorted(agreed), {*range(len(offers))} - deciders

    def _own_parts(self) -> list[tuple[int, dict[str, Any] | None]]:
        """Returns the steps in this folder, each with `Manifest.own_part`, or None if damaged."""
        found = []
        for step in self.local_steps():
            try:
                path = _require_file(self.path / str(step) / MANIFEST_FILE)
                found.append((step, parse_manifest(path.read_bytes()).own_part()))
            except (DamagedError, OSError):
                found.append((step, None))
        return found

    def begin(self, step: int, steps: list[int], damaged: set[int]) -> None:
        """Makes the folder of a new checkpoint, into which the writer then writes.

        Before that, removes what interrupted writes have left, and renames the checkpoints of the
        steps `damaged` to `STEP.corrupted`. `steps` are complete in all processes.
        """
        path = self.path / str(step)

        def prepare() -> None:
            self.remove_unfinished()
            for bad in damaged & {*self.local_steps()}:
                target = self.path / f"{bad}.corrupted"
                remove(target)
                (self.path / str(bad)).rename(target)
            # Without a shared folder, this process may have its part of a newer checkpoint whose
            # other parts are missing. It can never be restored, and its step will be written anew.
            if not self.shared:
                newest = max({*steps} - damaged, default=-1)
                for other in self.local_steps():
                    if other > newest:
                        remove(self.path / str(other))
            # All checkpoints of this step are gone by now, so this is something else.
            if path.exists() or os.path.islink(path):
                raise FileExistsError(f"{path} is no checkpoint: move it away")
            if not isinstance(path, Path):  # in a bucket, an empty file says "not complete"
                temporary(path).write_text("")
                return
            (temporary(path) / "state").mkdir(parents=True)
            (temporary(path) / MANIFEST_FILE).parent.mkdir()

        self.each(prepare)

    def remove_unfinished(self) -> None:
        """Removes what interrupted writes have left; `each` must call it."""
        for unfinished in self.path.glob(f"*{TEMPORARY_SUFFIX}*"):
            with contextlib.suppress(OSError):
                if not isinstance(unfinished, Path):  # a bucket has the data under the final name
                    remove(unfinished.with_name(unfinished.name.removesuffix(TEMPORARY_SUFFIX)))
                remove(unfinished)

    def delete_all_but(self, count: int) -> None:
        """Deletes all complete checkpoints but the newest `count`; warns if that fails."""
        steps = self.steps()

        def delete() -> None:
            # The newest first, because one that cannot be removed is often the oldest.
            for step in reversed(self.local_steps()):
                if step < steps[-count]:
                    remove(self.path / str(step))

        if len(steps) >= count:
            try:
                self.each(delete)
            except ConnectionError:  # another process has ended
                raise
            except OSError as error:
                warnings.warn(
                    f"old checkpoints in {self.path} cannot be deleted ({first_line(error)}): "
                    "delete them, or the disk fills.",
                    stacklevel=5,
                )


def remove(path: AnyPath) -> None:
    """Removes a folder, a file or a link, if it exists. The target of a link stays."""
    if path.is_dir() and not os.path.islink(path):
        epath.Path(path).rmtree()
    else:
        path.unlink(missing_ok=True)


def temporary(path: AnyPath) -> AnyPath:
    """Returns the path of a checkpoint that is not complete.

    On a disk it is the folder that is renamed to `path` at the end. In a bucket it is an empty
    file, which is there until all below `path` is written.
    """
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def sum_files(folder: AnyPath, subfolder: str, known: Collection[str] = ()) -> dict[str, int]:
    """Returns path -> CRC-32 of the files below `subfolder` in `folder`, without `known` paths."""
    sums = {}
    for path in (folder / subfolder).iterdir():
        name = f"{subfolder}/{path.name}"
        if path.is_dir():
            sums |= sum_files(folder, name, known)
        elif name not in known:
            sums[name] = _sum_file(path)
    return sums


def _require_file(path: AnyPath) -> AnyPath:
    """Returns the path; raises `DamagedError` if it is of a pipe, say, where a read may hang."""
    if path.exists() and not path.is_file():
        raise DamagedError(f"{path.name} is not a file")
    return path


def _sum_file(path: AnyPath) -> int:
    """Returns the CRC-32 of a file."""
    checksum = 0
    with _require_file(path).open("rb") as file:
        while block := file.read(READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


def read_checkpoint(
    source: Folder, step: int, like: Any, lost: set[int]
) -> tuple[Restored, list[int] | None]:
    """Reads one checkpoint in the form of `like`.

    Usually each process reads its own nodes. If folders are not shared, and a process does not have
    the nodes that it needs, all processes get the same NumPy arrays instead, of all nodes that are
    in some folder. Processes in `lost` have no part of the checkpoint.

    Returns:
      What was read; and None, or for such NumPy arrays, the node of each row.
    """
    folder = source.path / str(step)
    is_lost = jax.process_index() in lost
    manifest = _read_manifest(folder, lost)
    if manifest.part is not None and source.shared:
        raise ValueError(
            f"shared must be False, as in the run that saved {folder}, got True: that run had no "
            "folder that all processes shared."
        )
    like = like(manifest.metadata) if is_function(like) else like
    name = f"the checkpoint of step {step}"
    specs = leaf_specs(like)
    require_same_specs(manifest.leaves, specs, name)
    for leaf in jax.tree.leaves(like):
        if is_key(leaf) or getattr(leaf, "sharding", None) is None:
            continue  # JAX does not narrow keys and NumPy arrays
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:  # JAX would keep 32 bits
            raise ValueError(
                f"{name} has an array of {leaf.dtype}, which devices must be allowed to hold: set "
                "jax_enable_x64, as in the run that saved it."
            )
    if manifest.files is None and (narrow := [spec for spec in specs if NARROW.match(spec[2])]):
        raise ValueError(
            f"{name} was saved by gossipjax 0.4, which stored types of 8 bits and less in another "
            f"form, got {narrow[0][2]} of {narrow[0][0]}: go on with 0.4, or save it as bfloat16."
        )
    leaves, structure = jax.tree.flatten(like)
    part = manifest.own_part()
    if is_lost:
        part |= {"nodes": [], "whole": []}
    giver_of = None if source.shared else _find_givers(part, leaves, folder)
    _read_together(lambda: is_lost or _check_files(folder, manifest, source.shared), folder)
    if giver_of is None:
        arrays = _read_together(lambda: _read_arrays(folder, leaves), folder)
    else:
        # Each process reads the nodes that it gives to all. So that these can be gathered, all
        # processes give the same number of rows, some of them empty.
        givers = [*giver_of.values()]  # for each node, the process that gives it
        given = [node for node, process in giver_of.items() if process == jax.process_index()]
        padding = max(map(givers.count, givers)) - len(given)
        own = _read_together(lambda: _read_rows(folder, leaves, given, padding), folder)
        # For each node, the place of its row among the rows of its giver.
        positions = [givers[:i].count(process) for i, process in enumerate(givers)]
        rows = [gathered[givers, positions] for gathered in gather_arrays(own)]
        arrays = [*map(_give_form, rows, leaves)]
    restored = Restored(step, jax.tree.unflatten(structure, arrays), manifest.metadata)
    return restored, None if giver_of is None else [*giver_of]


def _check_files(folder: AnyPath, manifest: Manifest, shared: bool) -> None:
    """Raises `DamagedError` if a file has another checksum than in the manifest."""
    files = sorted((manifest.files or {}).items())
    if shared:  # each process checks some of the files
        files = files[jax.process_index() :: jax.process_count()]
    for name, checksum in files:
        if _sum_file(folder / name) != checksum:
            raise DamagedError(f"{name} has another checksum")


def _find_givers(part: dict[str, Any], leaves: list[Any], folder: AnyPath) -> dict[int, int] | None:
    """Returns a process that has it for each saved node; None if each has just what it needs."""
    # The nodes that this process needs, or None if it needs all.
    own = held_nodes(leaves) if all(map(spans_processes, leaves)) else None
    # A single process needs all nodes, and may have them.
    if jax.process_count() == 1 and part["whole"] == [*range(part["size"])]:
        return None
    if all_processes(own is not None and own == part["nodes"]):
        return None
    offers = [json.loads(text) for text in gather_texts(json.dumps(part["whole"]))]
    # Reversed, so that the first process that has a node gives it.
    giver_of = {node: i for i, nodes in reversed([*enumerate(offers)]) for node in nodes}
    if not giver_of:
        raise OSError(
            f"at least one of the {part['size']} nodes that saved {folder} must be whole in the "
            "folder of a process, got none: mount the disks of the processes that saved it, or "
            "begin in empty folders."
        )
    return dict(sorted(giver_of.items()))


def _read_rows(folder: AnyPath, leaves: list[Any], nodes: list[int], padding: int) -> list[Any]:
    """Reads the rows of `nodes` of each array, which orbax cannot; adds `padding` rows of 0."""
    path = f"{folder}/state/"
    base = {"driver": "file", "path": path} if isinstance(folder, Path) else path
    arrays = []
    for i, leaf in enumerate(leaves):
        form = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        rows = np.zeros((len(nodes) + padding, *form.shape[1:]), form.dtype)
        if nodes and np.size(rows):
            store = {"driver": "ocdbt", "base": base, "path": f"{i}/"}
            saved = tensorstore.open({"driver": "zarr", "kvstore": store}, open=True, read=True)
            rows[: len(nodes)] = saved.result()[nodes].read().result()
        arrays.append(rows)
    return arrays


def _read_manifest(folder: AnyPath, lost: set[int]) -> Manifest:
    """Reads the manifest in `folder`; a process in `lost` gets that of another process."""

    def read() -> Manifest | None:
        if jax.process_index() in lost:
            return None
        manifest = parse_manifest(_require_file(folder / MANIFEST_FILE).read_bytes())
        if str(manifest.step) != folder.name:
            raise DamagedError(f"it is the checkpoint of step {manifest.step}")
        return manifest

    manifest = _read_together(read, folder)
    if lost:
        texts = gather_texts("" if manifest is None else json.dumps(manifest._asdict()))
        manifest = manifest or Manifest(**json.loads(next(filter(None, texts))))
    return manifest


def _read_arrays(folder: AnyPath, leaves: list[Any]) -> list[Any]:
    """Reads the arrays of the checkpoint in `folder`, with the types and devices of `leaves`."""
    item = by_number(leaves)
    number = jax.process_index()
    # With no other process: `_read_together` agrees on failures.
    alone = ocp.options.MultiprocessingOptions(primary_host=number, active_processes={number})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    args = ocp.args.PyTreeRestore(item, restore_args=jax.tree.map(_restore_args, item))
    with contextlib.closing(handler):
        arrays = handler.restore(epath.Path(folder) / "state", args=args)
    return [_give_form(arrays.get(str(i)), leaf) for i, leaf in enumerate(leaves)]


def _read_together(read: Callable[[], Any], folder: AnyPath) -> Any:
    """Calls `read` in each process, again if the disk fails; returns what it has read.

    If one process cannot read, all processes raise the same type of error, also those that could
    read: `DamagedError` if every failure was a damaged checkpoint, else `OSError`.
    """
    result = None
    error: Exception | None = None
    for delay in (*RETRY_DELAYS, None):
        try:
            result, error = read(), None
        except (DamagedError, *NOT_OF_THE_DISK) as reason:
            error = DamagedError(first_line(reason))
        except Exception as reason:
            error = reason
        if not isinstance(error, OSError) or delay is None:
            break
        time.sleep(delay)
    if all_processes(error is None):
        return result
    # A process that could read votes True as well, so one failing disk makes all raise `OSError`.
    is_damaged = error is None or isinstance(error, DamagedError)
    if all_processes(is_damaged):
        raise error or DamagedError("another process cannot read it")
    raise OSError(
        f"the checkpoint {folder} cannot be read ({first_line(error)}), at least by one process. "
        "Nothing was changed: it may be complete. Mend the disk and try again, or rename the "
        "folder to use an older one."
    ) from error


def by_number(leaves: list[Any]) -> dict[str, Any]:
    """Returns the leaves by their number in the state, without empty ones: orbax writes none."""
    return {str(i): leaf for i, leaf in enumerate(leaves) if np.size(leaf)}


def _restore_args(leaf: Any) -> ocp.RestoreArgs:
    """Says how orbax restores a leaf: with its sharding, or as a NumPy array if it has none."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is None and is_key(leaf):  # NumPy has no type for keys
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


def _give_form(array: Any, leaf: Any) -> Any:
    """Gives an array that was read (None for an empty one) the type and the devices of `leaf`."""
    if isinstance(leaf, int | float):
        return type(leaf)(array)
    is_free = isinstance(leaf, jax.Array) and not leaf.committed  # JAX may move it to any device
    if array is None:
        array = np.zeros(leaf.shape, leaf.dtype)
        sharding = getattr(leaf, "sharding", None)
        return array if sharding is None else jax.device_put(array, None if is_free else sharding)
    if not is_key(leaf):
        return jax.device_put(np.asarray(array)) if is_free else array
    data = jax.random.key_data(array) if is_key(array) else array  # `_read_rows` returns data
    data = jax.device_put(np.asarray(data)) if is_free else data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(jnp.empty((), leaf.dtype)))


def first_line(error: BaseException | None) -> str:
    """Returns the first line of an error's text; None stands for an error of another process."""
    text = "by another process" if error is None else str(error).strip() or type(error).__name__
    return text.splitlines()[0][:500]
