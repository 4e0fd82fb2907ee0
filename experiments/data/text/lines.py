"""Files of text: their lines, plain or gzipped."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from experiments.data.local import DataError


def read_lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file in UTF-8, plain or (.gz) gzipped, which end with a newline only.

    A byte-order mark, which some editors write, is no part of the first line.

    Raises:
        DataError: names the file and the number of a line that is not UTF-8; also if the file is
            corrupt or cut short.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    encoding = "utf-8-sig" if number == 1 else "utf-8"
                    text = line.decode(encoding)
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}, line {number}, must be text in UTF-8, got {error.reason} at "
                        f"byte {error.start}: correct the line, or convert the file."
                    ) from error
                if text:  # not a file of nothing but a byte-order mark
                    yield text.rstrip("\r\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is corrupt or cut short: {error}; fetch it again.") from error


def require_once(paths: Iterable[Path]) -> None:
    """Raises `DataError` if a file is there twice, plain and gzipped."""
    paths = sorted(paths)
    for path in paths:
        other = path.with_name(f"{path.name}.gz")
        if other in paths:
            raise DataError(
                f"{path.parent} must hold each file of texts once, got both {path.name} and "
                f"{other.name}: remove one of them."
            )
