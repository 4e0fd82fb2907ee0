"""Each path that a folder of checkpoints uses may be a link, or a file or a folder of somebody.

And the disk may refuse any of them.
"""

import errno
import os
import shutil
import threading

import numpy as np
import pytest
from short_runs import names_in

from gossipjax.checkpoint import Checkpoints, _store

NAMES = ["1", "2", "3", "2.corrupted", "3.orbax-checkpoint-tmp", ".lock"]
KINDS = ["file", "folder", "link to a file", "link to a folder"]


def make_state(step):
    return {"a": np.arange(3.0) + step}


@pytest.fixture
def outside(tmp_path):
    """What is of somebody else."""
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("theirs")
    (outside / "folder" / "file").write_text("theirs")
    return outside


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put_in_place(path, kind, outside):
    """What was there, a checkpoint, moves to where a link to a folder leads."""
    if path.exists():
        shutil.rmtree(outside / "folder")
        path.rename(outside / "folder")
    match kind:
        case "file":
            path.write_text("")
        case "folder":
            shutil.copytree(outside / "folder", path)
        case _:
            path.symlink_to(outside / kind.removeprefix("link to a "))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("default:.*is damaged")
def test_a_run_goes_on_and_what_is_of_others_stays(kind, name, folder, outside):
    """It starts from the newest, saves and deletes the oldest. Or it is refused."""
    put_in_place(folder / name, kind, outside)
    before = contents(outside)
    if name == "2.corrupted":  # which a damaged checkpoint is going to have
        (folder / "2" / "manifest" / "metadata").write_text("{}")
    if name == ".lock" and kind != "file":
        with pytest.raises(OSError, match=r"where \.lock cannot be written \(.*Remove what has"):
            Checkpoints(folder)
    else:
        with Checkpoints(folder, max_to_keep=2) as checkpoints:
            restored = checkpoints.restore(make_state(0))
            assert restored is not None
            is_damaged = name == "2.corrupted" or (name == "2" and "folder" not in kind)
            assert restored.step == (1 if is_damaged else 2)
            np.testing.assert_array_equal(restored.state["a"], make_state(restored.step)["a"])
            checkpoints.save(3, make_state(3), {})
            if name == "3" and "folder" not in kind:
                with pytest.raises(OSError, match=r"step 3 could not .*3 is no checkpoint: move"):
                    checkpoints.wait()
            checkpoints.save(4, make_state(4), {})
            assert checkpoints.wait() == [2 if name == "3" and "folder" not in kind else 3, 4]
        assert not (folder / "1").is_dir()
        assert (folder / "2.corrupted" / "manifest").exists() == (name == "2.corrupted")
        assert not any("tmp" in name for name in names_in(folder))
    assert contents(outside) == before


@pytest.mark.filterwarnings("default:old checkpoints in")
def test_a_checkpoint_that_cannot_be_deleted_stops_no_other(folder, monkeypatch):
    remove = _store.remove

    def remove_or_fail(path):
        if path.name == "1":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        remove(path)

    monkeypatch.setattr(_store, "remove", remove_or_fail)

    with Checkpoints(folder, max_to_keep=2) as checkpoints:
        for step in (3, 4, 5):
            checkpoints.save(step, make_state(step), {})
        with pytest.warns(UserWarning, match=r"old .* cannot be deleted \(.*or the disk fills"):
            checkpoints.wait()
    assert names_in(folder) == ["1", "4", "5"]


def test_a_process_that_ends_is_no_disk_that_cannot_delete(folder, monkeypatch):
    def lose(*_):
        raise ConnectionError("process 1 has ended")

    monkeypatch.setattr(_store.Folder, "each", lose)
    with pytest.raises(ConnectionError, match="process 1 has ended"):
        _store.Folder(folder, shared=True).delete_all_but(1)


@pytest.mark.parametrize(("name", "allowed"), [("mkdir", 0), ("mkdir", 3), ("rename", 0)])
def test_a_write_that_cannot_begin_leaves_no_thread_that_waits(name, allowed, folder, monkeypatch):
    """Without inodes, quota or permission, from the n-th folder on: the process ends at once.

    A run restores from a disk that can only be read, and is told that it saves nothing.
    """
    (folder / "2" / "manifest" / "metadata").write_text("{}")
    action = getattr(os, name)
    done = []

    def act_or_fail(path, *args, **kwargs):
        if len(done) == allowed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        done.append(path)
        action(path, *args, **kwargs)

    before = set(threading.enumerate())
    with Checkpoints(folder) as checkpoints:
        with monkeypatch.context() as full:
            full.setattr(os, name, act_or_fail)
            with pytest.warns(UserWarning, match=r"step 2 in .* is damaged .*took that of step 1"):
                assert checkpoints.restore(make_state(0)) is not None
            checkpoints.save(3, make_state(3), {})
            with pytest.raises(OSError, match=r"step 3 could not .*No space left.*the first write"):
                checkpoints.wait()
        assert not {thread for thread in threading.enumerate() if not thread.daemon} - before
        checkpoints.save(4, make_state(4), {})
        assert checkpoints.wait() == [1, 4]
    assert names_in(folder) == ["1", "2.corrupted", "4"]
