"""Names in a traced program: what values are, and where its equations were written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxprs_in_params

# What the leaves of a tree are:
PARAMS = "gossipjax.params"  # the parameters that a gossip got
UPDATES = "gossipjax.updates"  # its updates of them
APPLIED = "gossipjax.applied"  # updates that a transform around it, such as gx.outer, has taken
GRADIENTS = "gossipjax.gradients"  # those of a loss
DESCENDED = "gossipjax.descended"  # what a gossip that is the optimizer takes for gradients

UPDATE = re.compile(r"<locals>\.\w*update")  # of a transform
LIBRARY = str(Path(__file__).parent.parent)


def mark(tree: Any, kind: str) -> Any:
    """`tree`, whose leaves are named by what they are: `PARAMS`, `UPDATES`, ...

    `PARAMS` come before the `UPDATES` of them.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: checkpoint_name(leaf, f"{kind}:{jax.tree_util.keystr(path)}"), tree
    )


def takes_gradients(opt_state: Any) -> bool:
    """Whether a chain, by its state, holds a gossip that is the optimizer."""

    def takes(part: Any) -> bool:
        return getattr(getattr(part, "plan", None), "takes_gradients", False)

    return any(map(takes, jax.tree.leaves(opt_state, is_leaf=takes)))


def open_jaxpr(jaxpr: Any) -> Any:
    """The `Jaxpr` of a closed one, which JAX 0.12 has no more."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def mark_of(eqn: Any) -> tuple[str, str] | None:
    """The kind and the path of a mark."""
    if eqn.primitive.name != "name" or not eqn.params["name"].startswith("gossipjax."):
        return None
    kind, _, path = eqn.params["name"].partition(":")
    return kind, path


def find_marks(jaxpr: Any) -> Iterator[tuple[str, str]]:
    for eqn in jaxpr.eqns:
        marked = mark_of(eqn)
        if marked is not None:
            yield marked
        elif eqn.primitive.multiple_results:
            for inner in jaxprs_in_params(eqn.params):
                yield from find_marks(open_jaxpr(inner))


def has_marks(eqn: Any) -> bool:
    if not eqn.primitive.multiple_results:
        return mark_of(eqn) is not None
    return any(any(True for _ in find_marks(open_jaxpr(j))) for j in jaxprs_in_params(eqn.params))


def describe(eqns: Sequence[Any]) -> str:
    """The transform of optax that has made an equation, and the user's line.

    What JAX has kept of an earlier trace has no such frames: those of the calls around it have.
    """
    frames = [frame for eqn in eqns for frame in getattr(eqn.source_info.traceback, "frames", ())]
    names = [
        frame.function_name.split(".")[0]
        for frame in frames
        if "/optax/" in frame.file_name and UPDATE.search(frame.function_name)
    ]
    name = f"`{(names or [eqns[0].primitive.name])[0]}`"
    for frame in frames:
        file = frame.file_name
        if "-packages/" not in file and not file.startswith((LIBRARY, "<")):
            return f"{name} ({'/'.join(file.split('/')[-2:])}:{frame.line_num})"
    return name
