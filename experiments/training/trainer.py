"""What the training programs share: where nodes run, and the compiled programs."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import gossipjax as gx
from experiments import processes
from experiments.methods import Method
from gossipjax.state import add, debias, find_state, numerators, push_sum_weight

STEPS_ALONE = 12  # that are timed without input
Where = Literal["auto", "mesh", "vmap"]
StatisticsPolicy = Literal["local", "mix", "average"]


class NonFiniteError(RuntimeError):
    """A node's loss or model is NaN or infinite."""


class Placement(NamedTuple):
    """Where the nodes run: what `gx.spmd` is told, and the same in words."""

    keywords: dict[str, Any]
    words: str

    @property
    def mesh(self) -> Mesh | None:
        """The devices of the nodes; None where they are simulated on one."""
        return self.keywords.get("mesh")


def request_cpu_devices(count: int) -> None:
    """Asks for so many virtual CPU devices; before JAX's first use. Accelerators do not mind.

    XLA's pool gets two threads for each: a device that waits for the others in a collective holds
    one, and with no more threads than devices, the last ones to come can be left without any for
    their convolutions, and wait for ever. NPROC is where XLA reads the size of its pool.
    """
    jax.config.update("jax_num_cpu_devices", count)
    os.environ["NPROC"] = str(max(2 * count, int(os.environ.get("NPROC", 0))))


def place(where: Where, nodes: int) -> Placement:
    """One device per node if there are enough of them, or all nodes on one device.

    Several processes hold as many nodes each, a device per node.

    Raises:
      ValueError: for a mesh of more nodes than devices, or processes that cannot share the nodes.
    """
    devices = jax.devices()
    kind = devices[0].platform.upper()
    if (count := jax.process_count()) > 1:
        if where == "vmap":
            raise ValueError(f"--where vmap is one process' way, and there are {count}.")
        mesh = gx.launch.mesh(nodes)
        return Placement({"mesh": mesh}, f"{count} processes, one {kind} device per node")
    if where == "vmap" or (where == "auto" and len(devices) < nodes):
        return Placement({"nodes": nodes}, f"simulated on one {kind} device by vmap")
    if len(devices) < nodes:
        raise ValueError(
            f"--where mesh needs a device per node: {nodes} nodes, {len(devices)} {kind} devices. "
            f"Use --nodes {len(devices)}, or --where vmap to simulate them on one device."
        )
    mesh = Mesh(np.array(devices[:nodes]), ("nodes",))
    return Placement({"mesh": mesh}, f"one {kind} device per node")


class Trainer:
    """One run: all nodes' parameters, optimizer state and next batch, and the compiled programs.

    The step exchanges nothing but gossip; what needs other nodes' values otherwise has a program of
    its own. It is compiled once per distinct round; beyond 32 of those once, with a traced step.

    Args:
      method: algorithm, topology and optimizer.
      loss: `loss(params, statistics, batch)` of one node: a scalar, and the statistics after it.
      placement: where the nodes run.
      params: the starting model, the same for every node: no node axis.
      batches: endless; of this process' nodes, `[own, B, ...]`.
      statistics: of normalization layers, at the start: no node axis; empty without such layers.
      policy: who shares them: `local`, nobody; `mix`, gossip at every step; `average`, all nodes
        when a model is evaluated.
    """

    def __init__(
        self,
        method: Method,
        loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]],
        placement: Placement,
        params: Any,
        batches: Iterator[Any],
        statistics: Any = (),
        policy: StatisticsPolicy = "local",
    ):
        tx, where, nodes = method.transform, placement.keywords, method.schedule.size

        def gradients(params: Any, statistics: Any, batch: Any) -> tuple[Any, Any]:
            (value, after), grads = jax.value_and_grad(loss, has_aux=True)(
                params, statistics, batch
            )
            return grads, (value, after)

        def mixed(statistics: Any, state: Any, number: Any) -> Any:
            return gx.mix_statistics(statistics, state, method.schedule, number)

        def distance(model: Any, state: Any) -> tuple[jax.Array, Any, jax.Array]:
            newest = gx.latest_model(model[0], state)
            layers = gx.diagnostics.layer_consensus_distance(newest)
            finite = jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(model)])
            return gx.diagnostics.consensus_distance(newest), layers, finite

        def distance_before_mixing(model: Any, state: Any, batch: Any) -> jax.Array:
            params, statistics = model
            grads, _ = jax.grad(loss, has_aux=True)(params, statistics, batch)
            updates, _ = method.inner.update(grads, state[0], params)
            gossip = find_state(state)
            moved = debias(add(numerators(params, gossip), updates), push_sum_weight(gossip))
            return gx.diagnostics.consensus_distance(moved)

        def node_model(model: Any, state: Any) -> Any:
            params, statistics = model
            if policy == "average":
                statistics = gx.average_statistics(statistics)
            return gx.latest_model(params, state), statistics

        def average_model(model: Any, state: Any) -> Any:
            params, statistics = model
            return gx.average_model(params, state), gx.average_statistics(statistics)

        self._step = gx.TrainStep(gradients, tx, method.schedule, method.lookback, **where)
        self._mixed = gx.spmd(mixed, **where, shared_argnums=2) if policy == "mix" else None
        self._distance = gx.spmd(distance, **where)
        self._distance_before_mixing = gx.spmd(distance_before_mixing, **where)
        self._node_model = gx.spmd(node_model, **where)
        self._average_model = gx.spmd(average_model, **where)
        self._mesh, self._nodes = placement.mesh, nodes
        self.model = self.placed(
            jax.tree.map(lambda x: np.stack([np.asarray(x)] * nodes), (params, statistics))
        )
        self.state = gx.spmd(tx.init, **where)(self.model[0])
        self.feed(batches)

    def placed(self, tree: Any) -> Any:
        """Arrays `[N, ...]` that all processes have, on the devices of their nodes."""
        own = processes.own_nodes(self._mesh, self._nodes)
        return processes.put(jax.tree.map(lambda x: x[own], tree), self._mesh, self._nodes)

    def feed(self, batches: Iterator[Any]) -> None:
        """These are the next batches."""
        self._batches = ahead(processes.put(b, self._mesh, self._nodes) for b in batches)
        self._batch = next(self._batches)

    def warm_up(self) -> float:
        """Runs every program on copies, so that no timed step compiles.

        Returns:
          The seconds of a compiled step by itself: of steps in a row on one batch that is there.
        """
        steps = list(self._step.steps or [0])
        model, state = jax.tree.map(jnp.copy, (self.model, self.state))
        for step in steps:
            model, state, _ = jax.block_until_ready(self._take(step, model, state))
        self.distance(0)
        self.distance_before_mixing()
        began = time.perf_counter()
        for step in range(STEPS_ALONE):
            model, state, _ = self._take(steps[step % len(steps)], model, state)
        jax.block_until_ready(model)
        return (time.perf_counter() - began) / STEPS_ALONE

    def _take(self, step: int, model: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        params, statistics = model
        if self._mixed is not None:
            statistics = self._mixed(statistics, state, np.int32(step))
        params, state, (loss, statistics) = self._step(step, params, state, statistics, self._batch)
        return (params, statistics), state, loss

    def advance(self, steps: range) -> tuple[np.ndarray, float]:
        """Takes these steps; returns every node's losses, `[steps, N]`, and the seconds it took.

        Raises:
          NonFiniteError: if a loss is NaN or infinite; it names node and step.
        """
        losses, began = [], time.perf_counter()
        for step in steps:
            self.model, self.state, loss = self._take(step, self.model, self.state)
            losses.append(loss)
            self._batch = next(self._batches)
        jax.block_until_ready(self.model)
        seconds = time.perf_counter() - began
        values = np.array(processes.fetch(losses)).reshape(len(steps), self._nodes)
        require_finite(values, steps.start)
        return values, seconds

    def distance(self, step: int) -> float:
        """The consensus distance of the nodes' newest models, mean over the nodes.

        Raises:
          NonFiniteError: if any value of a model is not finite; it names node, array and `step`.
        """
        distances, _, finite = processes.fetch(self._distance(self.model, self.state))
        bad = np.argwhere(~finite)
        if len(bad):
            node, number = bad[0]
            named = dict(zip(("params", "statistics"), self.model, strict=True))
            path, _ = jax.tree_util.tree_leaves_with_path(named)[number]
            raise NonFiniteError(
                f"{jax.tree_util.keystr(path, simple=True, separator='/')} of node {node} is not "
                f"finite after step {step}. Lower --rate."
            )
        return float(distances.mean())

    def layer_distances(self) -> dict[str, float]:
        """The same for every array of the parameters, by its path in the tree."""
        layers = processes.fetch(self._distance(self.model, self.state)[1])
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): float(np.mean(values))
            for path, values in jax.tree_util.tree_leaves_with_path(layers)
        }

    def distance_before_mixing(self) -> float:
        """The consensus distance after the next step's own half, `(x + u) / w`, mean over nodes."""
        distances = self._distance_before_mixing(self.model, self.state, self._batch)
        return float(processes.fetch(distances).mean())

    def average_model(self) -> Any:
        """`sum_i x_i / sum_i w_i`, messages in flight included, and mean statistics: per node."""
        return self._average_model(self.model, self.state)

    def node_models(self) -> Any:
        """Every node's newest model, and the statistics that it is evaluated with."""
        return self._node_model(self.model, self.state)


def ahead(items: Iterator[Any], count: int = 2) -> Iterator[Any]:
    """The items, made by a thread before they are asked for: `count` of them are kept ready."""
    end = object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="input")
    try:
        ready = deque(pool.submit(next, items, end) for _ in range(count))
        while (item := ready.popleft().result()) is not end:
            ready.append(pool.submit(next, items, end))
            yield item
    finally:  # not waiting for the thread: garbage is collected by any thread, this one too
        pool.shutdown(wait=False, cancel_futures=True)


def require_finite(losses: np.ndarray, first_step: int) -> None:
    """Raises `NonFiniteError` if a loss, `[steps, N]`, is not finite: names node and step."""
    bad = np.argwhere(~np.isfinite(losses))
    if len(bad):
        step, node = bad[0]
        raise NonFiniteError(
            f"the loss of node {node} is {losses[step, node]} at step {first_step + step}. Lower "
            "--rate, or look at that node's data."
        )


def intervals(
    steps: int, length: int, more_ends: Iterable[int] = (), start: int = 0
) -> Iterator[range]:
    """Divides the steps from `start` on at the multiples of `length`, at the other ends given, and
    at the end.

    >>> [(part.start, part.stop) for part in intervals(10, 4, [5])]
    [(0, 4), (4, 5), (5, 8), (8, 10)]
    """
    ends = {steps, *range(length, steps, length), *more_ends}
    later = sorted(end for end in ends if end > start)
    yield from map(range, [start, *later[:-1]], later)
