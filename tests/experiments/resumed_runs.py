"""A run that is stopped and resumed beside one that is not, for the tests of the programs."""

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gossipjax.checkpoint import Checkpoints

CLOCK_FIELDS = {
    "seconds",
    "examples_per_second",
    "seconds_per_step",
    "input_wait",
}


def read_results(out: Path) -> list[dict[str, Any]]:
    """The runs of the summary and the lines of the metrics, without what depends on the clock."""
    records = json.loads((out / "summary.json").read_text())["runs"]
    records += [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in CLOCK_FIELDS}
        for record in records
    ]


def require_resumable_to_the_bit(
    main: Callable[[Sequence[str]], None],
    arguments: Sequence[str],
    stop_after: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    after = Checkpoints.after

    def after_signal(self: Any, state: Any, last: bool = False) -> None:
        if state.step == stop_after:
            signal.raise_signal(signal.SIGTERM)
        after(self, state, last)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "after", after_signal)
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "--out", str(twice)])
    assert stop.value.code == 128 + signal.SIGTERM
    main([*arguments, "--out", str(twice), "--resume"])
    assert read_results(twice) == read_results(once)
    assert json.loads((twice / "summary.json").read_text())["environment"]["resumed"]
    return read_results(once)[0]
