"""Lets `flax.serialization` save the static data in a state, such as specs and plans, as text."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, TypeVar

from gossipjax.topology.schedule import Schedule

T = TypeVar("T")
_unregistered: list[type] = []  # marked dataclasses that flax does not know yet


def written_by_flax(kind: type[T]) -> type[T]:
    """Marks a dataclass for `register_with_flax`; only its field `value` may contain arrays."""
    _unregistered.append(kind)
    return kind


def register_with_flax() -> None:
    """Tells `flax.serialization` how to save the marked dataclasses, if flax is imported.

    It is called when a state is made, since flax may be imported after gossipjax, or not at all.
    """
    flax = sys.modules.get("flax.serialization")
    if flax is None:
        return

    def write(data: Any) -> Any:
        value = {"value": flax.to_state_dict(data.value)} if hasattr(data, "value") else {}
        return {"static": _describe_static(data), **value}  # `read` compares the text

    def read(data: Any, saved: Any) -> Any:
        expected = _describe_static(data)
        if saved["static"] != expected:
            raise ValueError(
                f"the state must be one of the same chain, with {expected}, got one that was saved "
                f"with {saved['static']}: restore it into tx.init(params) of that chain."
            )
        if "value" not in saved:
            return data
        value = flax.from_state_dict(data.value, saved["value"], name="value")
        return dataclasses.replace(data, value=value)

    while _unregistered:
        flax.register_serialization_state(_unregistered.pop(), write, read)


def _describe_static(data: Any) -> str:
    """Describes the static fields of a dataclass as text, which a restored state must equal.

    The field `value` contains arrays, which are saved by themselves. Schedules are left out,
    because a run may go on with another schedule, and so are fields that `==` ignores.
    """
    names = [f.name for f in dataclasses.fields(data) if f.compare and f.name != "value"]
    fields = {name: getattr(data, name) for name in names}
    texts = [
        f"{name}={_describe_static(value) if dataclasses.is_dataclass(value) else value}"
        for name, value in fields.items()
        if not isinstance(value, Schedule)
    ]
    return f"{type(data).__name__}({', '.join(texts)})"
