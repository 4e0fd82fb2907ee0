"""The folder of a call: what the program wrote, all that it printed, and how it ended."""

import contextlib
import json
import shutil
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.results import Record, create_run_dir
from experiments.results.records import NUMBER, TEXT, TEXTS, parse_object, read_text
from experiments.runner.run import Result, Run

STATE = "run.json"
LOG = "output.log"
DIVERGED = "must be finite, got"  # what the programs say of a loss that is not
MAX_LOG_LINES = 8  # of a run that failed, in messages
FIELDS = {"command": TEXTS, "status": TEXT, "error": TEXT, "seconds": NUMBER}


def make_folder(program: str, out: Path | None, overwrite: bool, name: str) -> Path:
    """Makes the folder of a program that runs others, with one for its runs, `OUT/NAME`.

    A later call knows it by that, and goes on.

    Raises:
      ValueError: if the folder holds another run, or its folder of runs those of other programs.
      OSError: if the folder cannot be made.
    """
    if out is not None:
        require_runs(out / name, overwrite)
        if overwrite:
            shutil.rmtree(out / name, ignore_errors=True)
    is_new = out is None or not (out / name).exists()
    out = create_run_dir(program, out, overwrite, resume=not is_new)
    (out / name).mkdir(exist_ok=not is_new)
    metrics = out / "metrics.jsonl"  # made for a run; its lines are in the runs' folders
    if not metrics.read_text():
        metrics.unlink()
    return out


def require_runs(folder: Path, is_removed: bool) -> None:
    """Raises `ValueError` if a folder of runs holds what this program has not made.

    Folders that other programs leave under `runs/` have no `run.json`.

    Args:
      folder: that of all runs.
      is_removed: whether it will be removed; else single files in it do no harm.
    """
    if not folder.exists():
        return
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        is_harmless = path.is_file() and path != folder and not is_removed
        if not is_run(path) and not is_harmless:
            raise ValueError(
                f"--out must be a folder with nothing but its own runs in {folder.name}/, got "
                f"{path}: move it, or choose another --out."
            )


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run, or empty."""
    if not path.is_dir():
        return False
    names = {inner.name for inner in path.iterdir()}
    return not names or not names.isdisjoint({STATE, LOG})


def empty_folder(folder: Path) -> None:
    """Makes the folder of a run anew.

    Raises:
      ValueError: if it exists and is none of a run; then nothing is removed.
    """
    if folder.exists() and not is_run(folder):
        raise ValueError(f"{folder} must be the folder of a run, got another: move it away.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def make_command(run: Run) -> list[str]:
    """Returns what identifies a call: program and arguments."""
    return [run.program, *run.arguments]


def read_state(folder: Path) -> Record | None:
    """Returns how the run of a folder ended; None if it has not, or if the file is damaged."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return parse_object(read_text(folder / STATE), f"{folder / STATE}", FIELDS)
    return None


def read_result(state: Record, folder: Path) -> Result | None:
    """Returns how a run ended in an earlier call; None if it failed, or has lost its summary."""
    if state["status"] == "finished":
        summary = read_summary(folder)
        if not summary:
            return None
    elif state["status"] == "diverged":
        summary = {}
    else:
        return None
    return Result(
        status=state["status"],
        folder=folder,
        summary=summary,
        error=state["error"],
        seconds=state["seconds"],
        code=state.get("code", ""),
        machine=state.get("machine", ""),
    )


def write_state(run: Run, result: Result, folder: Path) -> None:
    """Writes how a run ended."""
    state = {
        "command": make_command(run),
        "status": result.status,
        "error": result.error,
        "seconds": result.seconds,
        "code": result.code,
        "machine": result.machine,
    }
    temporary = folder / "run.new"
    temporary.write_text(json.dumps(state, indent=2))
    temporary.replace(folder / STATE)


def read_summary(folder: Path) -> Record:
    """Returns `summary.json` of a run; `{}` if there is none that has measured something."""
    path = folder / "summary.json"
    with contextlib.suppress(FileNotFoundError, ValueError):
        summary = parse_object(read_text(path), f"{path}", {})
        return summary if summary.get("runs", True) else {}
    return {}


def judge(folder: Path, status: int, seconds: float) -> Result:
    """Returns how a process ended, by its exit status and its output."""
    summary = read_summary(folder) if status == 0 else {}
    if summary:
        return Result(status="finished", folder=folder, summary=summary, seconds=seconds)
    with (folder / LOG).open(errors="replace") as log:
        lines = [line.rstrip() for line in deque(log, MAX_LOG_LINES) if line.strip()]
    error = "\n".join(lines) or f"it ended with status {status}"
    has_diverged = bool(lines) and DIVERGED in " ".join(lines)
    status_name = "diverged" if has_diverged else "failed"
    return Result(status=status_name, folder=folder, error=error, seconds=seconds)


def take_runs(runs: Iterable[Run], sources: Sequence[Path], folder: Path) -> list[str]:
    """Copies the runs that have ended in other folders by the same calls; returns their names.

    Args:
      runs: those that are needed.
      sources: folders of runs; the first that has a call counts.
      folder: of the runs; what has ended there stays.
    """
    found: dict[tuple[str, ...], Path] = {}
    for path in [path for source in sources for path in sorted(source.iterdir())]:
        state = read_state(path)
        if state is not None and read_result(state, path) is not None:
            found.setdefault(tuple(state["command"]), path)
    taken = []
    for run in runs:
        target = folder / run.name
        state = read_state(target)
        if state is not None and state["command"] == make_command(run):
            continue
        path = found.get((run.program, *run.arguments))
        if path is not None and path.resolve() != target.resolve():
            empty_folder(target)
            shutil.copytree(path, target, dirs_exist_ok=True)
            taken.append(run.name)
    return taken
