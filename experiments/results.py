"""The folder that a program writes its results into, and the bar that it shows meanwhile."""

import contextlib
import datetime
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import gossipjax as gx

RESULTS = ("metrics.jsonl", "summary.json", "checkpoints")


def claim_folder(program: str, out: Path | None, overwrite: bool, resume: bool = False) -> Path:
    """Makes the folder for the results, with an empty `metrics.jsonl`: `out`, or a new one named
    by date, time and process. With `resume`, what is in it stays; else old checkpoints go, too.

    Raises:
      ValueError: if the folder holds another run and `overwrite` is false.
      OSError: if the folder cannot be made or written to.
    """
    if out is None:
        out = Path("runs") / f"{program}-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    found = [name for name in RESULTS if (out / name).exists()]
    if found and not overwrite and not resume:
        raise ValueError(
            f"{out} holds another run ({', '.join(found)}): choose another --out, or pass "
            "--overwrite to replace it."
        )
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; it has to be a folder.")
    out.mkdir(parents=True, exist_ok=True)
    if found and resume:
        (out / "metrics.jsonl").touch()
        return out
    for old in [out / name for name in found] + (list(out.glob("*.png")) if found else []):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    # Claimed here and now: two programs that start together cannot both make it.
    (out / "metrics.jsonl").touch(exist_ok=False)
    return out


def read_summary(out: Path | None) -> dict[str, Any]:
    """What `summary.json` holds; nothing if there is none.

    Raises:
      ValueError: if it is no JSON.
    """
    found = out and out / "summary.json"
    if not found or not found.exists():
        return {}
    try:
        return json.loads(found.read_text())
    except ValueError as error:
        raise ValueError(f"{found} cannot be read ({error}): take --overwrite.") from error


def write_summary(
    out: Path, options: dict[str, Any], environment: dict[str, Any], runs: list[dict[str, Any]]
) -> None:
    """Writes `summary.json`: the options, what the program ran on and the finished runs."""
    versions = {"jax": jax.__version__, "gossipjax": gx.__version__}
    summary = {"options": options, "environment": versions | environment, "runs": runs}
    text = json.dumps(summary, indent=2, default=str, allow_nan=False)
    written = out / "summary.new"
    written.write_text(f"{text}\n")
    written.replace(out / "summary.json")  # all of it or nothing, when the program is ended


def progress_bar(console: Console) -> Progress:
    """A bar per run with a free `status` text; it stays when the run has ended."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
    )


def keep_lines(metrics: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Leaves those lines of `metrics.jsonl` that `keep` says; one that was cut short goes, too."""
    kept = []
    for text in metrics.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            if keep(json.loads(text)):
                kept.append(f"{text}\n")
    written = metrics.with_suffix(".new")
    written.write_text("".join(kept))
    written.replace(metrics)
