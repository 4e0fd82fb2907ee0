"""Paths between nodes: names, addresses of both kinds, and paths that pass one way only."""

import contextlib
import functools
import socket
import threading

import pytest
import real_nodes
from real_nodes import gradients, wait_for

join = functools.partial(real_nodes.join, secret=real_nodes.SECRET, patience=2.0)
HERE = "127.0.0.1"


@pytest.fixture
def names(monkeypatch):
    """Name -> its numbers here, and as asked for in other threads; a silent server says none."""
    known = {}
    is_over = threading.Event()
    ask = socket.getaddrinfo

    def answer(host, *args, **more):
        if host in known:
            is_main = threading.current_thread() is threading.main_thread()
            host = known[host][0 if is_main else -1]
        if host == "silent":
            is_over.wait()
            raise OSError("no answer")
        return ask(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    yield known
    is_over.set()


def test_a_name_that_nobody_answers_holds_up_no_other(names):
    names |= {"a": [HERE], "b": [HERE], "c": ["silent"]}
    with join(listen="a:0") as a, join(listen="b:0", address=[a.address, "c:5000"], place=1) as b:
        wait_for(lambda: a.members == b.members == [0, 1])
        b.step(gradients, 1.0)


def test_a_name_is_asked_for_again_where_its_node_is_silent(names):
    names |= {"a": [HERE, "127.0.0.9"]}  # where nobody listens
    with join(listen="a:0") as a, join(address=a.address, place=1, is_founder=False) as b:
        wait_for(lambda: b._service._sockets.find_numeric(a.address))
        names["a"] = [HERE]
        b.wait_for_mass(timeout=60)


@pytest.mark.parametrize("listen", ["[::1]:0", "six:0"])
def test_nodes_at_addresses_of_both_kinds_meet(names, listen):
    names["six"] = ["::1"]
    with join() as a, join(address=a.address, listen=listen, place=1) as b:
        wait_for(lambda: a.members == b.members == [0, 1])


def test_who_is_heard_and_hears_nothing_is_told_so(names):
    """Its address leads nowhere for the other, as behind a firewall that lets nobody in."""
    names["b"] = [HERE, "192.0.2.1"]
    with join() as a, join(listen="b:0", address=a.address, place=1, is_founder=False) as b:
        told = f"{a.address} hears this one, but cannot reach it at {b.address}. Open its port"
        with pytest.raises(TimeoutError, match=told):
            b.wait_for_mass(timeout=2)
        with contextlib.suppress(TimeoutError):
            b.wait_for_mass(timeout=3)
        assert any("cannot reach it at" in note for note in b._participant.members.notes.values())
