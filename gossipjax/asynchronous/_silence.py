"""Says why no other node gives a node mass, and what to do."""

from __future__ import annotations

import contextlib
import socket

from gossipjax.asynchronous._participant import Participant
from gossipjax.asynchronous._service import Service
from gossipjax.asynchronous._settings import Settings

GREETING = b"\xff" + bytes(7) + b"\x01\x7f"  # bytes with which ZeroMQ begins each connection
MAX_SHOWN = 8  # nodes that an error names


def explain_silence(node: Participant, service: Service, settings: Settings) -> str:
    """Says for each address why nothing came from it, and then what to do."""
    with service.lock:
        contacts = sorted(node.members.contacts)
        heard = {peer.identity.address for peer in node.members.peers.values()}

    def explain(address: str) -> str:
        if address in service.misfits:
            return f"{address} says that this node is {service.misfits[address]}"
        if address in heard:
            return f"{address} answers, but has nothing to give"
        greeting = read_greeting(address)
        if service.list_refusals([address]) and greeting == GREETING:
            return f"the node at {address} refuses this one, which has another secret"
        if greeting is None:
            return f"nobody listens at {address}"
        return f"{address} listens, but does not speak with this node"

    if service.misfits:
        way_out = "Give all nodes of the job the same"
    elif not node.founding.may_go_on_alone and service.list_refusals(contacts):
        way_out = (
            "Compare GOSSIPJAX_SECRET, or secret=, on both machines: "
            "`echo $GOSSIPJAX_SECRET | sha256sum` must print the same"
        )
    elif settings.num_nodes and settings.is_founder is None:
        way_out = (
            f"A job of {settings.num_nodes} nodes begins when most of them are there and none has "
            "made a step, or all. Start the others"
        )
    elif heard or not contacts:
        way_out = "One node must found the job: give it no address, or is_founder=True"
    else:
        way_out = "Give the address of one that lives"
    answers = "; ".join(map(explain, contacts[:MAX_SHOWN]))
    return f"{answers or 'there is no address'}. {way_out}."


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
