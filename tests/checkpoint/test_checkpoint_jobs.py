"""A job of two processes, killed in a save, started again, and ended by SIGTERM."""

import re
from pathlib import Path

import pytest
from launch.launching import run_job
from short_runs import names_in


@pytest.mark.smoke
def test_folders_that_are_not_shared(tmp_path):
    """What own_folders.py checks, in one job: each launch takes seconds."""
    worker = Path(__file__).with_name("own_folders.py").read_text()
    job = run_job(worker, "--processes", 2, "--local-devices", 2, FOLDER=str(tmp_path))
    assert job.returncode == 0, job.stderr
    assert job.stdout.count(" done") == 2 * worker.count("\ndef check_"), job.stdout


@pytest.mark.smoke
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own folders"])
def test_two_processes_write_their_rows_and_agree(shared, tmp_path):
    """On what is damaged, on one model, and to end when one of them is asked to.

    After SIGKILL in a save the launcher starts the job again at once: its own lock, which was left,
    does not stop it.
    """
    worker = Path(__file__).with_name("worker.py").read_text()
    options = ("--processes", 2, "--local-devices", 2, "--max-restarts", 1, "--restart-delay", 0)
    job = run_job(worker, *options, FOLDER=str(tmp_path), SHARED=str(shared))
    # Its peer may end first: the kernel closes the sockets of a process before it reports its end.
    killed = r"rank 0 failed \(SIGKILL, signal 9\)|process 1 of 2 ends: process 0"
    assert re.search(killed, job.stderr), job.stderr
    assert "failed (exit status 143)" in job.stderr, job.stderr
    of_damage = [
        "Close it first",
        "restored step 4 with 0 warnings",
        "restored step 2 with 1 warnings",
    ]
    for rank in range(2):
        lines = [line for line in job.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        lines = [line.removeprefix(f"[{rank}] ").rstrip() for line in lines]
        names = [["['.lock']", "['.lock', '2', '4.orbax-checkpoint-tmp']"], ["", ""]][rank]
        # Threads of Gloo print there too, and mix their lines.
        gloo = re.compile(r"Gloo|connected (to|peer)|^\d*$")
        assert [line for line in lines if not gloo.search(line)] == [
            f"process {rank} holds nodes {[2 * rank, 2 * rank + 1]}",
            *shared * of_damage,
            f"starts at 0 with None {names[0]}".rstrip(),
            f"starts at 2 with {{'nodes': 4}} {names[1]}".rstrip(),
            "as if never killed",
            "ends after step 8",
        ]
    if shared:
        assert names_in(tmp_path / "damaged") == ["2", "4.corrupted"]
    for folder in [tmp_path / "run"] if shared else (tmp_path / "run").iterdir():
        # A process that writes alone may have been done with step 4 when the other one was killed.
        assert [n for n in names_in(folder) if n != "4.superseded"] == ["4", "6", "8"]
