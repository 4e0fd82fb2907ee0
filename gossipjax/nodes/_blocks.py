"""Programs of several nodes on each device, by `vmap` inside of `shard_map`.

The per-node function is traced with an axis of all N nodes. Each collective over this axis is then
replaced by collectives over the devices and over the nodes of a device. A program whose collectives
are replaced is called composed. Everything else stays as it is. If one jitted the vmapped function
without this replacement, on sharded arrays, XLA would gather all N models on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from gossipjax.nodes._composed_axis import COLLECTIVES, ComposedAxis
from gossipjax.nodes._convolutions import vmap_nodes
from gossipjax.nodes.arguments import ArgumentKinds, require_all_stacked
from gossipjax.nodes.equations import all_equations, is_collective_over, name_of, params_of

if TYPE_CHECKING:
    from gossipjax.nodes import Nodes


Atom = Var | Literal
CUSTOM_RULES = ("custom_jvp_call", "custom_vjp_call", "CustomVJPTraced")


class Composition:
    """Runs functions of one of N nodes in `shard_map` over devices and `vmap` over their nodes.

    Together these two axes are the composed axis. A composed collective runs over both.
    """

    def __init__(self, axis: ComposedAxis):
        self._axis = axis
        self._empty: Jaxpr = jax.make_jaxpr(tuple)().jaxpr  # a program without equations
        # What runs an equation with a program inside, by `name_of` the equation.
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
        """Returns `fn` with composed collectives: for one node, in a program of several per device.

        Each collective over the nodes becomes one over the nodes of this device (the axis of
        `vmap`) and one over the devices. The result takes the arguments of `fn`, those of one node,
        and traces `fn` with them.
        """
        axis_env = [(self._axis.name, self._axis.size)]
        trace = jax.make_jaxpr(fn, axis_env=axis_env, return_shape=True)

        def composed(*args: Any) -> Any:
            jaxpr, shapes = trace(*args)
            results = self._evaluate(jaxpr, *jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(shapes), results)

        return composed

    def _evaluate(self, closed: ClosedJaxpr, *args: Any) -> list[Any]:
        """Runs a traced program, equation by equation, with composed collectives."""
        jaxpr = closed.jaxpr
        names = [*jaxpr.constvars, *jaxpr.invars]
        values = dict(zip(names, [*closed.consts, *args], strict=True))
        for eqn in jaxpr.eqns:
            results = self._evaluate_equation(eqn, _read(values, eqn.invars))
            values.update(zip(eqn.outvars, results, strict=True))
        return _read(values, jaxpr.outvars)

    def _evaluate_equation(self, eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        """Runs an equation: collectives in it are composed, and all else stays as it is."""
        name = name_of(eqn)
        inside = list(all_equations([eqn]))
        has_collective = any(is_collective_over(self._axis.name, inner) for inner in inside)
        if has_collective and name in COLLECTIVES:
            results = COLLECTIVES[name](self._axis, *operands, **eqn.params)
            shapes = [getattr(variable.aval, "shape", None) for variable in eqn.outvars]
            assert [x.shape for x in results] == shapes, eqn
            return results
        # A derivative rule may contain collectives, too. They cannot be seen here, because JAX
        # traces the rule only when it needs the derivative.
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
        return self._as_function(eqn)(*_values_of_variables(eqn, operands))

    def _inline(self, eqn: JaxprEqn, *operands: Any) -> Any:
        """Runs a call, as of a jitted function, as part of the program that contains the call."""
        return self._evaluate(eqn.params.get("jaxpr") or eqn.params["call_jaxpr"], *operands)

    def _composed_function(self, closed: ClosedJaxpr, *consts: Any) -> Callable[..., list[Any]]:
        """Makes `closed` a function, with composed collectives; `consts` are its first inputs."""
        return lambda *args: self._evaluate(closed, *consts, *args)

    def _cond(self, eqn: JaxprEqn, index: Any, *operands: Any) -> Any:
        """Runs `lax.cond` or `lax.switch` with composed branches."""
        branches = [self._composed_function(branch) for branch in eqn.params["branches"]]
        platforms = eqn.params.get("branches_platforms")
        if platforms is None:
            return jax.lax.switch(index, branches, *operands)
        # The equation is a `lax.platform_dependent`, in which the compiler chooses the branch.
        by_platform = {
            name: branch
            for names, branch in zip(platforms, branches, strict=True)
            for name in names or ("default",)
        }
        return jax.lax.platform_dependent(*operands, **by_platform)

    def _scan(self, eqn: JaxprEqn, *operands: Any) -> Any:
        """Runs `lax.scan` with a composed body."""
        # Only the body of the equation is replaced. `lax.scan` cannot be called here, as versions
        # of JAX describe the other parts of a scan differently.
        body = eqn.params["jaxpr"]
        shapes = [variable.aval for variable in body.jaxpr.invars]
        composed = jax.make_jaxpr(self._composed_function(body))(*shapes)
        eqn = eqn.replace(params={**eqn.params, "jaxpr": composed}, effects=composed.effects)
        return self._as_function(eqn)(*_values_of_variables(eqn, operands))

    def _while(self, eqn: JaxprEqn, *operands: Any) -> Any:
        """Runs `lax.while_loop` with a composed condition and body."""
        params = eqn.params
        # Operands are the constants of the condition, those of the body, and the first carry.
        first = params["cond_nconsts"]
        end = first + params["body_nconsts"]
        condition = self._composed_function(params["cond_jaxpr"], *operands[:first])
        body = self._composed_function(params["body_jaxpr"], *operands[first:end])
        return jax.lax.while_loop(
            lambda carry: condition(*carry)[0], lambda carry: body(*carry), list(operands[end:])
        )

    def _remat(self, eqn: JaxprEqn, *operands: Any) -> Any:
        """Runs what `jax.checkpoint` wraps, or, in a backward pass, computes it once more."""
        params = params_of(eqn)
        jaxpr = params["jaxpr"]
        closed = jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())
        apply = self._composed_function(closed)
        if not params.get("differentiated"):
            options = {name: params[name] for name in ("prevent_cse", "policy") if name in params}
            return jax.checkpoint(apply, **options)(*operands)
        # In a backward pass: without a barrier XLA would keep the values of the forward pass, and
        # not compute them again.
        if params["prevent_cse"]:
            operands = jax.lax.optimization_barrier(operands)
        return apply(*operands)

    def _custom_jvp(self, eqn: JaxprEqn, *operands: Any) -> Any:
        """Calls a function that has a JVP rule; collectives in function and rule are composed.

        Only derivatives of floats go through the composed program. Those of integers are `float0`,
        which a program cannot take.
        """
        variables = _variables(eqn)
        function = self._as_function(eqn)

        def differentiate(primals: Any, tangents: list[Any]) -> Any:
            results, derivatives = jax.jvp(function, primals, tuple(_fill(variables, tangents)))
            return results, _floats(eqn.outvars, derivatives)

        def jvp(primals: Any, tangents: Any) -> Any:
            tangents = _floats(variables, tangents)
            results, derivatives = self.compose(differentiate)(primals, tangents)
            return results, tuple(_fill(eqn.outvars, derivatives))

        apply = jax.custom_jvp(self._without_rule(eqn))
        apply.defjvp(jvp)
        return apply(*_values_of_variables(eqn, operands))

    def _custom_vjp(self, eqn: JaxprEqn, *operands: Any) -> Any:
        """Calls a function that has a VJP rule; collectives in function and rule are composed.

        The forward pass runs the composed function without its rule. The backward pass
        differentiates the original call with its rule, and composes the result.
        """
        variables = _variables(eqn)
        function = self._as_function(eqn)

        def differentiate(primals: Any, cotangents: list[Any]) -> Any:
            _, pull_back = jax.vjp(function, *primals)
            gradients = pull_back(tuple(_fill(eqn.outvars, cotangents)))
            return _floats(variables, gradients)

        def backward(primals: Any, cotangents: Any) -> Any:
            cotangents = _floats(eqn.outvars, cotangents)
            return tuple(_fill(variables, self.compose(differentiate)(primals, cotangents)))

        call = self._without_rule(eqn)
        apply = jax.custom_vjp(call)
        apply.defvjp(lambda *values: (call(*values), values), backward)
        return apply(*_values_of_variables(eqn, operands))

    def _as_function(self, eqn: JaxprEqn) -> Callable[..., tuple[Any, ...]]:
        """Returns an equation unchanged, as a function of its variables."""
        jaxpr = self._empty.replace(
            invars=_variables(eqn), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects
        )
        return lambda *values: tuple(jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*values))

    def _without_rule(self, eqn: JaxprEqn) -> Callable[..., Any]:
        """Returns what an equation calls, without its derivative rule, with composed collectives.

        The result is a function of the variables of the equation.
        """
        variables = _variables(eqn)

        def call(*values: Any) -> Any:
            operands = _read(dict(zip(variables, values, strict=True)), eqn.invars)
            params = params_of(eqn)
            program = params["traced"].jaxpr if "traced" in params else params["call_jaxpr"]
            return tuple(self._evaluate(program, *operands))

        return call


def _read(values: dict[Var, Any], atoms: Sequence[Atom]) -> list[Any]:
    """Returns the values of variables, and those of literals, which are written in the program."""
    return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]


def _variables(eqn: JaxprEqn) -> list[Var]:
    """Returns the operands of an equation that are not literals, each once."""
    return list(dict.fromkeys(atom for atom in eqn.invars if not isinstance(atom, Literal)))


def _values_of_variables(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Picks the values of an equation's `_variables` from the values of all its operands."""
    values = {
        atom: value
        for atom, value in zip(eqn.invars, operands, strict=True)
        if not isinstance(atom, Literal)
    }
    return list(values.values())


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def _floats(variables: Sequence[Var], values: Sequence[Any]) -> list[Any]:
    """Returns the values of float variables; the other variables have no derivative."""
    return [value for variable, value in zip(variables, values, strict=True) if _is_float(variable)]


def _fill(variables: Sequence[Any], floats: Sequence[Any]) -> list[Any]:
    """Undoes `_floats`: returns derivatives of all variables, with `float0` for integers."""
    remaining = iter(floats)
    return [
        next(remaining) if _is_float(variable) else np.zeros(variable.aval.shape, float0)
        for variable in variables
    ]


def run_in_blocks(
    fn: Callable[..., Any], kinds: ArgumentKinds, nodes: Nodes, check_vma: bool
) -> Callable[..., Any]:
    """Returns `fn` of one node for all nodes, with several nodes on each device.

    `shard_map` gives each device the rows of its nodes, and `vmap` runs `fn` for each row.
    """
    if check_vma:
        raise ValueError(
            f"check_vma must be False with {nodes.per_device} nodes per device, got True: types "
            "say what differs between devices, not between the nodes of one. Use a node per device."
        )
    assert nodes.mesh is not None
    axis = ComposedAxis(nodes.axis_name, nodes.mesh.size, nodes.per_device)

    def run(*args: Any) -> Any:
        """Checks the arguments, and runs `fn` for all nodes."""
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
