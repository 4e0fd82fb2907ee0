"""Damage of any kind: the right content, an older checkpoint with a warning, or a refusal.

Every test damages a copy of one saved folder.
"""

import os
import shutil
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modes import make_mesh
from short_runs import assert_equal_bits, names_in, snapshot

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, _store

COUNT = 56
NODES = gx.Nodes(4, mesh=make_mesh(2))
STEPS = (1, 2)


def make_state(step):
    """With what a plain sum of words does not tell apart: pages of ones, equal arrays."""
    noise = np.random.default_rng(step).normal(size=(4, 3000)).astype(np.float32)
    ones = np.full((4, 3000), step, np.float32)
    stacked = {"noise": noise, "ones": ones, "same": ones, "narrow": noise.astype(jnp.bfloat16)}
    keys = jax.random.split(jax.random.key(step), 4)
    return {"stacked": NODES.put(stacked), "keys": keys, "host": np.arange(step, 9 + step)}


def flip_bit(content, rng):
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)


def truncate(content, rng):
    del content[rng.integers(len(content)) :]


EDITS = [flip_bit, truncate]


def edit(file, change, rng):
    content = bytearray(file.read_bytes())
    change(content, rng)
    file.write_bytes(content)


def choose(items, rng):
    return items[rng.integers(len(items))]


def files_of(folder):
    """By size, the arrays last: names are random."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 16]
    return sorted(files, key=lambda path: path.stat().st_size)


def edit_arrays(folder, rng, steps=(2,)):
    for step in steps:
        edit(files_of(folder / str(step))[-1], choose(EDITS, rng), rng)


def edit_both_steps(folder, rng):
    edit_arrays(folder, rng, STEPS)


def edit_any(folder, rng):
    edit(choose(files_of(folder / "2"), rng), choose(EDITS, rng), rng)


def replace_file(folder, rng):
    """By nothing, an empty file, a folder, or a link to nothing or to another file."""
    path, other = rng.choice(files_of(folder / "2"), 2, replace=False)
    path.unlink()
    match rng.integers(5):
        case 0:
            path.write_bytes(b"")
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(folder / "nothing")
        case 3:
            path.symlink_to(other)


def swap_files(folder, rng):
    first, second = rng.choice(files_of(folder / "2"), 2, replace=False)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def take_folder_of_another_step(folder, rng):
    """A part of it, or all."""
    name = choose(("", "state", "manifest"), rng)
    shutil.rmtree(folder / "2" / name)
    shutil.copytree(folder / "1" / name, folder / "2" / name)


DAMAGES = [
    *(edit_arrays, edit_arrays, edit_any, edit_both_steps),
    *(replace_file, replace_file, swap_files, take_folder_of_another_step),
]


def restore(folder, like):
    """The step that is right, and whether there was a warning; or that it was refused."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with Checkpoints(folder) as checkpoints:
                restored = checkpoints.restore(like)
        except (OSError, ValueError):
            return "refused"
    assert restored is not None
    try:
        assert restored.metadata == {"step": restored.step}
        assert_equal_bits(restored.state, make_state(restored.step))
    except AssertionError:
        return "wrong"
    is_warned = any("is damaged" in str(warning.message) for warning in caught)
    return {(2, False): "right", (1, True): "older, with a warning"}.get(
        (restored.step, is_warned), "wrong"
    )


def test_no_damaged_folder_is_restored_with_wrong_content(saved, tmp_path):
    like = make_state(0)
    endings = {}
    for number in range(COUNT):
        damage = DAMAGES[number % len(DAMAGES)]
        folder = shutil.copytree(saved, tmp_path / str(number))
        damage(folder, np.random.default_rng(number))
        endings[number, damage.__name__] = restore(folder, like)
    counts = Counter(endings.values())
    assert [key for key, ending in endings.items() if ending == "wrong"] == []
    assert min(counts[ending] for ending in ("older, with a warning", "refused")) > 0


def test_a_damaged_checkpoint_is_passed_over_and_saved_again(folder):
    edit(files_of(folder / "2")[-1], flip_bit, np.random.default_rng(0))
    with Checkpoints(folder) as checkpoints:
        with pytest.warns(UserWarning, match=r"step 2 .* is damaged .* took that of step 1"):
            restored = checkpoints.restore(make_state(0))
        assert restored is not None
        assert (restored.step, restored.metadata) == (1, {"step": 1})
        assert_equal_bits(restored.state, make_state(1))
        assert names_in(folder) == ["1", "2"]
        checkpoints.save(2, make_state(4), {})  # the run comes there again
        restored = checkpoints.restore(make_state(0))
        assert restored is not None
        assert restored.step == 2
        assert_equal_bits(restored.state, make_state(4))
        for step in STEPS:
            (folder / str(step) / "manifest" / "metadata").write_text("{}")
        with pytest.raises(OSError, match=r"\(step 2: its manifest is not one: .*; step 1:"):
            checkpoints.restore(make_state(0))
    assert names_in(folder) == ["1", "2", "2.corrupted"]


@pytest.mark.parametrize("part", ["arrays", "manifest/metadata"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_file_that_never_ends_is_damage(make, part, folder):
    path = files_of(folder / "2")[-1] if part == "arrays" else folder / "2" / part
    path.unlink()
    make(path)
    is_damaged = pytest.warns(UserWarning, match=r"step 2 .* is damaged .* took that of step 1")
    with Checkpoints(folder) as checkpoints, is_damaged:
        restored = checkpoints.restore(make_state(0))
    assert restored is not None
    assert restored.step == 1


@pytest.mark.parametrize("part", ["arrays", "manifest/metadata"])
def test_a_disk_that_fails(part, folder, monkeypatch):
    """For good: the newest may be complete, neither renamed nor replaced. For a moment: right."""
    path = files_of(folder / "2")[-1] if part == "arrays" else folder / "2" / part
    kept = path.rename(path.with_name("kept"))
    path.symlink_to(path)  # every read is an OSError, ELOOP, also for root
    before = snapshot(folder / "2")
    with (
        Checkpoints(folder) as checkpoints,
        pytest.raises(OSError, match=r"2 cannot be read \(.*Nothing was changed"),
    ):
        checkpoints.restore(make_state(0))
    assert snapshot(folder / "2") == before

    def mend(_):
        if path.is_symlink():
            kept.replace(path)

    monkeypatch.setattr(_store.time, "sleep", mend)  # before it is read again
    assert restore(folder, make_state(0)) == "right"
    assert names_in(folder) == ["1", "2"]
