"""The launcher: processes that start and end together or by themselves, signals, restarts."""

import json
import os
import signal
import subprocess
import sys

import pytest
from launching import (
    PROLOGUE,
    TIMEOUT,
    is_alive,
    read_pids,
    run_job,
    started_job,
    wait_for,
)

from gossipjax.launch import MALLOC_ENVIRONMENT
from gossipjax.launch.__main__ import main
from gossipjax.launch._job import next_delay

# A job whose processes need each other, and one of nodes that are started again by themselves.
TOGETHER: tuple[str, ...] = ()
EACH = ("--asynchronous",)
both = pytest.mark.parametrize("kind", [TOGETHER, EACH], ids=["together", "each"])
AT_ONCE = ("--restart-delay", 0)
IGNORE = PROLOGUE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
SLEEP = "time.sleep(1000)\n"


def read_output(done, rank):
    prefix = f"[{rank}] "
    lines = done.stdout.splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def launcher_lines(done):
    return [line for line in done.stderr.splitlines() if line.startswith("[launch]")]


@pytest.mark.smoke
def test_each_process_gets_its_environment_and_its_output_a_prefix():
    code = PROLOGUE + (
        "import json; print('to stderr', file=sys.stderr); print('one\\ntwo')\n"
        "print(json.dumps(dict(os.environ)), end='')"
    )
    # Numbers of another job, in which the launcher may run, would contradict its own.
    outer = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "JAX_NUM_PROCESSES": "9"}
    done = run_job(code, "--processes", 3, "--local-devices", 2, **outer)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] to stderr" for rank in range(3)]
    jobs = set()
    for rank in range(3):
        one, two, text = read_output(done, rank)
        assert (one, two) == ("one", "two")
        variables = json.loads(text)
        names = ("COORDINATOR_ADDRESS", "JOB")
        jobs.add(tuple(variables[f"GOSSIPJAX_{name}"] for name in names))
        assert variables["GOSSIPJAX_PROCESS_ID"] == str(rank)
        assert variables["GOSSIPJAX_NUM_PROCESSES"] == "3"
        assert variables["JAX_NUM_CPU_DEVICES"] == "2"
        assert variables["JAX_LOCAL_DEVICE_IDS"] == f"{2 * rank},{2 * rank + 1}"
        assert int(variables["NPROC"]) >= 4
        assert MALLOC_ENVIRONMENT.items() <= variables.items()
        assert not {"GOSSIPJAX_SECRET", *outer} & variables.keys()
    assert len(jobs) == 1  # the same for all
    assert done.stdout.count("\n") == 9


def test_what_the_user_sets_stays():
    names = [*MALLOC_ENVIRONMENT, "GOSSIPJAX_SECRET"]
    code = f"import os; print([os.environ.get(name) for name in {names}])"
    given = dict.fromkeys(MALLOC_ENVIRONMENT, "")
    done = run_job(code, *EACH, "--processes", 1, **given, GOSSIPJAX_SECRET="mine")
    assert done.stdout == f"[0] {['', '', '', 'mine']}\n"
    job = run_job(code, *EACH, "--processes", 1, "--no-keep-memory")
    assert "[None, None, None, '" in job.stdout


def test_each_node_gets_its_place_and_one_that_fails_starts_again(tmp_path):
    code = PROLOGUE + (
        "import json, socket\n"
        "host, port = os.environ['GOSSIPJAX_NODE_ADDRESSES'].split(',')[rank].split(':')\n"
        "socket.create_server((host, int(port))).close()\n"  # it may listen there
        "print(json.dumps(dict(os.environ)), flush=True)\n"
        "announce(f'{rank} of {restart}'); wait_for('0 of 0', '1 of 0', '2 of 0')\n"
        "if rank == 1 and restart == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "wait_for('1 of 1')"
    )
    # Variables of another job, in which the launcher itself may run, do not reach the nodes.
    outer = {"GOSSIPJAX_COORDINATOR_ADDRESS": "a:1", "GOSSIPJAX_PROCESS_ID": "7"}
    outer |= {"GOSSIPJAX_NUM_PROCESSES": "9", "GOSSIPJAX_RESTART": "5", "GOSSIPJAX_NODE": "8"}
    options = (*EACH, "--processes", 3, "--max-restarts", 2, *AT_ONCE)
    done = run_job(code, *options, FOLDER=str(tmp_path), **outer)
    assert done.returncode == 0, done.stderr
    first, *others = launcher_lines(done)
    assert first.startswith("[launch] rank 1 failed (SIGKILL, signal 9), the others go on")
    assert others == ["[launch] rank 1: restart 1 of 2 in 0 s"]
    outputs = [[json.loads(line) for line in read_output(done, place)] for place in range(3)]
    assert [len(output) for output in outputs] == [1, 2, 1]
    for place, output in enumerate(outputs):
        for restart, values in enumerate(output):
            assert not {"GOSSIPJAX_PROCESS_ID", "GOSSIPJAX_COORDINATOR_ADDRESS"} & values.keys()
            number = (values["GOSSIPJAX_NODE"], values["GOSSIPJAX_RESTART"])
            assert number == (str(place), str(restart))
            for name in ("NODE_ADDRESSES", "JOB", "SECRET"):  # the same for all, and they stay
                assert values[f"GOSSIPJAX_{name}"] == outputs[0][0][f"GOSSIPJAX_{name}"]
            assert len(values["GOSSIPJAX_SECRET"]) >= 32


def test_all_are_stopped_when_one_fails(tmp_path):
    code = PROLOGUE + (
        "announce(rank); wait_for(0, 1, 2)\n"
        f"if rank != 1: {SLEEP}"
        "for i in range(50): print('line', i)\n"
        "print('last words', end=''); sys.exit(3)"
    )
    done = run_job(code, "--processes", 3, FOLDER=str(tmp_path))
    assert done.returncode == 3
    report = done.stderr.splitlines()
    assert report[0].startswith("[launch] rank 1 failed (exit status 3), stopping the others")
    assert report[1:] == [f"    line {i}" for i in range(31, 50)] + ["    last words"]
    assert not any(map(is_alive, read_pids(tmp_path)))


def test_nothing_is_left_when_the_launcher_is_killed_and_nothing_runs_unguarded(tmp_path):
    """A process whose guard is killed ends, and the job restarts; SIGTERM is ignored by all."""
    code = IGNORE + (
        f"if os.fork() == 0: announce(f'child of {{rank}} of {{restart}}'); {SLEEP}"
        f"announce(f'{{rank}} of {{restart}}'); {SLEEP}"
    )
    options = ("--processes", 3, "--max-restarts", 1, *AT_ONCE, "--grace", 0.1)
    with started_job(code, *options, FOLDER=str(tmp_path)) as launcher:
        wait_for(lambda: len(read_pids(tmp_path)) == 6)
        first = read_pids(tmp_path)
        [guard] = set(find_session(read_pid(tmp_path, "1 of 0"))) - set(first)
        os.kill(guard, signal.SIGKILL)
        wait_for(lambda: len(read_pids(tmp_path)) == 12)
        assert not any(map(is_alive, first))
        launcher.kill()
        wait_for(lambda: not any(map(is_alive, read_pids(tmp_path))))
        assert launcher.stderr is not None
        assert "rank 1 failed (SIGKILL, signal 9), stopping" in launcher.stderr.readline()


def read_pid(folder, name):
    return int((folder / f"{name}.pid").read_text())


def find_session(leader):
    """The processes of a session."""
    listed = subprocess.run(["ps", "-o", "pid=", "-s", str(leader)], capture_output=True, text=True)
    return [int(line) for line in listed.stdout.split()]


@both
class TestSignals:
    @pytest.mark.smoke
    def test_let_the_processes_save(self, kind, tmp_path):
        number = signal.SIGINT if kind else signal.SIGTERM
        code = PROLOGUE + (
            "def save(*_):\n"
            "    print('saved'); sys.exit(1)\n"
            f"signal.signal(signal.SIGTERM, save); announce(rank); {SLEEP}"
        )
        options = (*kind, "--processes", 2, "--max-restarts", 3)
        with started_job(code, *options, FOLDER=str(tmp_path)) as launcher:
            wait_for(lambda: len(read_pids(tmp_path)) == 2)
            launcher.send_signal(number)
            out, err = launcher.communicate(timeout=TIMEOUT)
        assert launcher.returncode == 128 + number, err
        assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
        assert "restart" not in err

    def test_kill_in_the_end(self, kind, tmp_path):
        """By a second signal (together), or after the grace period (each)."""
        code = IGNORE + f"announce(rank); {SLEEP}"
        is_impatient = kind == TOGETHER
        options = (*kind, "--processes", 2, "--grace", 1000 if is_impatient else 0.2)
        with started_job(code, *options, FOLDER=str(tmp_path)) as launcher:
            wait_for(lambda: len(read_pids(tmp_path)) == 2)
            launcher.send_signal(signal.SIGINT)
            assert launcher.stderr is not None
            assert "SIGINT" in launcher.stderr.readline()
            if is_impatient:
                launcher.send_signal(signal.SIGINT)
            launcher.communicate(timeout=TIMEOUT)
        assert launcher.returncode == 130
        assert not any(map(is_alive, read_pids(tmp_path)))

    def test_end_the_delay_before_a_restart(self, kind):
        options = (*kind, "--processes", 1, "--max-restarts", 3, "--restart-delay", 1000)
        with started_job("raise SystemExit(5)", *options) as launcher:
            assert launcher.stderr is not None
            while "in 1000 s" not in launcher.stderr.readline():
                pass
            launcher.send_signal(signal.SIGTERM)
            launcher.communicate(timeout=TIMEOUT)
        assert launcher.returncode == 143


def test_output_without_a_reader_stops_the_job(tmp_path):
    code = PROLOGUE + "announce(rank)\nwhile True: print('more')"
    options = ("--processes", 2, "--max-restarts", 3)
    with started_job(code, *options, FOLDER=str(tmp_path)) as launcher:
        assert launcher.stdout is not None
        assert "more" in launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(TIMEOUT) == 128 + signal.SIGPIPE
    assert not any(map(is_alive, read_pids(tmp_path)))


class TestRestarts:
    @pytest.mark.smoke
    @pytest.mark.parametrize(("restarts", "status"), [(1, 5), (2, 0)])
    @both
    def test_have_an_end(self, restarts, status, kind, tmp_path):
        """Nodes go on when one has failed for good, and the job's status says that it has."""
        code = PROLOGUE + (
            "print('attempt', restart, flush=True); announce(f'{rank} of {restart}')\n"
            "if restart < 2 and rank == 1: sys.exit(5)\n"
            f"wait_for('1 of {restarts}'); time.sleep(0.3); print('end')"
        )
        options = ("--processes", 2, "--max-restarts", restarts, *AT_ONCE)
        done = run_job(code, *kind, *options, FOLDER=str(tmp_path))
        assert done.returncode == status
        assert done.stderr.count("rank 1 failed (exit status 5)") == 2
        lines = [line for line in launcher_lines(done) if "restart" in line]
        start = "rank 1: " if kind else ""
        assert lines == [
            f"[launch] {start}restart {i + 1} of {restarts} in 0 s" for i in range(restarts)
        ]
        assert f"attempt {restarts}" in read_output(done, 1)
        assert ("end" in read_output(done, 0)) == (kind == EACH or status == 0)
        assert ("end" in read_output(done, 1)) == (status == 0)

    def test_do_not_follow_if_a_program_was_called_wrongly(self, capfd):
        """As its status says, for example that of a missing file."""
        options = ["--processes", "2", "--max-restarts", "5", "--restart-delay", "0"]
        assert main([*options, "--", sys.executable, "no_such_file.py"]) == 2
        report = capfd.readouterr().err
        assert "can't open file" in report
        assert "the program would fail again, so it is not started again\n" in report
        assert "restart 1" not in report


@pytest.mark.parametrize(
    ("first", "seconds", "delays"),
    [
        (1, [1] * 7, [1, 2, 4, 8, 16, 30, 30]),
        (1, [1, 1, 3600, 1], [1, 2, 1, 2]),  # the third attempt ran for an hour
        (100, [1] * 3, [100] * 3),
        (0, [0, 0, 3600, 0], [0, 0, 0, 0]),
    ],
)
def test_delays_between_restarts(first, seconds, delays):
    found = []
    for ran_seconds in seconds:
        found.append(next_delay(found[-1] if found else None, first, ran_seconds))
    assert found == delays
