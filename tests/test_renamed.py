"""Names of 0.4.0: an error says the new one, and no public function brings an old one back."""

import inspect
import pickle
import types
from collections.abc import Iterator
from typing import Any

import jax
import optax
import pytest

import gossipjax as gx
from gossipjax.renamed import WENT

RING = gx.topology.ring(4)
SGD = optax.sgd(0.1)
MESH = jax.make_mesh((1,), ("nodes",))
NAMES = {"gx": gx, "F": gx.faults, "T": gx.topology, "D": gx.diagnostics, "ring": RING}
NAMES |= {"sgd": SGD, "mesh": MESH}

# A call of 0.4.0 -> what its error says.
CALLS = {
    "gx.easgd(alpha=0.1)": "easgd takes strength instead of alpha since gossipjax 0.5.0.",
    "gx.easgd(0.1, period=4)": "easgd takes every instead of period",
    "gx.choco(ring, codec=None, gamma=0.1)": "choco takes (wire|strength) instead of",
    "gx.contrib.deepsqueeze(ring, None, gamma=0.1)": "strength instead of gamma",
    "gx.outer(sgd, sgd, 4, mix=0.2)": r"outer takes strength=1 - mix instead of mix",
    "gx.outer(sgd, sgd, 4, pull=2.0)": "outer takes anchor_strength instead of pull",
    "gx.d1d_psgd(n=4)": "d1d_psgd takes nodes instead of n",
    "gx.random_delays(n=4, rounds=2, seed=0)": "nodes instead of n",
    "gx.TrainState(0, None, None, batch_stats=1)": "TrainState takes rest instead of batch_stats",
    "gx.spmd(abs, mesh=mesh)": r"spmd takes nodes=gx.Nodes\(mesh=mesh\) instead of mesh",
    "gx.TrainStep(abs, sgd, mesh=mesh)": r"TrainStep takes nodes=gx.Nodes\(mesh=mesh\)",
    "T.ring(n=4)": "ring takes nodes instead of n",
    "T.k_peer_exponential(n=4, peers=1)": "nodes instead of n",
    "F.independent_drops(n=4, steps=2, seed=0, rate=0.1)": "nodes instead of n",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_before_says_how_to_write_it_now(call: str):
    with pytest.raises(TypeError, match=CALLS[call]):
        eval(call, {}, NAMES)


def test_a_mesh_in_the_place_of_nodes():
    with pytest.raises(ValueError, match=r"got a mesh: gx.Nodes\(mesh=mesh\)"):
        gx.TrainStep(abs, SGD, MESH)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", WENT)
def test_a_name_that_went_says_what_to_use(name: str):
    *module, name = name.split(".")
    with pytest.raises(AttributeError, match=f"{name} went: (use gx|use the|give|gx.)"):
        getattr(getattr(gx, module[0]) if module else gx, name)


PUBLIC = ("topology", "contrib", "faults", "diagnostics", "asynchronous", "cost_model")
PUBLIC += ("checkpoint", "launch", "processes")


def public_names() -> Iterator[tuple[str, Any]]:
    """What a user can import, except modules: the name by which it is reached, and itself."""
    for module in ("", *PUBLIC, "wire"):
        home = getattr(gx, module) if module else gx
        for name in home.__all__:
            value = getattr(home, name)
            if not isinstance(value, types.ModuleType):
                yield f"{module}.{name}".strip("."), value


def public_signatures() -> Iterator[tuple[str, dict[str, inspect.Parameter]]]:
    """Of functions, of classes and of their methods."""
    for name, value in public_names():
        is_result = inspect.isclass(value) and issubclass(value, tuple | Exception)
        if name.startswith("wire.") or not callable(value) or is_result:
            continue
        methods = vars(value).items() if inspect.isclass(value) else ()
        functions = [(k, v) for k, v in methods if inspect.isfunction(v) and k[0] != "_"]
        for part, function in [("", value), *functions]:
            yield f"{name} {part}".strip(), {**inspect.signature(function).parameters}


SIGNATURES = dict(public_signatures())


def test_axes_are_given_by_name():
    kinds = {
        name: [parameters[a].kind for a in ("axis_name", "local_axis_name") if a in parameters]
        for name, parameters in SIGNATURES.items()
    }
    assert sum(map(bool, kinds.values())) > 30
    by_position = [k for k, found in kinds.items() if {*found} - {inspect.Parameter.KEYWORD_ONLY}]
    assert by_position == []


def test_one_word_is_one_thing():
    old = {"n", "codec", "period", "gamma", "pull", "alpha", "mix"}
    allowed = {"dirichlet_split": {"alpha"}}  # that of a Dirichlet distribution
    found = {
        name: {*parameters} & old - allowed.get(name, set())
        for name, parameters in SIGNATURES.items()
    }
    assert {name: words for name, words in found.items() if words} == {}
    both = [
        k for k, p in SIGNATURES.items() if {"mesh", "nodes"} <= {*p} or {"mesh", "size"} <= {*p}
    ]
    assert both == ["Nodes", "processes.local_nodes", "processes.put"]  # where both are the point


def test_a_name_has_one_home():
    homes: dict[int, list[str]] = {}
    for name, value in public_names():
        homes.setdefault(id(value), []).append(name)
    twice = [names for names in homes.values() if len(names) > 1]
    assert twice == [["TrainState", "checkpoint.TrainState"]]


def test_a_function_stays_what_it_was():
    """Its signature, its docstring, and that it can be pickled, as by Ray."""
    for fn in (gx.sgp, gx.easgd, gx.topology.ring, gx.Nodes, gx.average_model):
        assert pickle.loads(pickle.dumps(fn)) is fn
        assert ">>> " in str(fn.__doc__)
    assert list(inspect.signature(gx.easgd).parameters)[:2] == ["strength", "every"]
    assert list(inspect.signature(gx.TrainStep).parameters)[:3] == ["gradients", "tx", "nodes"]
