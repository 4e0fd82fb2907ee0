"""Writes checkpoints by orbax, whose threads wait for those of other processes."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from gossipjax.checkpoint._leaves import encode
from gossipjax.launch import peers

_numbers = itertools.count()  # numbers of writers, the same in all processes


class Writer:
    """Orbax's writer. All processes write into one folder, or each writes alone into its own."""

    def __init__(self, timeout: float, shared: bool):
        self._number = next(_numbers)
        self._count = 0  # number of meetings so far
        self._meets = shared and peers.kept is not None
        self._problem: str | None = None
        process_id = jax.process_index()
        # With names, barriers go through JAX's coordinator: they have a time-out, unlike a
        # collective.
        processes = ocp.options.MultiprocessingOptions(
            primary_host=0 if shared else process_id,
            active_processes=set(range(jax.process_count())) if shared else {process_id},
            barrier_sync_key_prefix="gossipjax",
        )
        # Folders that threads make keep other threads waiting for 300 s if they cannot be made, and
        # the process does not end before these.
        options = ocp.AsyncOptions(
            timeout_secs=math.ceil(timeout),
            barrier_sync_fn=self._meet if self._meets else None,
            create_directories_asynchronously=False,
        )
        registry = {}
        if not shared:  # each process writes its own part of an array
            alone = ocp.type_handlers.ArrayHandler(
                primary_host=process_id, replica_id=None, use_replica_parallel=False
            )
            handlers = ocp.type_handlers.create_type_handler_registry((jax.Array, alone))
            registry["type_handler_registry"] = handlers
        state = ocp.PyTreeCheckpointHandler(
            use_compression=False, multiprocessing_options=processes, **registry
        )
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(
                multiprocessing_options=processes, async_options=options
            ),
            state=state,
            manifest=ocp.JsonCheckpointHandler(multiprocessing_options=processes),
        )
        self._orbax = ocp.AsyncCheckpointer(
            handler, async_options=options, multiprocessing_options=processes
        )

    def write(self, path: Path, arrays: dict[str, Any], manifest: Any) -> None:
        """Begins to write a checkpoint: numbered arrays, and a manifest in JSON."""
        arrays = {name: encode(leaf) for name, leaf in arrays.items()}
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays), manifest=ocp.args.JsonSave(manifest)
        )
        self._orbax.save(path, args=items)

    def wait(self) -> None:
        """Returns when the checkpoint is complete.

        Raises:
          Exception: if the checkpoint cannot be written; orbax raises many kinds.
          TimeoutError: if another process has not written its part in time.
        """
        try:
            self._orbax.wait_until_finished()
        except Exception:
            if self._meets:  # the other processes wait at the next meeting
                self._gather(is_written=False, timeout=0)
            raise
        if self._problem is not None:
            raise TimeoutError(self._problem)

    def close(self) -> None:
        """Ends the threads."""
        self._orbax.close()

    def _meet(self, *, key: str, timeout_ms: int) -> None:
        """Waits in orbax's thread until all have written, and until process 0 has renamed it.

        JAX's own barrier cannot be interrupted in a thread when another process has failed.
        """
        del key
        self._gather(is_written=True, timeout=timeout_ms / 1000)
        if self._problem is not None:
            # With this, orbax ends the thread without a trace of calls.
            raise concurrent.futures.CancelledError(self._problem)

    def _gather(self, is_written: bool, timeout: float) -> None:
        """Tells all processes whether this part is written, and notes what the others say."""
        assert peers.kept is not None
        self._count += 1
        name = f"writer {self._number}, meeting {self._count}"
        try:
            written = peers.kept.gather(name, is_written, timeout)
        except (TimeoutError, ConnectionError) as error:
            self._problem = str(error)
            return
        if not all(written):
            self._problem = f"process {written.index(False)} could not write its part"
