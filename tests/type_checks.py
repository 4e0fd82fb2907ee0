"""Runtime type checks of public functions: what they accept and return fits their hints.

A call is checked after it has returned: a wrong argument that the function refuses, by its
`ValueError`, is no violation, and one that it accepts is.
"""

import dataclasses
import functools
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Coroutine, Iterable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import jax
import numpy.typing as npt
import optax
from beartype import BeartypeConf, FrozenDict
from beartype.door import die_if_unbearable, is_bearable

# `optax.Params` is a recursive hint, which cannot be resolved: its inner trees are anything here.
NAMES = {"ArrayTree": Any, "ArrayLike": npt.ArrayLike}
CONF = BeartypeConf(
    is_pep484_tower=True,  # an int is a float
    hint_overrides=FrozenDict(
        {
            typing.Iterable[Any]: Iterable,  # the old names of typing warn
            typing.Mapping[Any, Any]: Mapping,
            optax.TransformInitFn: Callable,  # a protocol that cannot be checked
        }
    ),
)
VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
SPECIAL_METHODS = ("__init__", "__call__")


def check_types(package: str) -> None:
    """Imports a package, all that it offers, so that every public function is checked."""
    assert package not in sys.modules
    sys.meta_path.insert(0, CheckedImports(package))
    module = importlib.import_module(package)
    for name in module.__all__:  # imports what the package imports at the first use of a name
        getattr(module, name)


class CheckedImports(MetaPathFinder):
    """Replaces the public functions of a package's modules, once they are run, by checked ones."""

    def __init__(self, package: str):
        self.package = package

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] != self.package:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        exec_module = spec.loader.exec_module

        def exec_and_check(module: ModuleType) -> None:
            exec_module(module)
            check_members(module, module.__name__, self.package)

        spec.loader.exec_module = exec_and_check
        return spec


def check_members(owner: Any, module: str, package: str) -> None:
    """Replaces the public functions and methods of a module or class, which `module` defines."""
    for name, member in list(vars(owner).items()):
        is_public = not name.startswith("_") or name in SPECIAL_METHODS
        if not is_public or getattr(member, "__module__", None) != module:
            continue
        if inspect.isclass(member):
            check_members(member, module, package)
        elif isinstance(member, FunctionType) and not hasattr(member, "__wrapped__"):
            is_generated = name == "__init__" and dataclasses.is_dataclass(owner)
            if is_generated and hasattr(owner, "_flax_dataclass"):
                continue  # a pytree whose fields are anything that its leaves are mapped to
            bases = getattr(owner, "__mro__", ())[::-1]
            checked = make_checked(member, package, bases if is_generated else ())
            setattr(owner, name, checked)


def is_foreign(value: Any) -> bool:
    """Whether no hint knows a value: a test's double, or a pytree of a class of its own."""
    is_known = isinstance(value, Iterable) or type(value).__module__.startswith("gossipjax")
    is_double = isinstance(value, SimpleNamespace)  # of a device or mesh
    return is_double or (not is_known and not jax.tree_util.all_leaves([value]))


def make_checked(function: FunctionType, package: str, bases: tuple[type, ...]) -> Any:
    """Returns the function with a check of its arguments and result after every call.

    Of the `__init__` that a dataclass generates, with these bases, the fields are checked:
    `__post_init__` may replace arguments.
    """
    signature = inspect.signature(function)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    is_variadic = not VARIADIC.isdisjoint(kinds.values())

    @functools.cache
    def resolve_hints() -> dict[str, Any]:
        # A module may import names for type checkers only: the package's own, and ArrayLike.
        names = NAMES | vars(sys.modules[package])
        for base in bases:  # whose module knows the hints of inherited fields
            names |= vars(sys.modules[base.__module__])
        names |= function.__globals__
        hints = typing.get_type_hints(function, names)
        if inspect.iscoroutinefunction(function):
            hints["return"] = Coroutine  # which returns what the hint says
        return {name: hint for name, hint in hints.items() if hint is not Any}

    def check(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if is_variadic:
            arguments = signature.bind(*args, **kwargs).arguments
        else:  # the same: `bind` is slow, and some functions are called for every message
            arguments = dict(zip(kinds, args, strict=False)) | kwargs
        if bases:
            arguments = {name: getattr(args[0], name) for name in arguments if name != "self"}
        hints = resolve_hints()
        for name, value in {**arguments, "return": result}.items():
            if name not in hints:
                continue
            for each in split_variadic(kinds.get(name), value):
                if not is_bearable(each, hints[name], conf=CONF) and not is_foreign(each):
                    prefix = f"{function.__module__}.{function.__qualname__}, {name}: "
                    die_if_unbearable(each, hints[name], conf=CONF, exception_prefix=prefix)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        check(args, kwargs, result)
        return result

    # doctest knows a function of its module by its globals.
    checked = FunctionType(call.__code__, function.__globals__, closure=call.__closure__)
    return functools.update_wrapper(checked, function)


def split_variadic(kind: Any, value: Any) -> Iterable[Any]:
    """The values that the hint of an argument describes: each one of `*args` and `**kwargs`."""
    if kind is inspect.Parameter.VAR_POSITIONAL:
        return value
    return value.values() if kind is inspect.Parameter.VAR_KEYWORD else (value,)
