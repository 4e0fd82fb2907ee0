"""The rooms of the project: imports run one way, modules stay small, the core stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT / "gossipjax").rglob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.py"))
NUMPY_ONLY = {"edge_coloring", "schedule", "spectra", "topology"}
NUMPY_ONLY |= {"static_topology", "random_topology", "finite_time"}

# Each room may import those before it, and nothing else of the project.
ROOMS = {
    "edge_coloring": set(),
    "schedule": {"edge_coloring"},
    "static_topology": {"schedule"},
    "random_topology": {"schedule", "static_topology"},
    "finite_time": {"schedule", "static_topology"},
    "topology": {"schedule", "static_topology", "random_topology", "finite_time"},
    "spectra": {"schedule"},
    "buffers": set(),
    "collectives": {"schedule", "buffers"},
    "mixing": {"schedule", "buffers", "collectives"},
    "state": {"schedule", "buffers", "collectives"},
    "algorithms": {"schedule", "topology", "buffers", "collectives", "mixing", "state"},
    "statistics": {"schedule", "buffers", "collectives", "mixing", "state"},
    "diagnostics": {"spectra", "buffers", "collectives", "state"},
    "spmd": set(),
    "rendezvous": set(),
    "supervisor": set(),
    "launch": {"rendezvous", "supervisor"},
    "leaves": set(),
    "agreement": set(),
    "checkpoint": {"leaves", "agreement"},
    "resume": {"schedule", "buffers", "state", "spmd", "leaves"},
    "loop": {"schedule", "state", "algorithms", "spmd"},
}


def imported(path: Path) -> set[str]:
    """The dotted modules that a file imports, `from package import module` included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    return path.relative_to(ROOT / "gossipjax").with_suffix("").parts[0]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_one_way(path):
    own = {name.split(".")[1] for name in imported(path) if name.startswith("gossipjax.")}
    if path.name != "__init__.py":
        assert own - {room(path)} <= ROOMS[room(path)]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_core_needs_only_jax_optax_and_numpy(path):
    roots = {name.split(".")[0] for name in imported(path)} - set(sys.stdlib_module_names)
    allowed = {"gossipjax", "numpy"}
    if room(path) not in NUMPY_ONLY:
        allowed |= {"jax", "optax"}
    if path.stem == "checkpoint":  # an extra, which is imported by name only
        allowed |= {"orbax"}
    assert roots <= allowed


def test_nothing_private_of_jax_is_used():
    for path in (*LIBRARY, *EXPERIMENTS):
        names = imported(path)
        if path.name == "schedule_targets.py":
            names -= {"jax.experimental.topologies"}  # has no other public name
        assert not [name for name in names if "._" in name or "jax.experimental" in name]


def test_only_collectives_exchanges_parameters():
    for path in LIBRARY:
        if path.name != "collectives.py":
            calls = {
                node.attr
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute)
            }
            assert not calls & {"ppermute", "psum", "pmean", "all_gather", "pmax", "pmin"}, path


def lines_of_code(path: Path) -> int:
    """Lines that are not blank, and no comment or docstring."""
    text = path.read_text()
    said = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(
            node
        ):
            said |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in said
        for number, line in lines
    )


JOBS = {"rendezvous", "supervisor", "launch", "leaves", "agreement", "checkpoint", "resume"}


@pytest.mark.parametrize(("jobs", "lines", "code"), [(False, 3200, 1700), (True, 1510, 1015)])
def test_the_library_stays_small(jobs, lines, code):
    """An evening's reading: half of it is docstrings, which say what the other half computes.

    What runs jobs on several processes, and saves them, is a second one.
    """
    paths = [path for path in LIBRARY if (room(path) in JOBS) == jobs]
    sizes = [len(path.read_text().splitlines()) for path in paths]
    assert max(sizes) <= 300
    assert sum(sizes) < lines
    assert sum(map(lines_of_code, paths)) < code


def test_import_brings_nothing_heavy():
    code = (
        "import sys, gossipjax; "
        "heavy = {'flax', 'networkx', 'matplotlib', 'orbax', 'tensorflow_datasets'}; "
        "print(heavy & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.strip() == "set()", found.stderr
