"""Checkpoints of a training run: written beside it, all or nothing, and read back to the bit.

Needs orbax, `pip install "gossipjax[checkpoint]"`. `import gossipjax` does not import this module.
"""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import warnings
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from gossipjax.agreement import everywhere, require_shared_folder
from gossipjax.leaves import checksum, describe, is_key, require_same

try:
    import orbax.checkpoint as ocp
except ImportError as error:
    raise ImportError(
        'gossipjax.checkpoint needs orbax: pip install "gossipjax[checkpoint]".'
    ) from error


class Restored(NamedTuple):
    """What `Checkpoints.restore` found: the step, the state, and the place saved with it."""

    step: int
    state: Any
    place: dict[str, Any]


class Checkpoints:
    """The last `keep` checkpoints of a run, in a folder that all its processes share.

    A state is any pytree of arrays: node-stacked `[N, ...]` ones (parameters, optimizer state with
    messages in flight, statistics), PRNG keys, NumPy arrays, numbers. What is static in it (the
    schedule of an `InFlight`) is not written. With it goes `place`, a dict that JSON can hold: the
    place in the data, the options of the run, the number of nodes.

    Saving is asynchronous (orbax): `save` returns when the arrays are on the host, and they may be
    donated then. A checkpoint has its name, the number of the step, only when it is complete, and
    an older one is deleted only after that. One that cannot be written (no space left) ends nothing
    and harms no older one: it is removed, and the next call warns. Every process of a job makes the
    same calls; each writes and reads the nodes that it holds.

    Args:
      folder: made if it is not there.
      keep: how many complete checkpoints stay; with 2 or more, a damaged one costs little.
      timeout: seconds that processes wait for one another while a checkpoint is written.

    Raises:
      ImportError: if orbax is not installed.
      ValueError: if `keep` is below 1.
      OSError: if the folder cannot be made or written to, or is not the same for all processes.

    >>> import tempfile, jax, jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
    ...     checkpoints.save(7, {"z": jnp.arange(4.0)}, {"epoch": 1, "nodes": 4})
    ...     step, state, place = checkpoints.restore({"z": jnp.zeros(4)})
    >>> step, state["z"].tolist(), place["epoch"]
    (7, [0.0, 1.0, 2.0, 3.0], 1)
    """

    def __init__(self, folder: str | Path, keep: int = 3, timeout: int = 600):
        if keep < 1:
            raise ValueError(f"keep, how many checkpoints stay, is at least 1; got {keep}.")
        self.folder = Path(folder).resolve()
        require_shared_folder(self.folder)
        self._keep, self._timeout = keep, timeout
        self._last, self._failure = -1, None
        self._open()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None or jax.process_count() == 1:
            self.close()
        else:  # perhaps this process fails alone: no call that the others would have to make, too
            with contextlib.suppress(Exception):
                self._manager.wait_until_finished()

    def _open(self) -> None:
        if jax.process_index() == 0:
            for unfinished in self.folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(unfinished, ignore_errors=True)
        # Named, they wait for each other by JAX's coordinator: with a time-out, not a collective.
        together = ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count())), barrier_sync_key_prefix="gossipjax"
        )
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=self._keep,
                create=False,
                single_host_load_and_broadcast=True,
                async_options=ocp.AsyncOptions(timeout_secs=self._timeout),
                multiprocessing_options=together,
            ),
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(
                    use_compression=False, multiprocessing_options=together
                ),
                "about": ocp.JsonCheckpointHandler(multiprocessing_options=together),
            },
        )

    def save(self, step: int, state: Any, place: dict[str, Any]) -> None:
        """Begins to write a checkpoint; waits only for the one before it to be complete.

        Does nothing if this step was the last to be saved or restored. Others of this step or later
        ones are of another run, or of one that was taken up again before them: they are renamed to
        `STEP.superseded`.

        Raises:
          TypeError: if `place` holds something that JSON cannot.
        """
        self._settle()
        steps = self._steps()
        if step == self._last and step in steps:
            return
        leaves = [
            leaf if isinstance(leaf, jax.Array) else np.array(leaf)
            for leaf in jax.tree.leaves(state)
        ]
        about = {"leaves": describe(state), "sum": checksum(leaves), "place": place}
        text = json.dumps(about)
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_numbered(leaves)),
            about=ocp.args.JsonSave({"text": text, "sum": zlib.crc32(text.encode())}),
        )
        self._set_aside([other for other in steps if other >= step], "superseded")
        self._last = step
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:
            self._failure = error

    def wait(self) -> list[int]:
        """Waits until everything is written; returns the steps of the complete checkpoints."""
        self._settle()
        return self._steps()

    def close(self) -> None:
        """Waits until everything is written, and ends the threads that write."""
        self._settle()
        self._manager.close()

    def restore(self, like: Any, step: int | None = None) -> Restored | None:
        """The newest complete checkpoint, or None if there is none.

        One that is damaged is passed over for the one before it, with a warning, and renamed to
        `STEP.corrupted`. Damaged is what cannot be read or whose arrays have another checksum.

        Args:
          like: what the state looks like: a pytree of arrays or `jax.ShapeDtypeStruct`s, or a
            function that makes one from the saved `place`. Arrays come back with the shardings
            that these have, to the bit; as NumPy arrays, whole, where these have none, as those of
            `jax.eval_shape` (this is how the state of another number of nodes is read). What is
            static comes from here.
          step: the step of the checkpoint, if it is to be this one and no other.

        Raises:
          ValueError: if the checkpoint has other leaves than `like`: names the first that differs;
            for another number of nodes, see `gossipjax.resume`. If there is none of this `step`.
          OSError: if there are checkpoints and none of them can be read.
        """
        self._settle()
        steps = self._steps()
        if step is not None and step not in steps:
            raise ValueError(f"{self.folder} has no checkpoint of step {step}; it has {steps}.")
        damaged: dict[int, str] = {}
        for number in reversed(steps) if step is None else [step]:
            found = self._read(number, like)
            if isinstance(found, Restored):
                self._set_aside(list(damaged), "corrupted")
                self._last = number
                for bad, why in damaged.items():
                    warnings.warn(
                        f"the checkpoint of step {bad} in {self.folder} is damaged ({why}) "
                        f"and now named {bad}.corrupted: took that of step {number}.",
                        stacklevel=2,
                    )
                return found
            damaged[number] = found
        if not damaged:
            return None
        every = "; ".join(f"step {bad}: {why}" for bad, why in damaged.items())
        raise OSError(f"no checkpoint in {self.folder} can be read ({every}).")

    def _steps(self) -> list[int]:
        return sorted(map(int, self._manager.all_steps()))

    def _settle(self) -> None:
        """Waits for what is being written; if it failed on any process, says so and cleans up."""
        failure, self._failure = self._failure, None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            failure = error
        if everywhere(failure is None):
            return
        warnings.warn(
            f"the checkpoint of step {self._last} could not be written to {self.folder} "
            f"({_short(failure)}): the run goes on, the checkpoints before it are still there.",
            stacklevel=3,
        )
        with contextlib.suppress(Exception):
            self._manager.close()
        self._open()

    def _read(self, step: int, like: Any) -> Restored | str:
        path = self.folder / str(step)
        how = ocp.args.JsonRestore()
        written, problem = _attempt(ocp.JsonCheckpointHandler, path / "about", how)
        if problem is not None:
            return problem
        text = str(written.get("text"))
        if zlib.crc32(text.encode()) != written.get("sum"):
            return "its description has another checksum"
        about = json.loads(text)
        like = like(about["place"]) if callable(like) else like
        require_same(about["leaves"], describe(like), f"the checkpoint of step {step}")
        leaves, structure = jax.tree.flatten(like)
        arrays = _numbered(leaves)
        how = ocp.args.PyTreeRestore(item=arrays, restore_args=jax.tree.map(_how, arrays))
        read, problem = _attempt(ocp.PyTreeCheckpointHandler, path / "state", how)
        if problem is not None:
            return problem
        found = [_as_was(read.get(str(i)), leaf) for i, leaf in enumerate(leaves)]
        if checksum(found) != about["sum"]:
            return "its arrays have another checksum"
        return Restored(step, jax.tree.unflatten(structure, found), about["place"])

    def _set_aside(self, steps: list[int], word: str) -> None:
        if not steps:
            return
        if jax.process_index() == 0:
            for step in steps:
                target = self.folder / f"{step}.{word}"
                shutil.rmtree(target, ignore_errors=True)
                (self.folder / str(step)).rename(target)
        everywhere(True)
        self._manager.reload()


def _attempt(handler: Any, path: Path, how: Any) -> tuple[Any, str | None]:
    """What each process reads by itself, or the reason why one of them cannot."""
    read, problem, me = None, None, jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    try:
        with ocp.Checkpointer(
            handler(multiprocessing_options=alone), multiprocessing_options=alone
        ) as reader:
            read = reader.restore(path, args=how)
    except Exception as error:
        problem = _short(error)
    if problem is not None:
        with warnings.catch_warnings():  # of coroutines that orbax, having failed, did not await
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()
    if everywhere(problem is None):
        return read, None
    return None, problem or "another process cannot read it"


def _numbered(leaves: list[Any]) -> dict[str, Any]:
    """By their number; without empty ones, which orbax does not write."""
    return {str(i): leaf for i, leaf in enumerate(leaves) if np.size(leaf)}


def _how(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None and is_key(leaf):  # which NumPy does not know
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(sharding=sharding)


def _as_was(array: Any, leaf: Any) -> Any:
    if isinstance(leaf, int | float):
        return type(leaf)(array)
    if array is not None:
        return array
    empty, sharding = np.zeros(leaf.shape, leaf.dtype), getattr(leaf, "sharding", None)
    return empty if sharding is None else jax.device_put(empty, sharding)


def _short(error: Exception | None) -> str:
    text = "by another process" if error is None else str(error).strip() or type(error).__name__
    return text.splitlines()[0][:500]
