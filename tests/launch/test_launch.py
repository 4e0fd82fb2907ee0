"""The launcher: processes that start and end together, signals, restarts, its command line."""

import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from launching import (
    PROLOGUE,
    TIMEOUT,
    environment,
    is_alive,
    read_pids,
    run_job,
    started_job,
    wait_for,
)

from gossipjax.launch import MALLOC_ENVIRONMENT
from gossipjax.launch.__main__ import main
from gossipjax.launch.supervisor import _output, _worker
from gossipjax.launch.supervisor._reaper import Reaper
from gossipjax.launch.supervisor._supervisor import Backoff

__all__ = ["environment", "is_alive"]


@pytest.mark.smoke
def test_each_process_gets_its_environment_and_its_output_a_prefix():
    code = PROLOGUE + (
        "import json; print('to stderr', file=sys.stderr); print('one\\ntwo')\n"
        "print(json.dumps(dict(os.environ)), end='')"
    )
    done = run_job(code, "--processes", 3, "--local-devices", 2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] to stderr" for rank in range(3)]
    addresses = set()
    for rank in range(3):
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines[:2] == [f"[{rank}] one", f"[{rank}] two"]
        variables = json.loads(lines[2].removeprefix(f"[{rank}] "))
        addresses.add(variables["GOSSIPJAX_COORDINATOR_ADDRESS"])
        assert variables["GOSSIPJAX_PROCESS_ID"] == str(rank)
        assert variables["GOSSIPJAX_NUM_PROCESSES"] == "3"
        assert variables["GOSSIPJAX_NUM_PROCESSES_AT_START"] == "3"
        assert variables["JAX_NUM_CPU_DEVICES"] == "2"
        assert variables["JAX_LOCAL_DEVICE_IDS"] == f"{2 * rank},{2 * rank + 1}"
        assert int(variables["NPROC"]) >= 4
    assert len(addresses) == 1
    assert done.stdout.count("\n") == 9


@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("sys.exit(3)", 3, "exit status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL, signal 9"),
    ],
)
def test_one_failure_stops_all(end, status, reason, tmp_path):
    code = PROLOGUE + (
        "announce(rank); wait_for(0, 1, 2)\n"
        "if rank != 1: time.sleep(1000)\n"
        "for i in range(50): print('line', i)\n"
        f"print('last words', end=''); {end}"
    )
    done = run_job(code, "--processes", 3, FOLDER=str(tmp_path))
    assert done.returncode == status
    report = done.stderr.splitlines()
    assert "rank 1 failed" in report[0]
    assert reason in report[0]
    assert report[1:] == [f"    line {i}" for i in range(31, 50)] + ["    last words"]
    assert not any(map(is_alive, read_pids(tmp_path)))


def test_processes_that_ignore_sigterm_are_killed_and_grandchildren_too(tmp_path):
    code = PROLOGUE + (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0: announce(f'child of {rank}'); time.sleep(1000)\n"
        "wait_for('child of 0', 'child of 1'); announce(rank)\n"
        "if rank == 0: sys.exit(7)\n"
        "time.sleep(1000)"
    )
    done = run_job(code, "--processes", 2, "--grace", 0.1, FOLDER=str(tmp_path))
    assert done.returncode == 7
    assert len(read_pids(tmp_path)) == 4
    assert not any(map(is_alive, read_pids(tmp_path)))


def test_children_of_a_process_end_with_it(tmp_path):
    code = PROLOGUE + ("if os.fork() == 0: announce('child'); time.sleep(1000)\nwait_for('child')")
    assert run_job(code, "--processes", 1, FOLDER=str(tmp_path)).returncode == 0
    assert not any(map(is_alive, read_pids(tmp_path)))


def test_no_orphan_when_the_launcher_is_killed(tmp_path):
    code = PROLOGUE + (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0: announce(f'child of {rank}'); time.sleep(1000)\n"
        "announce(rank); time.sleep(1000)"
    )
    with started_job(code, "--processes", 2, FOLDER=str(tmp_path)) as launcher:
        wait_for(lambda: len(read_pids(tmp_path)) == 4)
        launcher.kill()
        wait_for(lambda: not any(map(is_alive, read_pids(tmp_path))))


def find_reaper(launcher: int) -> int:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = path.with_name("cmdline").read_text()
            if parent == launcher and command.endswith("_reaper.py\0"):
                return int(path.parent.name)
    raise AssertionError("no reaper")


def test_a_killed_reaper_costs_no_restart(tmp_path):
    """The next start brings another one, which knows the process that goes on."""
    code = PROLOGUE.replace("PROCESS_ID", "NODE") + (
        "announce(f'{rank} of {restart}'); wait_for('killed')\n"
        "if rank == 1 and restart == 0: sys.exit(5)\n"
        "time.sleep(1000)"
    )
    options = ("--asynchronous", "--processes", 2, "--max-restarts", 3, "--restart-delay", 0)
    with started_job(code, *options, FOLDER=str(tmp_path)) as launcher:
        wait_for(lambda: len(read_pids(tmp_path)) == 2)
        reaper = find_reaper(launcher.pid)
        os.kill(reaper, signal.SIGKILL)
        wait_for(lambda: not is_alive(reaper))
        (tmp_path / "killed.pid").touch()
        wait_for((tmp_path / "1 of 1.pid").exists)
        running = [int((tmp_path / name).read_text()) for name in ("0 of 0.pid", "1 of 1.pid")]
        assert all(map(is_alive, running))
        launcher.kill()
        wait_for(lambda: not any(map(is_alive, running)))


@pytest.mark.smoke
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_processes_save(number, tmp_path):
    code = PROLOGUE + (
        "def save(*_):\n"
        "    print('saved'); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save); announce(rank); time.sleep(1000)"
    )
    options = ("--processes", 2, "--max-restarts", 3)
    with started_job(code, *options, FOLDER=str(tmp_path)) as launcher:
        wait_for(lambda: len(read_pids(tmp_path)) == 2)
        launcher.send_signal(number)
        out, err = launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 128 + number, err
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert "restart" not in err


def test_a_second_signal_kills(tmp_path):
    code = PROLOGUE + (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); announce(rank); time.sleep(1000)"
    )
    options = ("--processes", 2, "--grace", 1000)
    with started_job(code, *options, FOLDER=str(tmp_path)) as launcher:
        wait_for(lambda: len(read_pids(tmp_path)) == 2)
        launcher.send_signal(signal.SIGINT)
        assert launcher.stderr is not None
        assert "SIGINT" in launcher.stderr.readline()
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 130
    assert not any(map(is_alive, read_pids(tmp_path)))


def test_output_that_nobody_reads_stops_the_job(tmp_path):
    code = PROLOGUE + "announce(rank)\nwhile True: print('more')"
    with started_job(code, "--processes", 2, FOLDER=str(tmp_path)) as launcher:
        assert launcher.stdout is not None
        assert "more" in launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(TIMEOUT) == 128 + signal.SIGPIPE
    assert not any(map(is_alive, read_pids(tmp_path)))


def fill_pipe(launcher, folder, processes=2):
    """Waits until all processes run and the launcher's stderr, which nobody reads, is full."""
    capacity = fcntl.fcntl(launcher.stderr, fcntl.F_GETPIPE_SZ)
    unread = bytearray(4)

    def is_full():
        fcntl.ioctl(launcher.stderr, termios.FIONREAD, unread)
        return int.from_bytes(unread, sys.byteorder) > 0.8 * capacity  # pages are not filled

    wait_for(lambda: len(read_pids(folder)) == processes and is_full())


CHATTER = "print(1000 * 'x', file=sys.stderr)\n"


@pytest.mark.parametrize("options", [(), ("--asynchronous",)])
def test_a_paused_reader_keeps_nobody_from_the_signals(options, tmp_path):
    """The first reaches the processes, which ignore it, and the second kills them."""
    prologue = PROLOGUE.replace("PROCESS_ID", "NODE") if options else PROLOGUE
    code = prologue + (
        "signal.signal(signal.SIGTERM, lambda *_: announce(f'{rank} got it')); announce(rank)\n"
        f"while True: {CHATTER}"
    )
    options = (*options, "--processes", 2, "--grace", 1000)
    with started_job(code, *options, FOLDER=str(tmp_path)) as launcher:
        fill_pipe(launcher, tmp_path)
        launcher.terminate()
        wait_for(lambda: len(read_pids(tmp_path)) == 4)
        launcher.terminate()
        assert launcher.wait(TIMEOUT) == 128 + signal.SIGTERM
    assert not any(map(is_alive, read_pids(tmp_path)))


def test_a_paused_reader_does_not_hide_a_stall(tmp_path):
    """The processes end, and the reader sees the report when it goes on."""
    code = PROLOGUE + f"for i in range(500): {CHATTER}announce(rank); time.sleep(1000)"
    options = ("--processes", 2, "--stall", 0.2, "--stall-slow", 1)
    with started_job(code, *options, FOLDER=str(tmp_path)) as launcher:
        wait_for(lambda: len(read_pids(tmp_path)) == 2)
        wait_for(lambda: not any(map(is_alive, read_pids(tmp_path))))
        _, err = launcher.communicate(timeout=TIMEOUT)
    assert launcher.returncode == 2
    assert err.count("xxx\n") == 1000
    assert "no process has advanced in 1 s" in err


def test_what_a_paused_reader_has_not_read_is_not_lost(tmp_path):
    """Though the processes have long ended: a full pipe, and more."""
    code = PROLOGUE + f"announce(rank)\nfor i in range(500): {CHATTER}"
    with started_job(code, "--processes", 2, FOLDER=str(tmp_path)) as launcher:
        fill_pipe(launcher, tmp_path)
        wait_for(lambda: not any(map(is_alive, read_pids(tmp_path))))
        with pytest.raises(subprocess.TimeoutExpired):
            launcher.wait(2.5)
        _, err = launcher.communicate(timeout=TIMEOUT)
    assert (launcher.returncode, err.count("xxx\n")) == (0, 1000)


def test_more_than_fits_waits_for_the_reader(monkeypatch):
    """Then the processes wait, as at any full pipe; the order stays."""
    monkeypatch.setattr(_output, "MAX_WAITING_BYTES", 10**6)
    source, sink = os.pipe()
    output = _output.Output(sink)
    lines = [b"%1000d\n" % i for i in range(2000)]
    count = 0
    while output.wait_for_room(0):
        output.put(lines[count])
        count += 1
    assert not output.wait_until_written(0)
    with open(source, "rb") as reader:
        assert [reader.readline() for _ in range(count)] == lines[:count]
        assert output.wait_for_room(TIMEOUT)
        assert output.wait_until_written(TIMEOUT)
    os.close(sink)


@pytest.mark.smoke
@pytest.mark.parametrize(("restarts", "status"), [(1, 5), (2, 0)])
def test_restarts(restarts, status):
    code = PROLOGUE + "print('attempt', restart); sys.exit(5 if restart < 2 and rank == 1 else 0)"
    options = ("--max-restarts", restarts, "--restart-delay", 0)
    done = run_job(code, "--processes", 2, *options)
    assert done.returncode == status
    assert done.stderr.count("rank 1 failed") == 2
    assert done.stderr.count("[launch] restart") == restarts
    assert f"[1] attempt {restarts}" in done.stdout


@pytest.mark.parametrize("options", [(), ("--asynchronous",)])
@pytest.mark.parametrize(
    ("command", "status", "shown"),
    [
        (
            [sys.executable, "-c", "import no_such_module"],
            1,
            "ModuleNotFoundError: No module named",
        ),
        ([sys.executable, "-c", "def f("], 1, "SyntaxError: '(' was never closed"),
        ([sys.executable, "-c", "from os import nothing"], 1, "ImportError: cannot import name"),
        ([sys.executable, "-m", "no_such_module"], 1, "No module named no_such_module"),
        ([sys.executable, "no_such_file.py"], 2, "can't open file"),
        (["sh", "-c", "no_such_program"], 127, "not found"),
    ],
)
def test_a_program_that_cannot_start_is_not_started_again(command, status, shown, options, capfd):
    restarts = ["--max-restarts", "5", "--restart-delay", "0"]
    assert main(["--processes", "2", *restarts, *options, "--", *command]) == status
    report = capfd.readouterr().err
    assert shown in report
    assert "the program would fail again, so it is not started again\n" in report
    assert "restart 1" not in report


def test_a_failed_import_counts_as_any_failure_once_the_program_has_started():
    code = PROLOGUE + (
        "if restart == 0: sys.exit(1)\n"
        "if restart == 1: import no_such_module\n"
        "print('started', restart)"
    )
    done = run_job(code, "--processes", 1, "--max-restarts", 3, "--restart-delay", 0)
    assert (done.returncode, done.stdout) == (0, "[0] started 2\n")


def test_bad_usage_is_not_tried_again():
    done = run_job(
        "import argparse; argparse.ArgumentParser().error('no')",
        *("--processes", 1, "--max-restarts", 5),
    )
    assert done.returncode == 2
    assert "restart" not in done.stderr


def test_elastic_restarts_on_the_surviving_processes(tmp_path):
    """Two are killed, and one fails because of it: that one is not lost."""
    code = PROLOGUE + (
        "from gossipjax import launch\n"
        "print('nodes', launch.surviving_nodes(8), 'rank', rank)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN if rank == 1 else lambda *_: sys.exit(1))\n"
        "announce(f'{rank} of {restart}')\n"
        "if restart == 0 and rank == 1:\n"
        "    wait_for(*(f'{i} of 0' for i in range(4)))\n"
        "    for i in (3, 1):\n"
        "        os.kill(int(Path(os.environ['FOLDER'], f'{i} of 0.pid').read_text()), 9)\n"
        "if restart == 0: time.sleep(1000)\n"
    )
    options = ("--processes", 4, "--max-restarts", 1, "--elastic")
    done = run_job(code, *options, FOLDER=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1, with 2 processes" in done.stderr
    after = [line for line in done.stdout.splitlines() if "nodes 4" in line]
    assert sorted(after) == ["[0] nodes 4 rank 0", "[1] nodes 4 rank 1"]


@pytest.mark.parametrize(
    ("first", "on_sigterm"),
    [
        # Rank 2 fails because rank 1 was killed, but the launcher hears of rank 2 first.
        (2, "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else sys.exit(1)"),
        (1, "os.kill(os.getpid(), signal.SIGSEGV)"),  # a crash while the process stops
        (1, "None"),  # the launcher kills it
    ],
    ids=["reported late", "crash while stopping", "killed by the launcher"],
)
def test_elastic_counts_one_loss_once(first, on_sigterm, tmp_path):
    code = PROLOGUE + (
        "if restart: sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, lambda *_: {on_sigterm})\n"
        "announce(rank); wait_for(*range(4))\n"
        f"if rank == {first}: sys.exit(1)\n"
        "while True: time.sleep(1)"
    )
    options = ("--processes", 4, "--max-restarts", 1, "--elastic", "--restart-delay", 0)
    done = run_job(code, *options, "--grace", 0.5, FOLDER=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1, with 3 processes" in done.stderr


class RecordedReaper(Reaper):
    """Records the state of a process that has exited when it is reported."""

    def __init__(self, states: list[tuple[str, str | None]]):
        super().__init__()
        self._states = states

    def discard(self, group):
        self._states.append(("report", process_state(group)))


def process_state(process: int) -> str | None:
    """State of a process, as a letter: Z is a zombie. None once its id is free."""
    path = Path(f"/proc/{process}/stat")
    return path.read_text().rpartition(")")[2].split()[0] if path.exists() else None


def test_a_group_is_signaled_only_while_its_leader_holds_its_number(monkeypatch):
    """The number of a process that was waited for may be that of another group already."""
    states = []

    def record(group, number):
        states.append((signal.Signals(number).name, process_state(group)))

    monkeypatch.setattr(_worker, "signal_group", record)
    exits = []
    with RecordedReaper(states) as reaper:
        worker = _worker.Worker(0, ["true"], dict(os.environ), exits.append, reaper)
        worker.join()
    assert states == [("SIGKILL", "Z"), ("report", "Z")]
    assert exits == [_worker.Exited(0, 0)]
    worker.send_signal(signal.SIGTERM)
    assert len(states) == 2


def test_restarts_are_delayed_more_after_each_failure():
    code = PROLOGUE + "print('time', time.time()); sys.exit(5)"
    done = run_job(code, "--processes", 1, "--max-restarts", 2, "--restart-delay", 0.5)
    assert done.returncode == 5
    assert "restart 1 of 2, with 1 processes, in 0.5 s\n" in done.stderr
    assert "restart 2 of 2, with 1 processes, in 1 s\n" in done.stderr
    times = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    delays = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert delays[0] >= 0.5
    assert delays[1] >= 1


@pytest.mark.parametrize(
    ("first", "seconds", "delays"),
    [
        (1, [1] * 7, [1, 2, 4, 8, 16, 30, 30]),
        (1, [1, 1, 3600, 1], [1, 2, 1, 2]),  # the third attempt ran for an hour
        (100, [1] * 3, [100] * 3),
        (0, [1] * 3, [0] * 3),
        (1, [1] * 5000, [1, 2, 4, 8, 16] + 4995 * [30]),
    ],
)
def test_delays_between_restarts(first, seconds, delays):
    backoff = Backoff(first)
    assert [backoff.next_delay(ran) for ran in seconds] == delays


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_delay_before_a_restart(number):
    options = ("--processes", 1, "--max-restarts", 3, "--restart-delay", 1000)
    with started_job("raise SystemExit(5)", *options) as launcher:
        assert launcher.stderr is not None
        while "in 1000 s" not in launcher.stderr.readline():
            pass
        start = time.monotonic()
        launcher.send_signal(number)
        launcher.communicate(timeout=TIMEOUT)
        assert time.monotonic() - start < 30
    assert launcher.returncode == 128 + number


@pytest.mark.parametrize(("option", "is_kept"), [("--keep-memory", 1), ("--no-keep-memory", 0)])
def test_memory_is_kept_only_on_request(option, is_kept):
    code = f"import os; print(sum(os.environ.get(k) == v for k, v in {MALLOC_ENVIRONMENT}.items()))"
    unset = dict.fromkeys(MALLOC_ENVIRONMENT, "")
    done = run_job(code, "--processes", 1, option)
    assert done.stdout == f"[0] {is_kept * len(MALLOC_ENVIRONMENT)}\n", done.stderr
    assert run_job(code, "--processes", 1, option, **unset).stdout == "[0] 0\n"


def test_memory_that_is_needed_once_goes_back():
    code = (
        "import numpy as np\n"
        "data = np.ones(170_000_000)\n"
        "del data\n"
        "print(int(open('/proc/self/statm').read().split()[1]) * 4096)"
    )
    done = run_job(code, "--processes", 1)
    assert int(done.stdout.split()[1]) < 2**29, done.stderr


def test_each_job_has_a_secret():
    code = "import os; print(os.environ['GOSSIPJAX_SECRET'])"
    outputs = [run_job(code, "--processes", 2).stdout.splitlines() for _ in range(2)]
    secrets = [{line.split()[1] for line in lines} for lines in outputs]
    assert [len(values) for values in secrets] == [1, 1]
    assert secrets[0] != secrets[1]
    assert min(map(len, secrets[0] | secrets[1])) >= 32
    assert "[0] mine\n" in run_job(code, "--processes", 1, GOSSIPJAX_SECRET="mine").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--processes 0 -- python", "--processes must be from 1 to 1024, got 0"),
        ("--processes 1000000 -- python", "--processes must be from 1 to 1024, got 1000000"),
        ("--processes 2 --local-devices 0 -- python", "--local-devices must be from 1 to 1024, "),
        ("--processes 2 --local-devices 100000 -- python", "from 1 to 1024, got 100000"),
        ("--processes 2 --grace -1 -- python", "--grace must be from 0 to 1e+06, got -1"),
        ("--processes 2 --grace nan -- python", "--grace must be from 0 to 1e+06, got nan"),
        ("--processes 2 --grace 1e300 -- python", "--grace must be from 0 to 1e+06, got 1e+300"),
        ("--processes 2 --max-restarts -1 -- python", "--max-restarts must be from 0 to 1e+06"),
        ("--processes 2 --max-restarts 1.5 -- python", "invalid int value"),
        ("--processes 2 --restart-delay inf -- python", "--restart-delay must be from 0 to 1e+06"),
        ("--processes 2 --restart-delay soon -- python", "invalid float value"),
        ("--processes 2 --stall 0 -- python", "--stall must be from 0.1 to 1e+06, got 0"),
        ("--processes 2 --elastic -- python", "--elastic must come with --max-restarts"),
        ("--processes 2", "no command"),
        ("--processes 2 --", "no command"),
        (
            "--processes 2 -- no-such-program",
            "the command must be a program that can be executed, got 'no-such",
        ),
        ("--processes two -- python", "invalid int value"),
        ("-- python", "--processes"),
    ],
)
def test_bad_input_to_the_launcher(arguments, message, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments.split())
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


def test_a_process_that_cannot_be_started(capsys):
    too_long = "x" * 2**18
    assert main(["--processes", "2", "--", "true", too_long]) == 1
    assert "error: cannot start rank 0: [Errno 7] Argument list too long" in capsys.readouterr().err
