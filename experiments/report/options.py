"""The options of the program, and where its data are."""

import dataclasses
from pathlib import Path

from experiments.data.idx import missing_idx_files
from experiments.data.speech import DATASET
from experiments.options.checks import PositiveInt, check_fields
from experiments.options.paths import OptionalPath
from experiments.report.section import Scale
from experiments.report.sections import check_names

RUNS = "runs"
SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class Options:
    """Runs the papers' experiments in miniature, and writes one report of what agrees."""

    quick: bool = False
    """Small versions of all runs: the whole report in less than ten minutes on two cores."""
    section: tuple[str, ...] = ()
    """One or several names of sections to run; others that are finished in --out stay in the
    report. If not given, all of them."""
    list_sections: bool = False
    """Print the names of the sections, and end."""
    jobs: PositiveInt | None = None
    """Runs side by side; if not given, one for each GPU, or for each core, at most 8. Runs that
    measure time come last, one at a time."""
    runs: tuple[Path, ...] = ()
    """Folders of other reports: their finished runs of the same commands are taken."""
    fashion_mnist: OptionalPath = None
    """Folder of the four files of Fashion-MNIST; if not given, 5,000 MNIST digits take its place.
    """
    speech: OptionalPath = None
    """Folder of speech_languages.npz; if not given, what needs it is left out."""
    translation: OptionalPath = None
    """Folder of train, valid and test files of pairs of sentences (.tsv or .tsv.gz); if not given,
    what needs them is left out."""
    out: OptionalPath = None
    """Folder for the report; what is finished there is not run again. A new one under runs/ if not
    given."""
    overwrite: bool = False
    """Replace the results of another report in --out, its runs too."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_names(self.section)
        if len(set(self.section)) < len(self.section):
            raise ValueError(f"--section must be different names, got {self.section}.")
        for folder in self.runs:
            if not (folder / RUNS).is_dir():
                raise ValueError(
                    f"--runs must be folders of reports, got {folder}, without {RUNS}/ in it: give "
                    "the --out of another report."
                )
        if self.fashion_mnist is not None and (missing := missing_idx_files(self.fashion_mnist)):
            _refuse("fashion-mnist", "the four files of the data set", self.fashion_mnist, missing)
        if self.speech is not None and not (self.speech / f"{DATASET}.npz").is_file():
            _refuse("speech", f"{DATASET}.npz", self.speech, [f"{DATASET}.npz"])
        if self.translation is not None:
            folder = self.translation
            missing = [name for name in SPLITS if not _has_pairs(folder, name)]
            if missing:
                names = [f"{name}.tsv" for name in missing]
                _refuse("translation", "train, valid and test.tsv or .tsv.gz", folder, names)

    @property
    def scale(self) -> Scale:
        """What the sections are given."""
        return Scale(
            is_quick=self.quick,
            fashion_mnist=self.fashion_mnist,
            speech=self.speech,
            translation=self.translation,
        )


def _has_pairs(folder: Path, split: str) -> bool:
    return any((folder / f"{split}{suffix}").is_file() for suffix in (".tsv", ".tsv.gz"))


def _refuse(option: str, files: str, folder: Path, missing: list[str]) -> None:
    raise ValueError(
        f"--{option} must be a folder that holds {files}, got {folder}, without "
        f"{', '.join(missing)}: give another folder, or leave the option out."
    )
