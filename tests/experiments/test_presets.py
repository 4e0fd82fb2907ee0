"""Presets: their values, their methods by shapes only, and `--preset` in programs."""

import collections
import dataclasses
import re
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import gossipjax as gx
from experiments import image, language, speech, translation
from experiments.presets.registry import FAMILIES, PRESETS
from experiments.training.main import parse_options
from experiments.training.plan import TrainingPlan

PROGRAMS = {
    "image": image.ImageOptions,
    "translation": translation.TranslationOptions,
    "speech": speech.SpeechOptions,
    "language": language.LanguageOptions,
}
OF_A_MACHINE = {"data_dir", "out", "placement", "preset", "tokenizer", "resume", "report_to"}
NUM_EXAMPLES = 1_281_167
NUM_TOKENS = 160_000_000


def make_options(preset):
    more = {"data_dir": Path("FOLDER")} if preset.needs_data else {}
    return PROGRAMS[preset.program](**{**preset.options, **more})


def shapes(leading, tree, drop=0):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*leading, *x.shape[drop:]), x.dtype), tree)


def trace_update(run, size, params):
    """Traces optimizer and exchange over all nodes; parameters keep their shapes."""
    tx = run.method.transform

    def update(grads, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params, step=0)
        return optax.apply_updates(params, updates), opt_state

    stacked = shapes((size,), params)
    opt_state = shapes((size,), jax.eval_shape(tx.init, params))
    new, new_state = jax.eval_shape(gx.Nodes(size).spmd(update), stacked, opt_state, stacked)
    assert shapes((), new) == stacked
    assert shapes((), new_state) == opt_state


def test_every_row_has_a_name_a_source_and_a_command():
    names = [preset.name for family in FAMILIES for preset in family.PRESETS]
    assert len(names) == len(set(names)) == len(PRESETS)
    for preset in PRESETS.values():
        assert bool(preset.figure) == bool(preset.hardware)
        if preset.figure:
            assert preset.paper is not None
            assert preset.place is not None
        assert not preset.options.keys() & OF_A_MACHINE
        module = f"experiments.{preset.program}"
        arguments = shlex.split(preset.command.removeprefix(f"python -m {module} "))
        parsed = parse_options(module, PROGRAMS[preset.program], arguments)
        assert parsed.preset == preset.name
        assert dataclasses.replace(parsed, preset=None) == make_options(preset)


def test_the_rows_of_the_tables():
    """As many as the papers have: SGP-19, DPSGD-17, RAND-20, RelaySGD and SlowMo."""
    tables = (name.split("-")[:2] for name in PRESETS if name[-1].isdigit() or "-single" in name)
    assert collections.Counter("-".join(table) for table in tables) == {
        "sgp19-table1": 12,
        "sgp19-table3": 10,
        "sgp19-table4": 6,
        "sgp19-table5": 4,
        "dpsgd17-resnet20": 8,
        "dpsgd17-resnet56": 6,
        "rand20-table2": 10,
        "rand20-table3": 2,
        "relaysgd-table2": 36,
        "slowmo-table1": 7,
    }


def test_methods_are_traced():
    """Each chain once, with a small model."""
    small = {"w": jax.ShapeDtypeStruct((3,), jnp.float32)}
    traced = set()
    for preset in PRESETS.values():
        options = make_options(preset)
        num_examples = NUM_TOKENS if preset.program == "translation" else NUM_EXAMPLES
        for run in TrainingPlan(options, num_examples).make_runs(options.nodes):
            chain = (run.title, options.optimizer)
            if chain not in traced:
                trace_update(run, options.nodes, small)
            traced.add(chain)


@pytest.mark.parametrize(
    ("name", "epochs", "expected"),
    [
        ("sgp19-table1-ar-32", (0, 5, 29, 31, 61, 81), (0.1, 3.2, 3.2, 0.32, 0.032, 0.0032)),
        ("sgp19-table1-sgp-32", (5, 39, 41, 71, 86), (1.2, 1.2, 0.12, 0.012, 0.0012)),
        ("sgp19-table5-sgp-32", (5, 89, 91, 181, 241), (3.2, 3.2, 0.32, 0.032, 0.0032)),
        ("dpsgd17-resnet56-dpsgd-112", (0, 81), (0.1 * 112**0.5, 0.01 * 112**0.5)),
        ("relaysgd-table2-sgp-m-0.01", (5, 149, 151, 181), (0.025, 0.025, 0.0025, 0.00025)),
        ("rand20-table2-d1d-64", (9.99, 10.5, 11.5), (1.0, 0.7071, 0.5)),
        ("rand20-table2-single", (0, 9, 10.5), (0.1, 0.1, 0.0707)),
    ],
)
def test_learning_rates_are_those_of_the_papers(name, epochs, expected):
    options = make_options(PRESETS[name])
    plan = TrainingPlan(options, NUM_EXAMPLES)
    per_epoch = plan.steps / options.epochs
    rates = [plan.learning_rate_at(round(per_epoch * epoch)) for epoch in epochs]
    assert rates == pytest.approx(list(expected), rel=2e-3)


def test_an_option_that_does_not_fit_names_the_preset_of_the_others(capsys):
    with pytest.raises(SystemExit, match="2"):
        image.main(["--preset", "sgp19-table1-sgp-32", "--epochs", "3"])
    printed = " ".join(re.sub("[│╭╮╰╯─]", "", capsys.readouterr().err).split())
    assert "got 40 70 85" in printed
    assert "are those of --preset sgp19-table1-sgp-32.)" in printed
    given = ["--preset", "sgp19-table1-sgp-32", "--no-no-decay-on-norm-and-bias"]
    options = parse_options("experiments.image", image.ImageOptions, given)
    assert (options.no_decay_on_norm_and_bias, options.learning_rate) == (False, 0.0375)
