"""The API reference: every public name has an entry, and an example."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import gossipjax as gx

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"currentmodule:: (\S+)\n(.*?)```", re.DOTALL)
ENTRY = re.compile(r"\.\. (?:auto(?:function|class|data)|py:data):: (\S+)")
MODULES = ["", *(name for name in gx.__all__ if isinstance(getattr(gx, name), ModuleType))]
FOR_THE_LIBRARY = {  # what its modules share, and a user does not need
    *("MIN_BITS", "WireLike", "as_key", "concatenate_in_place", "decode", "decode_each", "encode"),
    *("encode_each", "encode_pieces", "fold_in", "is_cpu_over_processes", "is_narrower"),
    *("is_real_float", "leaf_keys", "make_seed_key", "require_codec", "require_key"),
    *("require_seed", "split_by_size", "on_axis", "require_inside"),
}


def read_entries() -> dict[str, set[str]]:
    """The names of the pages, by module."""
    entries: dict[str, set[str]] = {}
    for path in sorted((DOCS / "api").glob("*.md")):
        text = path.read_text()
        for module, block in BLOCK.findall(text):
            entries.setdefault(module, set()).update(
                name.rpartition(".")[2] for name in ENTRY.findall(block)
            )
            entries[module] |= {name.rpartition(".")[2] for name in ENTRY.findall(text)}
    return entries


ENTRIES = read_entries()


def list_public(module: ModuleType) -> list[str]:
    """What a module offers: its `__all__`, or what is defined in it."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return [name for name in names if not isinstance(getattr(module, name), ModuleType)]
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]


@pytest.mark.parametrize("name", [*MODULES, "checkpoint"])
def test_every_public_name_has_an_entry_with_an_example(name: str):
    path = f"gossipjax.{name}".rstrip(".")
    module = importlib.import_module(path)
    everywhere = set().union(*ENTRIES.values())
    for public in set(list_public(module)) - FOR_THE_LIBRARY:
        assert public in ENTRIES.get(path, set()) or public in everywhere, public
        value = getattr(module, public)
        if callable(value):
            assert ">>>" in (inspect.getdoc(value) or ""), f"{path}.{public} has no example"


def test_pages_are_reached_from_the_index():
    """Each page is in a toctree, and every figure of a page says what it shows."""
    listed = set()
    for path in DOCS.rglob("*.md"):
        for block in re.findall(r"```\{toctree\}\n(.*?)```", path.read_text(), re.DOTALL):
            for line in block.splitlines():
                if line and not line.startswith(":"):
                    listed |= {found.resolve() for found in path.parent.glob(f"{line}.md")}
    pages = {path.resolve() for path in DOCS.rglob("*.md") if "_build" not in path.parts}
    assert pages - listed == {(DOCS / "index.md").resolve()}
    for path in pages:
        for text in re.findall(r"!\[(.*?)\]\(", path.read_text()):
            assert text.strip(), path
