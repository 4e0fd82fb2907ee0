"""The layers of the project: imports run downwards, and the core stays light."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from mutants import find_fault, read_table
from test_docs import MODULES as PUBLIC

from gossipjax.exchanges.plan import Plan
from gossipjax.exchanges.state import Exchanging

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT / "gossipjax").rglob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.py"))
SOURCES = [*LIBRARY, *EXPERIMENTS]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Folder or module of the library -> those below it, which it may import.
COLLECTIVES = {"topology", "wire", "sharding", "serialization"}
EXCHANGES = {"collectives", *COLLECTIVES}
ALGORITHMS = {"exchanges", *EXCHANGES}
TOP = {"exchanges", "meshes", "nodes", "processes", *EXCHANGES}
LAYERS = {
    "renamed": set(),  # all may import it
    "topology": set(),
    "wire": {"topology"},
    "meshes": set(),
    "processes": {"launch", "meshes"},
    "launch": set(),
    "dirichlet": set(),
    "batches": {"launch", "processes", "topology"},
    "train_state": set(),
    "collectives": COLLECTIVES,
    "sharding": {"serialization"},
    "serialization": {"topology"},
    "nodes": {"meshes", "processes", "sharding", "topology"},
    "exchanges": EXCHANGES,
    # In no row but those of what builds on one algorithm: nobody else imports these.
    "algorithms": ALGORITHMS,
    "contrib": {"algorithms", *ALGORITHMS},
    "faults": {"algorithms", *ALGORITHMS},
    "asynchronous": {"checkpoint", "collectives", "exchanges", "launch", "step", "wire"},
    "models": TOP,
    "step": {"launch", "models", "train_state", *TOP},
    "diagnostics": {"models", *TOP},
    "flax": {"serialization"},
    "checkpoint": {"launch", "train_state", *TOP},
    "cost_model": {"exchanges", "topology", "wire"},
}
ALLOWED_PACKAGES = {
    "flax.py": {"flax", "optax"},
    "topology": {"cvxpy", "numpy"},
    "dirichlet.py": {"numpy"},
    "checkpoint": {"etils", "fsspec", "jax", "numpy", "optax", "orbax", "tensorstore"},
    "asynchronous": {"jax", "numpy", "optax", "rich", "zmq"},
    "launch": {"jax", "numpy"},
}
PUBLIC_MODULES = {module.__name__ for module in PUBLIC}
LAX_COLLECTIVES = {"ppermute", "pshuffle", "psum", "pmean", "pmax", "pmin"}
LAX_COLLECTIVES |= {"all_gather", "all_to_all", "psum_scatter"}
MODULES_OF_EXCHANGES = {"_exchange", "_averages"}
COMPOSED = ROOT / "gossipjax" / "nodes" / "_composed_axis.py"  # what they are over several nodes
MAX_PACKED_ASSIGNMENTS = 10  # two of them swap


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def dotted_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted_name(path): path for path in SOURCES}


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Every import as `(module, name)`; that of a module of the project has no name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                yield (dotted, None) if dotted in MODULES else (node.module, alias.name)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def layer_of(dotted: str) -> str:
    """The layer of a module of the library."""
    return dotted.split(".")[1]


def test_imports_run_downwards():
    """Nobody above the algorithms imports one; the experiments are imported by nobody."""
    violations = []
    for path in LIBRARY:
        if path.parent == ROOT / "gossipjax" and path.stem in ("__init__", "_public"):
            continue
        layer = layer_of(dotted_name(path))
        for module, _ in imported_names(parse(path)):
            package, *rest = module.split(".")
            is_upward = bool(rest) and layer_of(module) not in {layer, "renamed", *LAYERS[layer]}
            if package == "experiments" or (package == "gossipjax" and (not rest or is_upward)):
                violations.append(f"{name_of(path)} imports {module}")
    assert violations == []


def list_answering(path: Path) -> list[str]:
    """The classes of a file that answer for an algorithm: states and plans."""
    classes = [node for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)]
    marks = [{ast.unparse(x) for x in (*c.decorator_list, *c.bases)} for c in classes]
    marked = zip(classes, marks, strict=True)
    return [c.name for c, names in marked if names & {"Exchanging.register", "Plan"}]


ALGORITHM_FILES = [path for path in LIBRARY if name_of(path).startswith("gossipjax/algorithms")]


def test_states_answer_all_that_is_asked():
    """`register` itself looks at nothing."""
    fields = {*Exchanging.__annotations__}
    states = []
    for path in LIBRARY:
        for name in list_answering(path):
            kind = getattr(importlib.import_module(dotted_name(path)), name)
            if not issubclass(kind, Plan):
                states.append(name)
                methods = Exchanging.__abstractmethods__ if kind.mixes_models else ()
                assert {*fields, *methods} <= {*dir(kind)}, name
    assert len(states) >= 3


def test_nobody_names_an_algorithm_but_its_own_files():
    """They ask a state or its plan; and no algorithm builds on another."""
    violations = []
    kinds = "|".join(name for path in ALGORITHM_FILES for name in list_answering(path))
    for path in LIBRARY:
        own = room_of(dotted_name(path)) if path.stem not in ("__init__", "_public") else ""
        is_algorithm = path in ALGORITHM_FILES
        if own and not is_algorithm and (found := re.search(kinds, path.read_text())):
            violations.append(f"{name_of(path)} names {found[0]}")
        for module, _ in imported_names(parse(path)):
            others = "gossipjax.algorithms."
            folder = f"{others}{path.parent.name}."
            is_same = path.parent.name != "algorithms" and module.startswith(folder)
            if is_algorithm and own and module.startswith(others) and not is_same:
                violations.append(f"{name_of(path)} imports {module}")
    assert violations == []


def test_private_modules_and_names_stay_in_their_folder():
    violations = []
    for path in SOURCES:
        for module, name in imported_names(parse(path)):
            if module not in MODULES:
                continue
            is_foreign = MODULES[module].parent != path.parent
            parts = module.split(".")
            if is_foreign and any(map(is_private, parts)):
                violations.append(f"{name_of(path)} imports {module}")
            if name is not None and is_private(name):
                violations.append(f"{name_of(path)} imports {module}.{name}")
    assert violations == []


def public_names(module: str) -> set[str] | None:
    """`__all__` of a module; None if it has none: public is then what has no underscore."""
    names = getattr(importlib.import_module(module), "__all__", None)
    return None if names is None else set(names)


def test_experiments_use_public_names_only():
    violations = set()
    for path in EXPERIMENTS:
        for module, name in imported_names(parse(path)):
            if module.split(".")[0] != "gossipjax":
                continue
            names = public_names(module) if module in PUBLIC_MODULES else set()
            if name is not None and names is not None and name not in names:
                violations.add(f"{name_of(path)} imports {module}.{name}: not in __all__?")
    assert sorted(violations) == []


@pytest.mark.parametrize(
    "folder", sorted({path.parent for path in LIBRARY}), ids=lambda path: name_of(path)
)
def test_every_folder_of_the_library_says_what_is_public(folder):
    names = public_names(dotted_name(folder / "__init__.py"))
    assert names is not None
    module = importlib.import_module(dotted_name(folder / "__init__.py"))
    assert not [name for name in names if is_private(name) or not hasattr(module, name)]


def parse_without_type_checking(path: Path) -> ast.Module:
    """A module without what only a type checker imports."""

    def is_for_types(node: ast.stmt) -> bool:
        return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"

    return ast.Module([node for node in parse(path).body if not is_for_types(node)], [])


def room_of(module: str) -> str:
    """The folder of a module; a module beside the folders of a package is a room by itself."""
    path = MODULES[module]
    is_beside = path.parent.parent == ROOT and path.name != "__init__.py"
    return module if is_beside else dotted_name(path.parent / "__init__.py")


@pytest.mark.parametrize("package", ["gossipjax", "experiments"])
def test_folders_import_one_way(package):
    edges: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        is_own = path.is_relative_to(ROOT / package)
        if not is_own or path.stem in ("__init__", "__main__", "_public"):
            continue
        room = room_of(module)
        modules = {name for name, _ in imported_names(parse_without_type_checking(path))}
        edges.setdefault(room, set()).update(
            room_of(other) for other in modules & set(MODULES) if room_of(other) != room
        )
    edges = {room: {other for other in others if other in edges} for room, others in edges.items()}
    TopologicalSorter(edges).prepare()  # a `CycleError` names the folders of a circle


def test_the_core_needs_only_jax_optax_and_numpy():
    violations = []
    for path in LIBRARY:
        packages = {module.split(".")[0] for module, _ in imported_names(parse(path))}
        packages -= {"gossipjax", *sys.stdlib_module_names}
        layer = path.relative_to(ROOT / "gossipjax").parts[0]
        extra = packages - ALLOWED_PACKAGES.get(layer, {"jax", "numpy", "optax"})
        violations += [f"{name_of(path)} imports {package}" for package in extra]
        if "orbax" in packages and path.stem not in ("_checkpoints", "_store", "_writer"):
            violations.append(f"{name_of(path)} imports orbax, which is an extra")
    assert violations == []


SOCKETS = {"socket", "zmq", "http", "socketserver", "urllib", "requests"}
USE_SOCKETS = {
    "gossipjax/asynchronous/_sockets.py",
    "gossipjax/checkpoint/_lock.py",  # the name of this machine
    "gossipjax/launch/_check.py",
    "gossipjax/launch/_hello.py",
    "gossipjax/launch/_job.py",  # free ports
    "gossipjax/launch/_process_info.py",  # the address of this machine
    "gossipjax/launch/peers.py",
}
RUN_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "torch"}
UNPICKLES = "experiments/data/originals.py"  # without any code of a file


def test_who_listens_and_who_runs_what_it_reads():
    """What SECURITY.md says of "nothing else", for the library and the programs."""
    packages = {
        name_of(path): {module.split(".")[0] for module, _ in imported_names(parse(path))}
        for path in SOURCES
    }
    sockets = {name for name in packages if packages[name] & SOCKETS}
    assert {name for name in sockets if name.startswith("gossipjax")} == USE_SOCKETS
    assert {name for name in packages if packages[name] & RUN_CODE} == {UNPICKLES}
    calls = {
        node.func.id
        for path in SOURCES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"eval", "exec"}


def test_nothing_private_or_experimental_of_jax_is_used():
    violations = []
    for path in SOURCES:
        tree = parse(path)
        names = {
            module if name is None else f"{module}.{name}" for module, name in imported_names(tree)
        }
        names |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        if name_of(path) == "experiments/speed/compiled/targets.py":
            names -= {"jax.experimental.topologies"}  # has no other public name
        for name in sorted(names):
            root, *parts = name.split(".")
            if root in ("jax", "jaxlib") and (
                "experimental" in parts or any(map(is_private, parts))
            ):
                violations.append(f"{name_of(path)} uses {name}")
    assert violations == []


def test_only_exchanges_call_lax_collectives():
    violations = []
    for path in LIBRARY:
        is_exchange = (
            path.parent == ROOT / "gossipjax" / "collectives" and path.stem in MODULES_OF_EXCHANGES
        )
        if is_exchange or path == COMPOSED:
            continue
        tree = parse(path)
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names = attributes | {name for _, name in imported_names(tree)}
        violations += [f"{name_of(path)} uses {name}" for name in names & LAX_COLLECTIVES]
    assert violations == []


def is_packed_assignment(node: Any) -> bool:
    """Whether `a, b = x, y`: two statements."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    )


def is_program(node: Any) -> bool:
    """Whether a function has more than three inside: a class, or several functions."""
    is_function = isinstance(node, FUNCTIONS)
    return is_function and sum(isinstance(one, FUNCTIONS) for one in ast.walk(node)) > 4


def is_frozen_lambda(node: Any) -> bool:
    """Whether it holds a loop's variable as a default argument: a function is missing."""
    return isinstance(node, ast.Lambda) and any([*node.args.defaults, *node.args.kw_defaults])


@pytest.mark.parametrize(
    ("is_fault", "allowed"),
    [(is_packed_assignment, MAX_PACKED_ASSIGNMENTS), (is_program, 0), (is_frozen_lambda, 0)],
)
def test_statements_that_are_written_otherwise(is_fault, allowed):
    found = [
        f"{name_of(path)}: {ast.unparse(node)[:99]}"
        for path in SOURCES
        for node in ast.walk(parse(path))
        if is_fault(node)
    ]
    assert len(found) <= allowed, found


def test_mutants_name_code_that_is_there():
    faults = {f"{mutant.file}: {mutant.name}": find_fault(mutant) for mutant in read_table()}
    assert {name: fault for name, fault in faults.items() if fault is not None} == {}


def run_code(code: str) -> list[str]:
    """The words that a fresh Python prints."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_import_brings_nothing_heavy():
    """The launcher, a module of NumPy and the names of the package need no JAX, either."""
    code = (
        "import sys, gossipjax as gx; from gossipjax.launch.__main__ import main; "
        "gx.launch.advance; gx.topology.ring; dir(gx); dir(gx.launch); "
        "print({'jax', 'optax'} & set(sys.modules)); "
        "gx.sgp; gx.launch.initialize; print('jax' in sys.modules); "
        "heavy = {'flax', 'networkx', 'matplotlib', 'orbax', 'tensorflow_datasets'}; "
        "print(heavy & set(sys.modules))"
    )
    assert run_code(code) == ["set()", "True", "set()"]


def test_names_do_not_depend_on_what_was_imported_first():
    """No folder or module has the name of a function of the package."""
    code = (
        "import gossipjax.step.train_step, gossipjax as gx; print(gx.spmd.__module__); "
        "from gossipjax import *; print(spmd is gx.spmd, sgp is gx.sgp, sgp.__module__); "
        "print({n for n in dir(gx) if n[0] != '_'} == {*gx.__all__}, hasattr(gx, 'nothing'))"
    )
    expected = "gossipjax.nodes.nodes True True gossipjax.algorithms.sgp True False"
    assert run_code(code) == expected.split()
