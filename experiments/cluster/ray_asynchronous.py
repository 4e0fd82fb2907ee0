"""Nodes that wait for nobody as actors of Ray: one that dies is replaced while the others train.

    pip install -e ".[experiments,ray]"
    python -m experiments.cluster.ray_asynchronous
    python -m experiments.cluster.ray_asynchronous --kill-at 50

Every actor is a node of `gossipjax.asynchronous`. They train until together they have taken
`--workers` times `--steps` steps, whoever took them. Ray starts an actor that died again, on any
host; it joins the job as a new node does: it asks a living one for half of what that holds, and
keeps no checkpoint. The addresses of the nodes are in an actor, so also the first may be replaced.

It runs on this machine, unless `--address` names a Ray cluster, whose hosts must have this code.
"""

import dataclasses
import os
import secrets
import signal
import time
from typing import Any

import optax
import tyro

from experiments import data
from experiments.cluster import digits
from gossipjax import asynchronous


@dataclasses.dataclass
class Options:
    """What the command line sets."""

    workers: int = 3
    """Nodes, each in a process."""
    steps: int = 300
    """Steps of every node, if all are equally fast."""
    seconds: float = 0.05
    """Pause after a step, as if the model were larger."""
    address: str | None = None
    """Of a Ray cluster. None starts Ray on this machine."""
    kill_at: int | None = None
    """After this step the last node kills itself, once, to try a failure."""


class Addresses:
    """Where the nodes listen."""

    def __init__(self):
        self.addresses: dict[int, str] = {}

    def read(self) -> dict[int, str]:
        return self.addresses

    def put(self, place: int, address: str):
        self.addresses[place] = address


class Node:
    """An actor, which trains. Ray makes its replacement with the same arguments."""

    def __init__(self, options: Options, place: int, secret: str):
        import ray  # pyright: ignore[reportMissingImports]

        book = ray.get_actor("addresses")
        addresses: Any = ray.get(book.read.remote())
        self.is_replacement = place in addresses
        self.node = asynchronous.join(
            optax.sgd(0.01, momentum=0.9),
            digits.init(),
            address=[address for other, address in addresses.items() if other != place],
            algorithm=asynchronous.sgp(),
            listen=f"{ray.util.get_node_ip_address()}:0",
            place=place,
            secret=secret,
        )
        ray.get(book.put.remote(place, self.node.address))
        self.options = options
        self.place = place

    def train(self):
        """Trains until the job has its steps; returns the test accuracy of the average model."""
        node = self.node
        options = self.options
        images = data.load("mnist5k")
        may_die = self.place == options.workers - 1 and not self.is_replacement
        node.wait_for_mass()
        if self.is_replacement:
            self.say("is back")
        while node.total_steps < options.workers * options.steps:
            node.step(digits.gradients, digits.draw_batch(images, node.total_steps, self.place))
            if may_die and node.statistics.steps == options.kill_at:
                self.say("dies")
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(options.seconds)
        model = node.average()
        node.leave()
        return digits.measure_accuracy(model, images)

    def say(self, what: str):
        text = f"node {self.place} {what}; together they have taken {self.node.total_steps} steps"
        print(text, flush=True)


def main(options: Options):
    """Trains on Ray; returns the test accuracy of the average model."""
    import ray  # pyright: ignore[reportMissingImports]

    processors = options.workers if options.address is None else None
    environment = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
    ray.init(options.address, num_cpus=processors, runtime_env=environment)
    # The actor lives as long as this variable.
    _book = ray.remote(num_cpus=0)(Addresses).options(name="addresses").remote()
    make_node = ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)(Node).remote
    secret = secrets.token_hex()
    nodes = []
    for place in range(options.workers):
        nodes.append(make_node(options, place, secret))
        if place == 0:  # the others join it
            ray.get(nodes[0].__ray_ready__.remote())
    # The first to end has the average of all that live then; a replacement may still be on its way.
    done, _ = ray.wait([node.train.remote() for node in nodes])
    accuracy = ray.get(done[0])
    ray.shutdown()
    print(f"test accuracy of the average model {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
