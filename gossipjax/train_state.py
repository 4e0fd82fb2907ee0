"""The state of a run, which `Checkpoints` saves and `gx.decentralize` steps."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import optax

from gossipjax.renamed import renamed


class _Fields(NamedTuple):  # a base class, because a NamedTuple cannot have its own `__new__`
    step: int
    params: optax.Params
    opt_state: optax.OptState
    rest: Any
    metadata: dict[str, Any] | None


class TrainState(_Fields):
    """Contains everything that a training run needs to go on.

    Attributes:
      step: the number of updates so far.
      params: the parameters, `[N, ...]`.
      opt_state: the state of the whole chain, `[N, ...]`.
      rest: other arrays of each node, `[N, ...]`: statistics of BatchNorm, keys, an EMA of the
        parameters; for `gx.decentralize` your state without the parameters. None if there are none.
      metadata: a dict that JSON can express, for example with the position in the data.
        `metadata["settings"]`, a dict, has the settings of the run, such as its learning rate:
        `Checkpoints.resume` warns if they differ. `Checkpoints` adds the number N as `"nodes"`.

    >>> import numpy as np, gossipjax as gx
    >>> gx.TrainState(3, params={"w": np.zeros((4, 2))}, opt_state=()).step
    3
    """

    __slots__ = ()

    @renamed(batch_stats="rest")
    def __new__(
        cls,
        step: int,
        params: optax.Params,
        opt_state: optax.OptState,
        rest: Any = None,
        metadata: dict[str, Any] | None = None,
    ) -> Self:
        return super().__new__(cls, step, params, opt_state, rest, metadata)

    @property
    def batch_stats(self) -> Any:
        """Old name of `rest`, from gossipjax 0.4. It raises `AttributeError`."""
        raise AttributeError("TrainState has no batch_stats since gossipjax 0.5: read `rest`.")

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """The node-stacked fields: `params`, `opt_state` and `rest`."""
        return self.params, self.opt_state, self.rest
