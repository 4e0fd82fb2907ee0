"""Writes checkpoints of a training run asynchronously, and restores them bit for bit."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import uuid
import warnings
from pathlib import Path
from typing import Any

import jax
from etils import epath
from fsspec.config import conf as fsspec_settings

from gossipjax import launch, meshes
from gossipjax.checkpoint._leaves import as_arrays, held_nodes, leaf_specs
from gossipjax.checkpoint._lock import FolderLock
from gossipjax.checkpoint._resize import ResizeReport
from gossipjax.checkpoint._store import (
    AnyPath,
    DamagedError,
    Folder,
    Manifest,
    Restored,
    by_number,
    first_line,
    read_checkpoint,
    require_metadata,
)
from gossipjax.checkpoint._train_state import (
    MakeTx,
    Preempted,
    fit_state,
    make_template,
    require_make_tx,
    warn_of_changes,
)
from gossipjax.checkpoint._writer import Writer
from gossipjax.nodes import Nodes
from gossipjax.processes import (
    all_processes,
    any_process,
    broadcast_text,
    meet_within,
    require_shared_folder,
)
from gossipjax.topology.schedule import require_int
from gossipjax.train_state import TrainState


class Checkpoints:
    """Saves a run in a folder that all its processes share, or in one folder for each process.

    In a training loop, `resume` returns the state to start from. `after` saves every `every` steps,
    at the end, and when any process gets SIGTERM. You can also call `save` and `restore` yourself,
    with any pytree of node-stacked arrays `[N, ...]`, PRNG keys, NumPy arrays and numbers. Static
    data (the schedule of a `GossipState`) are not saved. All processes make the same calls, and
    each writes and reads its own nodes.

    Saving is asynchronous (orbax). `save` returns when the arrays are on the host, and you may then
    donate them. A checkpoint is complete when its folder is named by the number of the step; then
    an older checkpoint is deleted. If the first write fails (for example on a full disk), the next
    call raises `OSError`; if the last write fails, the end of the `with` block does. If a write in
    between fails, you get a warning. Without a `with` block each save may be the last, so each is
    complete when `save` returns, or raises `OSError`.

    Without a shared disk (`shared=False`), a checkpoint is complete only if all processes have
    their parts. Other processes may resume it. If some of its nodes are in no folder, or a process
    has no part of it, because its machine is new or has lost its disk, `resume` warns and starts
    all nodes from the average model of the nodes that are there.

    Args:
      folder: where the checkpoints are, on a disk or at `gs://BUCKET/FOLDER`. Made if missing.
      every: steps between the checkpoints of `after`; None if you do not use `after`. If given,
        SIGTERM is caught inside `with Checkpoints(...)`.
      max_to_keep: how many complete checkpoints stay. With 2 or more, an older checkpoint can
        replace a damaged one.
      timeout: seconds that processes wait for one another while a checkpoint is written or read.
      read_only: if true, nothing in the folder is changed, so that another job may be saving there.
        Otherwise the job locks the file `.lock` until `close`, or the end of the block or process.
      shared: false if each process has a folder on its own disk. No process then waits for another.

    Attributes:
      resize_report: says what the last `resume` changed in nodes or chain; None if nothing.
      resumed_from: the folder from which the last `resume` restored; None if nothing was saved.
      is_preempted: whether this process has got SIGTERM.

    Raises:
      ValueError: if an argument is not as above, or the folder is another address (`s3://...`).
      OSError: if the folder cannot be made, written or read, is not the same for all processes, or
        another job has it open (the message names its process, machine and beginning).

    >>> import tempfile, jax.numpy as jnp, optax, gossipjax as gx
    >>> from gossipjax.checkpoint import Checkpoints, TrainState
    >>> nodes = gx.Nodes(4)
    >>> def make_tx(saved):
    ...     return optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.ring(saved["nodes"])))
    >>> start = TrainState(0, *nodes.init(make_tx({"nodes": 4}), jnp.ones(3)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Checkpoints(folder, every=10) as checkpoints:
    ...         state = checkpoints.resume(start, nodes, make_tx)  # nothing there: it is `start`
    ...         checkpoints.after(state._replace(step=10, metadata={"epoch": 1}))
    ...     with Checkpoints(folder) as checkpoints:
    ...         state = checkpoints.resume(start, nodes, make_tx)
    >>> state.step, state.metadata["epoch"]
    (10, 1)
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int | None = None,
        max_to_keep: int = 3,
        timeout: float = 600,
        read_only: bool = False,
        shared: bool = True,
    ):
        self.folder = _require_folder(folder, "folder")
        self._every = None if every is None else require_int(every, "every, in steps,", 1)
        self._max_to_keep = require_int(max_to_keep, "max_to_keep", 1)
        self._timeout = timeout
        self._is_read_only = read_only
        self._is_shared = shared
        self._has_parts = not shared and jax.process_count() > 1  # each has a part of a checkpoint
        self._store = Folder(self.folder, shared)
        self._lock = FolderLock(self.folder)
        if not read_only:
            if shared and isinstance(self.folder, Path):
                require_shared_folder(self.folder)
            else:
                self._store.each(lambda: self.folder.mkdir(parents=True, exist_ok=True))
            self._store.each(self._lock.acquire)
        self.resize_report: ResizeReport | None = None
        self.resumed_from: AnyPath | None = None
        self._last_step: int | None = None  # the newest step that was saved or restored
        self._problem: str | None = None  # why the last write failed, if it did
        self._is_entered = False
        self._damaged: set[int] = set()  # steps of damaged checkpoints, which the next save renames
        self._must_write = True  # whether a failed write is an error: until one has succeeded
        self.is_preempted = False
        self._at_exit = contextlib.ExitStack()  # what the `with` block undoes at its end
        self._writer = Writer(timeout, shared=not self._has_parts)

    def __enter__(self) -> Checkpoints:
        self._is_entered = True
        if self._every is not None:  # SIGTERM saves in `after`, which needs `every`
            handlers = launch.signal_handlers([signal.SIGTERM], self._on_sigterm)
            self._at_exit.enter_context(handlers)
        self._at_exit.callback(self._lock.release)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Completes the last write and frees the lock; raises `Preempted` after SIGTERM."""
        self._is_entered = False
        with self._at_exit:
            if kind is None:
                self.close()
                if self._every is not None and any_process(self.is_preempted):
                    self.is_preempted = True
            # This process ends by an error, and the others may go on. So it asks them nothing, but
            # completes its part of the checkpoint that is being written.
            elif (failure := self._writer.wait()) is not None:
                warnings.warn(f"{self._describe(failure)}: older ones are untouched.", stacklevel=2)
        # SIGTERM may have come after the last step, for example in the last write.
        if kind is None and self.is_preempted:
            raise Preempted(max(self._store.local_steps(), default=None), self.folder)

    def _on_sigterm(self, *_: object) -> None:
        self.is_preempted = True

    @launch.final_errors()
    @meshes.apart_from_set_mesh
    def resume(
        self, state: TrainState, nodes: Nodes, make_tx: MakeTx, init_from: str | Path | None = None
    ) -> TrainState:
        """Returns the newest saved state on the devices of `nodes`, or `state` if there is none.

        A run with the same nodes and chain continues bit for bit. If the number of nodes, the
        topology or the algorithm is another, all nodes start from the average model, as from
        `change_nodes`. Other changes of the chain (a rate, a momentum) go unnoticed, unless you
        give `metadata["settings"]`, a dict. A warning then names the settings that differ from the
        saved ones, and the returned metadata have those of `state`.

        Args:
          state: the state with which a new run would start, on the devices.
          nodes: the nodes of this run.
          make_tx: a function. `make_tx(metadata)` returns the chain of the run that saved
            `metadata`; `metadata["nodes"]` is its number of nodes.
          init_from: another folder of checkpoints, from which to start if this folder has none. The
            folder is only read, so another run may be saving there.

        Raises:
          ValueError: if the checkpoint is of another model or optimizer, `init_from` has no
            checkpoint, JSON cannot express the metadata, or `make_tx` is not a function of them.
          OSError: if the newest checkpoint cannot be read, or all checkpoints are damaged.
        """
        origin = None if init_from is None else _require_folder(init_from, "init_from")
        require_make_tx(make_tx)
        settings = require_metadata(state.metadata or {}).get("settings")
        fitted = self._restore_train_state(state, nodes, make_tx)
        self.resumed_from = None if fitted is None else self.folder
        if fitted is None and origin is not None:
            with Checkpoints(str(origin), read_only=True, shared=self._is_shared) as source:
                fitted = source._restore_train_state(state, nodes, make_tx)
            if fitted is None:
                raise ValueError(
                    f"init_from must be a folder of checkpoints, got {origin}, which holds none."
                )
            self.resumed_from = origin
        resumed, self.resize_report = fitted or (state, None)
        if fitted is None or not settings:
            return resumed
        metadata = resumed.metadata or {}
        warn_of_changes(metadata.get("settings"), settings)
        return resumed._replace(metadata={**metadata, "settings": settings})

    def _restore_train_state(
        self, state: TrainState, nodes: Nodes, make_tx: MakeTx
    ) -> tuple[TrainState, ResizeReport | None] | None:
        """Returns the newest checkpoint as a state of this run, and what a resize changed.

        Returns None if there is no checkpoint. Warns if parts of the checkpoint are lost.
        """
        make_like = functools.partial(make_template, state, nodes, make_tx)
        restored, found_nodes, lost_processes = self._restore(make_like, step=None)
        if restored is None:
            return None
        saved_nodes = {*range(restored.metadata.get("nodes", nodes.size))}
        lost_nodes = set[int]() if found_nodes is None else saved_nodes.difference(found_nodes)
        reasons = []
        if lost_processes:
            where = f"checkpoint of step {restored.step} in their folders, as {self.folder}"
            reasons.append(f"processes {sorted(lost_processes)} have no {where}")
        if lost_nodes:
            reasons.append(f"nodes {sorted(lost_nodes)} that saved it are in no folder")
        if reasons:
            warnings.warn(
                f"{', and '.join(reasons)}: all nodes start from the average model of nodes "
                f"{found_nodes} at step {restored.step}. If a disk is not mounted there, end the "
                "run and mount it.",
                stacklevel=5,
            )
        resumed = TrainState(restored.step, *restored.state, metadata=restored.metadata)
        return fit_state(resumed, state, nodes, make_tx, is_whole=not reasons)

    def after(self, state: TrainState, last: bool = False) -> None:
        """Saves `state` if its step is a multiple of `every` or the last step, or after SIGTERM.

        With several processes, each call makes a small all-reduce, which waits for the step. If
        steps are short, call `after` every few steps.

        Raises:
          Preempted: after SIGTERM to any process, when the state is completely written. After the
            last step, the end of the `with` block raises `Preempted`.
          ValueError: if the folder was opened without `every`.
        """
        if self._every is None:
            raise ValueError("every must be given to Checkpoints for its `after`, got None.")
        is_preempted = any_process(self.is_preempted)
        if is_preempted:
            self._must_write = False  # the run ends with an error in any case
        if is_preempted or last or state.step % self._every == 0:
            size = jax.tree.leaves(state.params)[0].shape[0]
            metadata = {**require_metadata(state.metadata or {}), "nodes": size}
            self.save(state.step, state.arrays, metadata)
        if is_preempted:
            raise Preempted(max(self.wait(), default=None), self.folder)

    @meshes.apart_from_set_mesh
    def save(self, step: int, state: Any, metadata: dict[str, Any]) -> None:
        """Waits until the previous checkpoint is complete, then starts to write this one.

        Does nothing if this step was the last one saved or restored.

        Raises:
          ValueError: if `step` is not an integer >= 0, the folder has a checkpoint of this step or
            a later one (of a run that was not resumed, for example), something in `state` is
            neither an array nor a number (with `shared=False`, no array on the devices of all
            processes), JSON cannot express the metadata, or the folder was opened `read_only`.
          OSError: if the previous write failed, and no write has succeeded so far.
        """
        if self._is_read_only:
            raise ValueError(f"read_only must be False for a save in {self.folder}, got True.")
        step = require_int(step, "step", 0)
        metadata = require_metadata(metadata)
        leaves = as_arrays(meshes.on_auto_axes(state), shared=not self._has_parts)
        self._store.each(self._lock.acquire)  # if `close` has released it
        self._finish_write()
        manifest = Manifest(step, leaf_specs(state), metadata)
        with meet_within(self._timeout):
            self._begin_write(leaves, manifest)
        if not self._is_entered:
            self._must_write = True
            self._finish_write()
        launch.advance()

    def _begin_write(self, leaves: list[Any], manifest: Manifest) -> None:
        """Makes the folder of a checkpoint, and lets the writer start to write into it."""
        step = manifest.step
        steps = self._store.steps()
        # The last step of a run may be a multiple of `every`, too. Then it is saved already.
        if step == self._last_step and step in steps:
            return
        later = [other for other in steps if other >= step and other not in self._damaged]
        if later:  # a resumed run would start from them, and not from this one
            raise ValueError(
                f"step must be after all checkpoints in {self.folder}, got {step}, and there are "
                f"{later}: resume from the newest, remove or rename what you do not want, or save "
                "in another folder."
            )
        if self._has_parts:  # the manifest says which nodes are in this folder, and of which save
            save = broadcast_text(uuid.uuid4().hex)
            part = {"nodes": held_nodes(leaves), "whole": held_nodes(leaves, only_whole=True)}
            part |= {"save": save, "is_first": not steps}
            manifest = manifest._replace(part=part)
        self._last_step = step
        try:
            self._store.begin(step, steps, self._damaged)
        except OSError as error:  # raised on all processes; `_finish_write` reports it
            self._writer.failure = error
            return
        self._damaged = set()
        self._writer.write(self.folder / str(step), by_number(leaves), manifest)

    def wait(self) -> list[int]:
        """Waits until everything is written; returns the steps of the complete checkpoints."""
        self._finish_write()
        return self._store.steps()

    def close(self) -> None:
        """Waits until everything is written, and lets another job use the folder.

        Raises:
          OSError: if the last checkpoint could not be written.
        """
        try:
            self._finish_write(warns=False)
        finally:
            self._lock.release()
        problem = self._problem
        self._problem = None
        if problem is not None:
            raise OSError(
                f"{problem}: it was the last write. Make room, and resume from the one before."
            )

    def restore(self, like: Any, step: int | None = None) -> Restored | None:
        """Returns the newest complete checkpoint, or None if there is none.

        If it is damaged (incomplete, of other checksums, step or format), `restore` warns and reads
        the one before it; the next `save` renames the damaged one to `STEP.corrupted`. If the disk
        itself fails, `restore` tries again for some seconds and then raises the error.

        Args:
          like: the form of the state: a pytree of arrays or `jax.ShapeDtypeStruct`s, or a function
            that makes this pytree from the saved `metadata`. Restored arrays get its shardings, and
            are whole NumPy arrays where it has none, as from `jax.eval_shape`. Static data are
            taken from `like`.
          step: the step of the checkpoint, if you do not want the newest.

        Raises:
          ValueError: if the checkpoint and `like` have different leaves (the message names the
            first), or if there is no checkpoint of this `step`.
          OSError: if the newest checkpoint cannot be read, or all checkpoints are damaged.
        """
        restored, found_nodes, lost_processes = self._restore(like, step)
        if found_nodes is not None:
            raise OSError(
                f"each process must have the nodes of its part of a checkpoint, got {self.folder} "
                f"with nodes {found_nodes} in all folders, and none in those of processes "
                f"{sorted(lost_processes)}: Checkpoints.resume takes other processes, and starts "
                "from the average."
            )
        return restored

    def _restore(
        self, like: Any, step: int | None
    ) -> tuple[Restored | None, list[int] | None, set[int]]:
        """Reads the newest checkpoint that is not damaged, or the checkpoint of `step`.

        Returns three values: what was read, or None if there is no checkpoint; the nodes that are
        in any folder, or None if each process had the nodes that it needs (see `read_checkpoint`);
        and the processes that have no part of the checkpoint.
        """
        if not self._is_read_only:
            self._store.each(self._lock.acquire)
        self._finish_write()
        steps, lost = self._store.agree()
        if step is not None and step not in steps:
            raise ValueError(
                f"step must be that of a checkpoint in {self.folder}, one of {steps}, got {step}."
            )
        damaged: dict[int, DamagedError] = {}
        for candidate in reversed(steps) if step is None else [step]:
            try:
                with meet_within(self._timeout), meshes.unset_mesh():
                    restored, found_nodes = read_checkpoint(self._store, candidate, like, lost)
            except DamagedError as error:
                damaged[candidate] = error
                continue
            self._damaged = {*damaged}
            self._last_step = candidate
            for bad, reason in damaged.items():
                warnings.warn(
                    f"the checkpoint of step {bad} in {self.folder} is damaged ({reason}): took "
                    f"that of step {candidate}.",
                    stacklevel=3,
                )
            return restored, found_nodes, lost
        if not damaged:
            return None, None, set()
        reasons = "; ".join(f"step {bad}: {reason}" for bad, reason in damaged.items())
        raise OSError(f"no checkpoint in {self.folder} can be read ({reasons}).")

    def _finish_write(self, warns: bool = True) -> None:
        """Waits for a write in progress. If it failed on any process, removes what it wrote.

        Raises `OSError` if the failed write was the first one, or there is no `with` block. After
        any other failure it warns, unless `warns` is false, and notes the failure for `close`.
        """
        launch.advance(slow=True)
        is_writing = self._writer.thread is not None
        failure = self._writer.wait()
        if all_processes(failure is None):
            if is_writing:
                self._problem = None
                self._must_write = False
                self._store.delete_all_but(self._max_to_keep)
            return
        self._store.each(self._store.remove_unfinished)
        problem = self._describe(failure)
        if self._must_write:
            raise OSError(
                f"{problem}: it was the first write, or there is no `with` block to wait for the "
                "last. Make room, or give a folder that takes it."
            )
        self._problem = problem
        if warns:
            warnings.warn(f"{problem}: the run continues, older ones are untouched.", stacklevel=3)

    def _describe(self, failure: Exception | None) -> str:
        """Says why the newest checkpoint was not written; None if another process failed."""
        return (
            f"the checkpoint of step {self._last_step} could not be written to {self.folder} "
            f"({first_line(failure)})"
        )


def _require_folder(folder: str | Path, what: str) -> AnyPath:
    """Returns an absolute path or one in a bucket; raises `ValueError` if `folder` is neither."""
    if str(folder).startswith("gs://"):  # without its cache, gcsfs sees what other jobs write
        fsspec_settings.setdefault("gcs", {}).setdefault("use_listings_cache", False)
        return epath.Path(folder)
    if not folder or ":/" in str(folder):  # paths shorten s3:// to s3:/
        raise ValueError(
            f"{what} must be a path on a disk or the text 'gs://BUCKET/FOLDER', got "
            f"{str(folder)!r}: orbax knows no other store. Save on a disk, and copy it there."
        )
    return Path(os.path.realpath(folder))  # `resolve` fails at a link that leads to itself
