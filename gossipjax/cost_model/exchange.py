"""What nodes send in a step, to whom, and who waits for it."""

import dataclasses
import math
from typing import Literal, get_args

import numpy as np

from gossipjax.cost_model.networks import Network
from gossipjax.exchanges import plan
from gossipjax.exchanges.transform import require_choice
from gossipjax.topology.schedule import Round

BACKWARD = 2 / 3  # of a step: the backward pass has two products per weight, the forward pass one
SAMPLE_SIZE = 2**20  # values of the message whose bytes a codec counts
Kind = Literal["ring", "tree", "server"]
Awaits = Literal["peers", "link", "nobody"]


@dataclasses.dataclass(frozen=True)
class Workload:
    """The computation of a node in one step.

    Attributes:
      parameters: the number of parameters of the model.
      compute_seconds: the seconds of a step: forward pass, backward pass and update.
      examples: the number of examples that a node uses in a step.
      bytes_per_parameter: the bytes of a parameter in memory. Messages may use fewer.

    >>> Workload(parameters=25.6e6, compute_seconds=0.228).model_bytes
    102400000.0
    """

    parameters: float = 25.6e6
    compute_seconds: float = 0.228
    examples: float = 256
    bytes_per_parameter: float = 4.0

    @property
    def model_bytes(self) -> float:
        """The bytes of the model in memory."""
        return self.parameters * self.bytes_per_parameter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange(plan.Exchange):
    """What nodes send and when, as the plan of a transform says it, and how the messages travel.

    At every step `t` with `t mod every = phase`, the nodes begin an exchange when they have
    computed. After the computation of step `t + overlap` the nodes wait until the exchange has
    ended. So with `overlap=0` the computation hides nothing of the exchange, and with `overlap=1`
    the exchange runs during the computation of the next step.

    Attributes:
      schedule: the schedule of gossip. At step `t` the nodes exchange by its round `t // every`.
        None if all nodes average at once.
      models: the number of models in a message; below 1 for a part of one.
      wire: the codec of the values; None for float32. Nodes gather the sparse messages of an
        average instead of adding them up.
      every: the number of steps from one exchange to the next.
      phase: the first step that exchanges.
      late: the number of steps from the start of an exchange to the use of its result.
      is_early: whether an exchange that is not late runs during the computation of its step.
      kind: how all nodes average: "ring" and "tree" are all-reduces, and "server" is a parameter
        server at node 0.
      layers: the number of layers of the model, or 0. With layers, an average sends a part for each
        layer when the backward pass has left the layer, and nodes wait for the part when the next
        forward pass reaches the layer. Each part pays the latency.
      fragment: the number f of the fragment that is averaged, if the model is cut into
        `p = 1 / models` fragments. Fragment f consists of the layers `f`, `f + p`, ...
      awaits: with "peers", a node waits for the messages that are sent to it. With "link", a node
        waits until its own link is free. With "nobody", a node does not wait, and does not send if
        its link is busy. An average over all nodes begins when the slowest of them is ready.
      is_half_duplex: whether a node sends and receives in turn, which takes twice the time.

    >>> Exchange(None).find_seconds(0, Workload(25e6), Network(1e9), nodes=2).tolist()
    [0.1, 0.1]
    """

    models: float = dataclasses.field(default=1, kw_only=False)  # not None, as in some plans
    kind: Kind = "ring"
    layers: int = 0
    fragment: int = 0
    awaits: Awaits = "peers"
    is_half_duplex: bool = False

    def __post_init__(self) -> None:
        require_choice(self.kind, "kind of an exchange", get_args(Kind))
        require_choice(self.awaits, "awaits of an exchange", get_args(Awaits))
        if self.schedule is None and self.awaits != "peers":
            raise ValueError(
                f"awaits of an average over all nodes must be 'peers', got {self.awaits!r}: all "
                "wait for all. Leave it out, or give a gossip over a schedule."
            )

    @property
    def overlap(self) -> int:
        """The number of computations during which an exchange runs."""
        return self.late or int(self.is_early)

    @property
    def bits(self) -> float:
        """The bits of a parameter in a message, scales and indices included.

        >>> import gossipjax as gx
        >>> Exchange(None, wire=gx.wire.int8()).bits
        8.125
        """
        return 32.0 if self.wire is None else 8 * self.wire.count_bytes(SAMPLE_SIZE) / SAMPLE_SIZE

    def happens_at(self, step: int) -> bool:
        """Says whether the nodes begin an exchange when they have computed `step`."""
        return step % self.every == self.phase

    def round_at(self, step: int) -> Round | None:
        """Returns the round of gossip at `step`; None for averages, and without an exchange."""
        return self.round_of(step // self.every) if self.happens_at(step) else None

    def is_collective_at(self, step: int) -> bool:
        """Says whether all nodes exchange by an all-reduce, or with a server, at `step`."""
        round_ = self.round_at(step)
        if round_ is not None:  # the exact average of more than two nodes is a ring's all-reduce
            return round_.is_uniform and round_.size > 2
        return self.schedule is None and self.happens_at(step)

    def messages_at(self, step: int) -> tuple[np.ndarray, ...]:
        """Returns the receivers `[N]` of the messages of gossip at `step`, one array for each slot.

        Node `j` sends to `receivers[j]`, or sends nothing if `receivers[j]` is `j`. For an
        all-reduce there are no arrays.
        """
        round_ = self.round_at(step)
        if round_ is None or self.is_collective_at(step):
            return ()
        nodes = np.arange(round_.size)
        return tuple(np.where(slot.weights > 0, slot.receivers, nodes) for slot in round_.slots)

    def count_bytes(self, workload: Workload, nodes: int) -> float:
        """Returns the bytes of a message of gossip, or of the values that an all-reduce averages.

        If nodes gather, it returns the bytes of the all-reduce that takes equally long.
        """
        size = workload.parameters * self.models * self.bits / 8
        # A node that gathers on a ring sends nodes - 1 messages, where an all-reduce sends
        # 2 (nodes - 1) / nodes of one.
        return size * nodes / 2 if self.gathers else size

    def list_layers(self) -> np.ndarray:
        """Returns the layers of the exchange, in the order in which a backward pass leaves them."""
        fragments = max(1, round(1 / self.models))  # p, which is 1 for a whole model
        return np.arange(self.fragment, self.layers, fragments)[::-1]

    def find_seconds(
        self, step: int, workload: Workload, network: Network, nodes: int
    ) -> np.ndarray:
        """Returns the seconds `[N]` of each node for the exchange at `step`, if all begin together.

        A node that sends nothing takes 0.
        """
        self.require_nodes(nodes)
        size = self.count_bytes(workload, nodes)
        if self.is_collective_at(step):
            parts = max(1, len(self.list_layers()))  # each part pays the latency
            each = _find_collective_seconds(self._collective_kind, size / parts, network, nodes)
            seconds = np.full(nodes, parts * each)
        else:
            # The messages of a node share its link, and each is copied through the host.
            seconds = network.message_seconds(size) + size / network.host_copy
            seconds = seconds * self._count_messages(step, nodes)
        return 2 * seconds if self.is_half_duplex else seconds

    def count_sent_bytes(self, step: int, workload: Workload, nodes: int) -> float:
        """Returns the bytes that the busiest node sends in the exchange at `step`.

        >>> Exchange(None).count_sent_bytes(0, Workload(25.0), nodes=4)
        150.0
        """
        size = self.count_bytes(workload, nodes)
        if not self.is_collective_at(step):
            return size * int(self._count_messages(step, nodes).max())
        messages: dict[Kind, float] = {
            "ring": 2 * (nodes - 1) / nodes,
            "tree": math.ceil(math.log2(nodes)),  # the root sends down at every level
            "server": nodes - 1,
        }
        return messages[self._collective_kind] * size

    def _count_messages(self, step: int, nodes: int) -> np.ndarray:
        """Counts the messages that each node sends at `step`, `[N]`."""
        count = np.zeros(nodes, int)
        for receivers in self.messages_at(step):
            count += receivers != np.arange(nodes)
        return count

    @property
    def _collective_kind(self) -> Kind:
        """The way in which all nodes average at once: `kind`, but a ring for gossip and gathers."""
        return self.kind if self.schedule is None and not self.gathers else "ring"

    @property
    def cycle(self) -> int:
        """The steps after which exchanges repeat, in the last segment of a piecewise schedule."""
        return self.every * (1 if self.schedule is None else len(self.schedule.segments[-1].cycle))

    def list_steps(self) -> list[int]:
        """Returns the steps of a cycle at which nodes exchange."""
        start = 0 if self.schedule is None else self.schedule.segments[-1].start
        first = start * self.every + self.phase
        return list(range(first, first + self.cycle, self.every))

    def find_exposed_seconds(self, seconds: float, compute_seconds: float) -> float:
        """Returns the part of an exchange's seconds that the computation does not hide.

        The formula is `max(0, e - min(overlap, every) c)`: the exchange takes `e` seconds, and the
        computation `c`. With `layers`, `e` is the delay of the layer that arrives latest.

        >>> exchange = Exchange(None, layers=2)
        >>> exchange.find_exposed_seconds(0.5, compute_seconds=0.3)
        0.4
        """
        delay = self._find_largest_delay(seconds, compute_seconds) if self.layers else seconds
        return max(0.0, delay - min(self.overlap, self.every) * compute_seconds)

    def _find_largest_delay(self, seconds: float, compute_seconds: float) -> float:
        """Returns by how many seconds the latest layer comes too late for the next forward pass."""
        layers = self.list_layers()  # the numbers of those that are sent, the last one first
        backward = BACKWARD * compute_seconds
        forward = compute_seconds - backward
        each = seconds / len(layers)  # how long a layer is on the link
        order = np.arange(len(layers))
        # Times count from the start of the backward pass. The link carries one layer after another:
        # `arrival[k] = max(ready[k], arrival[k - 1]) + each`. If `(k + 1) each` is subtracted from
        # both sides, this is a running maximum.
        ready = (self.layers - layers) * backward / self.layers
        arrival = np.maximum.accumulate(ready - order * each) + (order + 1) * each
        needed = backward + layers * forward / self.layers
        return float((arrival - needed).max())

    def require_nodes(self, nodes: int) -> None:
        """Raises `ValueError` if the schedule is for another number of nodes."""
        if self.schedule is not None and self.schedule.size != nodes:
            raise ValueError(
                f"nodes must be the {self.schedule.size} of the schedule, got {nodes}. Build the "
                "method for this number of nodes."
            )


def _find_collective_seconds(kind: Kind, size: float, network: Network, nodes: int) -> float:
    """Returns the seconds in which n nodes average S bytes, one copy through the host included.

    - "ring": a node sends `2 (n - 1)` messages of `S / n` to the next node.
    - "tree": `2 ceil(log2 n)` messages of S go up to the root, node 0, and down again.
    - "server": node 0 receives `n - 1` messages over its link, and then sends as many.
    """
    if nodes == 1:
        return 0.0
    copy = size / network.host_copy
    if kind == "ring":
        return copy + 2 * (nodes - 1) * network.message_seconds(size / nodes, is_gossip=False)
    if kind == "tree":
        levels = math.ceil(math.log2(nodes))
        return copy + 2 * levels * network.message_seconds(size, is_gossip=False)
    return copy + 2 * (network.latency + (nodes - 1) * size / network.bandwidth)
