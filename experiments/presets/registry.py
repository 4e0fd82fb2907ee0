"""All presets by name, and command lines whose defaults are those of a preset."""

import argparse
import contextlib
import dataclasses
import difflib
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

import tyro

from experiments.presets import dpsgd17, language_models, rand20, relaysgd, sgp19, slowmo
from experiments.presets.preset import Preset

Options = TypeVar("Options")

FAMILIES = (sgp19, dpsgd17, rand20, relaysgd, slowmo, language_models)
PRESETS: dict[str, Preset] = {preset.name: preset for f in FAMILIES for preset in f.PRESETS}


def find_preset(name: str) -> Preset:
    """Returns the preset of this name; raises `ValueError` with similar names without one."""
    if name in PRESETS:
        return PRESETS[name]
    nearest = difflib.get_close_matches(name, PRESETS, n=3)
    question = f"did you mean {', '.join(nearest)}? " if nearest else ""
    raise ValueError(
        f"--preset must be the name of a preset, got {name!r}: {question}`python -m "
        "experiments.presets` lists them."
    )


def parse_options(
    module: str, options_type: type[Options], arguments: Sequence[str] | None = None
) -> Options:
    """Returns the options of `python -m MODULE`; with `--preset`, defaults are the preset's.

    `options_type` is a dataclass with a field `preset`, in which the name is recorded. `arguments`
    are those of the command line; None is `sys.argv[1:]`.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    name = find_name(arguments)
    if name is None:
        flags = tyro.conf.FlagCreatePairsOff[options_type]
        return tyro.cli(flags, prog=f"python -m {module}", args=arguments)
    preset = find_preset(name)
    if module != f"experiments.{preset.program}":
        raise ValueError(
            f"--preset must be a preset of {module}, got {name}, of another program: run "
            f"`{preset.command}`."
        )
    values = {**preset.options, "preset": name}
    # Not checked: a preset may need an option that only the command line has, a folder.
    defaults = object.__new__(options_type)
    for field in dataclasses.fields(options_type):  # pyright: ignore[reportArgumentType]
        object.__setattr__(defaults, field.name, values.get(field.name, field.default))
    # With both --FLAG and --no-FLAG, since a preset may set a flag that is not wanted.
    try:
        return tyro.cli(options_type, prog=f"python -m {module}", args=arguments, default=defaults)
    except SystemExit as error:
        if error.code:  # that of wrong options, whose message tyro has printed
            print(describe_origin(name), file=sys.stderr)
        raise


def find_name(arguments: Sequence[str]) -> str | None:
    """Returns the last value of `--preset`; None without one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", nargs="?")
    return parser.parse_known_args(list(arguments))[0].preset


@contextlib.contextmanager
def mention_preset(arguments: Sequence[str] | None) -> Iterator[None]:
    """Adds to the message of a `ValueError` that options come from a preset, if they do."""
    name = find_name(sys.argv[1:] if arguments is None else arguments)
    try:
        yield
    except ValueError as error:
        if name is None or "--preset" in str(error):
            raise
        raise ValueError(f"{error} {describe_origin(name)}") from error


def describe_origin(name: str) -> str:
    """Returns where options come from, after an error."""
    return f"(Options that are not on the command line are those of --preset {name}.)"
