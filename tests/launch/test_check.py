"""What `--check` says of a path on which something is wrong, and of one that is well."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from launching import TIMEOUT, environment, free_address

from experiments.speed.wire import links
from gossipjax.launch import _check
from gossipjax.launch.__main__ import main

SECRET = "the secret of a job"
# A machine whose clock is ahead. The blocks need less time than between real machines.
RUN = """
import sys, time
from gossipjax.launch import __main__, _check
_check.SEND_SECONDS = 0.2
_check.CONNECT_SECONDS = 1.0
now, ahead = time.time, float(sys.argv.pop(1))
time.time = lambda: now() + ahead
sys.exit(__main__.main())
"""
NEEDS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or None in map(shutil.which, ("ip", "tc")),
    reason="needs root, ip and tc for network namespaces",
)


def make_command(option, address, ahead=0.0):
    return [sys.executable, "-c", RUN, f"{ahead}", option, address]


@contextlib.contextmanager
def listening(address, *prefix, ahead=0.0) -> Iterator[None]:
    command = [*prefix, *make_command("--listen", address, ahead)]
    variables = environment(GOSSIPJAX_SECRET=SECRET)
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            assert line.endswith(f"python -m gossipjax.launch --check {address}\n")
            yield
        finally:
            process.kill()


def check(address, *prefix, secret=SECRET):
    """The status, and what was printed."""
    done = subprocess.run(
        [*prefix, *make_command("--check", address)],
        env=environment(GOSSIPJAX_SECRET=secret),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_good_path_a_clock_and_a_secret():
    address = free_address()
    with listening(address):
        status, text = check(address)
        assert status == 0, text
        assert "nothing is wrong" in text
        there, back = map(float, re.findall(r"([\d.e+]+) Mbit/s there, ([\d.e+]+) back", text)[0])
        assert min(there, back) > 1
        status, text = check(address, secret="the secret of another job")
        assert (status, "has another secret" in text) == (1, True), text
    with listening(address, ahead=60.0):
        status, text = check(address)
        assert (status, "- the clocks differ" in text) == (0, True), text
        assert 59 < float(re.findall(r"clock +\+([\d.]+) s there", text)[0]) < 61


def test_who_has_not_the_secret_is_told_a_number_alone():
    address = free_address()
    with listening(address):
        for said in (b'"a guess"\n', b"[]\n", b"{" * 9000 + b"\n"):
            with socket.create_connection(_check.parse_address(address)) as stranger:
                stranger.sendall(said)
                answer = stranger.makefile("rb").read()
                assert re.fullmatch(rb'"[0-9a-f]{64}"\n(false\n)?', answer)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:{free}", "nothing listens at .*--listen 127.0.0.1:{free}"),
        ("nobody.invalid:5000", "no name server knows nobody.invalid"),
        ("127.0.0.1:{other}", "another program listens there"),
    ],
)
def test_what_is_not_reached(address, told, capsys, monkeypatch):
    monkeypatch.setattr(_check, "ANSWER_SECONDS", 0.2)  # who listens says nothing
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = {"free": free_address().split(":")[1], "other": server.getsockname()[1]}
        assert main(["--check", address.format(**ports)]) == 1
    assert re.search(told.format(**ports), capsys.readouterr().err)


def test_an_address_that_this_machine_has_not(capsys):
    assert main(["--listen", "203.0.113.1:5000"]) == 1
    assert "cannot listen at 203.0.113.1:5000" in capsys.readouterr().err


@NEEDS_ROOT
def test_a_small_mtu_and_a_firewall():
    with links.make_network(2, links.parse_rate("1gbit")) as (one, two):
        address = f"{one.address}:5000"
        with listening(address, *one.prefix):
            links.run_command("ip", "-n", str(one.namespace), "link", "set", "e0", "mtu", "1400")
            status, text = check(address, *two.prefix)
            assert status == 0, text
            assert "path MTU   1400 bytes" in text
            assert "`MTU = 1320`" in text
            # Its answers are dropped, and nobody is told.
            drop = ("route", "add", "blackhole", f"{two.address}/32")
            links.run_command("ip", "-n", str(one.namespace), *drop)
            start = time.monotonic()
            status, text = check(address, *two.prefix)
            assert (status, "sudo ufw allow 5000/tcp" in text) == (1, True), text
            assert time.monotonic() - start > 1
