"""Measurements on a wire: their arithmetic and options, and that they leave nothing behind."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_program import are_gone
from jax.sharding import Mesh

import gossipjax as gx
from experiments.speed.__main__ import main
from experiments.speed.wire import harness, links, stragglers
from experiments.speed.wire.measure import predict_row, summarize_configuration, summarize_row
from experiments.speed.wire.rows import WireOptions, average_at_center, build_rows, make_row
from experiments.speed.wire.stragglers import (
    BATCH_SIZE_PER_NODE,
    add_ratios,
    compute_ideal_ratio,
    summarize_run,
)
from experiments.speed.wire.timed import ALL_LINKS, BUSY_HOSTS, COMPUTATION, SINGLE_LINK
from experiments.training.methods import ALGORITHMS, spell_name

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--hosts", "2", "--megabytes", "0.02", "--compute-seconds", "0", "--iterations", "10"]
TINY += ["--computation", "slept"]
CAN_LIMIT = os.geteuid() == 0 and shutil.which("tc") and shutil.which("ip")


def list_rows(algorithms, wires, nodes, **options):
    return build_rows(WireOptions(algorithm=tuple(algorithms), wire=tuple(wires), **options), nodes)


def test_codecs_that_some_rows_do_not_have():
    names = ["sgp", "centralized", "async-sgp", "choco"]
    rows, left_out = list_rows(names, ["top_k", "int8"], 4)
    assert [(row.algorithm, row.wire) for row in rows] == [
        *(("sgp", "int8"), ("async-sgp", "int8"), ("choco", "top_k"), ("choco", "int8")),
    ]
    assert "must be float32 or bfloat16, got int8" in left_out["centralized, int8 wire"]


def test_every_algorithm_has_a_row():
    names = [spell_name(name, overlap=1) for name, row in ALGORITHMS.items() if row.exchanges]
    rows, left_out = list_rows(names, ["float32"], 4)
    assert not left_out
    assert [row.algorithm for row in rows] == names
    at_once = [row for row in rows if row.topology in ("complete", "center")]
    assert len(at_once) == 3  # an exchange of all nodes is an all-reduce
    assert {row.count_sent_bytes(0, 1000) for row in at_once} == {1.5 * 4000}


def make_records(rows, hosts=4):
    """Measurements of every host on links of 25 MB/s, made up; host 3 computes slowest."""
    names = [COMPUTATION, ALL_LINKS, SINGLE_LINK, BUSY_HOSTS, *(row.name for row in rows)]
    values = [0.5, 0.8, 1.0, 1.6, *[1.4 + 0.1 * i for i in range(len(rows))]]
    return [
        {
            "seconds": {
                name: [value * (1 if host == 3 or "stream" in name else 0.5)] * 9 + [9 * value]
                for name, value in zip(names, values, strict=True)
            },
            "cpu_seconds": {name: [0.1 + 0.2 * (name not in names[:4])] * 10 for name in names},
            "nic_bytes": {name: [20e6 + host] * 10 for name in names},
            "stream_bytes": 20_000_000,
            "parameters": 5_000_000,
            "examples": 7,
            "peak_memory_bytes": 1e9 + host,
        }
        for host in range(hosts)
    ]


def test_summary():
    rows, _ = list_rows(["sgp", "1-osgp"], ["float32"], 4)
    records = make_records(rows)
    configuration = summarize_configuration(4, "200mbit", "computed", records)
    assert configuration["computation_seconds"] == 0.5
    assert configuration["goodput_all_links"] == pytest.approx(25e6)
    assert configuration["goodput_one_link"] == pytest.approx(20e6)
    assert configuration["goodput_busy_hosts"] == pytest.approx(12.5e6)
    assert configuration["peak_memory_bytes"] == 1e9 + 3
    sgp, osgp = (summarize_row(row, configuration, records) for row in rows)
    assert sgp["goodput"] == pytest.approx(25e6)  # the faster of the two
    assert sgp["seconds"] == 1.4
    assert sgp["seconds_p90"] == pytest.approx(1.4 * (0.9 + 0.1 * 9))
    assert sgp["limit_seconds"] == pytest.approx(1.3, rel=1e-4)
    assert sgp["ratio_to_limit"] == pytest.approx(1.4 / 1.3, rel=1e-4)
    assert osgp["limit_seconds"] == pytest.approx(0.8, rel=1e-4)
    assert sgp["limit_max_seconds"] == pytest.approx(0.8, rel=1e-4)
    assert sgp["nic_bytes"] == 20e6 + 3
    assert sgp["exchange_cpu_seconds"] == pytest.approx(4 * 0.2 / (os.cpu_count() or 1))


@pytest.mark.parametrize(
    ("script", "stall_timeout", "message"),
    [
        ("time.sleep(60 * (rank == 0)); sys.exit('no such thing')", 60, r"host 1 .*no such thing"),
        (
            "(folder / f'{rank}.progress').write_text('waiting'); time.sleep(60)",
            2,
            r"the hosts hang \(host 0: waiting; host 1: waiting\).*silent for 2 s",
        ),
    ],
)
def test_one_that_fails_or_hangs_ends_all(tmp_path, script, stall_timeout, message):
    head = "import os, sys, time, pathlib; folder = pathlib.Path(sys.argv[1])"
    head += "; rank = int(sys.argv[2]); (folder / f'{rank}.pid').write_text(str(os.getpid()))\n"
    command = [sys.executable, "-c", head + script]
    members = [links.Host("127.0.0.1", None)] * 2
    with pytest.raises(harness.HostFailedError, match=f"(?s){message}"):
        harness.run_hosts(members, command, tmp_path, stall_timeout, print)
    assert are_gone([path.read_text() for path in tmp_path.glob("*.pid")], 0)


def start_measurement(tmp_path, arguments):
    """Starts a measurement; returns its process, as soon as its hosts run, and theirs."""
    command = [sys.executable, "-m", "experiments.speed", "wire", *TINY, *arguments]
    command += ["--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    children: list[str] = []
    deadline = time.monotonic() + 120
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children) < 2 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            children = [
                child
                for child in listed.read_text().split()
                if b"experiments.speed.wire" in Path(f"/proc/{child}/cmdline").read_bytes()
            ]
    assert len(children) == 2
    return process, children


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize("stop", ["SIGTERM", "SIGKILL"])
def test_a_run_that_is_stopped_leaves_nothing(tmp_path, stop):
    """No process; and no link, of a killed run after the next one."""
    process, members = start_measurement(tmp_path, ["--bandwidth", "100mbit"] if CAN_LIMIT else [])
    time.sleep(1.5)  # so that they are watching
    process.send_signal(signal.Signals[stop])
    process.communicate(timeout=30)
    assert process.returncode == {"SIGTERM": 143, "SIGKILL": -9}[stop]
    assert are_gone(members)
    if CAN_LIMIT:
        assert (process.pid in links.list_created()) == (stop == "SIGKILL")
        with links.make_network(2, 10_000_000):
            assert process.pid not in links.list_created()


@pytest.mark.skipif(not CAN_LIMIT, reason="network namespaces need root, ip and tc")
def test_a_network_is_removed_at_the_end():
    with links.make_network(3, 10_000_000) as members:
        assert len(links.list_created()[os.getpid()]) == 3 + 3 + 1
        command = [*members[2].prefix, "getent", "hosts", socket.gethostname()]
        assert subprocess.check_output(command, text=True).split()[0] == members[2].address
        queues = links.run_command("tc", "-n", str(members[0].namespace), "qdisc", "show")
        assert "tbf" in queues
    assert os.getpid() not in links.list_created()
    with pytest.raises(OSError, match=r"tc .* failed"), links.make_network(2, 0):
        pass
    assert os.getpid() not in links.list_created()


MEASURED = ("allreduce", "1-osgp", "async-sgp")


def test_measures(tmp_path, capsys):
    """The whole program, over loopback."""
    out = tmp_path / "out"
    main(["wire", *TINY, "--algorithm", *MEASURED, "--wire", "float32", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "2 hosts, loopback, computation slept" in printed
    assert "1-osgp*" in printed
    summary = json.loads((out / "summary.json").read_text())
    (configuration,) = summary["configurations"]
    assert configuration["computation_seconds"] > 0
    assert configuration["goodput_all_links"] > 1e6
    assert [run["algorithm"] for run in summary["runs"]] == list(MEASURED)
    for run in summary["runs"]:
        assert run["seconds_p10"] <= run["seconds"] <= run["seconds_p90"]
        assert run["iterations"] == 10
        assert run["nic_bytes"] is None
        assert run["ratio_to_limit"] == pytest.approx(run["seconds"] / run["limit_seconds"])
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == (4 + len(MEASURED)) * 10
    with pytest.raises(SystemExit):
        main(["wire", *TINY, "--out", str(out)])
    assert re.search(r"error: .* holds another run", capsys.readouterr().err)


def test_the_center_averages():
    """On a mesh, as its permutations are partial. The numbers are exact in 16 bits, too."""
    tx = average_at_center(gx.wire.float16())
    mesh = Mesh(np.array(jax.devices()[:4]), ("nodes",))
    x = {"a": np.arange(8.0, dtype=np.float32).reshape(4, 2), "b": np.ones(4, np.float32)}
    mean = gx.spmd(lambda g: tx.update(g, tx.init(g))[0], nodes=gx.Nodes(mesh=mesh))(x)
    np.testing.assert_allclose(mean["a"], [[3, 4]] * 4)
    np.testing.assert_allclose(mean["b"], np.ones(4))


PARAMETERS = 5_000_000  # 20 MB
CONFIGURATION = {
    "hosts": 4,
    "bandwidth": "200mbit",
    "parameters": PARAMETERS,
    "examples_per_host": 8,
    "goodput_all_links": 25e6,
    "goodput_one_link": 20e6,
    "goodput_busy_hosts": 16e6,
}
MODEL = 0.8  # seconds of a model on a link
BESIDE = 1.25  # beside computation


def end_alone(seconds):
    """Seconds of an exchange that takes so long beside computation, of which there are 0.5."""
    return 0.5 + (seconds - 0.5) * MODEL / BESIDE


def predict(algorithm, cpu=0.0, packing=0.0):
    row = make_row(algorithm, "float32", 4)
    seconds = predict_row(row, CONFIGURATION, 0.5, cpu, packing)
    assert seconds is not None
    return seconds


@pytest.mark.parametrize(
    ("algorithm", "seconds"),
    [
        # It begins after the forward pass, a third, and the last of eight layers.
        ("allreduce", 0.5 * (1 / 3 + 2 / 3 / 8) + 1.5 * MODEL),
        ("centralized", 0.5 + 6 * 20e6 / 20e6),  # it receives, then sends, one at a time
        ("sgp", 0.5 + MODEL),
        ("dpsgd@ring", end_alone(2 * BESIDE)),
        ("1-osgp", end_alone(BESIDE)),
        ("2-osgp", end_alone(BESIDE / 2)),
        ("gradient-tracking", 0.5 + 4 * MODEL),
        ("d1d-psgd", end_alone(1.5 * BESIDE)),
        ("async-sgp", 0.5),
    ],
)
def test_seconds_by_hand(algorithm, seconds):
    assert predict(algorithm) == pytest.approx(seconds, rel=1e-3)


def test_processor_time_is_added_where_it_cannot_hide():
    """Beside the computation it makes that longer; packing comes before the wire."""
    assert predict("sgp", cpu=0.3, packing=0.1) == pytest.approx(0.5 + MODEL + 0.1)
    assert predict("2-osgp", cpu=0.3, packing=0.05) == pytest.approx(0.8)
    beside, alone = BESIDE + 2 * 0.1, MODEL + 0.1  # half of the cores
    expected = 0.6 + (beside - 0.6) * alone / beside
    assert predict("1-osgp", cpu=0.1, packing=0.1) == pytest.approx(expected)
    assert predict("async-sgp", cpu=0.3) == pytest.approx(0.8)


STRAGGLERS = stragglers.StragglerOptions(nodes=2, steps=2, compute_seconds=0.5)


def make_node_record(ends, start=10.0):
    counts = {"sent": 3, "kept": 0, "staleness": 1.5}
    return {"start": start, "ends": [start + end for end in ends], **counts}


def test_ideals():
    """Of factors that change."""
    factors = np.array([[1.0, 3.0], [2.0, 1.0]])
    assert compute_ideal_ratio(factors, is_lockstep=True) == pytest.approx(2 / (3 + 2))
    assert compute_ideal_ratio(factors, is_lockstep=False) == pytest.approx((2 / 3 + 2 / 4) / 2)


def test_a_run_is_summarized():
    records = [make_node_record([2.0]), make_node_record([0.5, 1.0, 1.5])]
    run = summarize_run("async-sgp", "4x", STRAGGLERS, records)
    assert run["examples_per_second"] == pytest.approx(BATCH_SIZE_PER_NODE * 2.5)
    assert run["ideal_ratio_to_none"] == 0.625
    limit = 0.625 * 2 * BATCH_SIZE_PER_NODE / 0.5
    assert run["limit_examples_per_second"] == pytest.approx(limit)
    assert run["ratio_to_limit"] == pytest.approx(1)
    assert (run["steps_nodes"], run["steps_min"], run["steps_median"]) == ([1, 3], 1, 2)
    assert (run["seconds"], run["sent"]) == (2.0, 6)
    none = run | {"slowness": "none", "ideal_ratio_to_none": 1.0, "examples_per_second": 100.0}
    other = run | {"algorithm": "sgp"}
    add_ratios(runs := [none, run, other])
    assert [r["ratio_to_none"] for r in runs] == [1, pytest.approx(0.8), None]
    assert [r["ratio_to_ideal"] for r in runs] == [1, pytest.approx(0.8 / 0.625), None]


def test_a_small_measurement(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--nodes", "2", "--compute-seconds", "0.02", "--steps", "12"]
    arguments += ["--slowness", "none", "4x", "--algorithm", "1-osgp", "async-sgp"]
    main(["stragglers", *arguments, "--out", str(out)])
    summary = json.loads((out / "summary.json").read_text())
    runs = {(run["algorithm"], run["slowness"]): run for run in summary["runs"]}
    assert len(runs) == 4
    assert runs["1-osgp", "4x"]["steps_nodes"] == [12, 12]
    asynchronous = runs["async-sgp", "4x"]
    assert asynchronous["steps_nodes"][0] < asynchronous["steps_nodes"][1]
    assert sum(asynchronous["steps_nodes"]) >= 24
    assert asynchronous["sent"] > 0
    for run in summary["runs"]:
        assert 0 < run["ratio_to_limit"] < 1.2
    assert "Computation is a sleep of 0.02 s" in " ".join(capsys.readouterr().out.split())
