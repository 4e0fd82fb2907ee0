"""Types of options that programs share, with checks of their values.

A check is a part of a field's type, for example in `nodes: PositiveInt = 8`.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import jax.numpy as jnp
import tyro
from jax.typing import DTypeLike
from tyro.constructors import PrimitiveConstructorSpec

MAX_SEED = 2**32 - 1  # JAX without x64 keeps the lower 32 bits of a seed
MAX_FLOAT32 = 3.4e38

Options = TypeVar("Options")


def parse_arguments(
    options_type: type[Options], module: str, arguments: Sequence[str] | None
) -> Options:
    """Returns the options of `python -m MODULE`; `--help` shows the docstring of their type.

    If `arguments` is None, the command line is parsed. From then on the program prints "?" for
    characters that its output cannot show.
    """
    sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    flags = tyro.conf.FlagCreatePairsOff[options_type]
    return tyro.cli(flags, prog=f"python -m {module}", args=arguments)


@dataclasses.dataclass(frozen=True)
class Check:
    """A condition on a number, as an annotation of its type."""

    description: str  # what a value must be, as in "--nodes must be an integer >= 1"
    is_met: Callable[[float], bool]


FLOAT32 = Check(
    f"at most {MAX_FLOAT32:.2g}, the largest float32", lambda value: value <= MAX_FLOAT32
)
PositiveInt = Annotated[int, Check("an integer >= 1", lambda value: value >= 1)]
NonNegativeInt = Annotated[int, Check("an integer >= 0", lambda value: value >= 0)]
PositiveFloat = Annotated[
    float, Check("positive and finite", lambda value: 0 < value < math.inf), FLOAT32
]
NonNegativeFloat = Annotated[
    float, Check("finite and >= 0", lambda value: 0 <= value < math.inf), FLOAT32
]
Seed = Annotated[
    NonNegativeInt, Check(f"at most {MAX_SEED}, of 32 bits", lambda value: value <= MAX_SEED)
]
Fraction = Annotated[float, Check("at least 0 and below 1", lambda value: 0 <= value < 1)]
OpenFraction = Annotated[float, Check("between 0 and 1", lambda value: 0 < value < 1)]


def check_fields(options: Any) -> None:
    """Applies the checks in the types of a dataclass's fields; None passes every check.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Options:
    ...     batch_size: PositiveInt = 0
    >>> check_fields(Options())
    Traceback (most recent call last):
    ValueError: --batch-size must be an integer >= 1, got 0.
    """
    hints = get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        values = value if isinstance(value, tuple) else (value,)
        for check in _find_checks(hints[field.name]):
            for one in values:
                if one is not None and not check.is_met(one):
                    name = _find_name(hints[field.name]) or option_name(field.name)
                    raise ValueError(f"{name} must be {check.description}, got {one}.")


def require_different(options: Any, *fields: str) -> None:
    """Raises `ValueError` unless each of these fields has values that are all different."""
    for field in fields:
        values = getattr(options, field)
        if not values or len(set(values)) < len(values):
            raise ValueError(
                f"{option_name(field)} must be one or several different values, got "
                f"{' '.join(map(str, values)) or 'none'}."
            )


def option_name(field: str) -> str:
    """Returns the name of a field on the command line.

    >>> option_name("log_every")
    '--log-every'
    """
    return f"--{field.replace('_', '-')}"


def _find_name(hint: Any) -> str | None:
    """Returns the name that `tyro.conf.arg` gives an option; None if it gives none."""
    names = [getattr(annotation, "name", None) for annotation in getattr(hint, "__metadata__", ())]
    return next((f"--{name}" for name in names if isinstance(name, str)), None)


def _find_checks(hint: Any) -> Iterator[Check]:
    for annotation in getattr(hint, "__metadata__", ()):
        if isinstance(annotation, Check):
            yield annotation
    for part in get_args(hint):
        yield from _find_checks(part)


def parse_path(arguments: list[str]) -> Path:
    """Returns the path in the arguments of an option.

    >>> parse_path(["runs/7"])
    PosixPath('runs/7')
    """
    (text,) = arguments
    if not text:
        raise ValueError("a path must not be empty, got '': write . for the current folder.")
    return Path(text)


OptionalPath = Annotated[
    Path | None,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=parse_path,
        is_instance=lambda value: value is None or isinstance(value, Path),
        str_from_instance=lambda value: [str(value)],
    ),
]


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """Options of all programs that measure. The checks in the types of all fields are applied."""

    out: OptionalPath = None
    """Folder for the results. By default, a new folder in runs/ is made."""
    overwrite: bool = False
    """Replace the results that another run has written into --out."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class RunsOptions:
    """Options of programs that run other programs, several side by side."""

    jobs: PositiveInt | None = None
    """Runs side by side; if not given, one for each GPU, or for each core, at most 8. Runs that
    measure time come last, one at a time."""
    out: OptionalPath = None
    """Folder for the results; what is finished there is not run again. A new one under runs/ if not
    given."""
    overwrite: bool = False
    """Replace the results of other runs in --out."""

    def __post_init__(self) -> None:
        check_fields(self)


DTYPES: dict[str, tuple[DTypeLike, DTypeLike]] = {
    "float32": (jnp.float32, jnp.float32),
    "mixed_bfloat16": (jnp.bfloat16, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
}
"""The types of computation and of parameters, by precision."""
