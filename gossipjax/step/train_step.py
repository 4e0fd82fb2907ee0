"""The step of a training loop: one compiled program per round, overlapped with the exchange."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gossipjax import launch, meshes
from gossipjax.collectives import node_mean
from gossipjax.exchanges.chain import start_at, step_plan, wire_of_first_average
from gossipjax.exchanges.plan import Plan
from gossipjax.exchanges.transform import require_transform
from gossipjax.nodes import Nodes, as_nodes, donate_on_accelerators
from gossipjax.nodes.arguments import Argnums, argument_numbers, is_int
from gossipjax.nodes.program import Program
from gossipjax.nodes.stacked import is_raw_key
from gossipjax.processes import is_key
from gossipjax.renamed import renamed
from gossipjax.step import offloaded
from gossipjax.step.beside import Exchanger, UpdateDuringExchange
from gossipjax.step.buckets import UpdateInBuckets
from gossipjax.step.gradients import (
    ExtraArgs,
    Gradients,
    UpdateOfNode,
    check_gradients,
    make_update,
)
from gossipjax.step.mass_check import MassCheck
from gossipjax.topology.schedule import require_int

MAX_PROGRAMS = 32  # of one train step, if it is not told otherwise; beyond it, the step is traced

Update = Callable[..., tuple[optax.Params, optax.OptState, Any]]


class _Programs(NamedTuple):
    """The programs that take the steps of one plan.

    A step has two numbers: `step` counts the calls, and `number` is what the program gets for it,
    as `TrainStep._make_number` says.
    """

    # Takes a step, `(step, number, params, opt_state, *inputs)`, by `fused` or by several programs.
    update: Update
    fused: Program  # the whole step as one program, `(number, params, opt_state, *inputs)`
    is_static: bool  # whether a program is compiled for each number, else the number is an array
    offloads: bool  # whether `fused` takes only the state that its step needs
    called: set[Any]  # the static numbers and shapes of inputs for which programs are compiled

    def arguments(self, number: Any, params: Any, opt_state: Any, inputs: Any) -> tuple[Any, ...]:
        """Returns the arguments of `fused`: of an offloaded state, only what the step reads."""
        if self.offloads:
            opt_state = offloaded.bring_used_state(opt_state, number)
        return number, params, opt_state, *inputs


class TrainStep:
    """One update of all nodes: gradients, optimizer, exchange. Call it with the step number.

    `TrainStep` reads schedule, overlap and wire from the optimizer state. On a mesh it compiles one
    program per distinct round, with a static `gx.canonical_step`, so XLA can run the exchange
    during the computation. With more rounds than `max_programs`, and for simulated nodes whose
    rounds all exchange in the same way, it compiles one program with a traced step.

    On CPU, JAX does not overlap computation and exchange inside a program. If several processes
    have one device each, an exchange that needs no result of its step becomes a separate program on
    a thread, with the same results up to rounding. These are the exchanges of `osgp`, `dpsgd`,
    `adpsgd`, `sgp(order="combine-while-adapting")`, and `outer` with a delay, if its chain has no
    other collectives. If `gx.allreduce` is first in the chain and keeps no error, a thread
    averages the gradients of the last layers while those of the layers before are computed, in
    buckets as PyTorch's DDP makes them. Call any other program with collectives by `run` then.

    Args:
      gradients: `gradients(params, *inputs) -> (grads, aux)` of one node, such as
        `jax.grad(loss, has_aux=True)`. It must not contain collectives if the exchange is a
        separate program, except with `gx.allreduce`, whose step then stays one program.
      tx: the optax chain.
      nodes, axis_name: where the nodes run, as in `gx.spmd`.
      local_argnums: arguments of `gradients` that are split over the devices of a node, as in
        `spmd`; number 1 is the first of `inputs`.
      max_programs: how many programs may be compiled, one for each new round. In a single program
        with a traced step XLA cannot run the exchange of a mesh during the computation.
      overlap_in_thread: whether an exchange that needs no result of its step becomes a separate
        program, which a thread dispatches; None chooses by the backend.
      bucket_bytes: the bytes of gradients that a thread averages at once, at least; without a
        `wire` the first bucket has 1 MiB. On links of short delays, small buckets are faster
        than large ones; on links of long delays they are slower.
      offload_outer: whether the anchor and the other state of `gx.outer` wait in the host's memory
        from the first step on, except for steps that use a fragment: docs/guides/large_models.md.
        It has no effect without `gx.outer`, or if a thread dispatches the exchange, on CPU.
      extra_args: `extra_args(aux) -> dict`, arguments of `tx.update` that a node makes from `aux`,
        such as `{"value": aux["loss"]}` for `optax.contrib.reduce_on_plateau`. Except `node_weight`
        of `gx.weighted`, these arguments are averaged over the nodes, so that nodes decide alike.
      check_mass: the number of steps between two checks, 0 for none. Push-sum weights must add up
        to N, all nodes must have counted the same updates, and no sum may change before the next
        call. A check also warns, once, of nodes whose `aux` is not finite. It takes the time of one
        pass over the model.
      donated_inputs: the numbers of `inputs` that come back, new, in `aux`; accelerators donate
        them.

    Raises:
      ValueError: if `overlap_in_thread` is True with several devices per node. At the first step:
        if an optimizer comes after the gossip, if an optimizer with momentum comes before a gossip
        that is the optimizer itself, or if the devices of a node get parts of a batch but exchange
        nothing. Later: if `step` goes back and the state does not.

    >>> import jax, jax.numpy as jnp, optax, gossipjax as gx
    >>> nodes = gx.Nodes(4)
    >>> tx = optax.chain(optax.sgd(0.1), gx.osgp(gx.topology.one_peer_exponential(4)))
    >>> def gradients(z, target):
    ...     return z - target, jnp.square(z - target)
    >>> train_step = gx.TrainStep(gradients, tx, nodes=nodes)
    >>> z, opt_state = nodes.init(tx, jnp.zeros(()))
    >>> target = jnp.array([0.0, 1.0, 2.0, 5.0])
    >>> for step in range(300):
    ...     z, opt_state, losses = train_step(step, z, opt_state, target)
    >>> bool(abs(z.mean() - 2.0) < 1e-2)
    True
    """

    @renamed(mesh="nodes=gx.Nodes(mesh=mesh)")
    def __init__(
        self,
        gradients: Gradients,
        tx: optax.GradientTransformation,
        nodes: int | Nodes | None = None,
        *,
        axis_name: str = "nodes",
        local_argnums: Argnums = (),
        max_programs: int | None = None,
        overlap_in_thread: bool | None = None,
        bucket_bytes: int = 25 * 2**20,
        offload_outer: bool = False,
        extra_args: ExtraArgs | None = None,
        check_mass: int = 0,
        donated_inputs: tuple[int, ...] = (),
    ):
        self.nodes = as_nodes(nodes, axis_name)
        has_several_devices = self.nodes.local_devices is not None or self.nodes.inner_axes
        if overlap_in_thread and has_several_devices:
            raise ValueError(
                "overlap_in_thread must be None or False where a node has several devices, whose "
                "gradients are averaged in one program with the update, got True."
            )
        self._gradients = check_gradients(gradients)
        self._update = make_update(
            require_transform(tx, "tx"), _average_extra_args(extra_args, self.nodes)
        )
        self._has_extra_args = extra_args is not None
        self._donated_inputs = donated_inputs
        self._local_argnums = argument_numbers(local_argnums)
        self._max_programs = MAX_PROGRAMS if max_programs is None else max_programs
        self._overlap_in_thread = overlap_in_thread
        self._bucket_bytes = require_int(bucket_bytes, "bucket_bytes", 1)
        self._offload_outer = bool(offload_outer)
        self._mass = MassCheck(self.nodes, check_mass)
        self._programs: dict[Plan, _Programs] = {}
        # False until the first step has found that the devices of a node average their gradients.
        self._averages_locally = not self._local_argnums or (self.nodes.local_devices or 1) == 1
        self._numbers_on_device: dict[int, jax.Array] = {}  # by canonical step
        self._next_step: int | None = None  # the step that follows the last one

    def __call__(
        self, step: int, params: optax.Params, opt_state: optax.OptState, *inputs: Any
    ) -> tuple[Any, Any, Any]:
        """Takes a step of all nodes; returns the new parameters, the new state and `aux`, stacked.

        Accelerators donate `params` and `opt_state`, unless several nodes of one device mix their
        models: donation would then cost two copies of each array, and save at most its memory.
        """
        plan, programs = self._find_programs(opt_state)
        opt_state = self._begin(step, params, opt_state, count=1)
        number = self._make_number(plan, step, programs.is_static)
        if not self._averages_locally:
            self._require_local_average(
                programs.fused, *programs.arguments(number, params, opt_state, inputs)
            )
        is_new = self._announce_step(step, programs, number, inputs)
        result = programs.update(step, number, params, opt_state, *inputs)
        if is_new:
            launch.advance(step)  # from now on the launcher expects steps of the usual length
        self._mass.measure_after(self.run, step, *result)
        return result

    def scan(
        self, step: int, params: optax.Params, opt_state: optax.OptState, *inputs: Any
    ) -> tuple[Any, Any, Any]:
        """Runs K steps from `step` on as one program; results equal K calls, up to rounding.

        Use `scan` for small models, if a step is shorter than the call that starts the step. The
        step number is data, so one program can run all rounds. On a mesh this program chooses
        between the rounds, and XLA cannot run the exchange during the computation.

        Args:
          step: the number of the first of the K steps.
          params: `[N, ...]`, as in a call; accelerators donate `params` and `opt_state`.
          opt_state: `[N, ...]`.
          inputs: the inputs of K calls, `[K, N, ...]`: batches are `[K, N, B, ...]`.

        Returns:
          `(params, opt_state, aux)` after the last step, with `aux` of all steps, `[K, N, ...]`.

        Raises:
          ValueError: if a call would raise it, if an input is not `[K, N, ...]` with one K, if the
            devices of a node split a batch, if a thread dispatches the exchange, or with
            `offload_outer`.

        >>> import jax.numpy as jnp, optax, gossipjax as gx
        >>> nodes = gx.Nodes(4)
        >>> tx = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.one_peer_exponential(4)))
        >>> train_step = gx.TrainStep(lambda z, target: (z - target, z), tx, nodes=nodes)
        >>> targets = jnp.tile(jnp.array([0.0, 1.0, 2.0, 5.0]), (300, 1))
        >>> z, opt_state, aux = train_step.scan(0, *nodes.init(tx, jnp.zeros(())), targets)
        >>> aux.shape, bool(abs(z.mean() - 2.0) < 1e-2)
        ((300, 4), True)
        """
        if self._has_thread or self._local_argnums or self._offload_outer:
            raise ValueError(
                "scan must not be called where a thread dispatches the exchange, the devices of a "
                "node split a batch (local_argnums), or with offload_outer: call train_step for "
                "each step there."
            )
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(inputs)]
        count = shapes[0][0] if shapes and shapes[0] else 0  # K
        if not count or any(shape[:2] != (count, self.nodes.size) for shape in shapes):
            raise ValueError(
                f"inputs of scan must be [K, N, ...] with N = {self.nodes.size} and one K >= 1, "
                f"got {[list(shape) for shape in shapes[:4]]}: np.stack K node-stacked batches."
            )
        step_plan(opt_state)  # checks the chain
        if "_scanned" not in vars(self):  # the first call of `scan`: the program is not made yet
            _warn_of_equal_keys(jax.tree.map(lambda x: x[0], inputs))
        opt_state = self._begin(step, params, opt_state, count)
        steps = np.arange(step, step + count, dtype=np.int32)
        launch.advance(step, slow=True)  # it takes as long as K steps, and may compile
        by_node = jax.tree.map(lambda x: x.swapaxes(0, 1), inputs)  # [N, K, ...]
        params, opt_state, aux = self._scanned(steps, params, opt_state, *by_node)
        launch.advance(step + count - 1)
        self._mass.measure_after(self.run, step + count - 1, params, opt_state, aux, count)
        return params, opt_state, jax.tree.map(lambda x: x.swapaxes(0, 1), aux)

    def _begin(self, step: int, params: Any, opt_state: Any, count: int) -> optax.OptState:
        """Checks that the next `count` steps can begin at `step`; returns the state for `step`.

        This is `opt_state`, or if `step` does not follow the last call, what `start_at` returns.
        """
        if not is_int(step):
            kind = type(step).__name__
            raise ValueError(
                f"step must be the number of the step, an integer from 0, got a {kind}: call "
                "train_step(step, params, opt_state, *inputs) in a loop of Python, as its programs "
                "are compiled already, or train_step.scan for K steps at once."
            )
        is_start = step != self._next_step
        self._mass.check_before(self.run, step, params, opt_state, is_start)
        # The count in the state must match the step. To read it takes time, so this is checked only
        # at the first step of a loop, or after a jump.
        if is_start:
            with meshes.unset_mesh():
                opt_state = start_at(opt_state, require_int(step, "step", 0))
        self._next_step = step + count
        return opt_state

    def _announce_step(self, step: int, programs: _Programs, number: Any, inputs: Any) -> bool:
        """Tells the launcher that a step begins; returns whether the step first has to compile.

        The launcher ends processes that stand still, but waits longer for a step that compiles.
        """
        if not programs.called:
            _warn_of_equal_keys(inputs)
        shapes = tuple(getattr(x, "shape", ()) for x in jax.tree.leaves(inputs))
        compiled_for = number if programs.is_static else None, shapes
        is_new = compiled_for not in programs.called
        programs.called.add(compiled_for)
        launch.advance(step, slow=is_new)
        return is_new

    @functools.cached_property
    def _scanned(self) -> Program:
        """The program of K steps of all nodes; the inputs of each node are `[K, ...]`."""
        take_step = _make_step(self._gradients, self._update)

        def run_steps(steps: Any, params: Any, opt_state: Any, *inputs: Any) -> Any:
            def run_step(carry: Any, now: Any) -> Any:
                step, inputs = now
                params, opt_state, aux = take_step(step, *carry, *inputs)
                return (params, opt_state), aux

            carry, aux = jax.lax.scan(run_step, (params, opt_state), (steps, inputs))
            return *carry, aux

        donated = donate_on_accelerators(1, 2)
        return self.nodes.spmd(run_steps, shared_argnums=0, donate_argnums=donated)

    def lower(
        self, step: int, params: optax.Params, opt_state: optax.OptState, *inputs: Any
    ) -> Any:
        """Lowers the program of a step like `jax.jit(...).lower`, for arrays or their shapes.

        The program is the whole step, even if the exchange would run as a separate program.

        >>> import jax.numpy as jnp, optax, gossipjax as gx
        >>> nodes = gx.Nodes(4)
        >>> tx = optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.ring(4)))
        >>> train_step = gx.TrainStep(lambda z, target: (z - target, None), tx, nodes=nodes)
        >>> lowered = train_step.lower(0, *nodes.init(tx, jnp.zeros(9)), jnp.ones((4, 9)))
        >>> lowered.as_text().startswith("module")
        True
        """
        plan, programs = self._find_programs(opt_state)
        number = self._make_number(plan, step, programs.is_static)
        return programs.fused.lower(*programs.arguments(number, params, opt_state, inputs))

    def _require_local_average(self, fused: Program, *args: Any) -> None:
        """Raises `ValueError` if the devices of a node split a batch and exchange no gradients."""
        axis_name = self.nodes.local_axis_name
        if not fused.has_collective(axis_name, *args):
            raise ValueError(
                f"the devices of a node must average their gradients over {axis_name!r}, as each "
                f"has a part of the batch by local_argnums, got a chain without it: put "
                f"gx.allreduce({axis_name!r}) first in the chain; in a closed step take lax.pmean."
            )
        self._averages_locally = True

    def canonical_steps(self, opt_state: optax.OptState) -> list[int] | None:
        """Returns the static steps, one per compiled program; None if the step is traced."""
        plan, programs = self._find_programs(opt_state)
        return list(plan.canonical_steps) if programs.is_static else None

    def overlaps(self, opt_state: optax.OptState) -> bool:
        """Says whether the exchange runs as a separate program, on a thread.

        An exchange of several steps cannot run on a thread if the chain contains other collectives.
        Only the first step finds this out; before it, the result is True.
        """
        update = self._find_programs(opt_state)[1].update
        return isinstance(update, Exchanger) and update.is_on_thread is not False

    def _traces_rounds(self, plan: Plan) -> bool:
        """Says whether one program that gets the round as data is as fast as one per round."""
        return self.nodes.is_simulated and plan.is_one_program() and not self._has_thread

    def _make_number(self, plan: Plan, step: int, is_static: bool) -> Any:
        """Makes the number that the program of `step` takes: a static integer, or an array."""
        if is_static:
            return plan.canonical_step(step)
        if not self._traces_rounds(plan):
            return np.int32(step)
        canonical = plan.canonical_step(step)
        if canonical not in self._numbers_on_device:  # sent there once, not at every step
            self._numbers_on_device[canonical] = jax.device_put(np.int32(canonical))
        return self._numbers_on_device[canonical]

    def _is_static(self, plan: Plan) -> bool:
        """Says whether the step is static: then each canonical step has a program of its own."""
        limit = 1 if self._traces_rounds(plan) else self._max_programs
        return len(plan.canonical_steps) <= limit

    def run(self, program: Callable[..., Any], *args: Any) -> Any:
        """Runs another program with collectives between two steps; returns `program(*args)`.

        All processes must run their collectives in one order, or they hang. So if a thread
        dispatches the exchange, `run` first waits for the outer averages in flight, and then for
        the result of the program. Without such a thread, `run` only dispatches the program.

        >>> import jax.numpy as jnp, optax, gossipjax as gx
        >>> nodes = gx.Nodes(4)
        >>> tx = optax.chain(optax.sgd(0.1), gx.osgp(gx.topology.ring(4)))
        >>> train_step = gx.TrainStep(lambda z, target: (z - target, None), tx, nodes=nodes)
        >>> stats, opt_state = nodes.init(tx, jnp.zeros(()))
        >>> mix = nodes.spmd(gx.mix_batch_stats, static_argnums=2)
        >>> train_step.run(mix, jnp.arange(4.0), opt_state, gx.canonical_step(opt_state, 0)).shape
        (4,)
        """
        self.wait()
        result = program(*args)
        return jax.block_until_ready(result) if self._has_thread else result

    def wait(self) -> None:
        """Returns when no exchange is on its way any more."""
        for programs in self._programs.values():
            if isinstance(programs.update, Exchanger):
                programs.update.wait()

    def close(self) -> None:
        """Ends the thread of the exchange. The thread also ends with this object."""
        for programs in self._programs.values():
            if isinstance(programs.update, Exchanger):
                programs.update.close()

    @functools.cached_property
    def _has_thread(self) -> bool:
        """Says whether a thread dispatches exchanges that can run during a step's gradients."""
        if self._overlap_in_thread is not None:
            return self._overlap_in_thread
        # XLA on CPU runs the programs of a process with several devices one after another.
        on_cpu = jax.default_backend() == "cpu" and jax.process_count() > 1
        has_one_device = self.nodes.local_devices is None and not self.nodes.inner_axes
        return on_cpu and jax.local_device_count() == 1 and has_one_device

    def _find_programs(self, opt_state: optax.OptState) -> tuple[Plan, _Programs]:
        """Returns the plan of a chain, and its programs, which are made once."""
        plan = step_plan(opt_state)
        if plan not in self._programs:
            self._programs[plan] = self._make_programs(plan, opt_state)
        return plan, self._programs[plan]

    def _make_programs(self, plan: Plan, opt_state: optax.OptState) -> _Programs:
        """Decides how steps of a plan run, and makes their programs, which compile when called."""
        is_static = self._is_static(plan)
        # `plan.fields` are fields of the state that only some steps use.
        offloads = self._offload_outer and not self._has_thread and bool(plan.fields(0))
        if offloads and not is_static:
            raise ValueError(
                "offload_outer must be False where steps are traced, which take all of the state, "
                f"got True for {len(plan.canonical_steps)} programs: allow them by max_programs, "
                "or choose a schedule of fewer rounds."
            )
        lead = plan.lead(is_static) if self._has_thread else None
        # `extra_args` are averaged in each step. This collective must not overtake an exchange that
        # takes several steps.
        runs_early = lead == 0 or (lead is not None and not self._has_extra_args)
        # Do not donate what a thread still reads, or what other nodes of a device read at the same
        # time: XLA would write the new models elsewhere, and then copy them.
        is_read = (runs_early and lead) or (self.nodes.per_device > 1 and plan.mixes_in_place())
        donated = () if is_read else donate_on_accelerators(1, 2)
        donated_inputs = donate_on_accelerators(*(3 + i for i in self._donated_inputs))
        # A static step is part of the program, and so are its permutations; a traced one is data.
        by_step: dict[str, Any] = {"static_argnums" if is_static else "shared_argnums": 0}
        take_step = _make_step(self._gradients, self._update)
        fused = self.nodes.spmd(
            offloaded.take_used_state(take_step) if offloads else take_step,
            **by_step,
            donate_argnums=donated + donated_inputs,
            # `gradients` takes `(params, *inputs)`, a step `(number, params, opt_state, *inputs)`.
            local_argnums=[number + 2 if number else 1 for number in self._local_argnums],
        )
        fused.max_static_values = math.inf  # no warning: `max_programs` has limited them

        def update(step: int, *fused_arguments: Any) -> Any:
            del step  # the program takes only the number of the step
            return fused(*fused_arguments)

        arguments = self._gradients, self._update, self.nodes
        if runs_early:
            update = UpdateDuringExchange(*arguments, plan, is_static, fused)
        elif self._has_thread and (wire := wire_of_first_average(opt_state, self.nodes.axis_name)):
            update = UpdateInBuckets(*arguments, wire, self._bucket_bytes, fused)
        elif offloads:
            update = offloaded.OffloadedUpdate(fused, bool(donated))
        return _Programs(update, fused, is_static, offloads, set())

    def __repr__(self) -> str:
        plans = " or ".join(plan.in_words() for plan in self._programs) or "not called yet"
        return f"TrainStep({plans}; {self.nodes!r})"


def _warn_of_equal_keys(inputs: Any) -> None:
    """Warns if all nodes get the same PRNG key, because they would drop the same units."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(inputs):
        is_raw = is_raw_key(leaf)
        if not (is_raw or is_key(leaf)):
            continue
        if not getattr(leaf, "is_fully_addressable", True):  # other processes have a part
            continue
        keys = np.asarray(leaf if is_raw else jax.random.key_data(leaf))  # one row for each node
        if len(keys) > 1 and (keys == keys[:1]).all():
            warnings.warn(
                f"all nodes get the same PRNG key as input{jax.tree_util.keystr(path)}: "
                "nodes.replicate(key, fold_in=True) gives each its own.",
                stacklevel=3,
            )


def _average_extra_args(extra_args: ExtraArgs | None, nodes: Nodes) -> ExtraArgs:
    """Wraps `extra_args`, so that all its values but `node_weight` are averaged over the nodes.

    So all nodes decide alike. Call the result inside `Nodes.spmd`; without `extra_args` it is `{}`.
    """
    if extra_args is None:
        return lambda aux: {}

    def average(aux: Any) -> dict[str, Any]:
        values = {name: jnp.asarray(value) for name, value in extra_args(aux).items()}
        if nodes.local_devices is not None:  # each device has a part of the node's batch
            values = node_mean(values, nodes.local_axis_name)
        own_weight = {"node_weight": values.pop("node_weight")} if "node_weight" in values else {}
        return node_mean(values, nodes.axis_name) | own_weight

    return average


def _make_step(gradients: Gradients, update: UpdateOfNode) -> Update:
    """Makes a node's step `(step, params, opt_state, *inputs) -> (params, opt_state, aux)`."""

    def take_step(step: Any, params: optax.Params, opt_state: optax.OptState, *inputs: Any) -> Any:
        # In all algorithms the parameters are the models at which gradients are taken.
        grads, aux = gradients(params, *inputs)
        return *update(step, params, opt_state, grads, aux), aux

    return take_step
