"""Messages of gossip, and the links that carry them, in simulated time. NumPy only."""

import collections
from typing import NamedTuple

import numpy as np

Key = tuple[int, int]
"""Number of an exchange in its method, and the step at which it begins."""


class Message(NamedTuple):
    """One message of a round of gossip.

    Attributes:
      key: of its exchange.
      source, target: nodes.
      seconds: on the wire.
      copy_seconds: through the memory of the source, before the wire.
      time: when it was handed to the link of the source, in seconds.
    """

    key: Key
    source: int
    target: int
    seconds: float
    copy_seconds: float
    time: float


class Links:
    """The link of every node: one message at a time each way, first come, first served."""

    def __init__(self, nodes: int):
        self._out_free = np.zeros(nodes)  # when the last message that has begun ends, in seconds
        self._in_free = np.zeros(nodes)
        self._queues: list[collections.deque[Message]] = [collections.deque() for _ in range(nodes)]
        self._is_sending = [False] * nodes

    def is_busy(self, node: int) -> bool:
        """Whether a message of this node is being sent, or waits for that."""
        return self._is_sending[node] or bool(self._queues[node])

    def add(self, message: Message) -> None:
        """Puts a message behind those that wait for the link of its source."""
        self._queues[message.source].append(message)

    def begin_next(self, node: int, time: float) -> tuple[float, Message] | None:
        """Begins the next message of a node, if one waits and the link is free.

        Returns:
          When it arrives, in seconds, and the message.
        """
        if self._is_sending[node] or not self._queues[node]:
            return None
        message = self._queues[node].popleft()
        copied = max(time, self._out_free[node]) + message.copy_seconds
        end = max(copied, self._in_free[message.target]) + message.seconds
        self._out_free[node] = end
        self._in_free[message.target] = end
        self._is_sending[node] = True
        return end, message

    def release(self, node: int) -> None:
        """Says that the message that this node was sending has arrived."""
        self._is_sending[node] = False

    def begin_collective(self, ready: np.ndarray, seconds: float) -> float:
        """Occupies all links with an all-reduce in parts, once all are free.

        Args:
          ready: when each part may begin, in order, in seconds.
          seconds: of all parts together.

        Returns:
          When the last part ends.
        """
        end = max(self._out_free.max(), self._in_free.max())
        for begin in ready:
            end = max(begin, end) + seconds / len(ready)
        self._out_free[:] = end
        self._in_free[:] = end
        return float(end)
