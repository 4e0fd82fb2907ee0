"""Nodes that are far: what their job must end with, and the router between them."""

import json
import os
import socket
import time
from contextlib import contextmanager, suppress
from fractions import Fraction

import pytest

import gossipjax as gx
from experiments.fault_injection import router as routers
from experiments.fault_injection.__main__ import main
from experiments.fault_injection.far import FarOptions, check, make_row
from experiments.fault_injection.router import Router, list_missing, make_far_network
from experiments.fault_injection.stream import measure_stream
from experiments.speed.wire.links import Host, list_created

needs_network = pytest.mark.skipif(bool(list_missing()), reason=f"missing: {list_missing()}")
OPTIONS = FarOptions(nodes=2, megabytes=1.0)
RECORD = {
    "model": 0.25,
    "average": 0.5,
    "is_whole": True,
    "steps": 40,
    "sent": 3,
    "sent_bytes": 4_000_000,
    "weight": 1.25,
    "processor_seconds": 2.5,
}
EVENTS = ["life", "found", "begin", "share", "end", "share", "receive", "share"]
LIVING = {0: Fraction(1), 1: Fraction(1)}
ACCOUNT = gx.asynchronous.Account(Fraction(2), LIVING, Fraction(), Fraction(), Fraction())


def find_violations(record=None, events=EVENTS, account=ACCOUNT, options=OPTIONS):
    records = [RECORD, RECORD if record is None else record]
    return check(options, records, [EVENTS, events], account)


@pytest.mark.parametrize(
    ("changed", "violation"),
    [
        ({}, None),
        ({"record": {}}, "far: all nodes end, got [True, False]"),
        ({"record": RECORD | {"average": 0.51}}, "far: the same average on all"),
        ({"record": RECORD | {"is_whole": False}}, "far: whole models"),
        ({"record": RECORD | {"sent_bytes": 5_000_000}}, "far: nothing sent twice, got 1.12"),
        ({"events": [*EVENTS, "life"]}, "far: one life each, got [1, 2]"),
        ({"account": ACCOUNT._replace(dead=Fraction(1, 10**8))}, "far: the account closes"),
    ],
)
def test_what_the_job_must_end_with(changed, violation):
    found = find_violations(**changed)
    assert len(found) == bool(violation)
    assert violation is None or found[0].startswith(violation)


def test_a_partition_may_cost_lives_and_messages_but_no_weight():
    options = FarOptions(nodes=2, megabytes=1.0, partition=60.0)
    again = {"record": RECORD | {"sent_bytes": 9_000_000}, "events": [*EVENTS, "life"]}
    assert find_violations(**again, options=options) == []
    (violation,) = find_violations(
        **again, options=options, account=ACCOUNT._replace(in_flight=Fraction(1))
    )
    assert "the account closes" in violation


def test_a_row_has_a_cell_for_each_header_also_of_a_node_that_failed(tmp_path):
    journal = tmp_path / "0.jsonl"
    journal.write_text("".join(json.dumps({"event": event}) + "\n" for event in EVENTS))
    row = make_row(0, RECORD, journal)
    assert row == ("0", "1", "40", "3", "4", "1.250", "0.250", "0.5000", "2.5")
    assert make_row(0, {}, journal) == ("0", "1", *["-"] * 7)


def make_packet(receiver, number, size=100):
    """A packet of IPv4 to a host, which says which it is."""
    header = bytes([0x45, *[0] * 15, 10, 78, 0, receiver + 1])
    return (header + bytes([number])).ljust(size, b"\0")


@contextmanager
def join_hosts(count, **options):
    """A router between hosts that are sockets here."""
    settings = {"bytes_per_second": 1e6, "delay": 0.0, "loss": 0.0, "seed": 0} | options
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(count)]
    for device, host in pairs:
        device.setblocking(False)
        host.settimeout(0.3)
    router = Router([device.fileno() for device, _ in pairs], **settings)
    try:
        yield router, [host for _, host in pairs]
    finally:
        router.close()
        for device, host in pairs:
            device.close()
            host.close()


def take_all(host):
    """The numbers of the packets that arrive, until none has for a while."""
    numbers = []
    with suppress(TimeoutError):
        while True:
            numbers.append(host.recv(2000)[20])
    return numbers


def test_packets_arrive_in_order_at_their_host_after_the_delay():
    with join_hosts(3, delay=0.05) as (router, hosts):
        began = time.monotonic()
        for number in range(5):
            hosts[0].send(make_packet(2, number))
        assert hosts[2].recv(2000)[20] == 0
        assert time.monotonic() - began >= 0.05
        assert take_all(hosts[2]) == [1, 2, 3, 4]
        assert take_all(hosts[1]) == []
        assert router.passed == 5 * 100


def test_packets_wait_for_the_rate_and_are_lost_if_they_would_wait_long():
    """A packet takes 0.1 s; the fourth would wait 0.3 s."""
    with join_hosts(2, bytes_per_second=1000.0, queue_seconds=0.25) as (_, hosts):
        began = time.monotonic()
        for number in range(8):
            hosts[0].send(make_packet(1, number))
        hosts[1].settimeout(1.0)
        assert take_all(hosts[1]) == [0, 1, 2]
        assert time.monotonic() - began >= 0.4


def test_a_receiver_shares_its_rate_among_senders():
    """Each sends one packet of 0.1 s; they arrive one after another, and the third is lost."""
    with join_hosts(4, bytes_per_second=1000.0, queue_seconds=0.15) as (_, hosts):
        for sender in range(3):
            hosts[sender].send(make_packet(3, sender))
        assert len(take_all(hosts[3])) == 2


def test_a_part_of_the_packets_is_lost_by_the_seed():
    def send_many():
        with join_hosts(2, loss=0.5, seed=3) as (_, hosts):
            for number in range(100):
                hosts[0].send(make_packet(1, number))
                time.sleep(0.001)
            return take_all(hosts[1])

    first = send_many()
    assert 30 < len(first) < 70
    assert first == send_many()


def test_nothing_passes_where_the_way_is_cut():
    with join_hosts(3) as (router, hosts):
        router.cut = {frozenset((0, 1))}
        for receiver in (1, 2):
            hosts[0].send(make_packet(receiver, 7))
        hosts[1].send(make_packet(0, 7))
        assert [take_all(host) for host in hosts] == [[], [], [7]]
        router.cut = set()
        hosts[0].send(make_packet(1, 8))
        assert take_all(hosts[1]) == [8]


def test_packets_to_nobody_are_dropped():
    with join_hosts(2) as (router, hosts):
        for packet in (b"", b"E", make_packet(0, 1), make_packet(9, 1), b"\x60" + bytes(50)):
            hosts[0].send(packet)
        hosts[0].send(make_packet(1, 2))
        assert take_all(hosts[1]) == [2]
        assert router.passed == 100


def test_a_plain_stream_on_one_machine():
    here = Host("127.0.0.1", None)
    assert measure_stream(here, here, 0.1) > 0


@needs_network
def test_a_stream_between_namespaces_keeps_to_the_rate():
    with make_far_network(2, 1e6, 0.01, 0.0, 0) as (router, (sender, receiver)):
        rate = measure_stream(sender, receiver, 1.0)
        assert 0 < rate <= 1.1e6
        assert router.passed > rate
    assert os.getpid() not in list_created()


def test_far_nodes_need_root_and_tools(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(routers.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(routers.shutil, "which", lambda name: None)
    monkeypatch.setattr(routers, "TUN", "/dev/none")
    with pytest.raises(SystemExit) as stopped:
        main(["far", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "Missing: root (this is another user), the program ip, the device /dev/none." in error
