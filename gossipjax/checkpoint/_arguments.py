"""Checks of what users give: folders, times, chains, and metadata that JSON can hold."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from gossipjax.topology.schedule import require_int

MAX_TIMEOUT = 10**9  # seconds: in milliseconds it is still an int64
MAX_STEP = 2**63 - 1
MAX_DEPTH = 100  # of metadata: deeper ones refer to themselves


def require_folder(folder: Any, what: str) -> Path:
    """Returns an absolute path; raises `ValueError` unless `folder` is a path that is not empty."""
    text = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"{what} must be the path of a folder, got {folder!r}.")
    return Path(text).resolve()


def require_bool(value: Any, what: str) -> bool:
    """Returns `value`; raises `ValueError` unless it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be True or False, got {value!r}.")
    return value


def require_step(step: Any) -> int:
    """Returns `step` as an int; raises `ValueError` unless it is an integer from 0 to 2^63 - 1."""
    number = require_int(step, "step", 0)
    if number > MAX_STEP:
        raise ValueError(f"step must be an integer <= {MAX_STEP}, got {number}.")
    return number


def require_timeout(timeout: Any) -> int:
    """Returns whole seconds, rounded up; raises `ValueError` unless `timeout` is positive.

    >>> require_timeout(0.5)
    1
    """
    is_number = isinstance(timeout, int | float | np.integer | np.floating)
    if not is_number or isinstance(timeout, bool) or not 0 < timeout <= MAX_TIMEOUT:
        raise ValueError(
            f"timeout must be a number of seconds > 0 and <= {MAX_TIMEOUT}, got {timeout!r}."
        )
    return math.ceil(float(timeout))


def require_make_tx(make_tx: Any) -> None:
    """Raises `ValueError` unless `make_tx` can be called."""
    if not callable(make_tx):
        raise ValueError(
            f"make_tx must be a function that makes the chain from metadata, got {make_tx!r}."
        )


def require_transform(tx: Any) -> None:
    """Raises `ValueError` unless `tx` has the functions of an optax transform."""
    if not all(callable(getattr(tx, name, None)) for name in ("init", "update")):
        raise ValueError(
            f"tx must be an optax transform, with init and update, got {tx!r}: build the chain of "
            "the new run."
        )


def require_metadata(metadata: Any) -> dict[str, Any]:
    """Returns `metadata`; raises unless JSON can hold it, and names the key where it cannot.

    Tuples come back as lists. NaN and infinities come back as they are, as Python's JSON has them.

    Raises:
      ValueError: if it is not a dict, a key of it is not a string, a value is of another type than
        those of JSON, or it contains itself.

    >>> require_metadata({"epoch": {"batches": [1, {2}]}})
    Traceback (most recent call last):
    ValueError: metadata['epoch']['batches'][1] must be what JSON can hold (a dict with strings as \
keys, list, str, int, float, bool or None), got a set: {2}.
    """
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata must be a dict, got {_describe(metadata)}.")
    _require_json(metadata, "metadata", 0)
    return metadata


def _require_json(value: Any, name: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"metadata must be nested at most {MAX_DEPTH} deep, got {name[:80]} ...")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(
                    f"the keys of {name} must be strings, which JSON can hold, got "
                    f"{_describe(key)}: it would come back as another key."
                )
            _require_json(item, f"{name}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _require_json(item, f"{name}[{i}]", depth + 1)
    elif value is not None and not isinstance(value, str | int | float):
        raise ValueError(
            f"{name} must be what JSON can hold (a dict with strings as keys, list, str, int, "
            f"float, bool or None), got {_describe(value)}."
        )


def _describe(value: Any) -> str:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:80]} ..."
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}: {shown}"
