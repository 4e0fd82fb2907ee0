"""The manifest of a checkpoint: its arrays' specs and checksum, and the metadata of the user."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from gossipjax.checkpoint._arguments import require_metadata
from gossipjax.checkpoint._leaves import checksum, leaf_specs

FILE = Path("manifest", "metadata")  # in the folder of a checkpoint, as orbax names it


class ManifestError(ValueError):
    """A manifest that is not one, or was changed."""


class Manifest(NamedTuple):
    """What a checkpoint says of itself.

    Attributes:
      step: its number, which the name of its folder must be.
      leaves: `[path, shape, type]` of every array.
      checksum: of the arrays.
      metadata: of the user.
    """

    step: int
    leaves: list[list[Any]]
    checksum: int
    metadata: dict[str, Any]


def make_manifest(
    step: int, state: Any, leaves: list[Any], metadata: dict[str, Any]
) -> dict[str, Any]:
    """Returns the manifest of a state as it is written: a JSON text and its checksum.

    Raises:
      ValueError: if `metadata` holds something that JSON cannot.
    """
    manifest = Manifest(step, leaf_specs(state), checksum(leaves), require_metadata(metadata))
    text = json.dumps(manifest._asdict())
    return {"json": text, "checksum": zlib.crc32(text.encode())}


def parse_manifest(content: bytes) -> Manifest:
    """Returns the manifest that was written as `content`.

    Raises:
      ManifestError: if it is not one, or was changed.
    """
    try:
        written = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"its manifest is not JSON: {error}") from error
    text = written.get("json") if isinstance(written, dict) else None
    if not isinstance(text, str):
        raise ManifestError("its manifest lacks 'json', a text")
    if zlib.crc32(text.encode(errors="replace")) != written.get("checksum"):
        raise ManifestError("its manifest has another checksum")
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"its manifest is not JSON: {error}") from error
    if isinstance(manifest, dict) and "step" not in manifest:
        raise ManifestError(
            "an earlier version of gossipjax wrote it, whose checksum does not see all damage: "
            "finish the run with that version"
        )
    expected = {"step": int, "leaves": list, "checksum": int, "metadata": dict}
    for name, kind in expected.items():
        if not isinstance(manifest, dict) or not isinstance(manifest.get(name), kind):
            raise ManifestError(f"its manifest lacks {name!r}, {kind.__name__}")
    if not all(map(_is_spec, manifest["leaves"])):
        raise ManifestError("its manifest has 'leaves' that are not [path, shape, type]")
    return Manifest(*(manifest[name] for name in expected))


def _is_spec(spec: Any) -> bool:
    return (
        isinstance(spec, list)
        and [type(part) for part in spec] == [str, list, str]
        and all(type(size) is int for size in spec[1])
    )
