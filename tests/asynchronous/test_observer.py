"""What an observer sees of a job, and that nobody notices the observer."""

import functools
import json
import os
import subprocess
import sys

import pytest
import real_nodes
from real_nodes import SECRET, gradients

from gossipjax.asynchronous import _service
from gossipjax.asynchronous.__main__ import COLUMNS, main, show
from gossipjax.asynchronous._observer import Observer

join = functools.partial(real_nodes.join, secret=SECRET, patience=2.0)
ROW = dict.fromkeys(COLUMNS) | {"place": 0, "address": "[::1]:5000", "steps": 2400, "heard": 0.25}


def list_doing(rows):
    return [rows[place]["doing"] for place in sorted(rows)]


def look_until(observer, is_seen):
    rows = {}
    for _ in range(100):
        rows = {row["place"]: row for row in observer.look(0.1)}
        if is_seen(rows):
            return rows
    raise AssertionError(rows)


def test_a_job_of_which_a_node_leaves_and_one_dies():
    nodes = [join()]
    nodes += [join(nodes[0].address, place=place) for place in (1, 2)]
    observer = Observer(nodes[0].address, SECRET)
    try:
        for _ in range(5):
            for node in nodes:
                node.step(gradients, 1.0)
        rows = look_until(
            observer,
            lambda rows: [rows.get(i, {}).get("doing") for i in range(3)] == ["trains"] * 3,
        )
        for place, row in rows.items():
            assert row["steps"] == 5
            assert row["address"] == nodes[place].address
            assert 0 < row["weight"] < 1
            assert row["received"] > 0
            assert row["sent"] > nodes[place].statistics.sent_bytes > 0
        assert [node.members for node in nodes] == [[0, 1, 2]] * 3  # the observer is none
        nodes[1].leave()
        nodes[2]._service.close()  # without a word
        rows = look_until(observer, lambda rows: rows[2]["doing"].startswith("dead to 0"))
        assert rows[1]["doing"] == "has left"
        assert rows[0]["doing"].startswith(("trains", "has made no step for "))
        assert rows[2]["weight"] is None
    finally:
        observer.close()
        for node in nodes[:2]:
            node.leave()


@pytest.mark.parametrize(
    "report",
    [
        {"node": {"place": 1}, "over": {}, "others": []},
        {"node": ROW, "over": {}, "others": []},  # without steps of a life
        {"node": ROW | {"life": "a"}, "over": {}, "others": ["a text"]},
        [],
    ],
)
def test_a_node_of_another_version_may_answer_anything(report, monkeypatch):
    observer = Observer("127.0.0.1:9", SECRET)
    try:
        answer = json.dumps(report).encode()
        monkeypatch.setattr(observer._sockets, "read_answers", lambda address: [answer])
        assert {row["life"] for row in observer.look(0.05)} <= {"a"}
    finally:
        observer.close()


def test_what_a_node_waits_for(monkeypatch, capsys):
    monkeypatch.setattr(_service, "NOTICE_SECONDS", 0.1)
    founder = join()
    other = join(founder.address, place=1)
    seen = []

    def traced(params, target):
        seen.append(other._participant.describe())
        return gradients(params, target)

    try:
        assert founder._participant.describe() == "trains"
        other.step(traced, 1.0)
        assert {*seen} == {"compiles"}
        with pytest.raises(TimeoutError):
            founder.average(timeout=1.0)
        waits = "waits in average() for place 1: still trains, at step 1"
        assert founder._participant.describe().startswith(waits)
    finally:
        other.leave()
        founder.leave()
    with join("127.0.0.1:1", place=2) as alone, pytest.raises(TimeoutError):
        alone.wait_for_mass(1.0)
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if line.startswith(f"gossipjax: node 0 {waits}")]
    assert [line for line in told if line.startswith("gossipjax: node 2 waits for a model")]


@pytest.mark.parametrize(
    ("address", "status", "told"),
    [
        ("any text", 2, "must be HOST:PORT"),
        ("192.0.2.1:5000", 2, "GOSSIPJAX_SECRET must be"),
        ("127.0.0.1:1", 1, "nobody listens at 127.0.0.1:1"),
        ("{node}", 1, "has another secret. Compare GOSSIPJAX_SECRET"),
    ],
)
def test_who_is_not_answered_is_told_why(address, status, told, capsys, monkeypatch):
    monkeypatch.delenv("GOSSIPJAX_SECRET", raising=False)
    node = join()
    with node, pytest.raises(SystemExit) as error:
        sys.exit(main([address.format(node=node.address)]))
    assert error.value.code == status
    assert told in capsys.readouterr().err


def test_lines_for_a_log():
    node = join()
    command = [sys.executable, "-m", "gossipjax.asynchronous", "--json", node.address]
    variables = {**os.environ, "GOSSIPJAX_SECRET": SECRET}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        line = json.loads(process.stdout.readline() if process.stdout else "")
        process.kill()
    assert (line["place"], line["address"], line["weight"]) == (0, node.address, 1.0)
    node.leave()


@pytest.mark.parametrize("has_rich", [True, False])
def test_the_table(has_rich, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # of the terminal, for rich
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    show([ROW | {"doing": "is silent"}])
    text = capsys.readouterr().out
    assert ("│" in text) == has_rich
    assert all(part in text for part in ("[::1]:5000", "2,400", "0.25", "-", "is silent"))
