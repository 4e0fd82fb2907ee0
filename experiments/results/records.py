"""Checks of the JSON files of results: fields that must be there, and what they must be."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

WAY_OUT = "restore the file, or run again into another folder (--overwrite replaces results)"
MAX_SHOWN = 60  # characters of a wrong value in a message


class Kind(NamedTuple):
    """What the value of a field must be.

    Attributes:
      description: for messages, as in "seconds must be a finite number".
      is_met: whether a value is so.
    """

    description: str
    is_met: Callable[[object], bool]


def is_number(value: object) -> bool:
    """Whether a value of JSON is a finite number; `json` reads NaN and Infinity, too."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < math.inf


def is_list_of(is_met: Callable[[object], bool]) -> Callable[[object], bool]:
    """Returns whether a value is a list of such values."""
    return lambda value: isinstance(value, list) and all(map(is_met, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


NUMBER = Kind("a finite number", is_number)
OPTIONAL_NUMBER = Kind("a finite number or null", lambda value: value is None or is_number(value))
NUMBERS = Kind(
    "a list of one or several finite numbers",
    lambda value: bool(value) and is_list_of(is_number)(value),
)
COUNT = Kind("an integer >= 0", _is_count)
OPTIONAL_NUMBERS = Kind(
    f"{NUMBERS.description}, or null", lambda value: value is None or NUMBERS.is_met(value)
)
OPTIONAL_COUNT = Kind("an integer >= 0 or null", lambda value: value is None or _is_count(value))
TEXT = Kind("text", _is_text)
TEXTS = Kind("a list of texts", is_list_of(_is_text))
OBJECT = Kind("an object", _is_object)
LIST = Kind("a list", lambda value: isinstance(value, list))


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
