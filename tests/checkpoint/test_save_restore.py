"""What is saved comes back bit for bit; what cannot be saved or restored is refused."""

import json
import math
import subprocess
import sys
import zlib
from collections import OrderedDict
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from modes import make_mesh
from short_runs import assert_equal_bits, names_in

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints

ROOT = Path(__file__).parent.parent.parent
N = 8
PLACEMENTS = {"mesh": gx.Nodes(mesh=make_mesh(N)), "vmap": gx.Nodes(N)}


def test_saved_arrays_may_be_donated(tmp_path):
    """The next step takes the memory of the state before all of it is written."""
    nodes = PLACEMENTS["mesh"]
    program = nodes.spmd(lambda x: -2 * x, donate_argnums=0)
    current = nodes.put(jnp.ones((N, 200_000)))
    with Checkpoints(tmp_path, max_to_keep=4) as checkpoints:
        for k in range(4):
            checkpoints.save(k, current, {})
            current = program(program(current))
        for k in range(4):
            restored = checkpoints.restore(current, k)
            assert restored is not None
            assert (restored.state == 4**k).all()


NARROW = ["int2", "int4", "float4_e2m1fn", "bfloat16", "float8_e5m2"]
METADATA = {
    "text": 'ü "\ud800',
    "numbers": [1, 2.5, -0.0, 10**30, True, None, math.inf],
    "dicts": OrderedDict(a={}, b=[]),
}


def make_state(value=1):
    """One of everything."""
    numbers = np.arange(3 * N).reshape(N, 3) % 4 - 1
    narrow = {name: numbers.astype(getattr(ml_dtypes, name)) for name in NARROW}
    return {
        "weights": PLACEMENTS["mesh"].put(jnp.full((N, 40, 50), value, jnp.float32)),
        "low precision": jnp.full((N, 3), value, jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(value), N),
        "empty": jnp.zeros((N, 0)),
        "host": np.arange(3) + value,
        "float64": np.full(2, value + 1e-12),
        "flags": np.array([True, False]),
        **narrow,
        **{f"{name} on devices": PLACEMENTS["mesh"].put(x) for name, x in narrow.items()},
        "epoch": value,
        "rate": value / 3,
    }


def assert_same_state(actual, expected):
    for name, leaf in expected.items():
        assert type(actual[name]) is type(leaf)
        for attribute in ("sharding", "committed"):  # or programs would be compiled once more
            assert getattr(actual[name], attribute, None) == getattr(leaf, attribute, None)
    numbers = ("epoch", "rate")
    assert [actual[name] for name in numbers] == [expected[name] for name in numbers]
    states = (actual, expected)
    assert_equal_bits(*({k: v for k, v in s.items() if k not in numbers} for s in states))


@pytest.mark.smoke
def test_keeps_the_last_ones_and_restores_the_newest(tmp_path):
    folder = tmp_path / "new" / "folder"
    with Checkpoints(folder, max_to_keep=2) as checkpoints:
        assert checkpoints.restore(make_state()) is None
        for step in (5, 10, 15):
            checkpoints.save(step, make_state(step), METADATA | {"step": step})
        assert checkpoints.wait() == [10, 15]
        checkpoints.save(15, make_state(99), {})  # is there already
    with Checkpoints(folder) as checkpoints:
        for step, number in ((15, None), (10, 10)):
            restored = checkpoints.restore(make_state(), number)
            assert restored is not None
            assert (restored.step, restored.metadata) == (step, METADATA | {"step": step})
            assert_same_state(restored.state, make_state(step))
        # From devices to the host, and from the host to devices.
        state = {k: v for k, v in make_state(15).items() if any(name in k for name in NARROW)}
        host = {k: np.asarray(v) for k, v in state.items()}
        for convert in (np.asarray, PLACEMENTS["vmap"].put):
            like = {**make_state(), **{k: convert(v) for k, v in host.items()}}
            restored = checkpoints.restore(like)
            assert restored is not None
            assert_same_state(restored.state, make_state(15) | {k: like[k] for k in host})
        with pytest.raises(ValueError, match=r"step must be .*, one of \[10, 15\], got 11"):
            checkpoints.restore(make_state(), step=11)
    assert names_in(folder) == ["10", "15"]


def test_a_run_from_an_older_checkpoint_is_refused_where_the_newer_ones_are(tmp_path):
    """A later resume would take them."""
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step), {})
        checkpoints.restore(make_state(), step=1)
        checkpoints.save(1, make_state(1), {})  # is there already
        with pytest.raises(ValueError, match=r"got 2, and there are \[2, 3\]: resume from the"):
            checkpoints.save(2, make_state(22), {})
        assert checkpoints.wait() == [1, 2, 3]


FORM = {"a": jnp.ones(8), "b": jnp.ones((8, 3))}
OTHERS = [
    (FORM | {"b": jnp.ones((8, 2))}, r"\['b'\]: \[8, 2\] float32, as this run, .* another model"),
    (FORM | {"a": jnp.ones(8, jnp.bfloat16)}, r"\[8\] bfloat16, as this run, got .* float32\. It"),
    ({"b": FORM["a"], "c": FORM["b"]}, r"\['b'\]: .* as this run, got \['a'\]"),
    (FORM | {"c": jnp.ones(8)}, "got nothing more"),
    ({"a": FORM["a"]}, "must have nothing more"),
    ({"a": jnp.ones(5), "b": jnp.ones((5, 3))}, "resume takes other nodes, and .*change_nodes"),
]


def test_another_state_is_refused_before_an_array_is_read(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(4, FORM, {})
        checkpoints.wait()
        for path in tmp_path.rglob("d/*"):
            path.unlink()
        for expected, message in OTHERS:
            with pytest.raises(ValueError, match=message):
                checkpoints.restore(expected)
    assert names_in(tmp_path) == ["4"]


def test_numbers_of_64_bits_are_not_narrowed(tmp_path):
    with jax.enable_x64(True), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"a": jnp.arange(3.0)}, {"step": 1})
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=r"got .*float64"):
        checkpoints.restore({"a": jnp.zeros(3)})


@pytest.fixture
def disk(tmp_path, limit_files):
    return Disk(tmp_path / "run", limit_files)


class Disk:
    """Full, not full, or gone."""

    def __init__(self, folder, limit_files):
        self.folder = folder
        self.limit_files = limit_files

    def save(self, checkpoints, step, full):
        noise = np.random.default_rng(step).normal(size=(8, 50_000)).astype(np.float32)
        self.state = {"a": jnp.asarray(noise)}
        if full == "gone":
            self.folder.rename(self.folder.with_name("away"))
            self.folder.write_text("a file")
        self.limit_files(100_000 if full else -1)
        checkpoints.save(step, self.state, {})


@pytest.mark.filterwarnings("default:.*could not be written", "default:.*removed or replaced")
class TestNothingThatWasNotSavedEndsInSuccess:
    def test_a_middle_one_warns_and_harms_nothing(self, disk, caplog):
        with Checkpoints(disk.folder, max_to_keep=1) as checkpoints:
            disk.save(checkpoints, 1, full=False)
            checkpoints.wait()
            disk.save(checkpoints, 2, full=True)
            with pytest.warns(UserWarning, match=r"step 2 could not be .* the run continues"):
                checkpoints.wait()
            assert names_in(disk.folder) == ["1"]
            assert checkpoints.restore(disk.state) is not None
            disk.save(checkpoints, 3, full=False)
            assert checkpoints.wait() == [3]
        assert names_in(disk.folder) == ["3"]
        assert "SignalingThread" not in caplog.text  # a trace of 50 lines, by orbax

    def test_the_first_raises_at_the_next_call(self, disk):
        with Checkpoints(disk.folder) as checkpoints:
            disk.save(checkpoints, 1, full=True)
            with pytest.raises(OSError, match=r"step 1 could not be .*the first write"):
                checkpoints.save(2, disk.state, {})

    @pytest.mark.parametrize(
        ("full", "message"),
        [("full", r"step 2 could not be .*the last write"), ("gone", r"\.lock cannot be written")],
    )
    def test_the_last_raises_at_the_end(self, full, message, disk):
        def run():
            with Checkpoints(disk.folder) as checkpoints:
                disk.save(checkpoints, 1, full=False)
                checkpoints.wait()
                disk.save(checkpoints, 2, full)

        with pytest.raises(OSError, match=message):
            run()

    def test_another_error_goes_first(self, disk):
        def run():
            with Checkpoints(disk.folder) as checkpoints:
                disk.save(checkpoints, 1, full=True)
                raise KeyError("in the loop")

        with pytest.raises(KeyError), pytest.warns(UserWarning, match="step 1 could not be"):
            run()


SMALL = {"a": np.arange(3.0)}

WITHOUT_WITH = """
import sys
import jax.numpy as jnp
from gossipjax.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
for step in (1, 2):
    checkpoints.save(step, {"a": step * jnp.ones((8, 50_000))}, {})
"""


class TestWithoutAWithBlock:
    def test_a_program_ends_with_its_last_save(self, tmp_path):
        command = [sys.executable, "-c", WITHOUT_WITH, str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert (run.returncode, run.stderr) == (0, "")
        with Checkpoints(tmp_path, read_only=True) as checkpoints:
            for step in (1, 2):
                restored = checkpoints.restore({"a": jnp.ones((8, 50_000))}, step)
                assert restored is not None
                assert (restored.state["a"] == step).all()

    def test_each_save_that_fails_raises(self, disk):
        """Since it may be the last."""
        checkpoints = Checkpoints(disk.folder)
        disk.save(checkpoints, 1, full=False)
        for step in (2, 3):
            with pytest.raises(OSError, match=rf"step {step} could not be .*no `with` block"):
                disk.save(checkpoints, step, full=True)
        assert checkpoints.wait() == [1]


def test_a_checkpoint_of_gossipjax_0_4(tmp_path):
    """With a checksum of the arrays, a description of the chain, and no checksums of files.

    Narrow types were uint8 in its files, and would be read as numbers.
    """
    narrow = {"a": np.ones(3, ml_dtypes.float8_e5m2)}
    with Checkpoints(tmp_path) as checkpoints:
        for step, state in ((1, SMALL), (2, narrow)):
            checkpoints.save(step, state, {"epoch": 3})
            checkpoints.wait()
            path = tmp_path / str(step) / "manifest" / "metadata"
            fields = json.loads(json.loads(path.read_text())["json"])
            del fields["files"]
            text = json.dumps(fields | {"checksum": 123, "chain": {"schedule": "ring"}})
            path.write_text(json.dumps({"json": text, "checksum": zlib.crc32(text.encode())}))
        restored = checkpoints.restore(SMALL, step=1)
        with pytest.raises(ValueError, match=r"by gossipjax 0\.4, .* float8_e5m2 of \['a'\]"):
            checkpoints.restore(narrow)
    assert restored is not None
    assert (restored.step, restored.metadata) == (1, {"epoch": 3})
    np.testing.assert_array_equal(restored.state["a"], SMALL["a"])


def test_without_orbax():
    """A change of nodes needs NumPy only; the way out is in the error."""
    code = (
        "import sys; sys.modules['orbax'] = None\n"
        "from gossipjax.checkpoint import TrainState, average_nodes, change_nodes\n"
        "try: from gossipjax.checkpoint import Checkpoints\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "needs orbax: pip install orbax-checkpoint" in run.stdout, run.stderr
