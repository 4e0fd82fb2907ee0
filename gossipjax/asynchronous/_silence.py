"""Says why no other node gives a node mass, and what to do."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator

from gossipjax.asynchronous._participant import Participant
from gossipjax.asynchronous._service import UNREACHED, Service
from gossipjax.asynchronous._settings import Settings, may_connect

GREETING = b"\xff" + bytes(7) + b"\x01\x7f"  # bytes with which ZeroMQ begins each connection
MAX_SHOWN = 8  # nodes that an error names
FIT = "Give all nodes of the job the same"
COMPARE = (
    "Compare GOSSIPJAX_SECRET, or secret=, on both machines: `echo $GOSSIPJAX_SECRET | sha256sum` "
    "must print the same"
)
OPEN = "Open its port to the others, and let it listen at an address by which they reach it"
LARGE = "If the path loses large packets, lower the MTU of both machines"
WAYS_OUT = (FIT, COMPARE, OPEN, LARGE)  # the first that helps is shown


def all_refuse(node: Participant, service: Service, settings: Settings) -> bool:
    """Whether it does not help to wait: all nodes refuse this one, or are of another job."""
    if node.founding.may_go_on_alone or not node.members.contacts:
        return False
    return all(way_out in (FIT, COMPARE) for _, way_out in _ask_all(node, service, settings))


def explain_silence(node: Participant, service: Service, settings: Settings) -> str:
    """Says for each address why nothing came from it, and then what to do."""
    answers = list(itertools.islice(_ask_all(node, service, settings), MAX_SHOWN))
    ways_out = [way_out for way_out in WAYS_OUT if way_out in {way_out for _, way_out in answers}]
    if ways_out:
        way_out = ways_out[0]
    elif settings.num_nodes and settings.is_founder is None:
        way_out = (
            f"A job of {settings.num_nodes} nodes begins when most of them are there and none has "
            "made a step, or all. Start the others"
        )
    elif node.members.peers or not answers:
        way_out = "One node must found the job: give it no address, or is_founder=True"
    else:
        way_out = "Give the address of one that lives"
    text = "; ".join(text for text, _ in answers)
    return f"{text or 'there is no address'}. {way_out}."


def _ask_all(
    node: Participant, service: Service, settings: Settings
) -> Iterator[tuple[str, str | None]]:
    """Yields for each address why nothing came from it, and the way out if there is one."""
    with service.lock:
        contacts = sorted(a for a in node.members.contacts if may_connect(a, settings.secret))
        peers = node.members.peers.values()
        gives = {peer.identity.address: not peer.view.wants_mass for peer in peers}
    for address in contacts:
        if address in service.misfits:
            yield f"{address} says that this node is {service.misfits[address]}", FIT
        elif gives.get(address):
            yield f"{address} answers and holds a model, but nothing of it arrives here", LARGE
        elif address in gives:
            yield f"{address} answers, but has nothing to give", None
        elif (numbers := service.find_numbers(address)) is None:
            yield f"no name server says where {address} is", None
        elif isinstance(greeting := read_greeting(numbers), OSError):
            yield f"nobody listens at {address} ({greeting.strerror or greeting})", None
        # A tunnel lets everybody in, and then closes what it cannot pass on yet.
        elif greeting == GREETING and service.is_refused_at(numbers):
            yield f"the node at {address} refuses this one, which has another secret", COMPARE
        elif address in service.one_way:
            yield f"the node at {address} hears this one, {UNREACHED} {service.address}", OPEN
        else:
            yield f"{address} listens, but does not speak with this node", None


def read_greeting(address: str) -> bytes | OSError:
    """Connects to an address and returns the first bytes that it sends, or why nobody listens."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), 1)
    except OSError as error:
        return error
    with connection, contextlib.suppress(OSError):
        return connection.recv(len(GREETING))
    return b""
