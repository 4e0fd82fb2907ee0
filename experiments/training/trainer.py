"""The compiled programs of a run, for steps and for measurements between steps."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gossipjax as gx
from experiments.program import FatalError
from experiments.training.methods import Method
from experiments.training.options import BatchStatsPolicy
from experiments.training.placement import gather_where_used
from experiments.training.task import Task, Variables
from gossipjax.checkpoint import TrainState


class NonFiniteError(FatalError):
    """The loss or the model of a node is NaN or infinite."""


class Consensus(NamedTuple):
    """The Euclidean distance of a node's model, and of each array of parameters, to the average;
    and whether each array, also of running statistics, is finite."""

    distance: jax.Array
    by_layer: Any
    is_finite: Any


def make_variables(params: Any, batch_stats: Any) -> Variables:
    """Returns the variables of a model, with `batch_stats` if there are any."""
    variables = {"params": params}
    return variables if batch_stats is None else variables | {"batch_stats": batch_stats}


def make_gradients(
    task: Task, is_sharded: bool = False, parts: int = 1
) -> Callable[..., tuple[Any, Any]]:
    """Returns `(params, batch_stats, batch) -> (grads, (loss, new batch_stats))` of one node.

    `is_sharded` says whether model and batch are sharded inside a node. If a batch has several
    parts, they are computed one after another, and the results are means.
    """

    def loss(params: Any, batch_stats: Any, batch: Any) -> tuple[jax.Array, Any]:
        if is_sharded:
            params = gather_where_used(params)
        return task.loss(make_variables(params, batch_stats), batch)

    def gradients(params: Any, batch_stats: Any, batch: Any) -> tuple[Any, Any]:
        aux, grads = jax.value_and_grad(loss, has_aux=True)(params, batch_stats, batch)
        return grads, aux

    def accumulated(params: Any, batch_stats: Any, batch: Any) -> tuple[Any, Any]:
        accumulate = gx.accumulate_gradients(lambda p, part: gradients(p, batch_stats, part), parts)
        grads, aux = accumulate(params, batch)
        return grads, jax.tree.map(lambda x: x.mean(axis=0), aux)

    return gradients if parts == 1 else accumulated


def make_distance_before_mixing(
    task: Task, method: Method, is_sharded: bool = False, parts: int = 1
) -> Callable[..., jax.Array]:
    """Returns a function for the consensus distance of `(x + u) / w`, before the exchange."""
    gradients = make_gradients(task, is_sharded, parts)

    def distance_before_mixing(
        params: Any, opt_state: Any, batch_stats: Any, batch: Any
    ) -> jax.Array:
        grads, _ = gradients(params, batch_stats, batch)
        updates = method.local_updates(grads, opt_state, params)
        return gx.diagnostics.consensus_distance(gx.local_model(params, opt_state, updates))

    return distance_before_mixing


def measure_consensus(params: Any, opt_state: Any, batch_stats: Any) -> Consensus:
    """Compares the newest model of one node with the models of all others."""
    newest = gx.latest_model(params, opt_state)
    return Consensus(
        gx.diagnostics.consensus_distance(newest),
        gx.diagnostics.layer_consensus_distance(newest),
        jax.tree.map(lambda x: jnp.isfinite(x).all(), make_variables(params, batch_stats)),
    )


def make_average_variables(params: Any, opt_state: Any, batch_stats: Any) -> Variables:
    """Returns `sum_i x_i / sum_i w_i`, messages in flight included, with averaged statistics."""
    average = gx.average_model(params, opt_state)
    return make_variables(average, gx.average_batch_stats(batch_stats))


def make_node_variables(params: Any, opt_state: Any, batch_stats: Any, averages: bool) -> Variables:
    """Returns the newest model of one node, with its own or with averaged statistics."""
    stats = gx.average_batch_stats(batch_stats) if averages else batch_stats
    return make_variables(gx.latest_model(params, opt_state), stats)


MAX_PROGRAMS = 32  # of one run, each for a round; beyond it, the step number is traced


class Trainer:
    """The compiled programs of a run.

    The step is compiled once per distinct round. If there are more than `MAX_PROGRAMS` rounds,
    it is compiled once, with a traced step number.

    With `local`, nodes keep their running statistics. With `mix`, nodes gossip the statistics at
    every step. With `average`, the statistics are averaged over the nodes when a model is
    evaluated.

    Attributes:
      newest_loss: the losses of the newest step, `[N]`, which may still be computed; None before
        the first step.
    """

    def __init__(
        self,
        task: Task,
        method: Method,
        nodes: gx.Nodes,
        batch_stats: BatchStatsPolicy = "local",
        parts: int = 1,
    ):
        self.nodes = nodes
        self.newest_loss: jax.Array | None = None
        self._task = task
        self._tx = method.transform
        is_sharded = bool(nodes.inner_axes)
        self._init_state = nodes.spmd(self._tx.init)
        gradients = make_gradients(task, is_sharded, parts)
        self._train_step = gx.TrainStep(gradients, self._tx, nodes, max_programs=MAX_PROGRAMS)
        self._mixes_batch_stats = batch_stats == "mix"
        self._mix_batch_stats = nodes.spmd(gx.mix_batch_stats, static_argnums=2)
        self._mix_batch_stats_traced = nodes.spmd(gx.mix_batch_stats, shared_argnums=2)
        # These are separate programs, so that a training step exchanges gossip only.
        self._distance_before_mixing = nodes.spmd(
            make_distance_before_mixing(task, method, is_sharded, parts)
        )
        self._consensus = nodes.spmd(measure_consensus)
        self._average_variables = nodes.spmd(make_average_variables)
        averages = batch_stats == "average"
        self._node_variables = nodes.spmd(partial(make_node_variables, averages=averages))

    def init(self, seed: int) -> TrainState:
        """Returns the state at step 0, with the same model on every node."""
        if not self.nodes.inner_axes:
            variables = self._task.init(seed)
            params, opt_state = self.nodes.init(self._tx, variables["params"])
            batch_stats = variables.get("batch_stats")
        else:  # each device makes its part, as none may have room for all
            params, opt_state = self.nodes.init(self._tx, lambda: self._task.init(seed)["params"])
            batch_stats = jax.jit(lambda: self._task.init(seed).get("batch_stats"))()
        return TrainState(0, params, opt_state, self.nodes.replicate(batch_stats))

    def compile(self, state: TrainState, batches: Iterable[Any]) -> None:
        """Runs every program on copies of the state, so that no timed step compiles.

        `batches` contains one batch of every shape, on the devices.
        """
        steps = self._train_step.canonical_steps(state.opt_state) or [0]
        for batch in batches:
            for step in steps:
                # On a copy: accelerators donate the state that a step is given.
                self._run_step(self._restart(state), batch, step)
            gx.launch.advance(slow=True)  # another program will be compiled
            self.measure_distance_before_mixing(state, batch)
        self.measure_distance(state)

    def _restart(self, state: TrainState) -> TrainState:
        """Copies the state at step 0. Nothing is in flight, so any round may be the first."""
        params, batch_stats = jax.tree.map(jnp.copy, (state.params, state.rest))
        if not self.nodes.inner_axes:
            return TrainState(0, params, self.nodes.run(self._tx.init, params), batch_stats)
        shardings = jax.tree.map(lambda x: x.sharding, state.opt_state)
        opt_state = jax.jit(self._init_state, out_shardings=shardings)(params)
        return TrainState(0, params, opt_state, batch_stats)

    def run_steps(
        self, state: TrainState, batches: Iterable[Any]
    ) -> tuple[TrainState, list[jax.Array]]:
        """Makes a step with each of these batches, which are on the devices.

        Nothing else is transferred between host and devices. Waits until everything is computed;
        returns the state and the losses of each step, `[N]`.
        """
        losses = []
        with jax.transfer_guard("disallow"):  # no implicit one between host and devices
            for batch in batches:
                state, loss = self._run_step(state, batch, state.step)
                losses.append(loss)
                self.newest_loss = loss
            jax.block_until_ready((state.params, losses))
        return state, losses

    def _run_step(self, state: TrainState, batch: Any, step: int) -> tuple[TrainState, jax.Array]:
        batch_stats = state.rest
        if self._mixes_batch_stats:
            batch_stats = self._mix(batch_stats, state.opt_state, step)
        params, opt_state, (loss, batch_stats) = self._train_step(
            step, state.params, state.opt_state, batch_stats, batch
        )
        return TrainState(state.step + 1, params, opt_state, batch_stats, state.metadata), loss

    def _mix(self, batch_stats: Any, opt_state: Any, step: int) -> Any:
        if self._train_step.canonical_steps(opt_state) is None:
            program = self._mix_batch_stats_traced
            # Put there by name: `run_steps` refuses transfers that nobody has asked for.
            number = self.nodes.put_shared(np.int32(step))
        else:
            program = self._mix_batch_stats
            number = gx.canonical_step(opt_state, step)
        return self._train_step.run(program, batch_stats, opt_state, number)

    def fetch_losses(self, losses: list[jax.Array], first_step: int) -> np.ndarray:
        """Returns the losses of all nodes, `[steps, N]`, from `first_step` on."""
        values = np.array(self.nodes.to_host(losses)).reshape(len(losses), self.nodes.size)
        require_finite(values, first_step)
        return values

    def measure_distance(self, state: TrainState) -> float:
        """Returns the consensus distance of the newest models, as a mean over the nodes."""
        consensus = self.nodes.to_host(self._consensus(*state.arrays))
        for path, flags in jax.tree_util.tree_leaves_with_path(consensus.is_finite):
            if not flags.all():
                raise NonFiniteError(
                    f"{jax.tree_util.keystr(path, simple=True, separator='/')} of node "
                    f"{np.argmin(flags)} must be finite, got NaN or infinity after step "
                    f"{state.step}: lower --learning-rate."
                )
        return float(consensus.distance.mean())

    def measure_distance_by_layer(self, state: TrainState) -> dict[str, float]:
        """Returns the consensus distance of every array of parameters, by its path in the tree."""
        by_layer = self.nodes.to_host(self._consensus(*state.arrays).by_layer)
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): float(np.mean(distances))
            for path, distances in jax.tree_util.tree_leaves_with_path(by_layer)
        }

    def measure_distance_before_mixing(self, state: TrainState, batch: Any) -> float:
        """Returns the consensus distance of `(x + u) / w`, with u the next update on `batch`."""
        distances = self._distance_before_mixing(*state.arrays, batch)
        return float(self.nodes.to_host(distances).mean())

    def average_variables(self, state: TrainState) -> Variables:
        """Returns the average model, node-stacked: `sum_i x_i / sum_i w_i`."""
        return self._average_variables(*state.arrays)

    def node_variables(self, state: TrainState) -> Variables:
        """Returns the nodes' newest models, with the statistics for their evaluation."""
        return self._node_variables(*state.arrays)


def require_finite(losses: np.ndarray, first_step: int) -> None:
    """Raises `NonFiniteError`, with node and step, if a loss in `[steps, N]` is not finite."""
    bad = np.argwhere(~np.isfinite(losses))
    if len(bad):
        step, node = bad[0]
        raise NonFiniteError(
            f"the loss of node {node} must be finite, got {losses[step, node]} at step "
            f"{first_step + step}: lower --learning-rate, or look at the data of that node."
        )
