"""Every Python block of the READMEs and the site runs, those of a page in order; names hold."""

import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import optax
import pytest

import gossipjax as gx

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
READMES = [
    path
    for path in (
        ROOT / "README.md",
        *sorted(ROOT.glob("*/**/README.md")),
        *sorted(ROOT.glob("docs/**/*.md")),
    )
    if ".venv" not in path.parts and "```python" in path.read_text()
]


def run_blocks(text: str) -> dict[str, Any]:
    """Runs the Python blocks of a text; returns their namespace."""
    namespace: dict[str, Any] = {"__name__": "readme"}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "README.md", "exec"), namespace)
    return namespace


def test_the_quickstart_finds_the_parameters():
    model = run_blocks(README)["model"]["w"]
    assert abs(model - jnp.array([1.0, -2.0, 3.0, 0.5])).max() < 0.3


@pytest.fixture(autouse=True)
def promotion():
    """A user's programs promote types and ranks, and optax does."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.lab
@pytest.mark.parametrize("path", READMES[1:], ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_blocks(path.read_text())


def test_every_line_of_the_table_of_names_is_code_that_builds():
    n, k, rate = 8, 3, 0.1
    schedule = gx.topology.one_peer_exponential(n)
    names = {"gx": gx, "optax": optax, "n": n, "k": k, "rate": rate, "schedule": schedule}
    names |= {"np": np, "networkx": networkx}
    page = run_blocks((ROOT / "docs" / "your_algorithm.md").read_text())
    names = {name: value for name, value in page.items() if callable(value)} | names
    text = (ROOT / "docs" / "names.md").read_text()
    rows = text.split("\n\n")[2].splitlines()[2:]
    built = 0
    for row in rows:
        for code in re.findall(r"`([^`]+)`", row.split("|")[3]):
            if re.split(r"\W", code)[0] in names and "mix" not in code:
                eval(code, dict(names))
                built += 1
    assert built >= 50


def test_every_transform_and_topology_of_the_readme_exists():
    for name in re.findall(r"`gx\.(?:topology\.)?(\w+)", README):
        assert hasattr(gx, name) or hasattr(gx.topology, name), name
    listed = README.split("Topologies: ")[1].split(". [Which schedule")[0]
    for name in re.findall(r"`(\w+)`", listed):
        assert hasattr(gx.topology, name), name


@pytest.mark.parametrize(
    "path", [path for path in ROOT.glob("**/README.md") if ".venv" not in path.parts], ids=str
)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if not target.startswith("http"):
            assert os.path.exists(path.parent / target), target


def test_commands_are_marked_for_ci():
    for marker in ("main command", "test command"):
        assert len(re.findall(f"<!-- {marker} -->\n```sh\n[^\n]+\n```", README)) == 1
