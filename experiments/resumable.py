"""The files of an experiment that is resumed: checked before anything is loaded or removed."""

import json
from pathlib import Path
from typing import Any


def require_resumable(out: Path, summary: Any) -> None:
    """Raises `ValueError` unless an experiment can go on from these files, which people may edit.

    Args:
      out: the folder.
      summary: the content of its `summary.json`; `{}` if there is none.
    """
    path = out / "summary.json"
    _require(isinstance(summary, dict), path, "an object", summary)
    options = summary.get("options", {})
    environment = summary.get("environment", {})
    runs = summary.get("runs", [])
    _require(isinstance(options, dict), f"{path}, options", "an object", options)
    nodes = options.get("nodes", 1)
    _require(type(nodes) is int and nodes >= 1, f"{path}, options.nodes", "an integer >= 1", nodes)
    _require(isinstance(environment, dict), f"{path}, environment", "an object", environment)
    resumed = environment.get("resumed", [])
    are_texts = isinstance(resumed, list) and all(isinstance(text, str) for text in resumed)
    _require(are_texts, f"{path}, environment.resumed", "a list of texts", resumed)
    _require(isinstance(runs, list), f"{path}, runs", "a list", runs)
    for index, run in enumerate(runs):
        is_named = isinstance(run, dict) and isinstance(run.get("run"), str)
        _require(is_named, f"{path}, runs[{index}]", "an object with the name of its `run`", run)
    _require_metrics(out / "metrics.jsonl")


def _require_metrics(path: Path) -> None:
    if not path.exists():
        return
    try:
        lines = path.read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8, got {error}; pass --overwrite.") from error
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
        except ValueError:
            continue  # cut short when the program was stopped: it is removed
        is_placed = isinstance(line, dict) and isinstance(line.get("run"), str)
        is_placed = is_placed and type(line.get("step")) is int
        _require(is_placed, f"{path}, line {number}", "an object with its `run` and `step`", line)


def _require(is_right: bool, where: Path | str, kind: str, value: Any) -> None:
    if not is_right:
        raise ValueError(f"{where} must be {kind}, got {_shorten(value)}; pass --overwrite.")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} ..."
