"""The results of a program: their folder, their files, and a reporter to TensorBoard."""

import contextlib
import datetime
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import gossipjax as gx

Record = dict[str, Any]
"""A JSON object: a line of `metrics.jsonl`, or an entry of a list in `summary.json`."""

Curves = dict[str, list[list[Record]]]
"""The lines of the runs of each label (algorithm, topology, nodes), by seed."""

LOSS = "loss"
BEFORE_MIXING = "consensus_distance_before_mixing"
AFTER_MIXING = "consensus_distance"
AVERAGE_MODEL = re.compile(r"(?:test_(\w+)|(valid_\w+))_average_model")
TEXT_FOLDER = "texts"
RESULT_NAMES = (
    *("metrics.jsonl", "summary.json", "checkpoints", "nodes", TEXT_FOLDER, "tensorboard"),
)
WAY_OUT = "restore the file, or run again into another folder (--overwrite replaces results)"

ReportTo = Literal["none", "tensorboard"]


def create_run_dir(program: str, out: Path | None, overwrite: bool, resume: bool = False) -> Path:
    """Creates the folder for the results, with an empty `metrics.jsonl`.

    If `out` is None, the folder is a new one in `runs/`, named by program, date, time and process.
    With `overwrite`, results of another run are removed from the folder; with `resume` they stay.
    Raises `ValueError` if the folder contains another run, and neither is true.
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
    """Returns the content of a JSON file of results; raises `ValueError` if it is not JSON."""
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
    """Returns the content of `summary.json` in `out`; `{}` if there is no such file."""
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
    """Writes `summary.json` whole, or not at all if the program is stopped meanwhile.

    The versions of JAX and gossipjax are added to `environment`, and `more` to the top level.
    """
    versions = {"jax": jax.__version__, "gossipjax": gx.__version__}
    summary = {"options": options, "environment": versions | environment, "runs": runs, **more}
    text = json.dumps(summary, indent=2, default=str, allow_nan=False)
    replace_text(out / "summary.json", f"{text}\n")


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all, so that readers never see half of it."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def make_progress_bar(console: Console) -> Progress:
    """Makes a display with a bar per run, a `status` text, and the remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
    )


def read_lines(path: Path) -> list[Record]:
    """Returns the objects in a file of JSON lines, without a line that was cut short."""
    lines = []
    for text in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(text))
    return lines


def filter_metrics(metrics: Path, keep: Callable[[Record], bool]) -> None:
    """Removes from `metrics.jsonl` lines for which `keep` is false, and a line cut short."""
    lines = [f"{json.dumps(line)}\n" for line in read_lines(metrics) if keep(line)]
    replace_text(metrics, "".join(lines))


def find_metrics(records: Sequence[Record]) -> list[str]:
    """Returns the names of the test metrics in runs or lines, in order of appearance.

    >>> find_metrics([{"step": 8, "test_accuracy_average_model": 0.98}])
    ['accuracy']
    """
    matches = [AVERAGE_MODEL.fullmatch(field) for record in records for field in record]
    return list(dict.fromkeys(match[1] or match[2] for match in matches if match))


def metric_fields(metric: str) -> tuple[str, str]:
    """Returns the names of the fields for a metric of the average model, and of the nodes.

    >>> metric_fields("accuracy")
    ('test_accuracy_average_model', 'test_accuracy_nodes')
    >>> metric_fields("valid_loss")
    ('valid_loss_average_model', 'valid_loss_nodes')
    """
    name = metric if metric.startswith("valid_") else f"test_{metric}"
    return f"{name}_average_model", f"{name}_nodes"


def read_runs(folder: Path) -> tuple[list[Record], Curves]:
    """Returns the runs in a folder's `summary.json`, and the lines of `metrics.jsonl` by curve.

    Lines of a run that the summary does not list, because it was interrupted, are left out. Raises
    `ValueError`, which names the file, if a file was cut short or there is no run.
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
    """Groups runs by algorithm, topology and number of nodes; runs of a group differ by seed."""
    groups: dict[str, list[Record]] = {}
    for run in runs:
        label = f"{run['algorithm']}, {run['topology']}, {run['nodes']} nodes"
        groups.setdefault(label, []).append(run)
    return groups


# Methods whose defaults, as in their papers, differ in when models are mixed.
MIX_AFTER = ("sgp", "dpsgd-adapt-then-combine")
MIX_DURING = ("dpsgd", "sgp-cwa")


def describe_orders(algorithms: Iterable[str]) -> str:
    """Says which of these methods mix models after their step, if others mix them during it.

    >>> describe_orders(["dpsgd@torus", "sgp@ring", "allreduce"])
    'sgp mixes after the step, dpsgd while gradients are computed.'
    """
    names = {re.split("[/@]", algorithm)[0] for algorithm in algorithms}
    after, during = (sorted(names & {*group}) for group in (MIX_AFTER, MIX_DURING))
    if not after or not during:
        return ""
    verb = "mixes" if len(after) == 1 else "mix"
    return (
        f"{' and '.join(after)} {verb} after the step, {' and '.join(during)} while gradients are "
        "computed."
    )


def import_tensorboard() -> Any:
    """Returns the package that writes event files; raises `ValueError` if it is not installed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("tensorboardX")
    raise ValueError(
        "--report-to tensorboard needs the package tensorboardX, got none: run `pip install "
        "tensorboardX`, or leave the option out."
    )


class TensorboardReporter:
    """Writes event files into a folder. Lines that a resumed run repeats replace the old lines."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._writer: Any = None

    def start(self, step: int) -> None:
        """Starts the event files, or goes on after `step`."""
        files = len(list(self._folder.glob("events.*")))
        # Files are named by the second, so one of the same second would replace another.
        self._writer = import_tensorboard().SummaryWriter(
            str(self._folder),
            purge_step=step + 1 if files else None,
            filename_suffix=f".{files:05}",
        )

    def add(self, line: Record) -> None:
        """Adds a line of `metrics.jsonl`."""
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, line["step"])
        if samples := line.get("samples"):
            self._writer.add_text("samples", "\n\n".join(samples), line["step"])

    def close(self) -> None:
        """Writes the lines that are not written yet. Call `close` once, even without a `start`."""
        if self._writer is not None:
            self._writer.close()
