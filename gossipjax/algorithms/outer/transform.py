"""Outer optimizers: an optimizer step on the average of the models, every so many steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax

from gossipjax.algorithms.frame.state import require_axis_names
from gossipjax.algorithms.outer.plan import Average, OuterPlan
from gossipjax.algorithms.outer.stability import find_inner_plan, require_agreement
from gossipjax.algorithms.outer.steps import OuterSteps
from gossipjax.collectives import require_doubly_stochastic
from gossipjax.topology.schedule import Schedule, require_int
from gossipjax.wire import WireLike, make_wire


def outer(
    inner: optax.GradientTransformation,
    outer_tx: optax.GradientTransformation,
    every: int,
    average: Average = "exact",
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
    wire: WireLike | None = None,
    axis_name: str = "nodes",
    local_axis_name: str | None = None,
    *,
    pull: float = 1.0,
    reset_inner: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """An outer optimizer around a whole chain: it steps along what all nodes have moved together.

    With `a` the anchor, the model after the last outer step, at the end of every H-th step
    (`H = every`; steps H - 1, 2 H - 1, ...):

        D = a - avg(x);    a <- a + outer_tx(D at a);    x <- a

    So D is a gradient, which points away from where the nodes went. `outer_tx` is any optax
    optimizer; its state is the same on all nodes. Settings that have names:

    - Local SGD: `outer(sgd, optax.sgd(1.0), every)`.
    - SlowMo: `outer(chain(sgd, gx.sgp(schedule)), optax.sgd(1.0, momentum=0.5), every=48)`, with
      `reset_inner=True` where the base optimizer is SGD with momentum. Its slow momentum
      `u <- b u + D / rate; a <- a - alpha rate u` is `optax.sgd(alpha, momentum=b)` where the base
      learning rate is constant over an outer step.
    - DiLoCo: `outer(optax.adamw(...), optax.sgd(0.7, momentum=0.9, nesterov=True), every=500)`.
    - Streaming DiLoCo: the same with `fragments=p, delay=tau, mix=0.5`.
    - NoLoCo: `outer(optax.adamw(...), optax.sgd(b, momentum=a), every=50, average=pairs,
      pull=c / b)`, with a schedule of pairs.

    **Averages.** "exact": over all nodes; around `sgp` and `osgp` it is `sum x / sum w` with the
    messages in flight, and afterwards every weight is 1 and nothing is in flight. An exchange of
    the gossip inside would leave this average as it is, and nothing else remains where there are no
    fragments, no delay and `mix=0`. There it is skipped, if the step is a Python integer. A
    schedule: over the neighbours of this node, with `P` the round `m` of outer step `m`,

        D = P (a - x) + pull (a - P a)

    which is `a - P x` for `pull = 1`: anchors differ from node to node, and are drawn together.
    "none": `D = a - x`, every node for itself (SlowMo's "noaverage"). In these two, weights and
    messages of the chain inside go on as they are, and momentum acts on what the nodes differ in:
    with 0.7 and 0.9 it diverges on a directed ring, without any gradient. So an `outer_tx` that is
    linear (SGD, with momentum or not) is refused where the spectral radius of such differences is
    above 1.0001 per round; where its rate changes, at the counts 0, 1, 8, 64, ... Others (Adam, or
    what needs more than one parameter, as `optax.masked`) are not checked.

    **Fragments and delay.** The leaves are split, in their order, into p fragments of about the
    same size, each with its own average, outer step and state of `outer_tx`. Fragment `f` is sent
    at the end of every step `k` with `k + 1 = (f + 1) H // p (mod H)`. Its average is used `delay`
    steps later:

        x_f <- mix x_f + (1 - mix) a_f

    Until then the state holds `D` of this node, and its exchange needs nothing that later steps
    compute. In `tx.update` it stands in the step that uses it, and can run beside all of its
    computation; on TPUs it is a ring of permutes, as an all-reduce blocks there. `gx.TrainStep`
    runs it on JAX on CPU over several processes as a separate program, from the step at which it is
    sent on.

    Args:
      inner: the chain, with `sgp`, `osgp`, `dpsgd` or no gossip in it.
      outer_tx: the outer optimizer; it gets one outer gradient and the anchor, nothing else.
      every: H, steps from one average of a fragment to the next.
      average: "exact", "none", or a doubly stochastic schedule.
      fragments: p, at most H and at most the number of leaves.
      delay: steps between sending a fragment and using its average, below H.
      mix: the weight of the local model where an average is used, from 0 to below 1.
      wire: a narrower type or a dense codec, such as `gx.wire.int4()`: outer gradients are rounded,
        sums are float32 at least, and all nodes get the same values. What it leaves out is lost.
      axis_name: the mapped axis of the nodes.
      local_axis_name: the axis of the devices of one node, as in `sgp`.
      pull: how strongly anchors are drawn together, where `average` is a schedule.
      reset_inner: whether an outer step also sets what the chain inside keeps per parameter, its
        momentum and moments, to 0; counts stay, and gradients that are summed for an update to come
        (`optax.MultiSteps`, `optax.apply_every`).

    The state is an `OuterState`; `gx.gossip_state` finds the gossip inside, or, for a chain without
    gossip, the residuals of parameters of 16 bits. Nodes start from the same parameters; where
    `init` runs inside the mapped axis they may differ, and the first anchor is then their mean.

    `update` takes `step=` as in `sgp`: it picks the outer steps as well. They must follow one
    another if there is a delay.

    Raises:
      ValueError: if an argument is out of its range, or differences between the nodes' anchors
        would grow by themselves (see above); in `init`, if there are more fragments than leaves,
        `outer_tx` needs more than a gradient, or `inner` holds an algorithm of another kind; when
        traced, as `sgp`.

    References:
      Wang et al., "SlowMo", ICLR 2020, arXiv:1910.00643, algorithm 1.
      Douillard et al., "DiLoCo", 2023, arXiv:2311.08105, algorithm 1.
      Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv:2501.18512,
      algorithm 2.
      Kolehmainen et al., "NoLoCo", 2025, arXiv:2506.10911.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> tx = gx.outer(optax.sgd(1.0), optax.sgd(0.5), every=2)
    >>> def two_steps(z):
    ...     state = tx.init(z)
    ...     for step in range(2):
    ...         updates, state = tx.update(z, state, z, step=step)
    ...         z = z + updates
    ...     return z, state.anchor
    >>> z = jnp.array([1.0, 3.0])  # after one local step both are 0
    >>> [a.tolist() for a in jax.vmap(two_steps, axis_name="nodes")(z)]
    [[1.0, 1.0], [1.0, 1.0]]
    """
    for name, tx in (("inner", inner), ("outer_tx", outer_tx)):
        if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
            raise ValueError(
                f"{name} of outer must be an optax.GradientTransformation, got {type(tx).__name__}."
            )
    require_axis_names("outer", axis_name, local_axis_name)
    every = require_int(every, "every of outer", 1)
    _require_average(average, pull)
    if average == "none" and wire is not None:
        raise ValueError(
            f"wire of outer must be None where average is 'none' and nothing is sent, got {wire!r}."
        )
    plan = OuterPlan(
        every,
        average,
        require_int(fragments, "fragments of outer", 1, every),
        require_int(delay, "delay of outer", 0, every - 1),
        _require_number(mix, "mix of outer", below=1.0),
        float(pull),
        make_wire(axis_name, local_axis_name, wire),
    )
    if not isinstance(reset_inner, bool | np.bool_):
        raise ValueError(f"reset_inner of outer must be True or False, got {reset_inner!r}.")
    if reset_inner and fragments > 1:
        raise ValueError(
            f"reset_inner of outer must be False where there are fragments, got {fragments}: their "
            "outer steps come at different times."
        )
    steps = OuterSteps(
        plan,
        optax.with_extra_args_support(inner),
        optax.with_extra_args_support(outer_tx),
        bool(reset_inner),
    )
    if average != "exact":
        require_agreement(plan, steps.outer_tx, find_inner_plan(steps.inner))
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)


def _require_number(value: Any, name: str, below: float) -> float:
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not (is_number and 0 <= value < below):
        raise ValueError(f"{name} must be a number from 0 to below {below:g}, got {value!r}.")
    return float(value)


def _require_average(average: Any, pull: Any) -> None:
    if isinstance(average, Schedule):
        require_doubly_stochastic(average, "outer")
        _require_number(pull, "pull of outer", float("inf"))
        return
    if not isinstance(average, str) or average not in ("exact", "none"):
        raise ValueError(
            f"average of outer must be 'exact', 'none' or a gx.Schedule, got {average!r}."
        )
    if pull != 1:
        raise ValueError(
            f"pull of outer must be 1 where average is {average!r}, got {pull!r}: all nodes have "
            "one anchor, or none is compared. Give a schedule."
        )
