"""How `flax.serialization` writes data of a state that are not arrays: as text."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, TypeVar

from gossipjax.topology.schedule import Schedule

T = TypeVar("T")

_kinds: list[type] = []  # those that flax was not told of yet


def written_by_flax(kind: type[T]) -> type[T]:
    """Marks a dataclass that is part of states; only its field `value` may contain arrays."""
    _kinds.append(kind)
    return kind


def register_with_flax() -> None:
    """Tells `flax.serialization` how to write these kinds, if the program has imported it.

    Functions that make a state call this one, because flax may not be installed.
    """
    flax = sys.modules.get("flax.serialization")
    if flax is None:
        return

    def write(data: Any) -> Any:
        arrays = {"value": flax.to_state_dict(data.value)} if hasattr(data, "value") else {}
        return {"static": _describe_static(data), **arrays}

    def read(data: Any, saved: Any) -> Any:
        if saved["static"] != _describe_static(data):
            raise ValueError(
                f"the state must be one of the same chain, with {_describe_static(data)}, got one "
                f"that was saved with {saved['static']}: restore it into tx.init(params) of that "
                "chain."
            )
        if "value" not in saved:
            return data
        value = flax.from_state_dict(data.value, saved["value"], name="value")
        return dataclasses.replace(data, value=value)

    while _kinds:
        flax.register_serialization_state(_kinds.pop(), write, read)


def _describe_static(data: Any) -> str:
    """Describes the static fields of a dataclass as text, which a restored state must equal.

    The field `value` contains arrays, which are saved by themselves. Schedules are left out,
    because a run may go on with another schedule.
    """
    names = [f.name for f in dataclasses.fields(data) if f.compare and f.name != "value"]
    fields = {name: getattr(data, name) for name in names}
    texts = [
        f"{name}={_describe_static(value) if dataclasses.is_dataclass(value) else value}"
        for name, value in fields.items()
        if not isinstance(value, Schedule)
    ]
    return f"{type(data).__name__}({', '.join(texts)})"
