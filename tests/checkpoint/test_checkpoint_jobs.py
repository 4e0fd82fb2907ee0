"""Jobs of two processes, killed in a save, started again, and ended by SIGTERM."""

import re
from pathlib import Path

import pytest
from launch.launching import run_job
from short_runs import names_in


@pytest.mark.smoke
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own folders"])
def test_two_processes_write_their_rows_and_agree(shared, tmp_path):
    """On what is damaged, on one model, and to end when one of them is asked to.

    worker.py checks much else before, because each launch takes seconds.
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
    for rank in range(2):
        lines = [line for line in job.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        lines = [line.removeprefix(f"[{rank}] ").rstrip() for line in lines]
        names = [["['.lock']", "['.lock', '2', '4.orbax-checkpoint-tmp']"], ["", ""]][rank]
        # Threads of Gloo print there too, and mix their lines.
        gloo = re.compile(r"Gloo|connected (to|peer)|^\d*$")
        assert [line for line in lines if not gloo.search(line)] == [
            "checked",
            f"starts at 0 with None {names[0]}".rstrip(),
            f"starts at 2 with {{'nodes': 4}} {names[1]}".rstrip(),
            "as if never killed",
            "ends after step 8",
        ]
    for folder in [tmp_path / "run"] if shared else (tmp_path / "run").iterdir():
        assert names_in(folder) == ["4", "6", "8"]
