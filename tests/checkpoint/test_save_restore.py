"""Checkpoints: bit for bit, during the run, and nothing lost when one is damaged or not written."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modes import make_mesh
from promotion import apply_updates
from short_runs import NAMES, assert_equal_bits, make_chain

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, change_nodes
from gossipjax.checkpoint._leaves import checksum

ROOT = Path(__file__).parent.parent.parent
N = 8
STEPS = 13
PLACEMENTS = {
    "mesh": gx.Nodes(mesh=make_mesh(N)),
    "vmap": gx.Nodes(N),
    "several per device": gx.Nodes(N, make_mesh(2)),
}
CASES = [(name, kind) for name in NAMES for kind in ("mesh", "vmap")]
CASES += [(name, "several per device") for name in NAMES[:3]]


def abstract(state):
    """Shapes and shardings of JAX's arrays; other leaves as they are."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            if isinstance(x, jax.Array)
            else x
        ),
        state,
    )


def make_noisy_step(tx):
    """A step whose gradients are random, by a key that is a part of the state."""

    def step(params, state, key, k):
        key, step_key = jax.random.split(key)
        grads = jax.tree.map(lambda z: z - jax.random.normal(step_key, z.shape, z.dtype), params)
        updates, state = tx.update(grads, state, params, step=k)
        return apply_updates(params, updates), state, key

    return step


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_resumed_run_is_the_run_that_was_never_interrupted(name, kind, tmp_path):
    nodes = PLACEMENTS[kind]
    tx = make_chain(name, N)
    program = nodes.spmd(make_noisy_step(tx), shared_argnums=3)
    low_precision = jnp.bfloat16 if kind == "vmap" else jnp.float32
    params = nodes.put({"a": np.ones((N, 3, 2), np.float32), "b": np.ones((N, 5), low_precision)})
    keys = nodes.put(jax.random.split(jax.random.key(1), N))
    current = (params, nodes.run(tx.init, params), keys)
    template = abstract(current)
    rng = np.random.default_rng(sum(map(ord, name)))
    saved_steps = sorted(rng.choice(np.arange(1, STEPS), 3, replace=False).tolist())
    with Checkpoints(tmp_path) as checkpoints:
        for k in range(STEPS):
            if k in saved_steps:
                checkpoints.save(k, current, {"k": k})
            current = program(*current, jnp.int32(k))
        for k in saved_steps:
            restored = checkpoints.restore(template, k)
            assert restored is not None
            assert restored.metadata == {"k": k}
            state = restored.state
            for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(template), strict=True):
                assert a.sharding == b.sharding
            for later in range(k, STEPS):
                state = program(*state, jnp.int32(later))
            assert_equal_bits(state, current)


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
            restored = checkpoints.restore(abstract(current), k)
            assert restored is not None
            assert (restored.state == 4**k).all()


def make_state(value=1):
    """One of everything."""
    return {
        "weights": PLACEMENTS["mesh"].put(jnp.full((N, 40, 50), value, jnp.float32)),
        "low precision": jnp.full((N, 3), value, jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(value), N),
        "empty": jnp.zeros((N, 0)),
        "host": np.arange(3) + value,
        "float64": np.full(2, value + 1e-12),
        "flags": np.array([True, False]),
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


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_keeps_the_last_ones_and_restores_the_newest(tmp_path):
    folder = tmp_path / "new" / "folder"
    with Checkpoints(folder, max_to_keep=2) as checkpoints:
        assert checkpoints.restore(make_state()) is None
        for step in (5, 10, 15):
            checkpoints.save(step, make_state(step), {"epochs": [step]})
        assert checkpoints.wait() == [10, 15]
        checkpoints.save(15, make_state(99), {})  # is there already
    with Checkpoints(folder) as checkpoints:
        newest = checkpoints.restore(make_state())
        assert newest is not None
        assert (newest.step, newest.metadata) == (15, {"epochs": [15]})
        assert_same_state(newest.state, make_state(15))
        older = checkpoints.restore(make_state(), step=10)
        assert older is not None
        assert_same_state(older.state, make_state(10))
        with pytest.raises(ValueError, match=r"step must be .*, one of \[10, 15\], got 11"):
            checkpoints.restore(make_state(), step=11)
    assert names_in(folder) == ["10", "15"]


@pytest.mark.smoke
def test_a_checkpoint_on_disk(tmp_path):
    """The names that other programs read, and what is not there: static data."""
    tx = gx.sgp(gx.topology.ring(N))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, gx.spmd(tx.init, nodes=N)(jnp.ones(N)), {"nodes": N})
    names = names_in(tmp_path / "3")
    assert {"state", "manifest"} <= set(names)
    text = (tmp_path / "3" / "manifest" / "metadata").read_text()
    for name in ("json", "checksum", "leaves", "metadata", "nodes", ".weight"):
        assert name in text
    assert "ring" not in text


def test_arrays_of_the_host_may_be_changed_at_once(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        array = np.zeros(200_000)
        checkpoints.save(1, {"a": array}, {})
        array += 1
        restored = checkpoints.restore({"a": array})
    assert restored is not None
    assert not restored.state["a"].any()


def test_a_run_from_an_older_checkpoint_supersedes_the_newer_ones(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step), {})
        checkpoints.restore(make_state(), step=1)
        checkpoints.save(2, make_state(22), {})
        checkpoints.save(3, make_state(33), {})
        assert checkpoints.wait() == [1, 2, 3]
        restored = checkpoints.restore(make_state(), step=2)
        assert restored is not None
        assert_same_state(restored.state, make_state(22))
    assert names_in(tmp_path) == ["1", "2", "2.superseded", "3", "3.superseded"]


def test_an_unfinished_checkpoint_is_none(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(1), {})
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")  # as a kill leaves it
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.wait() == [1]
        checkpoints.save(3, make_state(3), {})  # it is removed now: nobody else writes here
        assert checkpoints.wait() == [1, 3]
    assert names_in(tmp_path) == ["1", "3"]


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "deleted":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)


def largest_array(folder):
    return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


# A read by orbax continues for a moment after it has failed, and complains of a closed loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["deleted", "truncated", "one bit"])
@pytest.mark.parametrize("part", ["arrays", "manifest", "index of arrays"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(part, kind, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), {"step": step})
    path = {
        "arrays": largest_array(tmp_path / "2"),
        "manifest": tmp_path / "2" / "manifest" / "metadata",
        "index of arrays": tmp_path / "2" / "state" / "manifest.ocdbt",
    }[part]
    damage(path, kind)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(UserWarning, match=r"step 2 .* is damaged .* took that of step 1"):
            restored = checkpoints.restore(make_state())
        assert restored is not None
        assert (restored.step, restored.metadata) == (1, {"step": 1})
        assert_same_state(restored.state, make_state(1))
        checkpoints.save(2, make_state(4), {})  # the run comes there again
        restored = checkpoints.restore(make_state())
        assert restored is not None
        assert restored.step == 2
        assert_same_state(restored.state, make_state(4))
    assert names_in(tmp_path) == ["1", "2", "2.corrupted"]


def test_all_damaged(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), {})
            checkpoints.wait()
            damage(tmp_path / str(step) / "manifest" / "metadata", "truncated")
        with pytest.raises(OSError, match=r"can be read \(step 2: .*; step 1: "):
            checkpoints.restore(make_state())
        assert checkpoints.wait() == [1, 2]


class TestAnotherState:
    def restore(self, folder, saved, expected):
        with Checkpoints(folder) as checkpoints:
            checkpoints.save(4, saved, {})
            checkpoints.wait()
            damage(largest_array(folder), "deleted")
            checkpoints.restore(expected)  # refuses before it looks at an array

    def test_another_shape(self, tmp_path):
        ones = {"a": jnp.ones((8, 2)), "b": jnp.ones((8, 3))}
        message = (
            r"step 4 must have \['b'\]: \[8, 2\] float32, as this run, got "
            r"\['b'\]: \[8, 3\] float32\. It is of another model"
        )
        with pytest.raises(ValueError, match=message):
            self.restore(tmp_path, ones, ones | {"b": jnp.ones((8, 2))})

    def test_another_type(self, tmp_path):
        message = r"\[8\] bfloat16, as this run, got .*\[8\] float32\. It is of another model"
        with pytest.raises(ValueError, match=message):
            self.restore(tmp_path, jnp.ones(8), jnp.ones(8, jnp.bfloat16))

    def test_another_model(self, tmp_path):
        message = r"\['b'\]: \[8\] float32, as this run, got \['a'\]: \[8\] float32"
        with pytest.raises(ValueError, match=message):
            self.restore(tmp_path, {"a": jnp.ones(8)}, {"b": jnp.ones(8)})

    @pytest.mark.parametrize("is_longer", [True, False])
    def test_more_arrays(self, tmp_path, is_longer):
        states = (jnp.ones(8),), (jnp.ones(8), jnp.ones(8))
        saved, expected = reversed(states) if is_longer else states
        with pytest.raises(ValueError, match="nothing more"):
            self.restore(tmp_path, saved, expected)

    def test_another_number_of_nodes(self, tmp_path):
        message = r"\[5, 2\].* got .*\[8, 2\].*Checkpoints.resume takes it, or .*change_nodes"
        with pytest.raises(ValueError, match=message):
            self.restore(tmp_path, jnp.ones((8, 2)), jnp.ones((5, 2)))


def test_read_as_it_was_saved_and_resized_for_another_number_of_nodes(tmp_path):
    """The parts of which `resume` is made: the metadata have the number of nodes of the state."""

    def make_start(nodes):
        params = jnp.ones((nodes, 4))
        return params, gx.spmd(make_chain("osgp 1", nodes).init, nodes=nodes)(params)

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(6, make_start(8), {"nodes": 8})
        restored = checkpoints.restore(
            lambda metadata: jax.eval_shape(lambda: make_start(metadata["nodes"]))
        )
    assert restored is not None
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(restored.state))
    params, state = restored.state
    _, _, report = change_nodes(params, state, make_chain("osgp 1", 5), 5)
    assert (report.before, report.after) == (restored.metadata["nodes"], 5)


@pytest.mark.filterwarnings("default:.*could not be written")
def test_no_space_left_harms_nothing(tmp_path):
    """A limit on the size of files is met in the thread that writes, as a full disk is."""
    noise = {"a": jnp.asarray(np.random.default_rng(0).normal(size=(8, 50_000)), jnp.float32)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, max_to_keep=1) as checkpoints:
        checkpoints.save(1, noise, {})
        checkpoints.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            checkpoints.save(2, noise, {})
            with pytest.warns(
                UserWarning, match=r"step 2 could not be written .* the run continues"
            ):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert names_in(tmp_path) == [".lock", "1"]
        assert checkpoints.restore(noise) is not None
        checkpoints.save(3, noise, {})
        assert checkpoints.wait() == [3]
    assert names_in(tmp_path) == ["3"]


class TestBadInput:
    def test_a_folder_that_is_a_file(self, tmp_path):
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "file" / "folder"):
            with pytest.raises(OSError, match=f"all processes share, got {path}: "):
                Checkpoints(path)

    def test_a_folder_that_cannot_be_written(self, tmp_path, monkeypatch):
        def refuse(*args, **kwargs):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "touch", refuse)  # root may write everywhere
        with pytest.raises(OSError, match="Permission denied"):
            Checkpoints(tmp_path)

    def test_numbers(self, tmp_path):
        with pytest.raises(ValueError, match="max_to_keep must be an integer >= 1, got 0"):
            Checkpoints(tmp_path, max_to_keep=0)
        with pytest.raises(ValueError, match="every, in steps, must be an integer >= 1, got 0"):
            Checkpoints(tmp_path, every=0)


def xxh32(index, word, seed):
    """Of 8 bytes, in Python's integers, by xxHash's specification."""
    hashed = seed + 374761393 + 8
    for lane in (index, word):
        hashed = (hashed + lane * 3266489917) % 2**32
        hashed = (hashed << 17 | hashed >> 15) * 668265263 % 2**32
    hashed = (hashed ^ hashed >> 15) * 2246822519 % 2**32
    hashed = (hashed ^ hashed >> 13) * 3266489917 % 2**32
    return hashed ^ hashed >> 16


def test_the_checksum_is_of_xxh32():
    """And does not depend on devices."""
    # By the package xxhash: xxh32(struct.pack("<II", index, word), seed).intdigest().
    assert xxh32(5, 0x3F800000, 3) == 21846059
    assert xxh32(2**32 - 1, 2**32 - 1, 2**32 - 1) == 2685863586
    x = np.random.default_rng(0).normal(size=(8, 30)).astype(np.float32)
    leaves = [x, x.astype(jnp.bfloat16)]
    expected = sum(
        xxh32(index, int(word), number)
        for number, leaf in enumerate(leaves)
        for index, word in enumerate(leaf.view(f"uint{8 * leaf.itemsize}").ravel())
    )
    assert checksum(leaves) == expected % 2**32
    assert checksum([jnp.asarray(leaf) for leaf in leaves]) == checksum(leaves)
    assert checksum(PLACEMENTS["mesh"].put(leaves)) == checksum(leaves)
    with jax.enable_x64():
        wide = x.astype(np.float64)
        assert checksum([wide]) == checksum([jnp.asarray(wide)])


def test_the_checksum_sees_what_keeps_a_sum():
    x = np.random.default_rng(0).normal(size=(8, 30)).astype(np.float32)
    signs = x.copy()
    signs[[0, 7], [3, 29]] *= -1
    ones = np.ones(8192, np.float32)
    page = ones.copy()
    page[1024:2048] = 0
    for arrays in ([x, -x, signs, x[::-1], np.roll(x, 1)], [ones, page, 0 * ones, -ones]):
        assert len({checksum([array]) for array in arrays}) == len(arrays)
    assert checksum([ones[:64]]) != checksum([0 * ones[:64]])
    assert checksum([x, x + 1]) != checksum([x + 1, x])


def test_without_orbax():
    """A change of nodes needs NumPy only; the way out is in the error."""
    code = (
        "import sys; sys.modules['orbax'] = None\n"
        "from gossipjax.checkpoint import TrainState, average_nodes, change_nodes\n"
        "try: from gossipjax.checkpoint import Checkpoints\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert 'needs orbax: pip install "gossipjax[checkpoint]"' in run.stdout, run.stderr
