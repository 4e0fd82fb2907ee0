"""Results of a program: their folder and files, and reporters.

A reporter takes the lines of `metrics.jsonl` to TensorBoard or Weights & Biases as well. Both are
optional packages, imported when they are asked for.
"""

import contextlib
import datetime
import importlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import gossipjax as gx
from experiments.program import ProgramError

Record = dict[str, Any]
"""One JSON object: a line of `metrics.jsonl`, or an entry of a list in `summary.json`."""

Curves = dict[str, list[list[Record]]]
"""Label (algorithm, topology, nodes) -> for each run of it, a seed each, its lines."""

LOSS = "loss"
BEFORE_MIXING = "consensus_distance_before_mixing"
AFTER_MIXING = "consensus_distance"
AVERAGE_MODEL = re.compile(r"(?:test_(\w+)|(valid_\w+))_average_model")
TEXT_FOLDER = "texts"
RESULT_NAMES = ("metrics.jsonl", "summary.json", "checkpoints", "nodes", TEXT_FOLDER)
RESULT_NAMES += ("tensorboard", "wandb")
WAY_OUT = "restore the file, or run again into another folder (--overwrite replaces results)"

ReportTo = Literal["none", "tensorboard", "wandb"]

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}
OFFLINE_MODES = ("offline", "dryrun", "disabled")
PROJECT = "gossipjax"


def create_run_dir(program: str, out: Path | None, overwrite: bool, resume: bool = False) -> Path:
    """Creates the folder for the results, with an empty `metrics.jsonl` in it.

    If `out` is None, it is a new one in `runs/`, named by program, date, time and process. With
    `overwrite`, the results of another run are removed from it; with `resume` they stay.

    Raises:
      ValueError: if the folder holds another run, and neither `overwrite` nor `resume` is true.
      OSError: if the folder cannot be created or written to.
    """
    if out is None:
        out = Path("runs") / f"{program}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    existing = [name for name in RESULT_NAMES if (out / name).exists()]
    if existing and not overwrite and not resume:
        raise ValueError(
            f"--out must be a folder without another run, got {out}, which holds another run "
            f"({', '.join(existing)}): choose another --out, or pass --overwrite to replace it."
        )
    if any(part.endswith(":") for part in out.parts[:1]):  # gs://..., which paths shorten to gs:/
        raise ValueError(f"--out must be a folder on a disk, got {out}: save there, and copy.")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out must be a folder, got the file {out}.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"--out must be a folder that can be made, got {out}: {error.strerror}. Choose another."
        ) from error
    if existing and resume:
        (out / "metrics.jsonl").touch()
        return out
    plots = list(out.glob("*.png")) if existing else []
    for path in [*(out / name for name in existing), *plots]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    # Fails if another program that started at the same time has just created the file.
    (out / "metrics.jsonl").touch(exist_ok=False)
    return out


def read_object(path: Path) -> Record:
    """Returns the content of a JSON file of results.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is not JSON: it was cut short.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"no {path.name} in {path.parent}: it must be the folder of a run, got one without "
            "that file."
        )
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, got {error}: {WAY_OUT}.") from error


def read_summary(out: Path | None) -> Record:
    """Returns the content of `summary.json` in `out`; `{}` if there is no such file.

    Raises:
      ValueError: if the file is not that of a run.
    """
    if out is None or not (out / "summary.json").exists():
        return {}
    summary = read_object(out / "summary.json")
    if missing := sorted({"options", "environment", "runs"} - summary.keys()):
        raise ValueError(
            f"{out / 'summary.json'} must have {', '.join(missing)}, got a file without: {WAY_OUT}."
        )
    return summary


def write_summary(
    out: Path, options: Record, environment: Record, runs: list[Record], **more: Any
) -> None:
    """Writes `summary.json`: the whole new file, or nothing if the program is stopped meanwhile.

    The versions of JAX and gossipjax are added to `environment`; `more` are top-level entries.
    """
    versions = {"jax": jax.__version__, "gossipjax": gx.__version__}
    summary = {"options": options, "environment": versions | environment, "runs": runs, **more}
    text = json.dumps(summary, indent=2, default=str, allow_nan=False)
    temporary = out / "summary.new"  # renamed when it is whole: readers never see half of it
    temporary.write_text(f"{text}\n")
    temporary.replace(out / "summary.json")


def make_progress_bar(console: Console) -> Progress:
    """Returns a display with a bar per run, a free `status` text, and the time that is left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
    )


def filter_metrics(metrics: Path, keep: Callable[[Record], bool]) -> None:
    """Removes the lines of `metrics.jsonl` for which `keep` is false, and a line cut short."""
    lines = []
    for text in metrics.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            if keep(json.loads(text)):
                lines.append(f"{text}\n")
    temporary = metrics.with_suffix(".new")
    temporary.write_text("".join(lines))
    temporary.replace(metrics)


def find_metrics(records: Sequence[Record]) -> list[str]:
    """Returns the names of the test metrics in runs or lines, in order of appearance.

    >>> find_metrics([{"step": 8, "test_accuracy_average_model": 0.98}])
    ['accuracy']
    """
    matches = [AVERAGE_MODEL.fullmatch(field) for record in records for field in record]
    return list(dict.fromkeys(match[1] or match[2] for match in matches if match))


def metric_fields(metric: str) -> tuple[str, str]:
    """Returns the names of a metric's fields: of the average model, and of the nodes.

    >>> metric_fields("accuracy")
    ('test_accuracy_average_model', 'test_accuracy_nodes')
    >>> metric_fields("valid_loss")
    ('valid_loss_average_model', 'valid_loss_nodes')
    """
    name = metric if metric.startswith("valid_") else f"test_{metric}"
    return f"{name}_average_model", f"{name}_nodes"


def read_runs(folder: Path) -> tuple[list[Record], Curves]:
    """Returns the runs in a folder's `summary.json`, and the lines of `metrics.jsonl` by curve.

    Lines of a run that the summary does not list, because it was interrupted, are left out.

    Raises:
      FileNotFoundError: if one of the two files is missing.
      ValueError: if a file was cut short, or there is no run; the message says where.
    """
    summary = folder / "summary.json"
    metrics = folder / "metrics.jsonl"
    runs = read_object(summary)["runs"]
    lines: dict[str, list[Record]] = {run["run"]: [] for run in runs}
    for number, text in enumerate(metrics.read_text("utf-8").splitlines(), start=1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(
                f"{metrics}, line {number} must be JSON, got {error}: {WAY_OUT}."
            ) from error
        lines.get(line["run"], []).append(line)
    if not runs:
        raise ValueError(f"{summary} must list one run or more, got none: let a run finish.")
    for name, lines_of_run in lines.items():
        if not any(LOSS in line for line in lines_of_run):
            raise ValueError(
                f"{metrics} must have a training line of run {name!r}, got none: {WAY_OUT}."
            )
    groups = group_by_label(runs).items()
    return runs, {label: [lines[run["run"]] for run in group] for label, group in groups}


def group_by_label(runs: Sequence[Record]) -> dict[str, list[Record]]:
    """Groups runs by algorithm, topology and number of nodes: those of a group differ by seed."""
    groups: dict[str, list[Record]] = {}
    for run in runs:
        label = f"{run['algorithm']}, {run['topology']}, {run['nodes']} nodes"
        groups.setdefault(label, []).append(run)
    return groups


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
