"""Removes from a schedule the messages that fail. NumPy only."""

from __future__ import annotations

import functools
import math
from typing import Literal, get_args

import numpy as np

from gossipjax.exchanges.transform import require_choice
from gossipjax.faults._faults import Faults, require_faults
from gossipjax.topology.schedule import TOLERANCE, Round, Schedule, Segment, named

Keep = Literal["sender", "both"]
MAX_ROUNDS = 2**16  # in all segments; to make one takes a tenth of a millisecond


@named
def apply(
    schedule: Schedule, faults: Faults, *, keep: Keep = "sender", overlap: int = 0
) -> Schedule:
    """Removes from a schedule the messages that fail, for any algorithm that takes a schedule.

    A message is not sent if it would not arrive, or if its sender or receiver is not active. The
    argument `keep` says where the weight of this message goes:

        keep="sender":  P[i, j] goes to P[j, j]. Columns sum to 1; rows do not.
        keep="both":    P[i, j] goes to P[j, j] and P[j, i] to P[i, i], where one of the two is
                        lost. Rows and columns sum to 1; `schedule` must be symmetric.

    Use `"sender"` for push-sum: the sender knows what did not arrive, as if acknowledgements never
    failed. Use `"both"` for doubly stochastic methods, whose mean then stays the same. With
    `gx.faults.sgp`, senders do not know what did not arrive. With `gx.faults.dpsgd`, a receiver
    uses its own model in place of a model that did not arrive, and the mean drifts.

    The rounds repeat after the least common multiple of the period of the schedule and the lengths
    of the tables, so draw tables whose length is a multiple of the period. Steps with different
    faults are different rounds, and on a mesh `gx.TrainStep` compiles a program for each round, up
    to `max_programs`. `gx.faults.sgp` and `dpsgd` need no more programs than without faults.

    Args:
      schedule: any schedule, whose round at step `k` meets the faults of step `k`.
      faults: what goes wrong, without delays and noise, which a schedule cannot express.
      keep: who keeps the weight of a message that is not sent.
      overlap: the `overlap` of `gx.osgp`. Nodes send round `r` at step `r overlap`. A message
        arrives `overlap` steps later, and is lost if the receiver is not active then.

    Raises:
      ValueError: if an argument is not as above, there are more than 65536 rounds, or the rounds do
        not connect all living nodes.

    >>> import gossipjax as gx
    >>> faults = gx.faults.Faults(3, deaths={2: 5})
    >>> schedule = gx.faults.apply(gx.topology.ring(3), faults, keep="both")
    >>> schedule.round_at(5).matrix.round(2).tolist()
    [[0.67, 0.33, 0.0], [0.33, 0.67, 0.0], [0.0, 0.0, 1.0]]
    """
    require_faults(faults, schedule.size, "apply")
    require_choice(keep, "keep of apply", get_args(Keep))
    if faults.max_delay or faults.noise:
        raise ValueError(
            f"the faults of apply must have no delays and no noise, got {faults.max_delay} steps "
            f"and {faults.noise}: gx.faults.sgp and dpsgd simulate them, and gx.osgp messages that "
            "are all equally late."
        )
    for number, round_ in enumerate(schedule.rounds if keep == "both" else ()):
        P = round_.matrix
        asymmetry = abs(P - P.T)
        if asymmetry.max() > TOLERANCE:
            i, j = divmod(int(asymmetry.argmax()), len(P))
            raise ValueError(
                f"the schedule of apply must be symmetric for keep='both', got a round {number} "
                f"with P[{i}, {j}] = {P[i, j]:.6g} and P[{j}, {i}] = {P[j, i]:.6g}: take ring, "
                "random_pairs or bipartite_exponential, or keep='sender' and push-sum."
            )
    stride = max(1, overlap)  # steps from one round to the next
    tables = faults.arrives, faults.active
    # After so many rounds, all tables are at the same row again.
    length = math.lcm(*(math.lcm(len(table), stride) // stride for table in tables))
    # The first round in which a dying node sends nothing, and the first in which it receives
    # nothing, which is earlier, because messages must arrive before the death. Both round up.
    sends_until = {node: -(-step // stride) for node, step in faults.deaths.items()}
    deaths = {node: -(-max(0, step - overlap) // stride) for node, step in faults.deaths.items()}
    starts_of_schedule = {segment.start for segment in schedule.segments}
    starts = sorted({*starts_of_schedule, *sends_until.values(), *deaths.values()})
    rounds: list[Round] = []
    segments = []
    for start in starts:
        # A death begins a new segment, which goes on in the cycle of the schedule.
        first, cycle = next(part for part in reversed(schedule.segments) if part.start <= start)
        steps = math.lcm(length, len(cycle))
        if len(rounds) + steps > MAX_ROUNDS:
            raise ValueError(
                f"the rounds of apply must be at most {MAX_ROUNDS}, got {steps} until schedule and "
                "tables repeat together: draw tables whose numbers of steps are multiples of one "
                "another."
            )
        segments.append(Segment(start, tuple(range(len(rounds), len(rounds) + steps))))
        sends = start * stride < faults.death_steps
        receives = start * stride + overlap < faults.death_steps
        for k in range(start, start + steps):
            step = k * stride
            sends_now = sends & faults.scheduled_at(step)
            receives_then = receives & faults.scheduled_at(step + overlap)
            arrives = faults.arrives_at(step) & sends_now & receives_then[:, None]
            number = cycle[(k - first) % len(cycle)]
            rounds.append(_remove_messages(schedule.rounds[number], arrives, keep))
    return Schedule(rounds, segments, deaths)


def _remove_messages(round_: Round, arrives: np.ndarray, keep: Keep) -> Round:
    """Returns the round without the messages that do not arrive; `arrives` is `[N, N]`."""
    if keep == "both":
        arrives = arrives & arrives.T
    receivers = round_.receivers
    senders = round_.senders
    is_kept = arrives[receivers, senders] | (receivers == senders)
    if is_kept.all():
        return round_
    # What is not sent stays with its sender, so that columns still sum to 1.
    returned = np.bincount(senders[~is_kept], round_.weights[~is_kept], round_.size)
    weights = round_.weights + np.where(receivers == senders, returned[senders], 0)
    entries = receivers[is_kept], senders[is_kept], weights[is_kept]
    return Round.from_entries(round_.size, *entries)


@functools.lru_cache(16)
def require_isolated(schedule: Schedule, faults: Faults, overlap: int) -> None:
    """Raises `ValueError` if a node exchanges anything at a step at which it is not active."""
    require_faults(faults, schedule.size, "inactive")
    stride = max(1, overlap)  # steps from one round to the next
    sends_nothing, receives_nothing = np.stack(
        [_find_isolated(round_) for round_ in schedule.rounds], axis=1
    )  # each [R, N]
    start, cycle = schedule.segments[-1]
    length = math.lcm(len(cycle), len(faults.arrives), len(faults.active))
    # One cycle after the last change, from when on all repeats.
    end = max([start * stride, *faults.deaths.values()]) + length * stride + overlap
    for step in range(0, min(end, MAX_ROUNDS), stride):
        sent_round = step // stride
        received_round = sent_round - 1 if overlap else sent_round  # what arrives now
        is_isolated = sends_nothing[schedule.index_at(sent_round)]
        if received_round >= 0:  # under overlap, step 0 receives nothing
            is_isolated = is_isolated & receives_nothing[schedule.index_at(received_round)]
        is_wrong = ~(faults.active_at(step) | is_isolated)
        if is_wrong.any():
            more = f", overlap={overlap}" if overlap else ""
            raise ValueError(
                "a node must exchange nothing while it is not active, got an exchange of node "
                f"{int(np.argmax(is_wrong))} at step {step}: inside gx.faults.inactive(chain, "
                f"faults) take the schedule gx.faults.apply(schedule, faults{more}), or "
                "gx.faults.sgp or dpsgd."
            )


def _find_isolated(round_: Round) -> tuple[np.ndarray, np.ndarray]:
    """Says whether each node sends nothing, and whether each receives nothing; both bool `[N]`."""
    edges = round_.receivers != round_.senders
    sends_nothing = np.bincount(round_.senders[edges], minlength=round_.size) == 0
    receives_nothing = np.bincount(round_.receivers[edges], minlength=round_.size) == 0
    return sends_nothing, receives_nothing
