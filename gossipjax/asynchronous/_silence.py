"""Says why no other node gives a node mass, and what to do."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator

from gossipjax.asynchronous._participant import Participant
from gossipjax.asynchronous._service import Service
from gossipjax.asynchronous._settings import Settings, may_connect

GREETING = b"\xff" + bytes(7) + b"\x01\x7f"  # bytes with which ZeroMQ begins each connection
MAX_SHOWN = 8  # nodes that an error names
# The ways out where it does not help to wait.
FIT = "Give all nodes of the job the same"
COMPARE = (
    "Compare GOSSIPJAX_SECRET, or secret=, on both machines: `echo $GOSSIPJAX_SECRET | sha256sum` "
    "must print the same"
)


def all_refuse(node: Participant, service: Service, settings: Settings) -> bool:
    """Whether it does not help to wait: all nodes refuse this one, or are of another job."""
    if node.founding.may_go_on_alone or not node.members.contacts:
        return False
    return all(way_out for _, way_out in _ask_all(node, service, settings))


def explain_silence(node: Participant, service: Service, settings: Settings) -> str:
    """Says for each address why nothing came from it, and then what to do."""
    answers = list(itertools.islice(_ask_all(node, service, settings), MAX_SHOWN))
    refusals = {way_out for _, way_out in answers if way_out}
    if refusals:
        way_out = FIT if FIT in refusals else COMPARE
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
    """Yields for each address why nothing came from it, and the way out if it never will."""
    with service.lock:
        contacts = sorted(a for a in node.members.contacts if may_connect(a, settings.secret))
        heard = {peer.identity.address for peer in node.members.peers.values()}
    for address in contacts:
        if address in service.misfits:
            yield f"{address} says that this node is {service.misfits[address]}", FIT
        elif address in heard:
            yield f"{address} answers, but has nothing to give", None
        elif (greeting := read_greeting(address)) is None:
            yield f"nobody listens at {address}", None
        # A tunnel lets everybody in, and then closes what it cannot pass on yet.
        elif greeting == GREETING and service.is_refused_at(address):
            yield f"the node at {address} refuses this one, which has another secret", COMPARE
        else:
            yield f"{address} listens, but does not speak with this node", None


def read_greeting(address: str) -> bytes | None:
    """Connects to an address and returns the first bytes that it sends; None if nobody listens."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), 1)
    except OSError:
        return None
    with connection, contextlib.suppress(OSError):
        return connection.recv(len(GREETING))
    return b""
