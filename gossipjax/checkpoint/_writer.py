"""Writes a checkpoint in a thread: orbax writes the arrays, and the manifest is written last."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from gossipjax.checkpoint._leaves import encode
from gossipjax.checkpoint._store import (
    MANIFEST_FILE,
    Manifest,
    sum_files,
    temporary,
)

_numbers = itertools.count()  # numbers of writers, the same in all processes


class Writer:
    """Writes one checkpoint at a time. All processes share the folder, or each writes alone.

    Each process writes its part into `STEP.orbax-checkpoint-tmp`. When all have written, the
    primary process sums all files, writes the manifest, and renames the folder to `STEP`.
    """

    def __init__(self, timeout: float, shared: bool):
        self._timeout = math.ceil(timeout)
        self._shared = shared
        self._name = f"gossipjax writer {next(_numbers)}"
        self._count = 0
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        process_id = jax.process_index()
        self._primary = 0 if shared else process_id
        self._processes = {*range(jax.process_count())} if shared else {process_id}
        registry = {}
        if not shared:  # each process writes its own part of an array
            alone = ocp.type_handlers.ArrayHandler(
                primary_host=process_id, replica_id=None, use_replica_parallel=False
            )
            handlers = ocp.type_handlers.create_type_handler_registry((jax.Array, alone))
            registry["type_handler_registry"] = handlers
        self._handler = ocp.PyTreeCheckpointHandler(
            use_compression=False,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                primary_host=self._primary, active_processes=self._processes
            ),
            **registry,
        )

    def write(self, path: Path, arrays: dict[str, Any], manifest: Manifest) -> None:
        """Copies the arrays, by their numbers, to the host, and begins to write them."""
        self._count += 1
        futures: list[Any] = []
        try:
            args = ocp.args.PyTreeSave({name: encode(leaf) for name, leaf in arrays.items()})
            futures = _run(self._handler.async_save(_arrays(path), args=args)) or []
        except Exception as error:  # the others wait for this process in their threads
            self._failure = error
        self._thread = threading.Thread(target=self._complete, args=(path, futures, manifest))
        self._thread.start()

    def wait(self) -> None:
        """Returns when the checkpoint is complete.

        Raises:
          Exception: if this process could not write its part; orbax raises many kinds.
          TimeoutError: if another process has not written its part in time.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure

    def _complete(self, path: Path, futures: list[Any], manifest: Manifest) -> None:
        folder = temporary(path)
        process_id = jax.process_index()
        try:
            try:
                if self._failure is None:
                    for future in futures:
                        future.result(timeout=self._timeout)
                    if process_id != self._primary:
                        sums = sum_files(folder, f"state/ocdbt.process_{process_id}/**/*")
                        _name_sums(folder, process_id).write_text(json.dumps(sums))
            finally:  # a process that failed does not stop the others
                if len(self._processes) > 1:
                    ocp.multihost.sync_global_processes(
                        f"{self._name}, {self._count}",
                        timeout=self._timeout,
                        processes=self._processes,
                    )
            if self._failure is None and process_id == self._primary:
                self._commit(path, manifest)
        except Exception as error:
            self._failure = error

    def _commit(self, path: Path, manifest: Manifest) -> None:
        folder = temporary(path)
        self._handler.finalize(_arrays(path))
        files: dict[str, int] = {}
        for number in self._processes - {self._primary}:
            sums = _name_sums(folder, number)
            if not sums.exists():
                raise OSError(f"process {number} could not write its part")
            files |= json.loads(sums.read_text())
            sums.unlink()
        files |= sum_files(folder, "state/**/*", known=files)
        (folder / MANIFEST_FILE).write_text(manifest._replace(files=files).to_json())
        folder.rename(path)


def _arrays(path: Path) -> epath.Path:
    """Returns the folder of the arrays of a checkpoint that is being written."""
    return epath.Path(temporary(path)) / "state"


def _name_sums(folder: Path, process_id: int) -> Path:
    """Returns the file in which a process tells the primary one what it has written."""
    return folder / f"files.{process_id}"


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in a thread, since a notebook has a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
