"""Writes `summary.json` and `metrics.jsonl` and moves the bar while a run trains."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from rich.progress import Progress, TaskID

from experiments.options import option_name
from experiments.results import (
    TEXT_FOLDER,
    Record,
    ReportTo,
    TensorboardReporter,
    filter_metrics,
    write_summary,
)
from experiments.training.options import TrainingOptions
from experiments.training.plan import TrainingRun
from experiments.training.task import Examination, Task
from experiments.training.trainer import NonFiniteError
from gossipjax.processes import is_main_process

Options = TypeVar("Options", bound=TrainingOptions)


@dataclasses.dataclass
class RunProgress:
    """The progress of a run, which is saved as JSON with every checkpoint."""

    seconds: float = 0.0  # in training steps
    examples: int = 0  # seen by all nodes together
    # Of every interval between two lines of `metrics.jsonl`.
    seconds_per_step: list[float] = dataclasses.field(default_factory=list)
    metrics: Record = dataclasses.field(default_factory=dict)  # of the last training line

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> Self:
        """Returns the progress in the metadata of a checkpoint."""
        return cls(**{field.name: metadata[field.name] for field in dataclasses.fields(cls)})

    def advance(self, steps: int, examples_per_step: int, seconds: float) -> None:
        """Adds an interval of steps to the progress."""
        self.seconds += seconds
        self.examples += steps * examples_per_step
        self.seconds_per_step.append(seconds / steps)


def write_texts(folder: Path, texts: Mapping[str, Sequence[str]]) -> None:
    """Writes lists of texts into files `FOLDER/NAME.txt`, a line for each text."""
    for name, lines in texts.items():
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{line}\n" for line in lines)
        (folder / f"{name}.txt").write_text(text, "utf-8", newline="\n")


class Output:
    """The results of an experiment in its folder. Only process 0 writes.

    `previous` is the content of `summary.json` if an experiment is resumed, else empty. `runs`
    contains an entry for each finished run.
    """

    def __init__(self, folder: Path, options: Record, environment: Record, previous: Record):
        self.folder = folder
        self.runs: list[Record] = list(previous.get("runs", []))
        self._options = options
        self._environment = environment
        self.resumed: list[str] = list(previous.get("environment", {}).get("resumed", []))

    def open_reporter(
        self, report_to: ReportTo, run: TrainingRun
    ) -> AbstractContextManager[TensorboardReporter | None]:
        """Opens the reporter that also gets the lines of a run, on process 0 only."""
        if report_to == "none" or not is_main_process():
            return contextlib.nullcontext()
        return contextlib.closing(
            TensorboardReporter(self.folder / "tensorboard" / run.folder_name)
        )

    @property
    def finished(self) -> set[str]:
        """The names of the finished runs."""
        return {run["run"] for run in self.runs}

    def write_summary(self) -> None:
        """Writes `summary.json`."""
        if is_main_process():
            environment = {**self._environment, "resumed": self.resumed}
            write_summary(self.folder, self._options, environment, self.runs)

    def add_run(self, run: Record) -> None:
        """Adds a finished run to `summary.json`."""
        self.runs.append(run)
        self.write_summary()

    def add_metrics(self, line: Record) -> None:
        """Adds a line to `metrics.jsonl`."""
        if is_main_process():
            with (self.folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")

    def truncate_metrics(self, run: str, step: int) -> None:
        """Removes lines of `metrics.jsonl` that a run, which starts after `step`, repeats."""
        finished = self.finished

        def is_kept(line: Record) -> bool:
            # Of runs that are neither finished nor this one nothing is left: they begin anew.
            return line["run"] in finished or (line["run"] == run and line["step"] <= step)

        if is_main_process():
            filter_metrics(self.folder / "metrics.jsonl", is_kept)


class RunLog(NamedTuple):
    """The lines of one run in `metrics.jsonl`, and its bar on the screen."""

    run: TrainingRun
    output: Output
    bar: Progress
    row: TaskID  # row of the bar
    num_examples: int  # examples of an epoch
    reporter: TensorboardReporter | None  # also gets the lines

    def start(self, step: int, message: str | None) -> None:
        """Logs that the run starts after `step`; `message` says from where a resumed run starts."""
        if message is not None:
            self.bar.console.print(message, soft_wrap=True)
            self.output.resumed.append(message)
            self.output.write_summary()
        self.output.truncate_metrics(self.run.name, step)
        if self.reporter is not None:
            self.reporter.start(step)

    def write_texts(self, texts: Mapping[str, Sequence[str]]) -> None:
        """Writes the texts of an examination into `OUT/texts/RUN`."""
        if is_main_process():
            write_texts(self.output.folder / TEXT_FOLDER / self.run.folder_name, texts)

    def add_training(self, step: int, progress: RunProgress) -> None:
        """Logs the metrics of the steps up to `step`."""
        metrics = progress.metrics
        self._add(step, progress, metrics)
        status = (
            f"loss {metrics['loss']:.3g}, consensus {metrics['consensus_distance']:.1e}, "
            f"{metrics['examples_per_second']:,.0f} examples/s"
        )
        self.bar.update(self.row, completed=step, status=status)

    def add_evaluation(
        self, step: int, progress: RunProgress, metrics: Record, examined: Examination
    ) -> None:
        """Logs the metrics on the test set after `step`, and the task's examination."""
        samples = list(examined.samples)
        self._add(
            step, progress, metrics | examined.metrics | ({"samples": samples} if samples else {})
        )
        for line in samples:
            self.bar.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _add(self, step: int, progress: RunProgress, metrics: Record) -> None:
        position: dict[str, Any] = {
            "run": self.run.name,
            "step": step,
            "epoch": progress.examples / self.num_examples,
            "seconds": progress.seconds,
        }
        for name, value in metrics.items():
            numbers = value if isinstance(value, list) else [value]
            bad = [x for x in numbers if isinstance(x, float) and not math.isfinite(x)]
            if bad:  # losses that are finite may have a sum, or distances, that are not
                raise NonFiniteError(
                    f"{name} must be finite, got {bad[0]} at step {step}: lower --learning-rate."
                )
        self.output.add_metrics(position | metrics)
        if self.reporter is not None:
            self.reporter.add(position | metrics)


def load_task(
    options: Options, previous: Record, make_task: Callable[[Options], Task]
) -> tuple[Options, Task, Record]:
    """Returns options, task, and the name and size of its data.

    `previous` is the `summary.json` of a run that is resumed, or empty. Raises `ValueError` unless
    that run had these options and data.
    """
    options = merge_saved_options(options, previous.get("options", {}))
    task = make_task(options)
    data = {"dataset": task.description, "num_examples": int(task.num_examples)}
    for name, value in data.items():
        before = previous.get("environment", {}).get(name, value)
        if before != value:
            raise ValueError(
                f"{name} must be {before!r}, as in the run in {options.out}, got {value!r}: give "
                "the data of that run to resume it, or choose another --out."
            )
    return options, task, data


def merge_saved_options(options: Options, saved: dict[str, Any]) -> Options:
    """Returns the options of a run that is resumed, with the number of nodes at its start."""
    for name, value in options.settings.items():
        if saved.get(name, value) != value:
            raise ValueError(
                f"{option_name(name)} must be {saved[name]}, as in the run in {options.out}, got "
                f"{value}: keep it to resume that run, or choose another --out."
            )
    return dataclasses.replace(options, nodes=saved.get("nodes", options.nodes))
