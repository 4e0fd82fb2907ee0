"""Writes checkpoints by orbax, whose threads may meet those of other processes, and let go."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import threading
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax._src import distributed

from gossipjax.checkpoint._leaves import encode

POLL_SECONDS = 0.02
LET_GO_SECONDS = 5.0  # that a process which ends waits for the others' parts
FAILED = "failed"

_numbers = itertools.count()  # of writers; all processes make the same


class Writer:
    """Orbax's writer. All processes write into one folder, or each alone into its own."""

    def __init__(self, timeout: float, shared: bool):
        self._meetings = f"gossipjax/writers/{next(_numbers)}"
        self._count = 0  # of meetings so far
        self._lets_go = threading.Event()
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
            barrier_sync_fn=self._meet if shared and jax.process_count() > 1 else None,
            create_directories_asynchronously=False,
        )
        registry = {}
        if not shared:  # each process writes the part of an array that it has
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
        """Begins to write a checkpoint of arrays by number and a JSON manifest."""
        arrays = {name: encode(leaf) for name, leaf in arrays.items()}
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(arrays), manifest=ocp.args.JsonSave(manifest)
        )
        self._orbax.save(path, args=items)

    def wait(self) -> None:
        """Returns when the checkpoint is complete.

        Raises:
          Exception: if it cannot be written, of any kind that orbax raises.
          TimeoutError: if another process has not written its part.
        """
        try:
            self._orbax.wait_until_finished()
        except Exception:
            if jax.process_count() > 1:  # the others wait at the next meeting
                self._say(self._count + 1, FAILED)
            raise
        if self._problem is not None:
            raise TimeoutError(self._problem)

    def let_go(self) -> None:
        """`wait` for an end of this process: the others, which may be dead, have some seconds."""
        self._lets_go.set()
        self.wait()

    def close(self) -> None:
        """Ends the threads."""
        self._orbax.close()

    def _say(self, meeting: int, text: str) -> None:
        key = f"{self._meetings}/{meeting}/{jax.process_index()}"
        _coordinator().key_value_set(key, text, allow_overwrite=True)

    def _meet(self, *, key: str, timeout_ms: int) -> None:
        """Waits in orbax's thread for the others: all are written, then, process 0 has named it.

        From JAX's own barrier a thread cannot be called back when another process has failed.
        """
        self._count += 1
        folder = f"{self._meetings}/{self._count}"
        self._say(self._count, key)
        start = time.monotonic()
        while True:
            found = _coordinator().key_value_dir_get(folder)
            words = {int(name.rpartition("/")[2]): word for name, word in found}
            seconds = time.monotonic() - start
            failed = [process for process, word in words.items() if word == FAILED]
            missing = sorted({*range(jax.process_count())} - {*words})
            if not failed and not missing:
                return
            limit = LET_GO_SECONDS if self._lets_go.is_set() else timeout_ms / 1000
            if failed:
                self._problem = f"process {failed[0]} could not write its part"
            elif seconds > limit:
                names = ", ".join(map(str, missing))
                self._problem = f"process {names} has not written its part for {seconds:.0f} s"
            if self._problem is not None:
                # With this, orbax ends the thread without a trace of calls.
                raise concurrent.futures.CancelledError(self._problem)
            time.sleep(POLL_SECONDS)


def _coordinator() -> Any:
    """JAX's store of keys and values; orbax uses it, too, and JAX has no public name for it."""
    return distributed.global_state.client
