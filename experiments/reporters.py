"""The lines of a run for TensorBoard or Weights & Biases, beside `metrics.jsonl`.

Both are optional packages, imported when they are asked for.
"""

import contextlib
import importlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from experiments.program import ProgramError
from experiments.results import Record

ReportTo = Literal["none", "tensorboard", "wandb"]

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
OFFLINE_MODES = ("offline", "dryrun", "disabled")
PROJECT = "gossipjax"


class Reporter:
    """Where the lines of one run go; this one takes them and does nothing."""

    def start(self, step: int) -> str | None:
        """Starts, or goes on after `step`; returns a message for the user, if there is one."""
        return None

    def add(self, line: Record) -> None:
        """Adds a line of `metrics.jsonl`."""

    def close(self, has_failed: bool) -> None:
        """Writes what is not written yet. Called once, also if nothing was started."""


def import_package(report_to: ReportTo) -> Any:
    """Returns the package that a choice needs; None for `none`.

    Raises:
      ValueError: if it is not installed; the message says how to do that.
    """
    if report_to == "none":
        return None
    name = PACKAGES[report_to]
    with contextlib.suppress(ImportError):
        package = importlib.import_module(name)
        if package.__file__ is not None:  # a folder wandb/, which it writes, is importable, too
            return package
    raise ValueError(
        f"--report-to {report_to} needs the package {name}, got none: run `pip install {name}`, or "
        "leave the option out."
    )


@contextlib.contextmanager
def open_reporter(
    report_to: ReportTo, out: Path, name: str, folder_name: str, options: Record
) -> Iterator[Reporter]:
    """Opens the reporter of one run, and closes it, also after an error.

    `out` is the folder of the results; `folder_name` is the `name` of the run in letters that a
    folder can have.
    """
    package = import_package(report_to)
    reporter = Reporter()
    if report_to == "tensorboard":
        reporter = TensorboardReporter(package, out / "tensorboard" / folder_name)
    elif report_to == "wandb":
        reporter = WandbReporter(package, out, name, folder_name, options)
    has_failed = True
    try:
        yield reporter
        has_failed = False
    finally:
        reporter.close(has_failed)


class TensorboardReporter(Reporter):
    """Event files in a folder of the run. Lines that a resumed run repeats replace the old ones."""

    def __init__(self, package: Any, folder: Path):
        self._package = package
        self._folder = folder
        self._writer: Any = None

    def start(self, step: int) -> str | None:
        files = len(list(self._folder.glob("events.*")))
        # Files are named by their second: one that is begun in the same would replace the other.
        self._writer = self._package.SummaryWriter(
            str(self._folder),
            purge_step=step + 1 if files else None,
            filename_suffix=f".{files:05}",
        )
        return None

    def add(self, line: Record) -> None:
        for name, value in select_numbers(line).items():
            self._writer.add_scalar(name, value, line["step"])
        if samples := line.get("samples"):
            self._writer.add_text("samples", "\n\n".join(samples), line["step"])

    def close(self, has_failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbReporter(Reporter):
    """A run of Weights & Biases in a group for the experiment; one that is resumed goes on.

    Without a login, and without `WANDB_MODE`, it is written offline. It never asks for a login.
    """

    def __init__(self, package: Any, out: Path, name: str, folder_name: str, options: Record):
        self._package = package
        self._out = out
        self._name = name
        self._folder_name = folder_name
        self._options = options
        self._run: Any = None

    def start(self, step: int) -> str | None:
        folder = self._out / "wandb"
        try:
            mode = self._choose_mode()
            self._run = self._package.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                group=self._out.name,
                name=self._name,
                id=read_or_make_id(folder / f"{self._folder_name}.id"),
                resume="allow",
                config=self._options,
                dir=str(self._out),
                mode=mode,
                settings=self._package.Settings(console="off", silent=True),
            )
            self._run.define_metric("*", step_metric="step")
        except self._package.Error as error:
            reason = " ".join(str(error).split())
            raise ProgramError(
                f"--report-to wandb must reach its server, got: {reason} Set WANDB_MODE=offline to "
                "upload later."
            ) from error
        if mode not in OFFLINE_MODES:
            return None
        return f"wandb: {mode}, in {folder}; `wandb sync FOLDER` uploads a run"

    def _choose_mode(self) -> str:
        mode = os.environ.get("WANDB_MODE")
        if mode in OFFLINE_MODES or self._package.login(prompt=False):
            return mode or "online"
        if mode is None:
            return "offline"
        raise ProgramError(
            f"--report-to wandb needs a login with WANDB_MODE={mode}, got none: run `wandb login`, "
            "or set WANDB_MODE=offline."
        )

    def add(self, line: Record) -> None:
        self._run.log(select_numbers(line) | {"step": line["step"]})

    def close(self, has_failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(has_failed))


def select_numbers(line: Record) -> dict[str, float]:
    """Returns the metrics of a line, without its step.

    >>> select_numbers({"run": "sgp", "step": 4, "loss": 0.5, "samples": ["a"]})
    {'loss': 0.5}
    """
    numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if name != "step"}


def read_or_make_id(path: Path) -> str:
    """Returns the id in a file, where a resumed run finds it; a new one if there is no file."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex)
    return path.read_text()
