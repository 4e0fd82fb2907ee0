"""Finds out whether nodes have lost mass, as when one of them alone skips an exchange."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from gossipjax.models import on_axis, sum_mass
from gossipjax.nodes import Nodes
from gossipjax.topology.schedule import require_int

Run = Callable[..., Any]  # `TrainStep.run`


class MassCheck:
    """Checks the sums of weights and numerators over all nodes, every `period` steps.

    Weights must add up to N. Between a checked step and the next, no sum may change at all. A
    period of 0 means no checks. The methods take `run` as an argument: an attribute would keep the
    train step alive.
    """

    def __init__(self, nodes: Nodes, period: int):
        self._nodes = nodes
        self._period = require_int(int(period), "check_mass", 0)
        self._sums: np.ndarray | None = None  # after the last step, if it was checked
        self._has_warned = False

    def check_before(
        self, run: Run, step: int, params: Any, opt_state: Any, is_start: bool
    ) -> None:
        """Raises `ValueError` if mass was lost since the last step, or before the loop.

        With `is_start`, `step` is the first step of a loop. At other steps nothing is checked
        unless the step before was measured.
        """
        before = self._sums
        self._sums = None
        if is_start and self._period:
            self._measure(run, f"before step {step}", params, opt_state, aux=None)
        elif before is not None:
            when = f"between steps {step - 1} and {step}"
            now = self._measure(run, when, params, opt_state, aux=None)
            # The same program on the same arrays: not a bit may differ.
            if not np.array_equal(now, before, equal_nan=True):
                raise ValueError(
                    f"the sums of weights and numerators must stay {before[:2].tolist()} {when}, "
                    f"got {now[:2].tolist()}: parameters or state were changed, as by a jnp.where "
                    "on each node. Skip steps by gx.apply_if_finite; if you mean the change, leave "
                    "check_mass out."
                )

    def measure_after(
        self, run: Run, step: int, params: Any, opt_state: Any, aux: Any, count: int = 1
    ) -> None:
        """Measures the sums after `step`, if one of the last `count` steps ends a period."""
        if self._period and (step + 1) % self._period < count:
            self._sums = self._measure(run, f"after step {step}", params, opt_state, aux)

    def _measure(self, run: Run, when: str, params: Any, opt_state: Any, aux: Any) -> np.ndarray:
        """Returns the sum of weights, the sum of numerators and the spread of update counts, `[3]`.

        It warns once of nodes whose `aux` is not finite. It raises `ValueError` if weights do not
        add up to N, or nodes have counted different numbers of updates.
        """
        program = on_axis(sum_mass, self._nodes.axis_name)
        results = run(self._nodes.run, program, params, opt_state, aux)
        mass, is_not_finite = (np.asarray(x.addressable_data(0))[0] for x in results)
        if is_not_finite.any() and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"the loss, or another part of aux, is not finite {when} on the nodes "
                f"{np.flatnonzero(is_not_finite).tolist()}: gossip carries such a model to "
                "all nodes. Skip such steps by gx.apply_if_finite, or take a smaller rate.",
                stacklevel=4,
            )
        size = self._nodes.size
        # Weights are float32 and rounded at every step, so their sum may miss N a little.
        weights, _, count_spread = mass
        if not abs(weights - size) <= 1e-2 + 1e-5 * size or count_spread != 0:
            raise ValueError(
                f"the weights of {size} nodes must add up to {size}, and all nodes must have "
                f"counted the same updates, {when}, got a sum of {weights:.6g} and "
                f"{'other' if count_spread else 'equal'} counts: a node has decided by itself "
                "whether to keep a state, by a jnp.where or a transform around the gossip. Skip "
                "steps by gx.apply_if_finite."
            )
        return mass
