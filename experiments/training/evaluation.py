"""Accuracies of the nodes' models and of their average on a test set."""

from typing import Any

import jax
import numpy as np

import gossipjax as gx
from experiments import data, models, processes
from experiments.training import Placement


class Accuracy:
    """Accuracies on the whole test set, the work divided over the nodes where it can be."""

    def __init__(
        self,
        model: models.SmallCNN,
        dataset: data.Dataset,
        nodes: int,
        placement: Placement,
    ):
        def correct(trained: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
            params, statistics = trained
            logits: Any = model.apply({"params": params, **statistics}, images)
            return (logits.argmax(axis=-1) == labels).sum()

        self._total = len(dataset.test_labels)
        parts = np.array_split(np.arange(self._total), nodes)
        width = max(map(len, parts))
        # No prediction equals the label -1 that fills the parts up.
        labels = np.full((nodes, width), -1, np.int32)
        images = np.zeros((nodes, width, *dataset.test_images.shape[1:]), np.float32)
        for node, part in enumerate(parts):
            labels[node, : len(part)] = dataset.test_labels[part]
            images[node, : len(part)] = dataset.test_images[part]
        mesh = placement.mesh
        own = processes.own_nodes(mesh, nodes)
        self._parts = processes.put((images[own], labels[own]), mesh, nodes)
        self._everywhere = [
            processes.put_everywhere(part, mesh) for part in zip(images, labels, strict=True)
        ]
        self._own_part = gx.spmd(correct, **placement.keywords)
        self._same_part = gx.spmd(correct, **placement.keywords, shared_argnums=(1, 2))

    def of_average(self, trained: Any) -> float:
        """Of one model that all nodes hold: each sees its own part of the test set."""
        return float(processes.fetch(self._own_part(trained, *self._parts)).sum()) / self._total

    def of_nodes(self, trained: Any) -> list[float]:
        """Of each node's own model."""
        found = [self._same_part(trained, *part) for part in self._everywhere]
        counts = np.sum(processes.fetch(found), axis=0)
        return [float(count) / self._total for count in counts]
