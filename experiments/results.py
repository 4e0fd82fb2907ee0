"""Results of a program: their folder and files, the checks of files that are read again."""

import contextlib
import datetime
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import gossipjax as gx

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
MAX_SHOWN = 60  # characters of a wrong value in a message


class Kind(NamedTuple):
    """What the value of a field must be."""

    description: str  # for messages, as in "seconds must be a finite number"
    is_met: Callable[[Any], bool]


def is_number(value: object) -> bool:
    """Whether a value of JSON is a finite number; `json` reads NaN and Infinity, too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < math.inf


def optional(kind: Kind) -> Kind:
    """Returns the kind of values that may be null, too."""
    return Kind(f"{kind.description} or null", lambda value: value is None or kind.is_met(value))


NUMBER = Kind("a finite number", is_number)
COUNT = Kind("an integer >= 0", lambda value: type(value) is int and value >= 0)
TEXT = Kind("text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
TEXTS = Kind("a list of texts", lambda value: LIST.is_met(value) and all(map(TEXT.is_met, value)))
NUMBERS = Kind(
    "a list of one or several finite numbers",
    lambda value: LIST.is_met(value) and bool(value) and all(map(is_number, value)),
)
OPTIONAL_NUMBER = optional(NUMBER)

RUN_FIELDS = {
    "run": TEXT,
    "algorithm": TEXT,
    "topology": TEXT,
    "nodes": COUNT,
    "seconds_per_step": NUMBER,
    "examples_per_second": NUMBER,
    AFTER_MIXING: NUMBER,
}
LINE_FIELDS = {"run": TEXT, "step": COUNT, "epoch": NUMBER, "seconds": NUMBER}
TRAINING_FIELDS = {
    LOSS: NUMBER,
    BEFORE_MIXING: OPTIONAL_NUMBER,  # not known of asynchronous nodes
    AFTER_MIXING: OPTIONAL_NUMBER,
}


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


def read_text(path: Path) -> str:
    """Returns the content of a file of results.

    Raises:
      FileNotFoundError: if there is no such file.
      ValueError: if it is not text in UTF-8.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"no {path.name} in {path.parent}: it must be the folder of a run, got one without "
            "that file."
        )
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, got {error}: {WAY_OUT}.") from error


def parse_object(text: str, where: str, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Returns a JSON object that has these fields; `where` is its place, for messages.

    Raises:
      ValueError: if it is none; the message names the place, the field and the value.

    >>> parse_object('{"step": "two"}', "line 1", {"step": COUNT})
    Traceback (most recent call last):
    ValueError: line 1: step must be an integer >= 0, got "two": restore the file, or run again \
into another folder (--overwrite replaces results).
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON, got {error}: {WAY_OUT}.") from error
    require_fields(value, where, kinds)
    return value


def require_fields(value: object, where: str, kinds: Mapping[str, Kind]) -> None:
    """Raises `ValueError` unless `value` is an object with these fields."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, got {_show(value)}: {WAY_OUT}.")
    if missing := sorted(kinds.keys() - value.keys()):
        raise ValueError(
            f"{where} must have {', '.join(missing)}, got an object without: {WAY_OUT}."
        )
    for name, kind in kinds.items():
        if not kind.is_met(value[name]):
            raise ValueError(
                f"{where}: {name} must be {kind.description}, got {_show(value[name])}: {WAY_OUT}."
            )


def _show(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."


def read_summary(out: Path | None) -> Record:
    """Returns the content of `summary.json` in `out`; `{}` if there is no such file.

    Raises:
      ValueError: if the file, or `metrics.jsonl` beside it, was not written by such a program.
    """
    if out is None:
        return {}
    path = out / "summary.json"
    metrics = out / "metrics.jsonl"
    if metrics.exists():
        for number, text in enumerate(read_text(metrics).splitlines(), start=1):
            with contextlib.suppress(json.JSONDecodeError):  # the last line may be cut short
                require_line(json.loads(text), f"{metrics}, line {number}")
    if not path.exists():
        return {}
    summary = parse_object(
        read_text(path), f"{path}", {"options": OBJECT, "environment": OBJECT, "runs": LIST}
    )
    resumed = {"resumed": summary["environment"].get("resumed", [])}
    require_fields(resumed, f"{path}, environment", {"resumed": TEXTS})
    require_runs(summary["runs"], path)
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
    temporary = out / "summary.new"
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
      ValueError: if a file is not JSON, or lacks a field or a run; the message says where.
    """
    summary = folder / "summary.json"
    metrics = folder / "metrics.jsonl"
    text_of_summary = read_text(summary)
    text_of_metrics = read_text(metrics)
    runs = parse_object(text_of_summary, f"{summary}", {"runs": LIST})["runs"]
    require_runs(runs, summary)
    lines: dict[str, list[Record]] = {run["run"]: [] for run in runs}
    for number, text in enumerate(text_of_metrics.splitlines(), start=1):
        where = f"{metrics}, line {number}"
        line = parse_object(text, where, LINE_FIELDS)
        require_line(line, where)
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


def require_runs(runs: Sequence[Record], path: Path) -> None:
    """Raises `ValueError` unless these are the runs of a summary, each with another name."""
    for index, run in enumerate(runs):
        require_fields(run, f"{path}, runs[{index}]", RUN_FIELDS)
    test_fields: dict[str, Kind] = {}
    for metric in find_metrics(runs):
        average, nodes = metric_fields(metric)
        test_fields |= {average: NUMBER, nodes: optional(NUMBERS)}
    names = set()
    for index, run in enumerate(runs):
        require_fields(run, f"{path}, runs[{index}]", test_fields)
        if run["run"] in names:
            raise ValueError(
                f"{path}: names of runs must differ, got {run['run']!r} twice: {WAY_OUT}."
            )
        names.add(run["run"])


def require_line(line: object, where: str) -> None:
    """Raises `ValueError` unless this is a line of `metrics.jsonl`."""
    require_fields(line, where, LINE_FIELDS)
    assert isinstance(line, dict)
    metrics = find_metrics([line])
    evaluated = {metric_fields(metric)[0]: NUMBER for metric in metrics}
    require_fields(line, where, evaluated if metrics else TRAINING_FIELDS)


def group_by_label(runs: Sequence[Record]) -> dict[str, list[Record]]:
    """Groups runs by algorithm, topology and number of nodes: those of a group differ by seed."""
    groups: dict[str, list[Record]] = {}
    for run in runs:
        label = f"{run['algorithm']}, {run['topology']}, {run['nodes']} nodes"
        groups.setdefault(label, []).append(run)
    return groups
