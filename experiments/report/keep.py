"""Runs of a report as small files, from which it is made again without training.

A file holds how a run ended, its summary, and its metrics with five digits. Folders of data sets
have the names of their options in it, so that nothing in it belongs to one machine.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.report.chapters import RUNS
from experiments.report.section import DATA, Scale
from experiments.results import read_lines
from experiments.runner import STATE, Run, read_result, read_state

KEPT = Path(__file__).with_name("kept")
KEPT_RUNS = "runs"  # in it, a file for each run
DIGITS = 5
UNUSED = ("environment",)  # of a summary: the run's state says it
UNDRAWN = ("seconds", "examples_per_second", "learning_rate", "epoch")  # of a line of the metrics


def name_data() -> Scale:
    """Returns the full scale, in which folders of data sets have the names of their options."""
    return dataclasses.replace(Scale(), **{name: Path(name) for name in DATA})


def keep_runs(runs: Iterable[Run], report: Path, scale: Scale, kept: Path) -> None:
    """Writes the finished runs of the folder of a report into that of the kept files.

    Folders of data sets, which `scale` has, lose their paths.
    """
    folder = kept / KEPT_RUNS
    folder.mkdir(exist_ok=True, parents=True)
    names = {f"{getattr(scale, name)}": name for name in DATA if getattr(scale, name)}
    for run in runs:
        source = report / RUNS / run.name
        state = read_state(source)
        result = None if state is None else read_result(state, source)
        if state is None or result is None:
            continue
        summary = {name: part for name, part in result.summary.items() if name not in UNUSED}
        path = source / "metrics.jsonl"
        lines = read_lines(path) if path.is_file() else []
        record = {
            "state": remove_paths(state, names),
            "summary": round_numbers(remove_paths(summary, names)),
            "metrics": [
                {name: round_numbers(x) for name, x in line.items() if name not in UNDRAWN}
                for line in lines
            ],
        }
        parts = (f'"{name}": {json.dumps(part)}' for name, part in record.items())  # a line each
        (folder / f"{run.name}.json").write_text("{" + ",\n".join(parts) + "}\n")


def remove_paths(value: Any, names: Mapping[str, str]) -> Any:
    """Returns a value of JSON without paths: `names` has other texts for some of them.

    Of an error, only the last line is left.

    >>> remove_paths({"data": ["/data/a", "b"], "error": "in /x:\\nno luck"}, {"/data/a": "a"})
    {'data': ['a', 'b'], 'error': 'no luck'}
    """
    if isinstance(value, Mapping):
        return {name: remove_paths(part, names) for name, part in value.items()}
    if isinstance(value, list):
        return [remove_paths(part, names) for part in value]
    if not isinstance(value, str):
        return value
    text = names.get(value, value).rpartition("\n")[2]
    return "" if text.startswith("/") else text


def unpack_runs(report: Path, kept: Path) -> None:
    """Makes the folders of runs of the files, as their programs left them but for plots."""
    for path in sorted((kept / KEPT_RUNS).glob("*.json")):
        record = json.loads(path.read_text())
        target = report / RUNS / path.stem
        target.mkdir(parents=True, exist_ok=True)
        (target / STATE).write_text(json.dumps(record["state"]))
        (target / "summary.json").write_text(json.dumps(record["summary"]))
        text = "".join(f"{json.dumps(line)}\n" for line in record["metrics"])
        (target / "metrics.jsonl").write_text(text)


def round_numbers(value: Any) -> Any:
    """Returns a value of JSON whose numbers have five digits.

    >>> round_numbers({"loss": 0.123456789, "steps": 1234567, "rows": [1 / 3]})
    {'loss': 0.12346, 'steps': 1234567, 'rows': [0.33333]}
    """
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: round_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [round_numbers(part) for part in value]
    return value
