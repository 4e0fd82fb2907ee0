"""Computes metrics of the average model and of every node's model on a whole test set."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gossipjax as gx
from experiments.data.prefetch import LazyBatch
from experiments.results import metric_fields
from experiments.training.placement import count_devices_per_node, make_put
from experiments.training.task import Examination, Task, Variables
from gossipjax.processes import gather_texts

Sums = dict[str, tuple[Any, Any]]
"""The sum of the totals and the sum of the counts of each metric, by name."""


class Evaluator:
    """Computes the metrics of a task's models on its test set; every example counts once."""

    def __init__(self, task: Task, nodes: gx.Nodes):
        self._task = task
        self._nodes = nodes
        sum_metrics = make_metric_sums(task)
        self._sum_part_of_node = nodes.spmd(sum_metrics)
        self._sum_same_part = nodes.spmd(sum_metrics, shared_argnums=(1, 2))

    def evaluate_whole(
        self, variables: Variables, is_last: bool
    ) -> tuple[dict[str, float], Examination]:
        """Returns the metrics of one model, and the task's examination of the model."""
        gx.launch.advance(slow=True)
        return self.evaluate_average(variables), self.examine_average(variables, is_last)

    def evaluate_average(self, variables: Variables) -> dict[str, float]:
        """Returns `test_METRIC_average_model` for one model, which is in equal rows for all nodes.

        Each node evaluates a part of the test set, which only its process reads.
        """
        sums = [
            self._nodes.to_host(self._sum_part_of_node(variables, *parts))
            for parts in self._divide_test_set()
        ]
        means = {
            name: float(totals.sum() / counts.sum())
            for name, (totals, counts) in _add_up(sums).items()
        }
        metrics = self._task.summarize(means)
        return {metric_fields(name)[0]: value for name, value in metrics.items()}

    def evaluate_nodes(self, variables: Variables) -> dict[str, list[float]]:
        """Returns `test_METRIC_nodes`, with a value per node, for node-stacked models.

        Each node evaluates the whole test set. Each process reads a part of it for all nodes.
        """
        sums = []
        for parts in map(self._nodes.to_host, self._divide_test_set()):
            for part in range(self._nodes.size):
                shared = self._nodes.put_shared(_take(parts, part))
                sums.append(self._nodes.to_host(self._sum_same_part(variables, *shared)))
        means = {name: totals / counts for name, (totals, counts) in _add_up(sums).items()}
        metrics = [
            self._task.summarize({name: float(values[node]) for name, values in means.items()})
            for node in range(self._nodes.size)
        ]
        return {
            metric_fields(name)[1]: [metrics_of_node[name] for metrics_of_node in metrics]
            for name in metrics[0]
        }

    def examine_average(self, variables: Variables, is_last: bool) -> Examination:
        """Returns the task's examination of one model, node-stacked with equal rows.

        Metrics have the names of fields, `test_METRIC_average_model`. In the details, the fields of
        the nodes are None. If the task examines nothing, the result is empty.
        """
        gx.launch.advance(slow=True)
        found = self._task.examine(self._nodes.one(variables, require_equal=False), is_last)
        if found is None:
            return Examination({})
        fields = {metric_fields(name)[0]: value for name, value in found.metrics.items()}
        not_measured = {metric_fields(name)[1]: None for name in found.metrics}
        return found._replace(metrics=fields, details=not_measured | found.details)

    def _divide_test_set(self) -> Iterator[tuple[Any, jax.Array]]:
        """Yields each test batch in N parts, `[N, W, ...]`, and which of their rows are examples.

        The parts are on the devices. A process reads the parts of its nodes ahead of their use.
        """
        read = map(self._read_parts, self._task.test_batches())
        for number, parts in enumerate(gx.prefetch(read)):
            gx.launch.advance(slow=number == 0)  # the first batch compiles
            yield parts

    def _read_parts(self, batch: Any) -> tuple[Any, jax.Array]:
        nodes = self._nodes.size
        devices = count_devices_per_node(self._nodes)
        is_lazy = isinstance(batch, LazyBatch)
        size = batch.size if is_lazy else len(jax.tree.leaves(batch)[0])
        parts = np.array_split(np.arange(size), nodes)
        # Shorter parts are filled up with example 0, which does not count.
        width = -(-max(map(len, parts)) // devices) * devices
        rows = np.zeros((nodes, width), int)
        is_example = np.zeros(rows.shape, bool)
        for node, part in enumerate(parts):
            rows[node, : len(part)] = part
            is_example[node, : len(part)] = True
        here = rows[self._nodes.local]
        examples = batch.read(here) if is_lazy else _take(batch, here)
        return make_put(self._nodes)((examples, is_example[self._nodes.local]))


def map_texts(
    function: Callable[[Sequence[str]], list[str]], texts: Sequence[str], variables: Variables
) -> list[str]:
    """Applies a function of many texts in all processes, each of which takes a part.

    Every process gets all results.
    """
    count = jax.process_count()
    # Processes over which a model is sharded compute together, so that all take all texts.
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(variables)):
        count = 1
    if count == 1:
        return function(texts)
    mine = texts[jax.process_index() :: count]
    results = [""] * len(texts)
    for process, part in enumerate(gather_texts(json.dumps(function(mine) if mine else []))):
        results[process::count] = json.loads(part)
    return results


def make_metric_sums(task: Task) -> Callable[[Variables, Any, jax.Array], Sums]:
    """Returns a function of one node that sums every metric over the examples of a batch."""

    def sum_metrics(variables: Variables, batch: Any, is_example: jax.Array) -> Sums:
        sums = {}
        for name, metric in task.metrics(variables, batch).items():
            counts = jnp.ones_like(is_example) if metric.counts is None else metric.counts
            values = (metric.totals, counts)
            if any(value.shape != is_example.shape for value in values):
                raise ValueError(
                    f"metric {name!r} must have a value per example, {list(is_example.shape)}, got "
                    f"{[list(value.shape) for value in values]}: do not average over the batch."
                )
            sums[name] = tuple(
                jnp.where(is_example, value.astype(jnp.float32), 0.0).sum() for value in values
            )
        return sums

    return sum_metrics


def _take(tree: Any, rows: Any) -> Any:
    return jax.tree.map(lambda array: array[rows], tree)


def _add_up(sums: list[Sums]) -> Sums:
    """Adds up the sums of all parts, `[N]`, in float64."""
    if not sums:
        return {}
    return jax.tree.map(lambda *values: np.sum(values, axis=0, dtype=np.float64), *sums)
