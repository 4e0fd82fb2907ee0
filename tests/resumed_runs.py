"""Runs that are stopped and resumed beside ones that are not, for the tests of the programs."""

import itertools
import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gossipjax.checkpoint import Checkpoints

CLOCK_FIELDS = {"seconds", "examples_per_second", "seconds_per_step", "input_wait"}
TERMINATED = 128 + signal.SIGTERM


def without_clock(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in CLOCK_FIELDS}


def read_results(out: Path) -> list[dict[str, Any]]:
    """The runs of the summary and the lines of the metrics, without what depends on the clock."""
    records = json.loads((out / "summary.json").read_text())["runs"]
    records += [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return list(map(without_clock, records))


def stop_after(
    step: int, train: Callable[[], object], number: int = signal.SIGTERM, run: int = 0
) -> Any:
    """Trains, with a signal after this step of this run; returns the exit status."""
    after = Checkpoints.after
    steps: list[int] = []

    def after_signal(self: Any, state: Any, last: bool = False) -> None:
        steps.append(state.step)
        runs_before = sum(a >= b for a, b in itertools.pairwise(steps))
        if state.step == step and runs_before == run:
            signal.raise_signal(number)
        after(self, state, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "after", after_signal)
        with pytest.raises(SystemExit) as stop:
            train()
    return stop.value.code


def require_resumable_to_the_bit(
    main: Callable[[Sequence[str]], None],
    arguments: Sequence[str],
    step: int,
    folder: Path,
    once: Path | None = None,
) -> dict[str, Any]:
    """Trains once in one go, and once with SIGTERM after a step; the losses are the same.

    `once` is a run in one go that is there already. Returns the first run of the summary.
    """
    twice = folder / "twice"
    arguments = [*arguments, "--checkpoint-every", "100", "--log-every", "1"]
    if once is None:
        once = folder / "once"
        main([*arguments, "--out", str(once)])
    assert stop_after(step, lambda: main([*arguments, "--out", str(twice)])) == TERMINATED
    main([*arguments, "--out", str(twice), "--resume"])
    assert read_results(twice) == read_results(once)
    assert json.loads((twice / "summary.json").read_text())["environment"]["resumed"]
    return read_results(once)[0]
