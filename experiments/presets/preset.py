"""What a preset is: a recipe in options of a program, and the figure that its paper reports."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Program = Literal["image", "translation", "speech", "language", "own"]


class Paper(NamedTuple):
    """A paper."""

    name: str  # as this project calls it, `SGP-19`
    reference: str  # authors, title, year, and its number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """One row of a paper, or a small version of its experiment."""

    name: str  # paper, table, row, nodes
    program: Program  # `experiments.PROGRAM` takes it
    task: str  # what is trained on what, `ImageNet, ResNet-50`
    method: str  # what is particular to this row, `SGP, one peer, 32 nodes`
    # Fields of the program's options, where they differ from its defaults; nothing that depends on
    # a machine, such as folders.
    options: Mapping[str, Any]
    paper: Paper | None = None  # None for a recipe that is of no paper
    place: str | None = None  # the table or section of the paper
    hardware: str | None = None  # what the paper ran on
    figure: str = ""  # what the paper reports for this row
    notes: tuple[str, ...] = ()  # what the paper does not say, and what differs here
    needs_data: bool = False  # whether the program needs `--data-dir`

    @property
    def source(self) -> str | None:
        """Paper and place, `SGP-19, Table 1`."""
        return ", ".join(filter(None, [self.paper and self.paper.name, self.place])) or None

    @property
    def command(self) -> str:
        """The command line, with FOLDER where the user must give one."""
        command = f"python -m experiments.{self.program} --preset {self.name}"
        return f"{command} --data-dir FOLDER" if self.needs_data else command
