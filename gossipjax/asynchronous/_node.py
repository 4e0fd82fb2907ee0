"""An asynchronous node, with the methods that its training loop calls."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import secrets
import time
import warnings
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax import launch
from gossipjax.asynchronous._clipping import pull_finals
from gossipjax.asynchronous._journal import Journal
from gossipjax.asynchronous._messages import VERSION, Format, Identity, Mass, choose_wires, make_key
from gossipjax.asynchronous._model import (
    Holding,
    add,
    advance,
    make_numerator,
    require_local,
    set_schedules,
    unpack,
    update,
)
from gossipjax.asynchronous._participant import Participant
from gossipjax.asynchronous._saving import Saves
from gossipjax.asynchronous._service import MAX_SHOWN, Service
from gossipjax.asynchronous._settings import Settings
from gossipjax.collectives import Layout
from gossipjax.exchanges.transform import require_transform
from gossipjax.step.gradients import Gradients

MAX_GRADIENTS = 8  # different `gradients` functions that a node compiles without a warning
AVERAGE_SECONDS = 600.0
PROBE_SECONDS = 2.0  # of silence, after which a node looks whether all others refuse it


class Statistics(NamedTuple):
    """Counts what a node has done since its process began, also before others declared it dead.

    >>> Statistics(9, skipped=1, sent=8, kept=1, staleness=1.5, sent_bytes=960, weight=1.0,
    ...            dropped={}).sent
    8
    """

    steps: int  # local steps
    skipped: int  # steps that were skipped because the update was not finite
    sent: int  # shares that were sent, or averages that were asked for
    kept: int  # steps without a message, because the peer had not acknowledged the last
    staleness: float  # the mean number of local steps until a message was acknowledged
    sent_bytes: int  # of all messages with a mass
    weight: float  # the push-sum weight that the node holds
    dropped: dict[str, int]  # reason -> messages that were not acted upon, or were clipped


class Node:
    """A node of an asynchronous job; `join` makes it.

    The node listens at `address`, where other nodes can join, and has the number `place` in the
    job. `opt_state` is the state of `tx`. A training loop may replace it, for example to set a
    learning rate.

    >>> import jax.numpy as jnp, optax, gossipjax.asynchronous as ga
    >>> node = ga.join(optax.sgd(0.1), jnp.zeros(3), algorithm=ga.sgp())
    >>> node  # doctest: +ELLIPSIS
    Node(0 at 127.0.0.1:..., 0 steps, weight 1)
    >>> node.leave()
    """

    def __init__(self, tx: optax.GradientTransformation, params: Any, settings: Settings):
        self.place = settings.place
        self._outer = settings.algorithm.outer
        require_transform(tx, "tx")
        self._layout = Layout(params)
        self._like = jax.eval_shape(lambda tree: tree, params)
        self._unpack = functools.partial(unpack, self._layout, self._like)
        self._wires = choose_wires(self._layout.dtypes, settings.wire) * settings.algorithm.models
        opt_state = tx.init(params)
        require_local(tx, params, opt_state)
        leaves, structure = jax.tree.flatten(self._like)
        self._update = functools.partial(update, tx, structure, tuple(leaves))
        self._compiled: set[Gradients] = set()
        self._steps = self._skipped = self._sent = self._kept = 0
        x = make_numerator(params, self._outer)
        folder = settings.folder and settings.folder / str(self.place)
        self._saves = Saves(folder, settings.every, x, opt_state)
        restored = self._saves.restored
        saved: dict[str, int] = {}
        if restored is not None:
            x, opt_state = restored.state
            saved = {"steps": restored.step, **restored.metadata}
            # The job may go on without this node, so it does not found one at once.
            settings = dataclasses.replace(settings, is_founder=None)
        self.opt_state = jax.tree.map(jnp.copy, opt_state)  # a step donates it
        self._settings = settings
        held = x if settings.is_founder else tuple(map(jnp.zeros_like, x))  # others hold nothing
        self._holding = Holding(Mass(held, float(bool(settings.is_founder))))
        self._service = Service(settings, self._make_format())
        self.address = self._service.address
        self._journal = Journal(settings.journal, is_continued=bool(saved), outer=self._outer)
        self._participant = Participant(
            settings, self._holding, self._begin_life, self._journal.add, time.monotonic()
        )
        if settings.is_founder is None:  # the node goes on with its model if nobody gives mass
            reserve = Mass(tuple(map(np.asarray, x)), 1.0)
            self._participant.founding.bring(reserve, **saved)
        self._update_factor = 1.0  # `Membership.update_factor` at the end of the last step
        self._is_open = True
        self._in_block = False  # whether the program uses the node in a `with` block
        self._warned = 0  # how many of the notes the program has been warned of
        self._service.start(self._participant, self._journal.has_written)

    def __repr__(self) -> str:
        weight = self.statistics.weight
        return f"Node({self.place} at {self.address}, {self.steps} steps, weight {weight:.3g})"

    def _make_format(self) -> Format:
        """Makes the format of the job's messages: a node refuses others with another header."""
        shapes = [(x.shape, str(x.dtype)) for x in jax.tree.leaves(self._like)]
        text = f"{jax.tree.structure(self._like)} {shapes}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        model = f"{sum(self._layout.sizes):,} parameters in {len(shapes)} arrays, {digest}"
        algorithm = str(self._outer or self._settings.algorithm.name)
        algorithm += " by node_weight" * (self._settings.node_weight is not None)
        algorithm += f" clip {self._settings.clip}" * (self._settings.clip is not None)
        sizes = tuple(self._layout.sizes) * self._settings.algorithm.models
        dtypes = tuple(self._layout.dtypes) * self._settings.algorithm.models
        buffers = tuple(zip(self._wires, sizes, dtypes, strict=True))
        # A floating-point codec is named by its `dtype`, as is a buffer of this type that travels
        # as it is: both send the same bytes.
        forms = [wire or dtype for wire, _, dtype in buffers]
        names = [getattr(form, "dtype", form) for form in forms]
        header = {"version": VERSION, "job": self._settings.job, "model": model}
        return Format(header | {"algorithm": algorithm, "wire": " ".join(map(str, names))}, buffers)

    def _begin_life(self) -> Identity:
        """Begins a new life, without local updates; journals and returns its identity."""
        self._local_updates = self._make_zero_updates()
        identity = Identity(self.place, secrets.token_hex(8), self.address)
        self._journal.begin_life(identity)
        return identity

    def _make_zero_updates(self) -> tuple[jax.Array, ...] | None:
        """Returns zeros to add updates to until the next outer step; None without outer steps."""
        layout = self._layout
        return self._outer and tuple(map(jnp.zeros, layout.sizes, layout.dtypes))

    @property
    def params(self) -> Any:
        """The model: `x / w` plus the updates since an outer step; 0 until the node holds mass."""
        with self._service.lock:
            mass = self._holding.merge()
            return self._unpack(mass.x, mass.w or 1.0, self._local_updates)

    @property
    def members(self) -> list[int]:
        """The places of this node and of the nodes that it hears and that hold mass."""
        with self._service.lock:
            others = self._participant.members.list_members()
        return sorted([self.place, *(peer.place for peer in others)])

    @property
    def steps(self) -> int:
        """The local steps of this place, those before restarts included, as far as known."""
        return self._participant.members.own_steps

    @property
    def total_steps(self) -> int:
        """The local steps of all places, those before restarts included, as far as known."""
        with self._service.lock:
            return sum(self._participant.members.steps.values())

    @property
    def statistics(self) -> Statistics:
        """What this node has done so far."""
        post = self._participant.post
        with self._service.lock:
            return Statistics(
                self._steps,
                self._skipped,
                self._sent,
                self._kept,
                post.staleness / max(1, post.acknowledged),
                self._service.sent_bytes,
                self._holding.total.weight,
                dict(post.dropped),
            )

    def step(self, gradients: Gradients, *inputs: Any) -> Any:
        """Makes a local step: updates the model `z = x / w`, and then sends as the algorithm says.

        The node adds the mass that has arrived, makes the update `x <- x + w u(z)`, and sends a
        share of `(x, w)` or asks a peer for an average. Under `outer` it sends only at every H-th
        step. A node without mass first waits until another node gives it half of its mass.

        Args:
          gradients: a function `gradients(params, *inputs) -> (grads, aux)`, which is compiled
            once. A `functools.partial` or `lambda` that is made anew is another function.
          inputs: the arrays of this step, for `gradients`.

        Returns:
          The `aux` of `gradients`.

        Raises:
          RuntimeError: if the node has left, or an error ended its thread.
          TimeoutError: if no living node answers.
          FloatingPointError: if the update is not finite, unless `join` got `nonfinite="skip"`. The
            model and the optimizer state do not change. If the model itself is not finite, it is
            written off in either case, and the node goes on as if it had just joined.
        """
        for text in list(self._participant.members.notes.values())[self._warned :]:
            self._warned += 1
            warnings.warn(text, stacklevel=2)
        # A step that failed has said that this node is finished. It is not, except in `average`.
        self._participant.ending.is_finished = self._participant.ending.is_averaging
        self.warm_up(gradients, *inputs)
        mass, moved, life = self._begin()
        result = self._update(gradients, mass.x, mass.w, moved, self.opt_state, *inputs)
        moved, self.opt_state, aux, is_finite = result
        # This waits for the device, without the lock, so that messages are taken in meanwhile.
        is_finite = bool(is_finite)
        fails = not (is_finite or self._settings.nonfinite == "skip")
        with self._service.lock:
            self._steps += 1
            self._skipped += not is_finite
            participant = self._participant
            # If its life is another now, the node was declared dead during the step, and has given
            # up the mass that the step has updated: then the update is dropped.
            if participant.life == life:
                participant.members.count_step()
                self._update_factor = participant.members.update_factor
                if is_finite:
                    self._journal.add("end", life, self._steps - 1, part=self._update_factor)
                self._local_updates = moved if self._outer else None
                if not is_finite and not self._holding.is_finite():
                    participant.give_up("write off", keeps=False)
                elif self._steps % (self._outer.every if self._outer else 1) == 0:
                    self._send(moved)
            if fails:  # the others need not wait for its next step, which may never come
                participant.ending.finish()
        self._service.wake()
        if fails:
            raise FloatingPointError(
                f"the update of step {self._steps - 1} must be finite, got NaN or infinity at "
                f"place {self.place}; it was not applied: lower the learning rate, or join with "
                "nonfinite='skip', which leaves such steps out and counts them."
            )
        self._save()
        return aux

    def _begin(self) -> tuple[Mass, Any, str]:
        """Begins a step when the node holds mass; returns the mass, the local updates, the life."""
        while True:
            self.wait_for_mass()
            launch.advance(self._steps)
            with self._service.lock:
                founding = self._participant.founding
                # A mass that was given up between the wait and the lock is waited for again.
                if not founding.wants_mass:
                    if founding.joined_at is not None:
                        # The optimizer's schedules go on at the step of the node that gave mass.
                        self.opt_state = set_schedules(self.opt_state, founding.joined_at)
                        founding.joined_at = None
                    mass = self._holding.merge()
                    life = self._participant.life
                    self._journal.add("begin", life, self._steps, mass)
                    return mass, self._local_updates, life

    def _save(self) -> None:
        """Saves the node if that is due; raises `Preempted` after SIGTERM."""
        steps = self.steps
        if self._saves.is_due(steps):
            with self._service.lock:
                mass = self._holding.merge()
                clock = self._participant.members.clock
                metadata = {"clock": clock, "branch": self._participant.founding.branch}
                moved = self._local_updates
            self._saves.save(steps, mass, moved, self.opt_state, metadata)
        self._end_if_asked()

    def _end_if_asked(self) -> None:
        """Raises `Preempted` if a signal has asked this process to end."""
        if self._saves.is_asked_to_end:
            with self._service.lock:
                has_heir = bool(self._participant.ending.list_heirs())
            self._saves.end(self.place, has_heir)

    @property
    def final_models(self) -> dict[int, Any]:
        """The models at the end, by place, of all nodes that lived then. Call `average` first."""
        with self._service.lock:
            finals = self._participant.ending.finals.items()
            masses = {who.place: mass for who, (_, mass) in finals if mass.w}
        return {place: self._unpack(masses[place].x, masses[place].w) for place in sorted(masses)}

    def warm_up(self, gradients: Gradients, *inputs: Any) -> None:
        """Compiles a step now, which the first step with these `gradients` would do otherwise."""
        if gradients in self._compiled:
            return
        if len(self._compiled) == MAX_GRADIENTS:
            warnings.warn(
                "a step is compiled anew for each function, and this is the "
                f"{MAX_GRADIENTS + 1}th: define `gradients` once, outside of the loop, and give "
                "what changes as inputs.",
                stacklevel=3,
            )
        launch.advance(slow=True)
        self._participant.is_compiling = True
        with self._service.lock:
            mass = self._holding.merge()
        state = (mass.x, mass.w or 1.0, self._local_updates, self.opt_state)
        update.lower(*self._update.args, gradients, *state, *inputs).compile()
        self._compiled.add(gradients)
        # Arrays with the shapes and types of a mass that arrives, and of local updates.
        arrived = tuple(map(np.asarray, mass.x))
        moved = mass.x[: len(self._layout.dtypes)]
        key = make_key(self._wires, self.place, 0)
        # A step needs another program if mass has arrived, and if it sends a share: compiles all.
        for arrays, wires in itertools.product((None, arrived), (None, self._wires)):
            advance.lower(mass.x, arrays, moved, 1.0, self._outer, wires, key).compile()
        add.lower(mass.x, arrived).compile()
        self._participant.is_compiling = False

    def wait_for_members(self, count: int, timeout: float) -> bool:
        """Waits until `count` nodes have called `wait_for_members`, or a node makes steps.

        Training does not need this wait, but a comparison may want all nodes to begin together.
        Returns False after `timeout` seconds.
        """
        with self._service.lock:
            self._participant.is_ready = True
            self._participant.members.next_beat = 0.0  # tells the others now
        self._service.wake()
        return self._service.wait_until(lambda: self._participant.all_are_ready(count), timeout)

    def wait_for_mass(self, timeout: float | None = None) -> None:
        """Waits until this node holds mass; a node that has just joined has none.

        Raises:
          TimeoutError: if no living node answers within `timeout` seconds (default: ten times the
            patience). If all known nodes are of another job or have another secret, the error comes
            sooner.
          ValueError: if a living node has the same place.
        """
        if not self._is_open:
            raise RuntimeError("the node has left: join again.")
        start = time.monotonic()
        end = start + (10 * self._settings.patience if timeout is None else timeout)
        members = self._participant.members
        founding = self._participant.founding

        def is_over() -> bool:
            must_end = members.twin is not None or self._saves.is_asked_to_end
            return must_end or not founding.wants_mass

        while not self._service.wait_until(is_over, min(PROBE_SECONDS, end - time.monotonic())):
            if time.monotonic() >= end or self._service.is_refused():
                break
        if members.twin is not None:
            raise ValueError(
                f"place must be nobody else's, got {self.place}, and the node at "
                f"{members.twin.address}, which lives, has it: give each node a place of its "
                "own, by GOSSIPJAX_NODE or place=, and all the same addresses."
            )
        if founding.wants_mass:
            self._end_if_asked()
            seconds = time.monotonic() - start
            raise TimeoutError(
                "another node must give this one half of what it holds, got nothing in "
                f"{seconds:.3g} seconds: {self._service.explain_silence()}"
            )

    def _send(self, moved: Any) -> None:
        """Moves the mass by the local updates `moved`; then sends to a peer, if one is free."""
        participant = self._participant
        averages = self._settings.algorithm.averages
        turn = self._steps // self._outer.every if self._outer else self._steps
        peer = participant.choose(self._settings.algorithm.choose, turn - 1)
        is_free = peer is not None and participant.may_send(peer, is_share=not averages)
        now = time.monotonic()
        if self._outer:
            self._journal.add("outer", participant.life, self._steps - 1, part=self._update_factor)
        wires = self._wires if is_free and not averages else None
        # The key is made of place and step alone, so that a replay rounds in the same way.
        key = make_key(self._wires, self.place, self._steps - 1)
        half = self._holding.move(moved, self._outer, wires, key, self._update_factor)
        self._local_updates = self._make_zero_updates()
        self._kept += peer is not None and not is_free
        if peer is None or not is_free:
            return
        if averages:
            self._sent += participant.ask(peer, now)
        elif half is None:  # what it holds is not finite
            participant.give_up("write off", keeps=False)
        else:
            participant.share(peer, half, now)
            self._sent += 1

    def _finish(self) -> None:
        """Adds the local updates since the last outer step to the mass, if that may change."""
        moved = self._local_updates
        self._local_updates = self._make_zero_updates()
        participant = self._participant
        if moved is not None and participant.may_change:
            self._journal.add("finish", participant.life, self._steps, part=self._update_factor)
            self._holding.move(moved, outer=None, wires=None, part=self._update_factor)

    def average(self, timeout: float | None = AVERAGE_SECONDS) -> Any:
        """Ends the training of this node; returns the average model of all living nodes.

        `average` waits until all nodes of the job have called it, no message is on its way, and all
        nodes know the final masses of all nodes. The result is `sum x / sum w`, and is equal on all
        nodes. With `timeout=None` (else seconds), it waits as long as other nodes train.

        Raises:
          TimeoutError: if `average` takes longer than `timeout`. The message says why, for each
            node.
          RuntimeError: if no node holds mass, or if large messages do not pass between this node
            and the other nodes, which then end without this one.
        """
        ending = self._participant.ending
        with self._service.lock:
            self._finish()
            ending.is_averaging = True
            ending.finish()
        self._service.wake()

        def is_over() -> bool:
            return ending.is_ended or ending.is_cut_off or self._saves.is_asked_to_end

        is_over_in_time = self._service.wait_until(is_over, timeout)
        if not ending.is_ended:
            self._end_if_asked()
        with self._service.lock:
            reasons = ending.explain_missing()
            # In the same order on all nodes: their sums are equal to the bit.
            finals = sorted((who, mass) for who, (_, mass) in ending.finals.items())
        if not is_over_in_time:
            missing = "; ".join(reasons[:MAX_SHOWN])
            raise TimeoutError(
                f"all nodes must end within {timeout:g} seconds, got no end of these: "
                f"{missing or 'what this node sent has not arrived'}. Give more time, or leave."
            )
        if ending.is_cut_off:
            raise RuntimeError(
                "all nodes must hear what each holds at the end, got nothing over most paths of "
                f"place {self.place}: the others end without it. If a path loses large packets, "
                "lower the MTU of both machines."
            )
        masses = [mass for _, mass in finals if mass.w]
        if not masses:
            raise RuntimeError("a node must hold something at the end, got none that does.")
        if self._settings.clip is not None:
            masses = pull_finals(masses, self._settings.clip, self._settings.algorithm.models)
        total = functools.reduce(Mass.__add__, masses)
        return self._unpack(total.x, total.w)

    def mean(self, figure: float | jax.Array) -> float:
        """Tells the others a number, such as a loss; returns the mean over the nodes heard so far.

        The mean is weighted by `node_weight`. Others hear the number within `patience / 10`, so
        theirs may be a little older. After `average` each node may call it once more: the call then
        waits, for up to the patience, until the others have given their last numbers, too.
        """
        members = self._participant.members
        ending = self._participant.ending
        with self._service.lock:
            members.figure = f"{float(figure)!r}{' last' * ending.is_ended}"
            if ending.is_ended:  # tells the others now
                members.next_beat = members.now
        self._service.wake()

        def has_all() -> bool:
            places = {who.place for who, (_, mass) in ending.finals.items() if mass.w}
            last = {place for place, (*_, is_last) in members.figures.items() if is_last}
            return places <= last | {self.place}

        if ending.is_ended:
            self._service.wait_until(has_all, self._settings.patience)
        with self._service.lock:
            heard = {peer.identity.place for peer in members.peers.values()}
            told = [said for place, said in members.figures.items() if place in heard or said[2]]
        weights, figures, _ = zip((members.weight, float(figure), True), *told, strict=True)
        return float(np.average(figures, weights=weights))

    def leave(self, timeout: float | None = None) -> None:
        """Leaves the job, and gives the mass of this node to a node that goes on, if any.

        Other nodes have `timeout` seconds to acknowledge, by default the patience.
        """
        if not self._is_open:
            return
        self._is_open = False
        with self._service.lock:
            self._finish()
            self._participant.ending.leave()
        self._service.wake()
        seconds = self._settings.patience if timeout is None else timeout
        try:
            self._service.wait_until(lambda: self._participant.ending.has_left, seconds)
        finally:
            self._service.close()
            self._journal.close(seconds)
            if self._saves.checkpoints is not None and not self._in_block:
                self._saves.checkpoints.close()

    def __enter__(self) -> Self:
        self._saves.block.__enter__()
        self._in_block = True
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self.leave()
        finally:
            self._saves.block.__exit__(*error)
