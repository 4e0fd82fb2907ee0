"""Programs of several nodes on each device, by `vmap` inside of `shard_map`.

The per-node function is traced with an axis of all N nodes. Each collective over this axis is then
replaced by collectives over the devices and over the nodes of a device. Everything else stays as it
is. If XLA alone got the vmapped function and sharded arrays, it would gather all N models on every
device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)
from jax.sharding import PartitionSpec as P

from gossipjax.nodes._composed_axis import COLLECTIVES, ComposedAxis
from gossipjax.nodes._convolutions import vmap_nodes
from gossipjax.nodes.arguments import ArgumentKinds, require_all_stacked
from gossipjax.nodes.equations import (
    all_equations,
    is_collective_over,
    name_of,
    params_of,
)

if TYPE_CHECKING:
    from gossipjax.nodes import Nodes


Atom = Var | Literal
CUSTOM_RULES = ("custom_jvp_call", "custom_vjp_call", "CustomVJPTraced")


class Composition:
    """Functions of one of N nodes, run in `shard_map` and `vmap` over a composed axis."""

    def __init__(self, axis: ComposedAxis):
        self._axis = axis
        self._empty: Jaxpr = jax.make_jaxpr(tuple)().jaxpr
        self._control_flow: dict[str, Callable[..., Any]] = {
            "jit": self._inline,
            "pjit": self._inline,
            "closed_call": self._inline,
            "cond": self._cond,
            "scan": self._scan,
            "while": self._while,
            "remat": self._remat,
            "remat2": self._remat,
            "checkpoint": self._remat,
            "RematTraced": self._remat,
            "custom_jvp_call": self._custom_jvp,
            "custom_vjp_call": self._custom_vjp,
            "CustomVJPTraced": self._custom_vjp,
        }

    def compose(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Replaces the collectives over the axis in `fn`, a function of positional arguments."""
        axis_env = [(self._axis.name, self._axis.size)]
        trace = jax.make_jaxpr(fn, axis_env=axis_env, return_shape=True)

        def composed(*args: Any) -> Any:
            jaxpr, shapes = trace(*args)
            results = self._evaluate(jaxpr, *jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shapes), results)

        return composed

    def _evaluate(self, closed: ClosedJaxpr, *args: Any) -> list[Any]:
        jaxpr = closed.jaxpr
        names = [*jaxpr.constvars, *jaxpr.invars]
        values = dict(zip(names, [*closed.consts, *args], strict=True))
        for eqn in jaxpr.eqns:
            results = self._evaluate_equation(eqn, _read(values, eqn.invars))
            values.update(zip(eqn.outvars, results, strict=True))
        return _read(values, jaxpr.outvars)

    def _evaluate_equation(self, eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        name = name_of(eqn)
        inside = list(all_equations([eqn]))
        has_collective = any(is_collective_over(self._axis.name, inner) for inner in inside)
        if has_collective and name in COLLECTIVES:
            results = COLLECTIVES[name](self._axis, *operands, **eqn.params)
            shapes = [getattr(variable.aval, "shape", None) for variable in eqn.outvars]
            assert [x.shape for x in results] == shapes, eqn
            return results
        # The rule of a derivative may contain collectives, and is traced only when it is needed.
        has_rule = any(name_of(inner) in CUSTOM_RULES for inner in inside)
        if name in self._control_flow and (has_collective or has_rule):
            return self._control_flow[name](eqn, *operands)
        if has_collective:
            supported = ", ".join(f"lax.{supported}" for supported in COLLECTIVES)
            raise ValueError(
                f"collectives over {self._axis.name!r} must be among {supported}, in jit, cond, "
                "scan, while_loop or checkpoint, where devices hold several nodes each, got "
                f"{name!r}: write it with these, or use a node per device."
            )
        return self._as_function(eqn)(*_operands_of(eqn, operands))

    def _inline(self, eqn: JaxprEqn, *operands: Any) -> Any:
        return self._evaluate(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"], *operands)

    def _function(self, closed: ClosedJaxpr, *consts: Any) -> Callable[..., list[Any]]:
        return lambda *args: self._evaluate(closed, *consts, *args)

    def _cond(self, eqn: JaxprEqn, index: Any, *operands: Any) -> Any:
        branches = [self._function(branch) for branch in eqn.params["branches"]]
        platforms = eqn.params.get("branches_platforms")
        if platforms is None:
            return jax.lax.switch(index, branches, *operands)
        by_platform = {
            name: branch
            for names, branch in zip(platforms, branches, strict=True)
            for name in names or ("default",)
        }
        return jax.lax.platform_dependent(*operands, **by_platform)

    def _scan(self, eqn: JaxprEqn, *operands: Any) -> Any:
        # The same equation around another body, as versions of JAX name the parts of a scan
        # differently.
        body = eqn.params["jaxpr"]
        shapes = [variable.aval for variable in body.jaxpr.invars]
        composed = jax.make_jaxpr(self._function(body))(*shapes)
        eqn = eqn.replace(params={**eqn.params, "jaxpr": composed}, effects=composed.effects)
        return self._as_function(eqn)(*_operands_of(eqn, operands))

    def _while(self, eqn: JaxprEqn, *operands: Any) -> Any:
        params = eqn.params
        first = params["cond_nconsts"]
        end = first + params["body_nconsts"]
        condition = self._function(params["cond_jaxpr"], *operands[:first])
        body = self._function(params["body_jaxpr"], *operands[first:end])
        return jax.lax.while_loop(
            lambda carry: condition(*carry)[0], lambda carry: body(*carry), list(operands[end:])
        )

    def _remat(self, eqn: JaxprEqn, *operands: Any) -> Any:
        params = params_of(eqn)
        jaxpr = params["jaxpr"]
        apply = self._function(jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ()))
        if not params.get("differentiated"):
            options = {name: params[name] for name in ("prevent_cse", "policy") if name in params}
            return jax.checkpoint(apply, **options)(*operands)
        # Values that are computed anew must not be joined with values computed before.
        if params["prevent_cse"]:
            operands = jax.lax.optimization_barrier(operands)
        return apply(*operands)

    def _custom_jvp(self, eqn: JaxprEqn, *operands: Any) -> Any:
        variables = _variables(eqn)
        function = self._as_function(eqn)

        def differentiate(primals: Any, tangents: list[Any]) -> Any:
            results, derivatives = jax.jvp(function, primals, tuple(_fill(variables, tangents)))
            return results, _floats(eqn.outvars, derivatives)

        def jvp(primals: Any, tangents: Any) -> Any:
            tangents = _floats(variables, tangents)
            results, derivatives = self.compose(differentiate)(primals, tangents)
            return results, tuple(_fill(eqn.outvars, derivatives))

        apply = jax.custom_jvp(self._call_function(eqn))
        apply.defjvp(jvp)
        return apply(*_operands_of(eqn, operands))

    def _custom_vjp(self, eqn: JaxprEqn, *operands: Any) -> Any:
        variables = _variables(eqn)
        function = self._as_function(eqn)

        def differentiate(primals: Any, cotangents: list[Any]) -> Any:
            _, pull_back = jax.vjp(function, *primals)
            gradients = pull_back(tuple(_fill(eqn.outvars, cotangents)))
            return _floats(variables, gradients)

        def backward(primals: Any, cotangents: Any) -> Any:
            cotangents = _floats(eqn.outvars, cotangents)
            return tuple(_fill(variables, self.compose(differentiate)(primals, cotangents)))

        call = self._call_function(eqn)
        apply = jax.custom_vjp(call)
        apply.defvjp(lambda *values: (call(*values), values), backward)
        return apply(*_operands_of(eqn, operands))

    def _as_function(self, eqn: JaxprEqn) -> Callable[..., tuple[Any, ...]]:
        """Returns an equation unchanged, as a function of its variables."""
        jaxpr = self._empty.replace(
            invars=_variables(eqn), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects
        )
        return lambda *values: tuple(jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*values))

    def _call_function(self, eqn: JaxprEqn) -> Callable[..., Any]:
        """Returns the function of an equation that has rules, as a function of its variables."""
        variables = _variables(eqn)

        def call(*values: Any) -> Any:
            operands = _read(dict(zip(variables, values, strict=True)), eqn.invars)
            params = params_of(eqn)
            program = params["traced"].jaxpr if "traced" in params else params["call_jaxpr"]
            return tuple(self._evaluate(program, *operands))

        return call


def _read(values: dict[Var, Any], atoms: Sequence[Atom]) -> list[Any]:
    return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]


def _variables(eqn: JaxprEqn) -> list[Var]:
    """The operands of an equation that are not literals, each once."""
    return list(dict.fromkeys(atom for atom in eqn.invars if not isinstance(atom, Literal)))


def _operands_of(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The values of the variables of an equation."""
    values = {
        atom: value
        for atom, value in zip(eqn.invars, operands, strict=True)
        if not isinstance(atom, Literal)
    }
    return list(values.values())


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _floats(variables: Sequence[Var], values: Sequence[Any]) -> list[Any]:
    """The values of the variables that have a derivative."""
    return [value for variable, value in zip(variables, values, strict=True) if _is_float(variable)]


def _fill(variables: Sequence[Any], floats: Sequence[Any]) -> list[Any]:
    """Inverse of `_floats`; the other variables get what JAX expects as their derivative."""
    remaining = iter(floats)
    return [
        next(remaining) if _is_float(variable) else np.zeros(variable.aval.shape, float0)
        for variable in variables
    ]


def run_in_blocks(
    fn: Callable[..., Any], kinds: ArgumentKinds, nodes: Nodes, check_vma: bool
) -> Callable[..., Any]:
    """Runs `fn` for several nodes on each device: `vmap` inside `shard_map` over the devices."""
    if check_vma:
        raise ValueError(
            f"check_vma must be False with {nodes.per_device} nodes per device, got True: types "
            "cannot tell apart the nodes of a device. Use a node per device."
        )
    assert nodes.mesh is not None
    axis = ComposedAxis(nodes.axis_name, nodes.mesh.size, nodes.per_device)

    def run(*args: Any) -> Any:
        dynamic = require_all_stacked(kinds, args, nodes)

        def run_node(values: dict[int, Any]) -> Any:
            return jax.tree.map(jnp.asarray, fn(*kinds.merge(args, values)))

        run_device = vmap_nodes(
            Composition(axis).compose(run_node),
            ({i: None if i in kinds.shared else 0 for i in dynamic},),
            axis.row_axis,
            axis.per_device,
        )
        mapped = jax.shard_map(
            run_device,
            mesh=nodes.mesh,
            in_specs=({i: P() if i in kinds.shared else P(axis.name) for i in dynamic},),
            out_specs=P(axis.name),
            check_vma=False,
        )
        return mapped(dynamic)

    return run
