"""Published tables as grids, with the papers' figures, and what they become in miniature."""

import difflib

from experiments.compare.grid import Grid, Line

ALPHAS = (1.0, 0.1, 0.01)
COLUMNS = tuple(
    Line(f"Dirichlet {alpha:g}", ("--dirichlet-alpha", f"{alpha!r}")) for alpha in ALPHAS
)
GRIDS: dict[str, Grid] = {}


def find_grid(name: str) -> Grid:
    """Returns the published table of this name.

    Raises:
      ValueError: if there is none; the message has the nearest names.
    """
    if name in GRIDS:
        return GRIDS[name]
    nearest = difflib.get_close_matches(name, GRIDS, n=3)
    question = f"did you mean {', '.join(nearest)}? " if nearest else ""
    raise ValueError(
        f"--grid must be the name of a published table, got {name!r}: {question}`python -m "
        "experiments.compare --list-grids` prints them."
    )
