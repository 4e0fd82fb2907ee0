"""The process of one node: its settings, and how it meets the others."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import gossipjax as gx
from experiments.results import Record
from experiments.speed.stragglers.problem import Data, make_params
from experiments.speed.stragglers.slowness import draw_factors


@dataclasses.dataclass(frozen=True)
class WorkerConfig:
    """Settings that all nodes of a measurement share; written as `config.json`.

    Attributes:
      coordinator_address: address and port where node 0 starts JAX's coordination service.
      addresses: of every node.
      runs: pairs of an algorithm and a slowness, those of an algorithm one after another.
      steps: of each run: N times as many of all nodes together.
      compute_seconds: of a step of a node that is not slow.
      megabytes: 1e6 bytes of float32 parameters, at least.
      secret: of nodes that wait for nobody; None where they listen on the loopback interface.
    """

    coordinator_address: str
    addresses: list[str]
    runs: list[tuple[str, str]]
    steps: int
    compute_seconds: float
    megabytes: float
    secret: str | None

    @property
    def nodes(self) -> int:
        """N."""
        return len(self.addresses)


class Worker:
    """This process among the others.

    Attributes:
      config: the settings.
      rank: its number.
      nodes: those of all processes.
      data: the digits.
      params: the model at the start.
    """

    def __init__(self, config: WorkerConfig, folder: Path, rank: int):
        self.config = config
        self.rank = rank
        self.nodes = gx.Nodes(mesh=Mesh(np.array(jax.devices()), ("nodes",)))
        self.data = Data.read(folder, config.nodes, rank)
        self.params: Any = make_params(self.data.images.shape[1], config.megabytes)
        self._folder = folder
        self._all_gather = self.nodes.spmd(lambda x: jax.lax.all_gather(x, "nodes"))

    def report_progress(self, run: int, step: float, status: str) -> None:
        """Writes how far this node is to where the parent reads it."""
        algorithm, slowness = self.config.runs[run]
        text = f"run {run} step {int(step)}: {status} {algorithm}, {slowness}"
        (self._folder / f"{self.rank}.progress").write_text(text)

    def write_record(self, run: int, record: Record) -> None:
        """Writes what this node measured in a run, for `read_records`."""
        path = record_path(self._folder, run, self.rank)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(record))
        temporary.replace(path)

    def gather(self, value: float) -> np.ndarray:
        """The numbers of all nodes, float32 `[N]`; waits for all of them."""
        gathered = self._all_gather(self.nodes.put(np.array([value], np.float32)))
        return np.asarray(gathered.addressable_shards[0].data)[0]

    def draw_seconds(self, slowness: str) -> np.ndarray:
        """Seconds of this node's steps, float32; as many as it may make, and they begin anew."""
        config = self.config
        factors = draw_factors(slowness, config.nodes, config.steps * config.nodes)
        return (config.compute_seconds * factors[:, self.rank]).astype(np.float32)


def record_path(folder: Path, run: int, rank: int) -> Path:
    """The file of a node's record."""
    return folder / f"{run}-{rank}.json"


def read_records(folder: Path, nodes: int) -> list[list[Record]]:
    """The records of the nodes, of each run that all have finished."""
    records: list[list[Record]] = []
    while True:
        paths = [record_path(folder, len(records), rank) for rank in range(nodes)]
        if not all(path.exists() for path in paths):
            return records
        records.append([json.loads(path.read_text()) for path in paths])
