"""The model of a node: its compiled programs, and its mass on the device and on the host."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax.asynchronous._messages import Mass, Wire, Words, is_finite
from gossipjax.asynchronous.algorithms import Outer
from gossipjax.collectives import Layout, cast_like
from gossipjax.step.gradients import Gradients, check_gradients
from gossipjax.wire import fold_in

MAX_DIGITS = 8  # binary digits of a weight
# States of optax whose `count` is the step of a schedule; other counts are of moments.
SCHEDULED = {  # names, as not all of these types are public
    "ScaleByScheduleState", "WrappedScheduleState",
    "InjectHyperparamsState", "InjectStatefulHyperparamsState",
}  # fmt: skip


def unpack(layout: Layout, like: Any, x: Any, w: Any, moved: Any = None) -> Any:
    """Returns the model `x / w` plus the local updates `moved`, as a tree of arrays like `like`."""
    z = [b / jnp.asarray(w, b.dtype) for b in x[: len(layout.dtypes)]]  # without a momentum
    z = z if moved is None else [a + b for a, b in zip(z, moved, strict=True)]
    return cast_like(layout.unpack(z), like)


@functools.partial(jax.jit, static_argnums=1)
def make_numerator(params: Any, outer: Outer | None) -> tuple[Any, ...]:
    """Returns the numerator at weight 1: copies of the parameters, and zeros for a momentum."""
    x = tuple(map(jnp.copy, Layout(params).pack(params)))
    return x + tuple(map(jnp.zeros_like, x)) if outer and outer.momentum else x


def require_local(tx: optax.GradientTransformation, params: Any, opt_state: Any) -> None:
    """Raises `ValueError` if an update of `tx` calls a collective: no other node would join it."""
    try:
        jax.eval_shape(tx.update, params, opt_state, params)
    except (NameError, ValueError) as error:  # errors of JAX and of `axis_size`
        if "axis name" in str(error).replace("_", " "):
            raise ValueError(
                "tx must update one node by itself, got a part that exchanges over an axis: leave "
                "gossip, gx.allreduce and gx.apply_if_finite out of the chain. The `algorithm` of "
                "join exchanges here, and its `nonfinite` skips."
            ) from None
        raise


def set_schedules(opt_state: Any, step: int) -> Any:
    """Returns an optimizer state with its schedules at a step; those inside `MultiSteps` stay."""

    def put(state: Any) -> Any:
        if type(state).__name__ not in SCHEDULED:
            return state
        inner = {name: set_schedules(value, step) for name, value in state._asdict().items()}
        count = jnp.full_like(state.count, min(step, np.iinfo(np.int32).max))
        return state._replace(**inner | {"count": count})

    whole = {*SCHEDULED, "MultiStepsState"}  # types of states that `put` gets as a whole
    return jax.tree.map(put, opt_state, is_leaf=lambda state: type(state).__name__ in whole)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=7)
def update(
    tx: optax.GradientTransformation,
    structure: Any,  # of the model
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    gradients: Gradients,
    x: Any,
    w: Any,
    moved: Any,
    opt_state: Any,
    *inputs: Any,
) -> Any:
    """Computes a node's update u; returns `(moved + u, opt_state, aux, is_finite)`.

    `moved` is the sum of the updates since the last outer step; without outer steps it is None, and
    the result u. If u is not finite, 0 takes its place and `opt_state` stays. Nodes in one process
    that have the same `tx` and `gradients` share one compiled program.
    """
    like = jax.tree.unflatten(structure, leaves)
    layout = Layout(like)
    params = unpack(layout, like, x, w, moved)
    grads, aux = check_gradients(gradients)(params, *inputs)
    updates, new_state = optax.with_extra_args_support(tx).update(grads, opt_state, params)
    buffers = tuple(layout.pack(updates))
    is_finite = functools.reduce(jnp.logical_and, [jnp.isfinite(b).all() for b in buffers])
    # The device chooses here, as the optimizer's old state is donated and gone afterwards.
    zeros = jax.tree.map(jnp.zeros_like, buffers)
    new = (buffers, new_state)
    old = (zeros, opt_state)
    change, state = jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, old)
    return change if moved is None else add(moved, change), state, aux, is_finite


@jax.jit
def add(x: tuple[Any, ...], change: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns `x + change` in the types of `x`; `change` may be on the host."""
    return tuple(a + jnp.asarray(b, a.dtype) for a, b in zip(x, change, strict=True))


@functools.partial(jax.jit, static_argnums=3)
def move(
    x: tuple[Any, ...], moved: tuple[Any, ...], w: Any, outer: Outer | None
) -> tuple[Any, ...]:
    """Moves a numerator x by `moved`, p: what the node's local steps have changed in its model.

    `x` holds the numerator, and behind it the outer momentum m if that travels. Returns `x + w p`,
    and m as it is. With an outer step (Nesterov's momentum, of the gradient `-w p`), computes
    `m <- beta m - w p` and `x <- x + rate (w p - beta m)`; without a momentum, `x + rate w p`.
    """
    m = x[len(moved) :]
    x = x[: len(moved)]
    wp = tuple(jnp.asarray(w, p.dtype) * p for p in moved)
    if outer is None:
        return add(x, wp) + m
    direction = wp
    if m:
        beta = outer.momentum
        m = tuple(beta * a - b for a, b in zip(m, wp, strict=True))
        direction = tuple(b - beta * a for a, b in zip(m, wp, strict=True))
    return tuple(a + outer.learning_rate * b for a, b in zip(x, direction, strict=True)) + m


@functools.partial(jax.jit, static_argnums=(4, 5), donate_argnums=2)
def advance(
    x: tuple[Any, ...],
    arrived: tuple[Any, ...] | None,
    moved: tuple[Any, ...],
    w: Any,
    outer: Outer | None,
    wires: tuple[Wire, ...] | None,
    key: Any = None,
) -> tuple[Any, Any]:
    """Adds the arrived numerator to x, and moves the sum; with `wires`, also halves the result.

    Returns the half to keep, in the memory of `moved`, which is donated, and the half to send, as
    words of the codecs. A buffer that travels as it is has no words, but None: its two halves are
    equal, and share their memory. Without `wires`, returns the whole, and None.
    """
    if arrived is not None:
        x = add(x, arrived)
    x = move(x, moved, w, outer)
    if wires is None:
        return x, None
    kept: list[Any] = []
    words: list[Any] = []
    for number, (a, wire) in enumerate(zip(x, wires, strict=True)):
        words.append(None if wire is None else wire.encode(a / 2, fold_in(key, number)))
        kept.append(a / 2 if wire is None else a - wire.decode(words[-1], a))
    return tuple(kept), tuple(words)


class Holding:
    """A mass on the device, and on the host the changes that have arrived since.

    The training loop merges the changes at each step. The loop and the thread that receives both
    use this object, under the lock of the service. Nothing donates the arrays of `mass`.
    """

    def __init__(self, mass: Mass):
        self.mass = mass
        self._change: Mass | None = None

    @property
    def total(self) -> Mass:
        """The mass and what has arrived, without a numerator: only the weight and its exponent."""
        return self.mass.bare if self._change is None else self.mass.bare + self._change.bare

    def read(self) -> Mass:
        """Returns the mass, with what has arrived, as arrays on the host."""
        mass = dataclasses.replace(self.mass, x=tuple(map(np.asarray, self.mass.x)))
        return mass if self._change is None else mass + self._change

    def add(self, mass: Mass) -> None:
        """Adds a mass, in the types of this one, to the changes that the next merge takes in."""
        if not self.total.w:  # a mass without weight takes any units
            self.mass = dataclasses.replace(self.mass, exponent=mass.exponent)
        # If what has arrived is far larger than the units of this mass, the sum could overflow.
        elif mass.exponent > self.mass.exponent + MAX_DIGITS:
            self.mass = self.merge().at(mass.exponent)
        mass = mass.at(self.mass.exponent)
        x = tuple(np.asarray(a, own.dtype) for a, own in zip(mass.x, self.mass.x, strict=True))
        mass = dataclasses.replace(mass, x=x)
        if self._change is not None:  # the sum overwrites one of the two if nothing else uses it
            other, fresher = sorted((self._change, mass), key=lambda m: m.is_fresh)
            pairs = zip(other.x, fresher.x, strict=True)
            x = tuple(np.add(a, b, out=b if fresher.is_fresh else None) for a, b in pairs)
            mass = dataclasses.replace(other.bare + fresher.bare, x=x, is_fresh=True)
        self._change = mass

    def halve(self) -> Mass:
        """Takes half out of the mass and returns this half; both halves share the same arrays."""
        self.mass = self.read() / 2  # on the host: the next step takes it to the device
        self._change = None
        return self.mass

    def take(self) -> Mass:
        """Takes out the whole mass and returns it on the host; leaves zeros with weight 0."""
        mass = self.read()
        zeros = tuple(jnp.zeros_like(x) for x in self.mass.x)
        self.mass = Mass(zeros, 0.0, self.mass.exponent)
        self._change = None
        return mass

    def merge(self) -> Mass:
        """Adds what has arrived to the mass on the device; returns this mass."""
        if self._change is not None:
            x = add(self.mass.x, self._change.x)
            self.mass = dataclasses.replace(self.total, x=x)
            self._change = None
        digits = math.log2(self.mass.w) if self.mass.w > 0 else 0
        if abs(digits) >= MAX_DIGITS:  # changes the units, so that the weight is near 1 again
            self.mass = self.mass.at(self.mass.exponent + round(digits))
        return self.mass

    def is_finite(self) -> bool:
        """Says whether all values of the model are finite."""
        mass = self.merge()
        return all(is_finite(np.asarray(x), mass.w or 1.0) for x in mass.x)

    def move(
        self,
        moved: tuple[Any, ...],
        outer: Outer | None,
        wires: Any | None,
        key: Any = None,
        part: float = 1.0,
    ) -> Mass | None:
        """Adds what has arrived, and moves the mass by `part` times `moved`, the local updates.

        With `wires`, takes out half of the result to be sent, and returns it on the host. Returns
        None without `wires`, or if the half is not finite.
        """
        total = self.total
        arrived = None if self._change is None else self._change.x
        self._change = None
        kept, shared = advance(self.mass.x, arrived, moved, part * total.w, outer, wires, key)
        self.mass = dataclasses.replace(total, x=kept)
        if wires is None:
            return None
        x = (
            np.asarray(a) if wire is None else Words(np.asarray(words), wire, a.size, a.dtype)
            for a, words, wire in zip(kept, shared, wires, strict=True)
        )
        half = dataclasses.replace(total / 2, x=tuple(x))
        if not all(is_finite(np.asarray(x), half.w) for x in half.x):
            return None
        self.mass = dataclasses.replace(half, x=kept)
        return half
