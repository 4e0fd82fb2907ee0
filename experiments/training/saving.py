"""Checkpoints of the experiments' runs: where a run goes on, and with how many nodes."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

import gossipjax as gx
from experiments.methods import Method
from experiments.training import Trainer
from gossipjax.agreement import everywhere
from gossipjax.checkpoint import Checkpoints
from gossipjax.resume import average_nodes, change_nodes
from gossipjax.supervisor import handling

Place = dict[str, Any]
"""Of a checkpoint: `algorithm`, `seed` and `nodes`, and what else a run wants to have back."""


class Saver:
    """Where a run goes on, and the checkpoints that it leaves.

    Args:
      trainer: as it starts.
      method: of this run.
      place: of this run, as it starts; what is in it is saved with every checkpoint.
      method_of: that of a run that has saved such a place.
    """

    def __init__(
        self,
        trainer: Trainer,
        method: Method,
        place: Place,
        method_of: Callable[[Place], Method],
    ):
        self._trainer, self._method, self._place = trainer, method, place
        self._method_of = method_of
        self._checkpoints: Checkpoints | None = None
        self._asked, self._every = False, 0

    def restore(self, folder: Path, initial: Path | None) -> tuple[int, str | None]:
        """Takes model, state and place from the newest checkpoint in `folder`; where there is none,
        from that in `initial`.

        Returns:
          The step after which the run goes on, 0 where there is no checkpoint; and what is to be
          said of it.

        Raises:
          CheckpointError: if it is of another model or optimizer, or `initial` holds none.
          OSError: if there are checkpoints, but none that can be read.
        """
        try:
            if everywhere(folder.exists()) and (found := self._restore(folder, True)):
                return found
            if initial is None:
                return 0, None
            if everywhere(initial.exists()) and (found := self._restore(initial, False)):
                return found
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        raise CheckpointError(f"--initial {initial} holds no checkpoint.")

    def _restore(self, folder: Path, is_own: bool) -> tuple[int, str] | None:
        trainer, place = self._trainer, self._place

        def is_same(saved: Place) -> bool:
            return all(saved[key] == place[key] for key in ("algorithm", "seed", "nodes"))

        def like(saved: Place) -> Any:
            if is_same(saved):
                return trainer.model, trainer.state

            def other(x: jax.Array) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct((saved["nodes"], *x.shape[1:]), x.dtype)

            model = jax.tree.map(other, trainer.model)
            init = gx.spmd(self._method_of(saved).transform.init, nodes=saved["nodes"])
            return model, jax.eval_shape(init, model[0])

        with Checkpoints(folder) as checkpoints:
            found = checkpoints.restore(like)
        if found is None:
            return None
        (params, statistics), state = found.state
        said = f"{place['algorithm']} goes on after step {found.step}"
        if not is_same(found.place):
            nodes = place["nodes"]
            params, state, change = change_nodes(params, state, self._method.transform, nodes)
            statistics = average_nodes(statistics, nodes)
            (params, statistics), state = trainer.placed(((params, statistics), state))
            said += f" of {found.place['algorithm']}: {change}"
        trainer.model, trainer.state = (params, statistics), state
        goes_on = place.keys() - {"nodes"} if is_own else {"examples"}
        place |= {key: found.place[key] for key in goes_on & found.place.keys()}
        return found.step, said

    @contextlib.contextmanager
    def saving(self, folder: Path, every: int | None, keep: int) -> Iterator[None]:
        """Saves into `folder` every so many steps, if any, in this context; SIGTERM waits then."""
        if every is None:
            yield
            return
        self._every = every

        def hear(*_: object) -> None:
            self._asked = True

        with Checkpoints(folder, keep) as self._checkpoints, handling([signal.SIGTERM], hear):
            yield
        if self._asked:  # after the last step: what follows hears of it
            signal.raise_signal(signal.SIGTERM)

    def after(self, step: int, last: bool) -> None:
        """Saves if it is time to, or the last step, or if a process was asked to end.

        Raises:
          PreemptedError: in the last case.
        """
        if self._checkpoints is None:
            return
        asked = not everywhere(not self._asked)
        if asked or last or step % self._every == 0:
            state = self._trainer.model, self._trainer.state
            self._checkpoints.save(step, state, self._place)
        if asked:
            self._checkpoints.wait()
            raise PreemptedError(f"asked to end: saved after step {step}; --resume goes on there.")


class CheckpointError(RuntimeError):
    """A run cannot go on from a checkpoint."""


class PreemptedError(RuntimeError):
    """The run was asked to end, and has saved what it had."""


def folder_of(out: Path, name: str) -> Path:
    """Where the checkpoints of the run of this name are.

    >>> folder_of(Path("out"), "sgp, complete/ring, seed 0").as_posix()
    'out/checkpoints/sgp-complete-ring-seed-0'
    """
    words = "".join(letter if letter.isalnum() or letter in "_." else " " for letter in name)
    return out / "checkpoints" / "-".join(words.split())
