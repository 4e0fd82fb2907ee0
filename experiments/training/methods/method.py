"""The method that a name means: an algorithm on a topology, around an optimizer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gossipjax as gx
from experiments.training.methods.algorithms import (
    ALGORITHMS,
    FIXED_TOPOLOGIES,
    MOMENTUM,
    MOMENTUMS,
    OUTER_NAMES,
    Algorithm,
    parse_name,
)
from experiments.training.methods.options import (
    FORMS,
    MethodOptions,
    OuterOptions,
    Sharding,
    Transform,
)
from experiments.training.methods.topologies import MAX_ROUNDS, make_schedule


@dataclasses.dataclass(frozen=True)
class Method:
    """One algorithm on one topology, around an optimizer.

    Attributes:
      algorithm: its name, without the topology.
      topology: its name.
      schedule: the rounds in the order in which updates use them; under overlap, one every
        `overlap` updates.
      inner: what comes before the gossip.
      gossip: goes last.
      outer: an outer optimizer around both.
      rate: the learning rate, where the gossip is the optimizer, and gradients arrive at it.
      sharding: that of the model inside a node; what exchanges exchanges parts of it then.
      accumulate: steps for one update.
    """

    algorithm: str
    topology: str
    schedule: gx.Schedule
    inner: Transform
    gossip: Transform
    outer: OuterOptions | None = None
    rate: optax.ScalarOrSchedule | None = None
    sharding: Sharding | None = None
    accumulate: int = 1

    @property
    def transform(self) -> Transform:
        """The whole chain; its state, or the one inside, is the pair of its parts' states."""
        updates = self._transform_of_updates
        return updates if self.accumulate == 1 else gx.accumulate(updates, self.accumulate)

    @property
    def _transform_of_updates(self) -> Transform:
        chain = optax.chain(self.inner, self.gossip)
        outer = self.outer
        if outer is None:
            return chain
        optimizer = optax.sgd(outer.rate, outer.momentum or None, outer.nesterov)
        whole = gx.outer(
            chain,
            optimizer,
            outer.every,
            outer.average,
            outer.fragments,
            outer.delay,
            outer.mix,
            FORMS[outer.wire].codec,
            reset_inner=outer.reset,
        )
        return whole if self.sharding is None else self.sharding.shard(whole)

    def local_updates(self, grads: Any, opt_state: Any, params: Any) -> optax.Updates:
        """Returns the update of this node before the exchange, given the state of the chain.

        It is that of all gradients since the last update, these among them.
        """
        chain_state = opt_state
        if self.accumulate > 1:
            count = opt_state.pending + 1
            grads = jax.tree.map(lambda total, g: (total + g) / count, opt_state.total, grads)
            chain_state = opt_state.inner
        if self.outer is not None:
            chain_state = (chain_state if self.sharding is None else chain_state.inner).inner
        updates, _ = self.inner.update(grads, chain_state[0], params)
        if self.rate is None:
            return updates
        state = gx.gossip_state(opt_state)
        assert state is not None
        rate = jnp.asarray(self.rate(state.count) if callable(self.rate) else self.rate)

        def step(g: jax.Array, m: jax.Array) -> jax.Array:
            return -rate * (g + MOMENTUM * (MOMENTUM * m + g))  # Nesterov's

        return jax.tree.map(step, updates, state.extra["momentum"].value)

    def state(self, params: Any = None) -> gx.GossipState | None:
        """Returns the gossip state of one node, of shapes and static data; None without gossip.

        Args:
          params: `[...]`, arrays or their shapes; if not given, those of the sharded model, or a
            few leaves of one value.
        """
        return gx.gossip_state(self._init_shapes(params))

    def canonical_steps(self) -> list[int]:
        """Returns the steps that need different programs; see `gx.canonical_steps`."""
        return gx.canonical_steps(self._init_shapes())

    def _init_shapes(self, params: Any = None) -> Any:
        if params is None and self.sharding is not None:
            params = self.sharding.params
        if params is None:  # a leaf for every fragment
            leaves = 1 if self.outer is None else self.outer.fragments
            params = [jax.ShapeDtypeStruct((1,), jnp.float32)] * leaves
        return jax.eval_shape(self.transform.init, params)


def make_method(
    name: str,
    options: MethodOptions,
    optimizer: optax.GradientTransformation,
    default_topology: str | None = None,
) -> Method:
    """Returns the named algorithm on its topology, around `optimizer`.

    Args:
      name: `ALGORITHM` or `ALGORITHM@TOPOLOGY`; a topology is a name or a hybrid, `FIRST/THEN`,
        as AR/1P-SGP is `sgp@complete/one_peer_exponential`.
      options: those of the run; `overlap` is taken from the name.
      optimizer: the local one; with momentum that is mixed or quasi-global, what stands before it.
      default_topology: used if the name has none; None is that of the algorithm's paper.

    Raises:
      ValueError: for an unknown name, a topology that is impossible for this number of nodes or
        this algorithm, a form of messages that the algorithm does not have, or an outer optimizer
        around an algorithm that it cannot stand around.

    >>> make_method("dpsgd", MethodOptions(nodes=4), optax.sgd(0.1)).topology
    'ring'
    """
    parsed = parse_name(name)
    algorithm = ALGORITHMS[parsed.row]
    options = dataclasses.replace(options, overlap=parsed.overlap)
    if options.wire not in algorithm.wires:
        raise ValueError(
            f"the wire of {parsed.row} must be {' or '.join(algorithm.wires)}, got "
            f"{options.wire}: leave out the algorithm or the option."
        )
    if options.local_steps > 1 and not algorithm.exchanges:
        raise ValueError(
            f"--local-steps must be 1 with {parsed.row}, which exchanges nothing by itself, got "
            f"{options.local_steps}: give --outer-every {options.local_steps} instead."
        )
    if options.local_steps > 1 and not algorithm.skips_steps:
        raise ValueError(
            f"{parsed.row} must exchange at every update: --local-steps must be 1, got "
            f"{options.local_steps}: leave out the algorithm or the option."
        )
    build = algorithm.build
    if options.momentum in MOMENTUMS:
        _require_momentum(parsed.row, algorithm, options)
        build = MOMENTUMS[options.momentum]
    topology = _choose_topology(algorithm, parsed.topology, default_topology)
    if algorithm.fixed_topology:
        schedule = FIXED_TOPOLOGIES[topology](options.nodes, MAX_ROUNDS, options.seed)
    else:
        schedule = _make_rounds(topology, options)
    if not algorithm.goes_first:
        schedule = schedule.every(options.local_steps)
    transform = build(schedule, options)
    if options.sharding is not None and algorithm.exchanges:
        transform = options.sharding.shard(transform)
    inner = optimizer
    if algorithm.goes_first:
        inner = optax.chain(transform, optimizer)
        transform = optax.with_extra_args_support(optax.identity())
    if options.outer is not None:
        _require_takes_outer(parsed.row, algorithm, options)
    method = Method(
        algorithm=name.partition("@")[0],
        topology=topology,
        schedule=schedule,
        inner=optax.with_extra_args_support(inner),
        gossip=transform,
        outer=options.outer,
        rate=options.rate if options.momentum in MOMENTUMS else None,
        sharding=options.sharding,
        accumulate=options.accumulate,
    )
    if options.outer is not None:
        method.state()  # raises where these outer options cannot stand around this algorithm
    return method


def _require_momentum(name: str, algorithm: Algorithm, options: MethodOptions) -> None:
    """Raises `ValueError` unless the algorithm can mix this momentum."""
    if not algorithm.mixes_after:
        names = " or ".join(row for row, other in ALGORITHMS.items() if other.mixes_after)
        raise ValueError(
            f"the algorithm of --momentum {options.momentum} must be {names}, which mix models "
            f"after a local step, got {name}: leave out the algorithm or the option."
        )
    if options.local_steps > 1:
        raise ValueError(
            f"--momentum {options.momentum} must exchange at every update: --local-steps must be "
            f"1, got {options.local_steps}."
        )


def _require_takes_outer(name: str, algorithm: Algorithm, options: MethodOptions) -> None:
    """Raises `ValueError` unless an outer optimizer can stand around the algorithm."""
    if not algorithm.takes_outer:
        raise ValueError(
            "the algorithm of --outer-every, or --momentum outer, must be one of "
            f"{OUTER_NAMES}, got {name}, which keeps more than models: leave out the algorithm or "
            "the option."
        )
    if options.momentum in MOMENTUMS:
        raise ValueError(
            "--momentum must be local or outer with --outer-every, got "
            f"{options.momentum}: leave one of them out."
        )


def _choose_topology(algorithm: Algorithm, given: str | None, default: str | None) -> str:
    if given is not None:
        return given
    if algorithm.fixed_topology or default is None:
        return algorithm.topology
    return default


def _make_rounds(topology: str, options: MethodOptions) -> gx.Schedule:
    """The rounds of a topology, or of two one after the other: `FIRST/THEN`."""
    names = topology.split("/")
    schedules = [make_schedule(name, options.nodes, seed=options.seed) for name in names]
    if len(schedules) == 1:
        return schedules[0]
    if len(schedules) > 2:
        raise ValueError(f"a hybrid must have two topologies, FIRST/THEN, got {topology!r}.")
    if names[0] == names[1]:
        raise ValueError(
            f"a hybrid must have two different topologies, FIRST/THEN, got {topology!r}: give one."
        )
    # The switch points of a piecewise schedule count rounds.
    steps_per_round = options.local_steps * max(1, options.overlap) * options.accumulate
    switch = max(1, round(options.switch_at * options.steps / steps_per_round))
    if switch * steps_per_round >= options.steps:
        raise ValueError(
            f"{topology} would never switch: {options.steps} steps are too few at "
            f"{steps_per_round} steps per round. Train longer, or lower --switch-at."
        )
    return gx.topology.piecewise({0: schedules[0], switch: schedules[1]})
