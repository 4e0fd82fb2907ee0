"""The steps of asynchronous nodes once more, in the order of their journals."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.asynchronous._journal import Line, read_journal
from gossipjax.asynchronous._messages import Mass
from gossipjax.asynchronous._model import (
    make_numerator,
    make_update,
    move,
    rescale,
    set_schedules,
    split,
    unpack,
)
from gossipjax.asynchronous._wire import Wire, make_key, to_host, wire_types
from gossipjax.asynchronous.algorithms import Outer
from gossipjax.collectives import Layout
from gossipjax.wire import WireLike


class ReplayedStep(NamedTuple):
    """A local step of a replay.

    >>> ReplayedStep(place=1, life="1.0", step=4, params=[0.5], aux=()).step
    4
    """

    place: int  # of the node
    life: str  # in which it made the step
    step: int  # its number in the node's process
    params: Any  # the model `z` at which the gradient was taken
    aux: Any  # what `gradients` returned beside the gradient


def replay(
    journals: Iterable[Path],
    tx: optax.GradientTransformation,
    params: Any,
    gradients: Callable[..., tuple[Any, Any]],
    inputs: Callable[[int, int], Sequence[Any]],
    wire: WireLike | None = None,
) -> Iterator[ReplayedStep]:
    """Runs the events of a job again, in one process.

    The events of each node follow in its own order, and one that receives follows the one that
    sent. The models are those of the job up to the rounding of the sums, whose order is the same.

    Args:
      journals: the files that the nodes wrote, one for each place.
      tx, params, gradients, wire: those of the job.
      inputs: `(place, step) -> inputs` of that local step.

    Yields:
      Every local step, in an order in which the job may have made them.

    Raises:
      ValueError: if a journal cannot be read, or lacks an event that another one needs, or a node
        went on from a checkpoint, which journals do not have.

    >>> list(replay([], optax.sgd(0.1), 0.0, lambda z: (z, None), lambda place, step: ()))
    []
    """
    replayer = Replayer(tx, params, gradients, inputs, wire)
    queues = [deque(read_journal(path)) for path in journals]
    nodes: list[ReplayedNode | None] = [None] * len(queues)
    while any(queues):
        is_stuck = True
        for number, queue in enumerate(queues):
            while queue and replayer.is_possible(queue[0]):
                is_stuck = False
                line = queue.popleft()
                nodes[number], step = replayer.apply(nodes[number], line)
                if step is not None:
                    yield step
        if is_stuck:
            line = next(queue[0] for queue in queues if queue)
            raise ValueError(
                f"the journals must have what life {line['peer']} sent as number "
                f"{line['number']} to {line['life']}, got none: give those of all nodes, whole."
            )


@dataclasses.dataclass
class ReplayedNode:
    """The state of one process."""

    process: str
    place: int
    opt_state: Any
    outer: Outer | None
    mass: Mass = Mass((), 0.0)  # noqa: RUF009 - masses do not change
    estate: Mass | None = None
    moved: Any = None  # what its model has moved by itself, to be added to the mass
    ended: Any = None  # the same after the step that goes on
    step: int = 0  # the number of that


class Replayer:
    """The effects of the events. Masses on their way are kept by `(sender, receiver, number)`."""

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: Any,
        gradients: Callable[..., tuple[Any, Any]],
        inputs: Callable[[int, int], Sequence[Any]],
        wire: WireLike | None,
    ):
        self._tx = tx
        self._params = params
        self._layout = Layout(params)
        self._wires = wire_types(self._layout.dtypes, wire)
        self._inputs = inputs
        self._update = make_update(self._tx, params, gradients)
        self._parcels: dict[tuple[str, str, int], Mass] = {}
        self._answers: dict[tuple[str, str, int], Mass] = {}

    def is_possible(self, line: Line) -> bool:
        """Whether what an event needs of another node has happened."""
        key = (line.get("peer", ""), line["life"], line.get("number", 0))
        if line["event"] in ("receive", "average"):
            return key in self._parcels
        if line["event"] == "averaged":
            return (line["life"], line["peer"], line["number"]) in self._answers
        return True

    def apply(
        self, node: ReplayedNode | None, line: Line
    ) -> tuple[ReplayedNode | None, ReplayedStep | None]:
        """Applies an event; returns the node, and the step that it begins."""
        event = line["event"]
        if event == "life":
            if line["is_continued"]:
                raise ValueError(
                    f"the journals must be of nodes that began anew, got that of place "
                    f"{line['place']}, which went on from what an earlier process had saved."
                )
            if node is None or node.process != line["process"]:
                state = self._tx.init(self._params)
                outer = line.get("outer")
                outer = Outer(*outer) if outer else None
                node = ReplayedNode(line["process"], line["place"], state, outer)
            return node, None
        if node is None:
            raise ValueError(f"a journal must begin with a life, got {event!r}.")
        if event == "begin":
            return node, self._begin(node, line)
        self._change_mass(node, line)
        return node, None

    def _change_mass(self, node: ReplayedNode, line: Line) -> None:
        sent = (line["life"], line["peer"], line["number"])
        received = (line["peer"], line["life"], line["number"])
        match line["event"]:
            case "found" | "join" as event:
                founds = event == "found"
                x = make_numerator(self._params, node.outer, founds)
                node.mass = Mass(x, float(founds))
                node.moved = None
            case "admit":
                node.opt_state = set_schedules(node.opt_state, line["number"])
            case "share":
                self._parcels[sent] = self._halve(node, self._wires)
            case "grant":
                self._parcels[sent] = self._halve(node, tuple(self._layout.dtypes))
            case "hand over":
                self._parcels[sent] = node.mass
                node.mass = node.mass - node.mass
            case "receive" | "return":
                key = received if line["event"] == "receive" else sent
                node.mass = node.mass + self._parcels[key]
            case "ask":
                self._parcels[sent] = node.mass
            case "average":
                change = self._answers[received] = (self._parcels[received] - node.mass) / 2
                node.mass = node.mass + change
            case "averaged" | "undo" as event:
                key = sent if event == "averaged" else received
                node.mass = node.mass - self._answers.pop(key)
            case "give up":
                node.estate = node.mass
            case "revive" if node.estate is not None:
                node.mass = node.mass + node.estate
            case "end":
                node.moved = node.ended
                if node.outer is None:
                    self._move(node, None)
            case "outer":
                self._move(node, node.outer)
            case "finish":
                self._move(node, None)

    def _move(self, node: ReplayedNode, outer: Outer | None) -> None:
        moved = node.moved
        node.moved = None
        if moved is None:  # no local step was made since the last outer one
            moved = tuple(map(jnp.zeros, self._layout.sizes, self._layout.dtypes))
        x = move(node.mass.x, moved, node.mass.w, outer)
        node.mass = dataclasses.replace(node.mass, x=x)

    def _halve(self, node: ReplayedNode, wires: tuple[Wire, ...]) -> Mass:
        mass = node.mass
        wires *= len(mass.x) // len(wires)
        kept, shared = split(mass.x, wires, make_key(wires, node.place, node.step))
        shared = tuple(
            b if a is None else jnp.asarray(np.asarray(to_host(a, wire, b)).astype(b.dtype))
            for a, b, wire in zip(shared, kept, wires, strict=True)
        )
        half = dataclasses.replace(mass, x=()) / 2
        node.mass = dataclasses.replace(half, x=kept)
        return dataclasses.replace(half, x=shared)

    def _begin(self, node: ReplayedNode, line: Line) -> ReplayedStep:
        mass = node.mass = rescale(node.mass)
        node.step = line["number"]
        inputs = self._inputs(node.place, node.step)
        params = unpack(self._layout, self._params, mass.x, mass.w, node.moved)
        update = self._update(mass.x, mass.w, node.moved, node.opt_state, *inputs)
        node.ended, node.opt_state, aux, _ = update
        return ReplayedStep(node.place, line["life"], line["number"], params, aux)
