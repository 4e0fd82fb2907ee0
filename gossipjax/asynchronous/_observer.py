"""An observer of a job, which asks all nodes what they do, and holds no mass.

No node remembers an observer, so nobody waits for it, and without one nothing more is sent.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from typing import Any

from gossipjax.asynchronous._service import LOOK
from gossipjax.asynchronous._sockets import Sockets

PATIENCE = 10.0
SILENT_SECONDS = 3.0
RATE_SECONDS = 10.0  # over which steps a second are counted
POLL_SECONDS = 0.02
NEEDED = {"place", "life", "address", "steps", "heard"}  # what a node must tell for its row


class Observer:
    """Asks the node at an address, and then all nodes of which a node tells."""

    def __init__(self, address: str, secret: str | None):
        self._sockets = Sockets("127.0.0.1:0", secret, PATIENCE)
        self.close = self._sockets.close
        self._address = address
        self._nodes: dict[int, dict[str, Any]] = {}  # place -> what was last told of its node
        self._ended: dict[str, str] = {}  # life -> how it ended

    def look(self, seconds: float) -> list[dict[str, Any]]:
        """Asks all nodes, reads for a while what they answer, and returns a row for each node."""
        end = time.monotonic() + seconds
        silent = {self._address, *(node["address"] for node in self._nodes.values())}
        addresses = list(silent)
        for address in addresses:
            self._sockets.send(address, [LOOK])
        while time.monotonic() < end:
            for address in addresses:
                for answer in self._sockets.read_answers(address):
                    # A node of another version may answer anything.
                    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                        self._learn(json.loads(answer), time.monotonic())
                        silent.discard(address)
            time.sleep(POLL_SECONDS)
        for address in silent:  # the name may have another numeric address: then connects anew
            self._sockets.look_after(address)
        return [self._make_row(self._nodes[place]) for place in sorted(self._nodes)]

    def _learn(self, report: dict[str, Any], now: float) -> None:
        """Notes what a node has answered: about itself, and about others if that is newer."""
        self._note(report["node"] | {"heard": now, "answered": now})
        self._ended |= report["over"]
        for other in report["others"]:
            heard = now - other.pop("ago")
            is_newer = heard > self._nodes.get(other["place"], {"heard": 0.0})["heard"]
            if is_newer and other["life"] not in self._ended:
                self._note(other | {"heard": heard})

    def _note(self, news: dict[str, Any]) -> None:
        """Updates what is known of a node, and its steps in the last seconds, for the rate."""
        if missing := NEEDED - news.keys():
            raise KeyError(*missing)
        node = self._nodes.get(news["place"], {"steps": 0, "counts": deque()})
        news["steps"] = max(news["steps"], node["steps"])  # another node may tell an old number
        node.update(news)
        self._nodes[news["place"]] = node
        node["counts"].append((news["heard"], news["steps"]))  # a time, and the steps by then
        while news["heard"] - node["counts"][0][0] > RATE_SECONDS:
            node["counts"].popleft()

    def _make_row(self, node: dict[str, Any]) -> dict[str, Any]:
        """Makes a row of the table; a node that does not answer has no rate and no weight."""
        now = time.monotonic()
        ago = now - node["heard"]
        first_time, first_steps = node["counts"][0]
        time_now, steps_now = node["counts"][-1]
        seconds = time_now - first_time
        rate = (steps_now - first_steps) / seconds if seconds > 0 else None
        if now - node.get("answered", 0.0) <= SILENT_SECONDS:
            return node | {"heard": ago, "rate": rate}
        reason = "is heard by others, but not here" if ago <= SILENT_SECONDS else "is silent"
        doing = self._ended.get(node["life"], reason)
        return node | {"heard": ago, "rate": None, "weight": None, "doing": doing}

    def explain_silence(self) -> str:
        """Says why no node has answered."""
        obstacle, way_out = self._sockets.find_obstacle(self._address) or (
            f"{self._address} is open, but no node of this version of gossipjax answers",
            None,
        )
        return f"{obstacle}. {way_out or 'Give the address of a node that runs'}."
