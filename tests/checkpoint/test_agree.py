"""Which checkpoints count, where each process has a folder of its own, and who takes part."""

import json
from pathlib import Path

import pytest

from gossipjax.checkpoint import _store
from gossipjax.checkpoint._store import Folder

A, B, C, D = range(4)


def agree(monkeypatch, *folders):
    """The steps and who has no part, by what each process has: steps, and who saved them."""

    def describe(process, step, saved_by):
        names = "".join(map(str, saved_by))
        part = {"save": f"{step} {names}", "is_first": step == 10, "size": len(saved_by)}
        nodes = [i for i, machine in enumerate(saved_by) if machine == process]
        return part | {"nodes": nodes, "whole": nodes}

    texts = [
        json.dumps([(step, by and describe(machine, step, by)) for step, by in folder.items()])
        for machine, folder in folders
    ]
    monkeypatch.setattr(_store, "gather_texts", lambda text: texts)
    monkeypatch.setattr(Folder, "_own_parts", lambda self: [])
    return Folder(Path(), shared=False).agree()


BOTH, ALL = (A, B), (A, B, C)


@pytest.mark.parametrize(
    ("folders", "steps", "lost"),
    [
        ([(A, {20: BOTH, 30: BOTH}), (B, {20: BOTH, 30: BOTH})], [20, 30], set()),
        # killed while B wrote: the older one, which both have
        ([(A, {20: BOTH, 30: BOTH}), (B, {20: BOTH})], [20], set()),
        ([(A, {20: BOTH, 30: BOTH}), (B, {})], [20, 30], {1}),
        ([(A, {10: BOTH}), (B, {})], [], set()),  # perhaps B did not complete it
        ([(A, {10: BOTH}), (B, {10: BOTH}), (C, {})], [10], {2}),  # but here both have
        ([(A, {}), (B, {})], [], set()),
        # C is gone
        ([(A, {20: ALL, 30: ALL}), (B, {20: ALL, 30: ALL})], [20, 30], set()),
        ([(A, {20: ALL, 30: ALL}), (B, {20: ALL})], [20], set()),
        # C was gone, and comes back with what it had saved
        (
            [(A, {30: ALL, 40: BOTH}), (B, {30: ALL, 40: BOTH}), (C, {20: ALL, 30: ALL})],
            [30, 40],
            {2},
        ),
        ([(A, {40: BOTH}), (B, {40: BOTH}), (C, {20: ALL, 30: ALL})], [40], {2}),
        # the same, and now B is gone: what A had saved since counts
        ([(A, {40: BOTH, 50: BOTH}), (C, {20: ALL, 30: ALL})], [40, 50], {1}),
        # without C, killed in their first save
        ([(A, {30: ALL, 40: BOTH}), (B, {30: ALL})], [30], set()),
        # D takes the place of C
        ([(A, {20: ALL, 30: ALL}), (B, {20: ALL, 30: ALL}), (D, {})], [20, 30], {2}),
        # damaged at B, which nobody knows before it is read
        ([(A, {20: BOTH, 30: BOTH}), (B, {20: BOTH, 30: None})], [20, 30], set()),
        # one alone, then two
        ([(A, {20: (A,), 30: (A,)}), (B, {})], [20, 30], {1}),
        ([(B, {20: ALL}), (A, {20: ALL}), (C, {20: ALL})], [20], set()),
    ],
)
def test_the_newest_save_that_was_complete_decides(monkeypatch, folders, steps, lost):
    assert agree(monkeypatch, *folders) == (steps, lost)


def test_two_runs_that_end_alike_are_refused(monkeypatch):
    folders = [(A, {20: BOTH, 30: BOTH}), (C, {20: (C, D), 30: (C, D)})]
    with pytest.raises(OSError, match="of one run, got several of step 20"):
        agree(monkeypatch, *folders)
