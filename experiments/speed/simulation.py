"""Images per second of many nodes on one machine, compared with one plain optax loop.

    python -m experiments.speed local simulation --nodes 8 32 64 128

Trains the small CNN on random images: by SGP over N nodes, each with a separate model; and by plain
optax one model on the batch of all nodes together. Each loop runs in a separate process, because
the N devices and 2 N threads of the nodes slow down a plain loop beside them, which would flatter
the ratio. The two take turns, so that noise affects both alike; the process whose turn it is not
waits for its input. README.md in this folder lists the columns and fields.

    python -m experiments.speed local simulation --nodes 64 --devices 2

compares N nodes on two devices, N / 2 on each, with a device per node and with all on one device.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from experiments import results
from experiments.data.prefetch import require_memory
from experiments.options import OptionalPath, PositiveInt, check_fields
from experiments.program import FatalError, ProgramError, exit_on_error
from experiments.results import Record
from experiments.speed.simulation_loop import IMAGE_SHAPE, OPTIMIZER, LoopSettings
from experiments.speed.timing import summarize_samples
from experiments.training.methods import Method, MethodOptions, make_method
from experiments.training.options import Placement

LOOP = "experiments.speed.simulation_loop"
TURNS = 7  # of which the median is reported
ROOT = Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurement of simulated nodes."""

    nodes: tuple[PositiveInt, ...] = (8, 32, 64, 128)
    """Number of simulated nodes: one or several numbers."""
    algorithm: str = "sgp"
    """ALGORITHM or ALGORITHM@TOPOLOGY, as in experiments.image."""
    batch_size_per_node: PositiveInt = 32
    """Images per node and step."""
    steps: PositiveInt = 5
    """Steps of one turn."""
    placement: Placement = "auto"
    """mesh: a device per node, virtual ones on a CPU. vmap: one device. auto: mesh if possible."""
    devices: PositiveInt | None = None
    """Compare three placements: N nodes on this many devices, mesh and vmap."""
    out: OptionalPath = None
    """Folder for the results; a new one under runs/ if not given."""
    overwrite: bool = False
    """Replace another run's results in --out."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.nodes:
            raise ValueError("--nodes must be one or several numbers, got none.")
        divided = [size for size in self.nodes if self.devices and size % self.devices]
        if divided:
            raise ValueError(
                f"--devices must divide --nodes, got {self.devices} devices and {divided[0]} "
                "nodes: give a divisor."
            )
        if self.devices and self.placement != "auto":
            raise ValueError(
                f"--placement must be auto beside --devices, got {self.placement}: leave one out, "
                "as --devices compares the placements."
            )

    @property
    def placements(self) -> tuple[tuple[Placement, int | None], ...]:
        """What is measured for each number of nodes: a placement, and a number of devices."""
        if self.devices is None:
            return ((self.placement, None),)
        return (("mesh", self.devices), ("mesh", None), ("vmap", None))


class LoopProcess:
    """The process of a loop, as a context that ends it."""

    def __init__(self, settings: LoopSettings):
        self._settings = settings

    def __enter__(self) -> "LoopProcess":
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        settings = json.dumps(dataclasses.asdict(self._settings))
        self._process = subprocess.Popen(
            [sys.executable, "-m", LOOP, settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Both processes share an accelerator: none may take most of its memory at once.
            env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C goes to the parent only
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_until_compiled(self) -> Record:
        """Returns the placement of the loop, and the bytes per device of the simulated nodes.

        Raises:
          FatalError: if it is impossible.
          ProgramError: if the process ends.
        """
        answer = self._read()
        if "error" in answer:
            raise FatalError(answer["error"])
        return answer

    def run(self, steps: int) -> Record:
        """Runs the next steps; returns the seconds that they took, and the peak of the memory."""
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Record:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ProgramError(
                f"the process of {self._settings} must answer, got its end with status "
                f"{self._process.wait()}: its error output says why."
            )
        return json.loads(line)


def measure_case(
    options: Options, method: Method, size: int, placement: Placement, devices: int | None
) -> Record:
    """Runs both loops in turns; returns the object in `runs`.

    Args:
      options: of the program.
      method: that of the simulated nodes.
      size: their number.
      placement, devices: one of `options.placements`.
    """
    settings = LoopSettings(None, size, options.batch_size_per_node, placement, devices)
    simulated_settings = dataclasses.replace(settings, algorithm=options.algorithm)
    seconds: list[tuple[float, float]] = []
    with LoopProcess(simulated_settings) as simulated, LoopProcess(settings) as plain:
        description = simulated.wait_until_compiled()
        plain.wait_until_compiled()
        for _ in range(TURNS):
            answer = simulated.run(options.steps)
            seconds.append((answer["seconds"], plain.run(options.steps)["seconds"]))
            description["peak_bytes"] = answer["peak_bytes"]  # so far
    return summarize_case(options, method, size, description, seconds)


def summarize_case(
    options: Options,
    method: Method,
    size: int,
    description: Record,
    seconds: Sequence[tuple[float, float]],
) -> Record:
    """The object in `runs` of one number of nodes.

    Args:
      options, method, size: as in `measure_case`.
      description: `placement`, `bytes_per_device` and `peak_bytes` of the simulated nodes.
      seconds: of the simulated and of the plain loop, turn by turn.
    """
    simulated_seconds, plain_seconds = np.transpose(seconds)
    images = options.steps * size * options.batch_size_per_node  # of a turn
    return {
        "algorithm": method.algorithm,
        "topology": method.topology,
        "nodes": size,
        **description,
        "images_per_second": images / float(np.median(simulated_seconds)),
        "plain_images_per_second": images / float(np.median(plain_seconds)),
        **summarize_samples("ratio", plain_seconds / simulated_seconds),
    }


def make_table(runs: list[Record]) -> Table:
    """A row per number of nodes."""
    table = Table(box=SIMPLE_HEAD, title="Images per second, all nodes together")
    for header in ("nodes", "simulated", "one model,\none batch", "ratio", "10-90 %"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("MB per\ndevice", justify="right", no_wrap=True)
    table.add_column("placement")
    for run in runs:
        table.add_row(
            f"{run['nodes']}",
            f"{run['images_per_second']:,.0f}",
            f"{run['plain_images_per_second']:,.0f}",
            f"{run['ratio']:.2f}",
            f"{run['ratio_p10']:.2f}-{run['ratio_p90']:.2f}",
            f"{run['bytes_per_device'] / 1e6:,.0f}",
            run["placement"],
        )
    return table


def measure_simulation(options: Options) -> None:
    """Images per second of simulated nodes, compared with one plain loop."""
    out = None
    with exit_on_error(lambda: out):
        methods = [
            make_method(options.algorithm, MethodOptions(size), OPTIMIZER) for size in options.nodes
        ]
        example = np.broadcast_to(np.float32(0), (max(options.nodes), *IMAGE_SHAPE))
        require_memory(example, options.batch_size_per_node)
        out = results.create_run_dir("simulation", options.out, options.overwrite)
        console = Console()
        runs: list[Record] = []
        with results.make_progress_bar(console) as bar:
            cases = [
                (method, size, *placement)
                for method, size in zip(methods, options.nodes, strict=True)
                for placement in options.placements
            ]
            task = bar.add_task("simulation", total=len(cases), status="")
            for case in cases:
                bar.update(task, status=f"{case[1]} nodes")
                runs.append(measure_case(options, *case))
                bar.advance(task)
                results.write_summary(out, dataclasses.asdict(options), {}, runs)
        console.print(make_table(runs))
