"""Makes the steps of asynchronous nodes again, in the order of their journals."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from gossipjax.asynchronous._journal import Line, read_journal
from gossipjax.asynchronous._messages import Mass
from gossipjax.asynchronous._model import (
    Holding,
    make_numerator,
    make_update,
    set_schedules,
    travels_twice,
    unpack,
)
from gossipjax.asynchronous._wire import Wire, make_key, wire_types
from gossipjax.asynchronous.algorithms import Outer
from gossipjax.collectives import Layout
from gossipjax.wire import WireLike


class ReplayedStep(NamedTuple):
    """A local step that `replay` has made again.

    >>> ReplayedStep(place=1, life="1.0", step=4, params=[0.5], aux=()).step
    4
    """

    place: int  # the place of the node
    life: str  # the life in which the node made the step
    step: int  # the number of the step in the node's process
    params: Any  # the model `z` at which the gradient was taken
    aux: Any  # what `gradients` returned besides the gradient


def replay(
    journals: Iterable[Path],
    tx: optax.GradientTransformation,
    params: Any,
    gradients: Callable[..., tuple[Any, Any]],
    inputs: Callable[[int, int], Sequence[Any]],
    *,
    wire: WireLike | None = None,
) -> Iterator[ReplayedStep]:
    """Runs the events of a job again, in one process.

    The events of each node keep their order, and a mass is received after it was sent. The models
    are the same as in the job, up to the rounding of sums.

    Args:
      journals: the journals of the nodes, one file for each place.
      tx, params, gradients, wire: as in the job.
      inputs: a function `(place, step) -> inputs` that returns the inputs of a local step.

    Yields:
      Every local step, in an order in which the job may have made them.

    Raises:
      ValueError: if a journal cannot be read, an event is missing that another event needs, or a
        node went on from a checkpoint, which is not in a journal.

    >>> list(replay([], optax.sgd(0.1), 0.0, lambda z: (z, None), lambda place, step: ()))
    []
    """
    layout = Layout(params)
    update = make_update(tx, params, gradients)
    job = _Job(tx, params, layout, update, inputs, wire_types(layout.dtypes, wire))
    nodes = [_Node(job, deque(read_journal(path))) for path in journals]
    while any(node.lines for node in nodes):
        is_stuck = True
        for node in nodes:
            while node.lines and node.is_possible(node.lines[0]):
                is_stuck = False
                step = node.apply(node.lines.popleft())
                if step is not None:
                    yield step
        if is_stuck:
            line = next(node.lines[0] for node in nodes if node.lines)
            raise ValueError(
                f"the journals must have what life {line['peer']} sent as number "
                f"{line['number']} to {line['life']}, got none: give those of all nodes, whole."
            )


@dataclasses.dataclass
class _Job:
    """The state that all nodes share. Masses on their way are by `(sender, receiver, number)`."""

    tx: optax.GradientTransformation
    params: Any
    layout: Layout
    update: Any
    inputs: Callable[[int, int], Sequence[Any]]
    wires: tuple[Wire, ...]  # of the buffers of a model
    parcels: dict[tuple[str, str, int], Mass] = dataclasses.field(default_factory=dict)
    answers: dict[tuple[str, str, int], Mass] = dataclasses.field(default_factory=dict)


class _Node:
    """The node at a place: the rest of its journal, and its state after the events so far."""

    def __init__(self, job: _Job, lines: deque[Line]):
        self.lines = lines
        self._job = job
        self._process: str | None = None
        self._holding = Holding(Mass((), 0.0))
        self._estate: Mass | None = None

    def is_possible(self, line: Line) -> bool:
        """Whether everything has happened that an event needs from other nodes."""
        key = (line.get("peer", ""), line["life"], line.get("number", 0))
        if line["event"] in ("receive", "average"):
            return key in self._job.parcels
        if line["event"] == "averaged":
            return (line["life"], line["peer"], line["number"]) in self._job.answers
        return True

    def apply(self, line: Line) -> ReplayedStep | None:
        """Applies an event; returns the step that it begins."""
        if line["event"] == "begin":
            return self._begin(line)
        if line["event"] == "life":
            self._begin_life(line)
        else:
            self._change_mass(line)
        return None

    def _begin_life(self, line: Line) -> None:
        if line["is_continued"]:
            raise ValueError(
                f"the journals must be of nodes that began anew, got that of place "
                f"{line['place']}, which went on from what an earlier process had saved."
            )
        if line["process"] != self._process:
            self._process = line["process"]
            self._place = line["place"]
            self._opt_state = self._job.tx.init(self._job.params)
            self._outer = Outer(*line["outer"]) if line.get("outer") else None
            self._step = 0  # the number of the current step
            self._moved: Any = None  # the node's own movement, which the mass does not have yet
            self._ended: Any = None  # the same after the current step

    def _change_mass(self, line: Line) -> None:
        parcels = self._job.parcels
        answers = self._job.answers
        holding = self._holding
        sent = (line["life"], line["peer"], line["number"])
        received = (line["peer"], line["life"], line["number"])
        match line["event"]:
            case "found" | "join" as event:
                x = make_numerator(self._job.params, self._outer, event == "found")
                self._holding = Holding(Mass(x, float(event == "found")))
                self._moved = None
            case "admit":
                self._opt_state = set_schedules(self._opt_state, line["number"])
            case "share":
                wires = self._job.wires * (1 + travels_twice(self._outer))
                parcels[sent] = self._move(None, wires, make_key(wires, self._place, self._step))
            case "grant":
                parcels[sent] = holding.halve()
            case "hand over":
                parcels[sent] = holding.take()
            case "receive" | "return" as event:
                holding.add(parcels[received if event == "receive" else sent])
            case "ask":
                parcels[sent] = holding.read()
            case "average":
                answers[received] = (parcels[received] - holding.read()) / 2
                holding.add(answers[received])
            case "averaged" | "undo" as event:
                holding.add(-answers.pop(sent if event == "averaged" else received))
            case "give up":
                self._estate = holding.take()
            case "revive" if self._estate is not None:
                holding.add(self._estate)
            case "end":
                self._moved = self._ended
                if self._outer is None:
                    self._move(None)
            case "outer":
                self._move(self._outer)
            case "finish":
                self._move(None)

    def _move(self, outer: Outer | None, wires: Any = None, key: Any = None) -> Any:
        """Moves the mass by the node's own movement; returns the half to send, if any."""
        moved = self._moved
        self._moved = None
        if moved is None:  # no local step was made since the last move
            layout = self._job.layout
            moved = tuple(map(jnp.zeros, layout.sizes, layout.dtypes))
        return self._holding.move(moved, outer, wires, key)

    def _begin(self, line: Line) -> ReplayedStep:
        mass = self._holding.merge()
        self._step = line["number"]
        inputs = self._job.inputs(self._place, self._step)
        params = unpack(self._job.layout, self._job.params, mass.x, mass.w, self._moved)
        update = self._job.update(mass.x, mass.w, self._moved, self._opt_state, *inputs)
        self._ended, self._opt_state, aux, _ = update
        return ReplayedStep(self._place, line["life"], self._step, params, aux)
