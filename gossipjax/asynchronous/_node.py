"""A node that waits for nobody, as its training loop sees it."""

from __future__ import annotations

import functools
import itertools
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax import launch
from gossipjax.asynchronous._holding import Holding
from gossipjax.asynchronous._journal import Journal
from gossipjax.asynchronous._update import Gradients, add, advance, make_update, unpack
from gossipjax.asynchronous.algorithms import Algorithm
from gossipjax.asynchronous.protocol import Identity, Mass, Participant
from gossipjax.asynchronous.transport import Format, Service
from gossipjax.collectives import Layout

# A node that is much faster than the others would send nearly all that it holds.
MIN_SHARED_COUNT = 0.5
MAX_GRADIENTS = 32  # different functions that a node compiles


class Statistics(NamedTuple):
    """What a node has done in its lives.

    Attributes:
      steps: local steps.
      sent: shares sent, or averages asked for.
      kept: steps at which it sent nothing, because its peer had not acknowledged the last message.
      staleness: local steps from sending a message to its acknowledgement, the mean.
      sent_bytes: of all messages with a mass.
      weight: the push-sum weight that it holds.
      dropped: reason -> number of messages that were not acted upon.
    """

    steps: int
    sent: int
    kept: int
    staleness: float
    sent_bytes: int
    weight: float
    dropped: dict[str, int]


class Node:
    """A node of a job in which nobody waits; made by `join`.

    Attributes:
      address: where it listens, for others to join.
      place: its number in the job.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: Any,
        algorithm: Algorithm,
        form: Format,
        service: Service,
        place: int,
        contacts: Sequence[str],
        is_founder: bool,
        patience: float,
        journal: Path | None,
        opt_state: Any,
        steps: int,
    ):
        self.address = service.address
        self.place = place
        self._algorithm = algorithm
        self._tx = optax.with_extra_args_support(tx)
        self._layout = Layout(params)
        self._like = jax.eval_shape(lambda tree: tree, params)
        self._wires = form.wire_dtypes
        self._journal = Journal(journal, is_continued=opt_state is not None or steps > 0)
        opt_state = self._tx.init(params) if opt_state is None else opt_state
        self._opt_state = jax.tree.map(jnp.copy, opt_state)
        self._updates: dict[Gradients, Any] = {}
        self._sent = self._kept = self._acknowledged = self._staleness = 0
        self._on_way: dict[str, int] = {}
        weight = float(is_founder)
        x = tuple(jnp.copy(b) * jnp.asarray(weight, b.dtype) for b in self._layout.pack(params))
        self._holding = Holding(Mass(x, weight, weight))
        self._service = service
        self._participant = Participant(
            self._make_life(),
            self._holding,
            contacts,
            patience,
            time.monotonic(),
            self._make_life,
            self._journal.add,
            is_founder,
        )
        self._participant.steps[self._participant.identity.life] = steps
        self._patience = patience
        self._steps = 0
        self._is_open = True
        self._service.start(self._participant)

    def _make_life(self) -> Identity:
        identity = Identity(time.time(), uuid.uuid4().hex, self.place, self.address)
        self._journal.begin_life(identity)
        return identity

    @property
    def params(self) -> Any:
        """The model, `x / w`; that of a node that has nothing yet is 0."""
        with self._service.lock:
            mass = self._holding.merge()
        return self._unpack(mass.x, mass.w or 1.0)

    @property
    def members(self) -> list[int]:
        """The places of the nodes that it hears and that hold something, its own included."""
        with self._service.lock:
            return sorted([self.place, *(peer.place for peer in self._participant.list_members())])

    @property
    def total_steps(self) -> int:
        """Local steps of all lives of all nodes, as far as this node knows."""
        with self._service.lock:
            return sum(self._participant.steps.values())

    @property
    def statistics(self) -> Statistics:
        """What it has done so far."""
        with self._service.lock:
            dropped = self._participant.dropped | self._service.all_dropped
            staleness = self._staleness / max(1, self._acknowledged)
            return Statistics(
                self._steps,
                self._sent,
                self._kept,
                staleness,
                self._service.sent_bytes,
                self._holding.weight,
                dropped,
            )

    def step(self, gradients: Gradients, *inputs: Any) -> Any:
        """One local step: the update at `z = x / w`, and the message of the algorithm after it.

        `x <- x + u(z)`; then a share of `(x, w)` leaves, or an average is asked for. What arrives
        while the update is computed is added first, and so is what arrives between two steps.

        A node that has nothing, after it joined or was declared dead, first waits for half of what
        another holds.

        Args:
          gradients: `gradients(params, *inputs) -> (grads, aux)`; compiled once.
          inputs: arrays of this step.

        Returns:
          aux.

        Raises:
          RuntimeError: if the node has left, or its thread ended by an error.
          TimeoutError: if no living node answers.
        """
        self.wait_for_mass()
        launch.advance(self._steps, slow=gradients not in self._updates)
        with self._service.lock:
            self._service.require_running()
            participant = self._participant
            mass = self._holding.merge()
            life = participant.identity.life
            self._journal.add("begin", life, self._steps, None)
        update = self._get_update(gradients)
        change, self._opt_state, aux = update(mass.x, mass.w, self._opt_state, *inputs)
        jax.block_until_ready(change)
        with self._service.lock:
            self._steps += 1
            if participant.identity.life == life:
                self._journal.add("end", life, self._steps - 1, None)
                self._send(participant.steps[life], change)
                participant.count_step()
        self._service.wake()
        return aux

    @property
    def opt_state(self) -> Any:
        """The state of `tx`; a training loop may set it, such as a learning rate in it."""
        return self._opt_state

    @opt_state.setter
    def opt_state(self, opt_state: Any) -> None:
        self._opt_state = opt_state

    @property
    def final_models(self) -> dict[int, Any]:
        """Place -> the model of that node at the end, after `average`; of all that lived then."""
        with self._service.lock:
            masses = {who.place: mass for who, mass in self._participant.finals.items() if mass.w}
        return {
            place: self._unpack([jnp.asarray(x) for x in masses[place].x], masses[place].w)
            for place in sorted(masses)
        }

    def warm_up(self, gradients: Gradients, *inputs: Any) -> None:
        """Compiles a step, and changes nothing."""
        launch.advance(slow=True)
        with self._service.lock:
            mass = self._holding.merge()
        opt_state = jax.tree.map(jnp.copy, self._opt_state)
        update = self._get_update(gradients)
        change, *_ = update(mass.x, mass.w or 1.0, opt_state, *inputs)
        arrived = tuple(map(np.asarray, mass.x))
        for arrays, wires in itertools.product((None, arrived), (None, self._wires)):
            jax.block_until_ready(advance(mass.x, arrays, change, 1.0, wires))
        jax.block_until_ready(add(mass.x, arrived))

    def wait_for_members(self, count: int, timeout: float) -> bool:
        """Waits until so many nodes, itself included, have called this, or one makes steps.

        Training needs no such wait; a comparison may want all nodes to begin together.

        Returns:
          Whether it does; False after `timeout` seconds.
        """
        with self._service.lock:
            self._participant.set_ready(time.monotonic())
        self._service.wake()
        return self._service.wait_until(lambda: self._participant.all_are_ready(count), timeout)

    def wait_for_mass(self, timeout: float | None = None) -> None:
        """Waits until it holds something: at once, unless it has just joined.

        Args:
          timeout: seconds; None is ten times the patience.

        Raises:
          TimeoutError: if no living node answers.
        """
        if not self._is_open:
            raise RuntimeError("the node has left: join again.")
        seconds = 10 * self._patience if timeout is None else timeout
        if not self._service.wait_until(lambda: not self._participant.wants_mass, seconds):
            raise TimeoutError(
                f"a living node must answer within {seconds:g} seconds, got none from "
                f"{', '.join(sorted(self._participant.contacts)) or 'no address'}: give the "
                "address of one that lives."
            )

    def _send(self, step: int, change: Any) -> None:
        """Adds the update of a step, and sends what the algorithm sends after it."""
        participant = self._participant
        holding = self._holding
        peer = self._algorithm.choose(participant.list_members(), participant.identity, step)
        self._count_acknowledged()
        now = time.monotonic()
        averages = self._algorithm.averages
        is_low = not averages and holding.count < MIN_SHARED_COUNT
        is_free = peer is not None and not is_low and peer in participant.list_free_peers()
        half = holding.update(change, self._wires if is_free and not averages else None)
        self._kept += peer is not None and not is_free
        if peer is None or not is_free:
            return
        if half is None:
            self._sent += participant.ask(peer, now)
        else:
            participant.share(peer, half, now)
            self._sent += 1

    def _count_acknowledged(self) -> None:
        """Adds up how many steps each message was on its way."""
        peers = self._participant.peers
        for life in list(self._on_way):
            if life not in peers or peers[life].parcel is None:
                self._staleness += self._steps - self._on_way.pop(life)
                self._acknowledged += 1
        for life, peer in peers.items():
            if peer.parcel is not None:
                self._on_way.setdefault(life, self._steps)

    def _get_update(self, gradients: Gradients) -> Any:
        if gradients not in self._updates:
            if len(self._updates) == MAX_GRADIENTS:
                raise ValueError(
                    f"a node must be given at most {MAX_GRADIENTS} different functions of "
                    "gradients, each of which is compiled, got another one: define it once, "
                    "outside of the loop."
                )
            self._updates[gradients] = make_update(self._tx, self._layout, self._like, gradients)
        return self._updates[gradients]

    def _unpack(self, x: Any, w: Any) -> Any:
        return unpack(self._layout, self._like, x, w)

    def average(self, timeout: float | None = None) -> Any:
        """Ends the training of this node; returns the average model of all that live.

        It waits until all nodes that it hears have called this and nothing is on its way:
        `sum x / sum w`, the same on all of them.

        Args:
          timeout: seconds; None waits as long as others train.

        Raises:
          TimeoutError: if it takes longer.
        """
        participant = self._participant
        with self._service.lock:
            participant.is_finished = True
        self._service.wake()
        if not self._service.wait_until(lambda: participant.has_finals, timeout):
            with self._service.lock:
                places = ", ".join(map(str, participant.list_unfinished()))
            raise TimeoutError(
                f"all nodes must end within {timeout:g} seconds, got no end of those at the places "
                f"{places}: give more time, or leave."
            )
        with self._service.lock:
            total = functools.reduce(Mass.__add__, participant.finals.values())
        return self._unpack([jnp.asarray(x) for x in total.x], total.w)

    def leave(self, timeout: float | None = None) -> None:
        """Leaves: hands what it holds over to a node that goes on, if there is one.

        Args:
          timeout: seconds in which others may acknowledge; None is the patience.
        """
        if not self._is_open:
            return
        self._is_open = False
        with self._service.lock:
            self._participant.leave()
        self._service.wake()
        try:
            self._service.wait_until(
                lambda: self._participant.has_left, self._patience if timeout is None else timeout
            )
        finally:
            self._service.close(linger=0.2)
            self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()
