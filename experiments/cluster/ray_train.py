"""Ray Train around a training function that knows nothing of Ray: a dead worker costs a few steps.

    pip install -e ".[experiments,ray]"
    python -m experiments.cluster.ray_train --storage runs/ray
    python -m experiments.cluster.ray_train --storage runs/ray_killed --kill-at 150

The workers are the processes of one JAX job. When one dies, Ray ends the others and starts all of
them again; they go on from the newest checkpoint, bit for bit as if nothing had happened. So does a
run that is started again with its folder.

It runs on this machine, unless `--address` names a Ray cluster. The hosts of a cluster must share
the folder and have this code. This example computes on CPUs. For GPUs leave JAX_PLATFORMS out, and
give each host one worker that has all its GPUs: Ray gives workers of one host the same GPU.
"""

import dataclasses
import functools
import logging
import os
import signal
from pathlib import Path

import jax
import tyro

from experiments.cluster import digits


@dataclasses.dataclass
class Options:
    """What the command line sets."""

    storage: Path
    """Folder of the checkpoints and of Ray's notes; all hosts must share it."""
    workers: int = 2
    """Processes, with a node per device each."""
    steps: int = 200
    """Steps of every node."""
    checkpoint_every: int = 20
    """Steps between checkpoints."""
    address: str | None = None
    """Of a Ray cluster. None starts Ray on this machine."""
    kill_at: int | None = None
    """Before this step the last worker kills itself, once, to try a failure."""


def train(config):
    """Runs on every worker."""
    options = config["options"]
    logging.getLogger("absl").setLevel(logging.WARNING)  # Ray would show all that orbax notes
    return digits.train(
        options.storage / "checkpoints",
        options.steps,
        options.checkpoint_every,
        before_step=functools.partial(kill_once, options),
    )


def kill_once(options: Options, step: int):
    """Ends the last worker as a lost host would, unless that has happened."""
    is_last = jax.process_index() == jax.process_count() - 1
    marker = options.storage / "killed"
    if step == options.kill_at and is_last and not marker.exists():
        marker.touch()
        print(f"worker {jax.process_index()} dies before step {step}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def main(options: Options):
    """Trains on Ray; returns the test accuracy of the average model."""
    import ray  # pyright: ignore[reportMissingImports]
    from ray.train import (  # pyright: ignore[reportMissingImports]
        FailureConfig,
        RunConfig,
        ScalingConfig,
    )
    from ray.train.v2.jax import JaxConfig, JaxTrainer  # pyright: ignore[reportMissingImports]

    storage = options.storage.resolve()
    processors = options.workers if options.address is None else None
    environment = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
    ray.init(options.address, num_cpus=processors, runtime_env=environment)
    trainer = JaxTrainer(
        train,
        train_loop_config={"options": dataclasses.replace(options, storage=storage)},
        jax_config=JaxConfig(use_gpu=True),  # on CPUs too: else Ray makes no JAX job
        scaling_config=ScalingConfig(num_workers=options.workers),
        run_config=RunConfig(
            storage_path=str(storage), failure_config=FailureConfig(max_failures=3)
        ),
    )
    accuracy = trainer.fit().return_value
    ray.shutdown()
    print(f"test accuracy of the average model {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
