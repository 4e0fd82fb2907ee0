"""Writes a checkpoint in a thread: orbax writes the arrays, and the manifest is written last."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from gossipjax.checkpoint._store import MANIFEST_FILE, AnyPath, Manifest, sum_files, temporary

_numbers = itertools.count()  # of writes: all processes count alike, and so name each barrier alike
# `Writer.wait` returns these errors, of which orbax also logs traces of 50 lines each.
logging.getLogger("absl").addFilter(lambda log: "_SignalingThread" not in log.getMessage())


class Writer:
    """Writes one checkpoint at a time, into one folder of all processes, or each into its own.

    Each process writes its part below `STEP.orbax-checkpoint-tmp`. When all have written, the
    primary process sums the files, writes the manifest, and renames the folder to `STEP`.
    """

    def __init__(self, timeout: float, shared: bool):
        self._timeout = math.ceil(timeout)
        self.thread: threading.Thread | None = None  # the thread that writes, until `wait`
        self.failure: Exception | None = None  # why the write failed, as `wait` will return
        process_id = jax.process_index()
        self._processes = {*range(jax.process_count())} if shared else {process_id}
        self._primary = min(self._processes)
        options = {}
        if not shared:  # each process writes its own part of an array
            alone = ocp.type_handlers.ArrayHandler(
                primary_host=process_id, replica_id=None, use_replica_parallel=False
            )
            handlers = ocp.type_handlers.create_type_handler_registry((jax.Array, alone))
            options["type_handler_registry"] = handlers
        processes = ocp.options.MultiprocessingOptions(
            primary_host=self._primary, active_processes=self._processes
        )
        self._handler = ocp.PyTreeCheckpointHandler(
            use_compression=False, multiprocessing_options=processes, **options
        )

    def write(self, path: AnyPath, arrays: dict[str, Any], manifest: Manifest) -> None:
        """Copies the arrays to the host, and starts a thread that writes them below `path`."""
        self._name = f"gossipjax write {next(_numbers)}"
        folder = self._folder = epath.Path(temporary(path) if isinstance(path, Path) else path)
        futures: list[Any] = []
        try:
            save = self._handler.async_save(folder / "state", args=ocp.args.PyTreeSave(arrays))
            # `asyncio.run` needs another thread: in a notebook, this one has a running loop.
            with ThreadPoolExecutor(1) as pool:
                futures = pool.submit(asyncio.run, save).result() or []
        # The others wait for this process in `_complete`. So its thread starts in any case.
        except Exception as error:
            self.failure = error
        self.thread = threading.Thread(target=self._complete, args=(path, futures, manifest))
        self.thread.start()

    def wait(self) -> Exception | None:
        """Waits until the checkpoint (or this process's part) is complete; returns any failure."""
        if self.thread is not None:
            self.thread.join()
        failure = self.failure
        self.thread = self.failure = None
        return failure

    def _complete(self, path: AnyPath, futures: list[Any], manifest: Manifest) -> None:
        """Waits, in the thread, until all processes have written; the primary one then commits."""
        folder = self._folder
        process_id = jax.process_index()
        try:
            try:
                for future in futures:
                    future.result(timeout=self._timeout)
                if process_id != self._primary and self.failure is None:
                    sums = sum_files(folder, f"state/ocdbt.process_{process_id}")
                    (folder / f"files.{process_id}").write_text(json.dumps(sums))
            finally:  # also after a failure, as the others wait here
                ocp.multihost.sync_global_processes(
                    self._name, timeout=self._timeout, processes=self._processes
                )
            if process_id == self._primary and self.failure is None:
                self._commit(path, manifest)
        except Exception as error:
            self.failure = error

    def _commit(self, path: AnyPath, manifest: Manifest) -> None:
        """Completes a checkpoint: writes the manifest, with all checksums, and renames the folder.

        In a bucket nothing can be renamed, so there it removes the file that says "not complete".
        """
        folder = self._folder
        self._handler.finalize(folder / "state")
        files: dict[str, int] = {}
        for process_id in self._processes - {self._primary}:
            sums_file = folder / f"files.{process_id}"
            if not sums_file.exists():
                raise OSError(f"process {process_id} could not write its part")
            files |= json.loads(sums_file.read_text())
            sums_file.unlink()
        files |= sum_files(folder, "state", known=files)
        (folder / MANIFEST_FILE).write_text(manifest._replace(files=files).to_json())
        if isinstance(path, Path):
            folder.rename(path)
        else:
            temporary(path).unlink()
