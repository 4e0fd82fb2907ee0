"""What a preset is: a recipe in options of a program, and the figure that its paper reports."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Program = Literal["image", "translation", "speech", "language"]


class Paper(NamedTuple):
    """A paper.

    Attributes:
      name: as this project calls it, `SGP-19`.
      reference: authors, title, year, and its number.
    """

    name: str
    reference: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """One row of a paper, or a small version of its experiment.

    Attributes:
      name: of the preset, in lower case: paper, table, row, nodes.
      program: `experiments.PROGRAM` takes it.
      task: what is trained on what, `ImageNet, ResNet-50`.
      method: what is particular to this row, `SGP, one peer, 32 nodes`.
      options: fields of the program's options, where they differ from its defaults; nothing that
        depends on a machine, such as folders.
      paper: None for a recipe that is of no paper.
      place: the table or section of the paper.
      hardware: what the paper ran on.
      figures: what the paper reports for this row, by quantity; empty for small versions.
      notes: what the paper does not say, so that it was chosen here, and what differs.
      needs_data: whether the program needs `--data-dir`.
    """

    name: str
    program: Program
    task: str
    method: str
    options: Mapping[str, Any]
    paper: Paper | None = None
    place: str | None = None
    hardware: str | None = None
    figures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    needs_data: bool = False

    @property
    def source(self) -> str | None:
        """Paper and place, `SGP-19, Table 1`."""
        return ", ".join(filter(None, [self.paper and self.paper.name, self.place])) or None

    @property
    def description(self) -> str:
        """Task and method in a line."""
        return f"{self.task}: {self.method}"

    @property
    def command(self) -> str:
        """The command line, with FOLDER where the user must give one."""
        command = f"python -m experiments.{self.program} --preset {self.name}"
        return f"{command} --data-dir FOLDER" if self.needs_data else command

    @property
    def figure(self) -> str:
        """The figures in a line.

        >>> Preset(name="a", program="image", task="", method="", options={},
        ...        figures={"top-1": "76.3%", "hours": "11.8"}).figure
        'top-1 76.3%, hours 11.8'
        """
        return ", ".join(f"{quantity} {value}" for quantity, value in self.figures.items())
