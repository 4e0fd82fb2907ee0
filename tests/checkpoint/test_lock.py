"""One job at a time has a folder. Others are refused by name; what a killed one left is seen."""

import errno
import fcntl
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from short_runs import names_in

from gossipjax.checkpoint import Checkpoints

ROOT = Path(__file__).parent.parent.parent
STATE = {"a": np.arange(3.0)}

JOB = """
import os, sys, warnings
import numpy as np
from gossipjax.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(1, {"a": np.arange(3.0)}, {})
checkpoints.wait()
warnings.simplefilter("ignore")  # JAX does not like forks
if os.fork():
    print("open", flush=True)
sys.stdin.read()  # as the loader of its data, the fork lives on when the job is killed
os._exit(0)
"""


def require_refused(folder, message):
    with pytest.raises(OSError, match=f"must be of one job at a time, got {folder}, {message}"):
        Checkpoints(folder)


def test_a_second_job_is_refused_by_name_until_the_first_is_killed(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", JOB, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        assert job.stdout.readline() == "open\n"
        who = rf"process {job.pid} on {re.escape(socket.gethostname())}"
        since = r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        way_out = "Wait for its end, or end it; read_only=True only reads"
        require_refused(tmp_path, f"which {who}, {since} has open. {way_out}")
        with Checkpoints(tmp_path, read_only=True) as checkpoints:
            assert checkpoints.restore(STATE) is not None
        assert names_in(tmp_path) == ["1"]
        job.send_signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert names_in(tmp_path) == ["1"]
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(2, STATE, {})
            assert checkpoints.wait() == [1, 2]
        job.stdin.close()
    assert names_in(tmp_path) == ["1", "2"]


def test_one_process_opens_a_folder_once(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        require_refused(tmp_path, rf"which process {os.getpid()} on .* Close it first")
        assert checkpoints.wait() == []
    with Checkpoints(tmp_path) as other:
        with pytest.raises(OSError, match="Close it first"):
            checkpoints.save(1, STATE, {})
        assert other.wait() == []
    checkpoints.save(1, STATE, {})  # nobody has it now
    assert names_in(tmp_path) == ["1"]
    require_refused(tmp_path, "which process")
    del checkpoints  # by a program that does not close it
    gc.collect()
    with pytest.raises(RuntimeError), Checkpoints(tmp_path):
        raise RuntimeError("in the loop")
    Checkpoints(tmp_path).close()


@pytest.mark.parametrize("change", [shutil.rmtree, lambda path: path.rename(f"{path}.old")])
def test_a_folder_that_is_removed_in_a_run_is_made_and_locked_anew(change, tmp_path):
    folder = tmp_path / "saved"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, STATE, {})
        checkpoints.wait()
        change(folder)
        with pytest.warns(UserWarning, match="was removed or replaced while this job saves there"):
            checkpoints.save(2, STATE, {})
        assert checkpoints.wait() == [2]
        require_refused(folder, "which process")


def test_a_disk_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.warns(UserWarning, match=r"has no locks \(No locks available\), so a second job"):
        Checkpoints(tmp_path).close()
