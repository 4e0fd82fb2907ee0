"""The API reference: every public name has one page, and an example."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import gossipjax as gx

DOCS = Path(__file__).parent.parent / "docs"
# In the tables of docs/api, from which Sphinx makes a page for each name.
MODULE_OR_NAME = re.compile(r"^(?:\.\. currentmodule:: ([\w.]+)|   (\w+))$", re.MULTILINE)


def list_modules(module: ModuleType) -> Iterator[ModuleType]:
    """A module, and the modules that its `__all__` offers."""
    yield module
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield from list_modules(value)


MODULES = [*list_modules(gx)]
assert len(MODULES) > 8


def list_public(module: ModuleType) -> dict[str, object]:
    """What a module offers, without its modules."""
    values = {name: getattr(module, name) for name in module.__all__}
    return {name: value for name, value in values.items() if not isinstance(value, ModuleType)}


def find(path: str) -> object:
    """What has this dotted name."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def read_entries() -> list[str]:
    """The dotted names of the reference, each as often as it is in a table."""
    entries: list[str] = []
    for path in sorted((DOCS / "api").glob("*.md")):
        module = ""
        for other, name in MODULE_OR_NAME.findall(path.read_text()):
            module = other or module
            if name:
                entries.append(f"{module}.{name}")
    return entries


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_has_one_page_and_an_example(module: ModuleType):
    """One page, also where two modules offer the same thing."""
    entries = read_entries()
    for name, value in list_public(module).items():
        same = [entry for entry in entries if entry.endswith(f".{name}") and find(entry) is value]
        assert len(same) == 1, f"{name} must be in one table of docs/api, got {same}"
        if inspect.isroutine(value) or inspect.isclass(value):
            assert ">>>" in (value.__doc__ or ""), f"{module.__name__}.{name} has no example"


def test_every_entry_is_public():
    public = {f"{module.__name__}.{name}" for module in MODULES for name in list_public(module)}
    missing = [entry for entry in read_entries() if entry not in public]
    assert not missing, "not in the __all__ of their module"


def test_nobody_is_told_to_install_what_is_on_no_index():
    sources = [*DOCS.rglob("*.md"), *DOCS.parent.glob("gossipjax/**/*.py")]
    sources += DOCS.parent.glob("experiments/**/*.py")
    assert [path for path in sources if re.search(r"install .?gossipjax", path.read_text())] == []


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
        assert not re.search("^%", path.read_text(), re.MULTILINE), path  # a comment of MyST
        for text in re.findall(r"!\[(.*?)\]\(", path.read_text()):
            assert text.strip(), path


def test_ten_minutes_needs_the_light_extra_alone():
    page = (DOCS / "start" / "first.md").read_text()
    imports = set(re.findall(r"^ *(?:import|from) (\w+)", page, re.MULTILINE))
    assert imports == {"jax", "matplotlib", "numpy", "optax", "gossipjax"}
