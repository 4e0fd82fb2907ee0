"""Every row of the tables ends in a clear error, and none in a trace of internals.

Clear: raised by a check of this project, it says what must be and what was got. A program ends with
its exit status, no traceback, and the error as the last line; its parser of the command line, which
is of another project, may use its own words.
"""

import importlib
import os
import re
import shlex
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tyro
from small import make_small

from bad_input import algorithms, checkpoint, cost_model, faults, nodes, programs
from bad_input.rows import Call, Line
from experiments.training import placement

ROOT = Path(__file__).parents[2]
SOURCES = [f"{ROOT / package}{os.sep}" for package in ("gossipjax", "experiments")]
TABLES = (algorithms, nodes, checkpoint, cost_model, faults)
CALLS = [
    pytest.param(call, id=f"{table.__name__} {number}: {call[1]}")
    for table in TABLES
    for number, call in enumerate(table.CALLS)
]


def import_main(name: str) -> Callable[[list[str]], object]:
    """The function that `python -m` calls."""
    package = "gossipjax" if name == "launch" else "experiments"
    module: Any = importlib.import_module(f"{package}.{name}")
    if hasattr(module, "__path__"):  # a folder
        module = importlib.import_module(f"{package}.{name}.__main__")
    if name == "plots":
        return lambda arguments: tyro.cli(module.main, args=arguments)
    return module.main


class StartedError(BaseException):
    """A row starts a process: it was accepted, and something real would run."""


def refuse_to_start(*args: object, **kwargs: object) -> NoReturn:
    """Stands for `subprocess.Popen`."""
    raise StartedError(f"a bad command line must start no process, got {args}.")


def require_no_type_checker(error: BaseException) -> None:
    """Users run the library without the tests' type checks: they may not be what refuses a row."""
    chain: list[BaseException] = [error]
    for one in chain:
        assert not type(one).__module__.startswith("beartype"), repr(one)
        chain += [cause for cause in (one.__cause__, one.__context__) if cause is not None]


def require_clear(message: str) -> None:
    """What must be, and what was got."""
    assert re.search(r"\bmust\b|\bneeds?\b", message), message
    assert re.search(r"\bgot\b|^error: no (topology|algorithm) is named", message), message


@pytest.mark.parametrize("row", CALLS)
def test_calls(row: Call):
    call, message = row
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        call()
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert last.filename.startswith(tuple(SOURCES)), f"{last.filename}: {raised.value}"
    require_no_type_checker(raised.value)
    require_clear(str(raised.value))


def flatten(text: str) -> str:
    """The words of a message, without the box that tyro draws around it."""
    return " ".join(re.sub("[│╭╮╰╯─]|-{4,}", " ", text).split())


@pytest.mark.parametrize("row", programs.ROWS, ids=lambda row: row.id)
def test_command_lines(
    row: Line,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    main = import_main(row.program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement, "request_cpu_devices", lambda count: None)  # the devices exist
    monkeypatch.setattr(subprocess, "Popen", refuse_to_start)
    make_small(monkeypatch.setattr, has_plots=True)
    row.write(tmp_path)
    arguments = shlex.split(row.arguments.replace("OUT", str(tmp_path)))
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == row.status
    check_printed(row, capsys.readouterr().err)


def check_printed(row: Line, printed: str) -> None:
    """One error at the end, in words: a line of the program, or the box of its parser."""
    assert "Traceback" not in printed
    message = flatten(printed)
    assert row.message in message
    if not row.parsed:
        require_clear(message[message.index("error: ") :] if "error: " in message else message)
    is_of_the_parser = "For full helptext" in message  # the last line in its frame
    assert is_of_the_parser or "error: " in printed.splitlines()[-1]
