"""The example programs run, are short, and find what they look for."""

import ast
from pathlib import Path

import jax
import pytest

from experiments import examples
from experiments.examples import flax_nnx, grain_language_model, whole_program

PROGRAMS = sorted(Path(examples.__path__[0]).glob("[a-z]*.py"))
PROGRAMS = [
    path for path in PROGRAMS if path.stem not in ("conftest", "digits", "methods", "tiny_qwen")
]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_says_how_to_run_it(path):
    documentation = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert f"python -m experiments.examples.{path.stem}" in documentation


def test_a_whole_program_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    whole_program.main(tmp_path / "stopped", steps=40)
    stopped = whole_program.main(tmp_path / "stopped", steps=60)
    assert stopped == whole_program.main(tmp_path / "whole", steps=60)
    assert min(stopped.values()) > 0.8
    assert list((tmp_path / "whole" / "tensorboard").iterdir())


def test_a_loop_of_nnx_learns_digits(monkeypatch):
    """On eight devices, and simulated on one, with the same result."""
    on_devices = flax_nnx.main(steps=60)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert on_devices > 0.85
    assert flax_nnx.main(steps=60) == pytest.approx(on_devices, abs=0.01)


def test_a_language_model_in_parts_learns(monkeypatch):
    """Four nodes of two devices; nats per byte start at 5.5."""
    monkeypatch.setattr(grain_language_model, "LAYERS", 1)
    assert grain_language_model.main(steps=30, batch_size=16) < 3.6
