"""Folders that others use too, disks that fail for a moment, and signals in the last write."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, Preempted, TrainState, _store

ROOT = Path(__file__).parent.parent.parent
NODES = gx.Nodes(2)
STATE = {"a": np.arange(3000.0)}
UNFINISHED = "9.orbax-checkpoint-tmp"


def make_tx(metadata):
    return optax.chain(optax.sgd(0.1), gx.sgp(gx.topology.ring(metadata["nodes"])))


def make_start():
    return TrainState(0, *NODES.init(make_tx({"nodes": 2}), jnp.ones(3)))


def snapshot(folder):
    """All names, and when and where each was written."""
    paths = [folder, *folder.rglob("*")]
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in paths}


@pytest.fixture
def others(tmp_path):
    """The folder of another run, which is saving."""
    folder = tmp_path / "others"
    with Checkpoints(folder, every=1) as checkpoints:
        checkpoints.after(make_start()._replace(step=1))
        checkpoints.after(make_start()._replace(step=2))
    (folder / UNFINISHED / "state").mkdir(parents=True)
    (folder / UNFINISHED / "state" / "part").write_text("half of it")
    return folder


class TestReadOnly:
    def test_init_from_leaves_the_folder_of_a_saving_run_as_it_is(self, others, tmp_path):
        before = snapshot(others)
        with Checkpoints(tmp_path / "mine", every=1) as checkpoints:
            state = checkpoints.resume(make_start(), NODES, make_tx, init_from=others)
            assert state.step == 2
            checkpoints.after(state._replace(step=3))
        assert snapshot(others) == before

    def test_restores_and_writes_nothing(self, others):
        before = snapshot(others)
        with Checkpoints(others, read_only=True) as checkpoints:
            assert checkpoints.wait() == [1, 2]
            assert checkpoints.resume(make_start(), NODES, make_tx).step == 2
            restored = checkpoints.restore(make_start().arrays, step=1)
            assert restored is not None
        assert snapshot(others) == before

    def test_leaves_a_damaged_checkpoint_where_it_is(self, others):
        (others / "2" / "manifest" / "metadata").write_text("{}")
        before = snapshot(others)
        with (
            Checkpoints(others, read_only=True) as checkpoints,
            pytest.warns(UserWarning, match=r"is damaged \([^)]*\): took that of step 1"),
        ):
            assert checkpoints.resume(make_start(), NODES, make_tx).step == 1
        assert snapshot(others) == before

    def test_refuses_to_save(self, others):
        with Checkpoints(others, read_only=True) as checkpoints:
            with pytest.raises(ValueError, match=r"read_only must be False for a save in .*others"):
                checkpoints.save(3, STATE, {})
            with pytest.raises(ValueError, match="every must be given to Checkpoints"):
                checkpoints.after(make_start())

    def test_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(OSError, match=r"can read, got .*missing: there is no such folder"):
            Checkpoints(tmp_path / "missing", read_only=True)
        assert not (tmp_path / "missing").exists()


def test_an_open_folder_is_cleaned_at_the_first_save_only(others):
    """A program that only looks must not end a save in progress."""
    with Checkpoints(others, every=1) as checkpoints:
        checkpoints.resume(make_start(), NODES, make_tx)
        assert (others / UNFINISHED / "state" / "part").exists()
        checkpoints.after(make_start()._replace(step=3))
        assert not (others / UNFINISHED).exists()


def array_file(folder):
    return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


def break_path(path):
    """Makes every read of a file an OSError, ELOOP, also for root."""
    kept = path.with_name("kept")
    path.rename(kept)
    path.symlink_to(path)
    return kept


def make_broken(folder, part):
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, STATE, {})
    path = {
        "arrays": array_file(folder / "2"),
        "manifest": folder / "2" / "manifest" / "metadata",
        "index of arrays": folder / "2" / "state" / "manifest.ocdbt",
    }[part]
    return path, break_path(path)


# A read by orbax continues for a moment after it has failed, and complains of a closed loop.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("part", ["arrays", "manifest", "index of arrays"])
class TestADiskThatFails:
    def test_for_a_moment(self, part, tmp_path, monkeypatch):
        path, kept = make_broken(tmp_path, part)
        monkeypatch.setattr(_store, "RETRY_DELAYS", (0.1, 0.5, 5.0))

        def mend():
            path.unlink()
            kept.rename(path)

        timer = threading.Timer(0.3, mend)
        timer.start()
        try:
            with Checkpoints(tmp_path) as checkpoints:
                restored = checkpoints.restore(STATE)
        finally:
            timer.join()
        assert restored is not None
        assert restored.step == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]

    def test_for_good(self, part, tmp_path):
        """The newest may be complete: neither renamed nor silently replaced by an older one."""
        path, kept = make_broken(tmp_path, part)
        before = snapshot(tmp_path / "2")
        with (
            Checkpoints(tmp_path) as checkpoints,
            pytest.raises(OSError, match=r"2 cannot be read \(.*Nothing was changed"),
        ):
            checkpoints.restore(STATE)
        assert snapshot(tmp_path / "2") == before
        path.unlink()
        kept.rename(path)
        with Checkpoints(tmp_path) as checkpoints:
            restored = checkpoints.restore(STATE)
        assert restored is not None
        assert restored.step == 2


def test_a_read_error_of_python_is_tried_again_and_then_raised(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, {})
    failures = iter([OSError(5, "Input/output error"), TimeoutError("slow"), None])
    real_read = _store.parse_manifest

    def read(content):
        failure = next(failures, None)
        if failure is not None:
            raise failure
        return real_read(content)

    monkeypatch.setattr(_store, "parse_manifest", read)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(STATE) is not None
        failures = iter([OSError(5, "Input/output error")] * 9)
        with pytest.raises(OSError, match="Input/output error"):
            checkpoints.restore(STATE)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


SLOW_LAST_WRITE = """
import os, signal, sys, threading, time
import jax.numpy as jnp, numpy as np, optax
import gossipjax as gx
from gossipjax.checkpoint import Checkpoints, TrainState, _store
nodes = gx.Nodes(2)
real_make = _store.ocp.CheckpointManager._finalize
def slow(self, *args, **kwargs):
    time.sleep(2)
    return real_make(self, *args, **kwargs)
_store.ocp.CheckpointManager._finalize = slow
try:
    with Checkpoints(sys.argv[1], every=1) as checkpoints:
        state = TrainState(1, *nodes.init(optax.sgd(0.1), jnp.ones(3)))
        checkpoints.after(state, last=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("in the last write", os.path.isdir(sys.argv[1] + "/1"), flush=True)
    print("not reached", flush=True)
finally:
    print("cleaned up", flush=True)
"""


def test_sigterm_in_the_last_write_completes_it_and_ends_with_143(tmp_path):
    """As after any other step: the program unwinds, no signal kills it."""
    run = subprocess.run(
        [sys.executable, "-c", SLOW_LAST_WRITE, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert run.stdout.splitlines() == ["in the last write False", "cleaned up"], run.stderr
    assert run.returncode == 143, run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.wait() == [1]


def test_sigterm_in_the_last_write_says_what_is_saved(tmp_path):
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def run_until_sigterm():
        with Checkpoints(tmp_path, every=2) as checkpoints:
            checkpoints.after(make_start()._replace(step=4), last=True)
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        with pytest.raises(Preempted, match="saved after step 4") as preempted:
            run_until_sigterm()
        assert (preempted.value.step, preempted.value.code) == (4, 143)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, former)


DTYPES = [
    *("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "bfloat16"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
]


@pytest.mark.parametrize("shape", [(4, 3), (4, 4)], ids=["odd", "even"])
def test_narrow_types_come_back_bit_for_bit(shape, tmp_path):
    """From the host and from devices, to both: of less than 8 bits, float8 and bfloat16."""
    numbers = np.arange(np.prod(shape)).reshape(shape) % 4 - 1
    host = {name: numbers.astype(getattr(ml_dtypes, name)) for name in DTYPES}
    devices = gx.Nodes(4).put(host)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"host": host, "devices": devices}, {})
        for source in (host, devices):
            form = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), host)
            like = {"host": source, "devices": form}
            restored = checkpoints.restore(like)
            assert restored is not None
            for part in ("host", "devices"):
                expected = source if part == "host" else host
                for name, leaf in restored.state[part].items():
                    assert isinstance(leaf, jax.Array) == isinstance(expected[name], jax.Array)
                    assert leaf.dtype == host[name].dtype
                    actual = np.asarray(leaf).view(np.uint8)
                    np.testing.assert_array_equal(actual, host[name].view(np.uint8), err_msg=name)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_sixty_four_bits_for_devices_that_hold_thirty_two(tmp_path):
    """Not a damage of the file, which must keep its name."""
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, {})
        form = jax.ShapeDtypeStruct((3000,), np.float64, sharding=jnp.ones(1).sharding)
        with pytest.raises(ValueError, match=r"\['a'\] of type float64.*set jax_enable_x64"):
            checkpoints.restore({"a": form})
    assert [path.name for path in tmp_path.iterdir()] == ["1"]
