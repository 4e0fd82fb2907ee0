"""The delays that the journals of a run show."""

import json

import numpy as np
import pytest

from experiments.training.delays import measure_delays


def write_journals(folder, lives):
    """Writes `place -> [[(begin, end), ...] of a life, ...]`; an end of None is a kill."""
    for place, steps_of_lives in lives.items():
        lines = []
        for number, steps in enumerate(steps_of_lives):
            life = f"{place}.{number}"
            lines.append({"event": "life", "life": life, "place": place})
            for begin, end in steps:
                lines.append({"event": "begin", "life": life, "time": begin})
                if end is not None:
                    lines.append({"event": "end", "life": life, "time": end})
        (folder / f"{place}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return sorted(folder.glob("*.jsonl"))


def test_a_slow_node_is_behind_by_the_rounds_that_others_made(tmp_path):
    """While the node at place 5 computes for 4 s, three others make 4 steps each: 12 of 4 nodes."""
    fast = [(float(k), k + 0.99) for k in range(8)]
    slow = [(0.5, 4.5), (4.5, 8.5)]
    journals = write_journals(tmp_path, {0: [fast], 2: [fast], 3: [fast], 5: [slow]})
    delays = measure_delays(journals)
    # Both rows: those of the fast nodes, which no other passes, and 12 // 4.
    np.testing.assert_array_equal(delays, [[0, 0, 0, 3], [0, 0, 0, 3]])


def test_a_step_that_a_kill_cut_off_has_no_delay(tmp_path):
    fast = [(k / 10, k / 10 + 0.09) for k in range(40)]
    lives = [[(0.0, 0.95), (1.0, None)], [(2.0, 2.35)]]
    journals = write_journals(tmp_path, {0: [fast], 1: lives})
    delays = measure_delays(journals)
    assert delays.shape == (2, 2)
    assert delays[:, 1].tolist() == [9 // 2, 3 // 2]


def test_journals_without_steps_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a step that ended, got none"):
        measure_delays(write_journals(tmp_path, {0: [[(0.0, None)]]}))
