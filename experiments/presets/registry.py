"""All presets by name."""

import difflib

from experiments.presets import dpsgd17, language_models, rand20, relaysgd, sgp19, slowmo
from experiments.presets.preset import Preset

FAMILIES = (sgp19, dpsgd17, rand20, relaysgd, slowmo, language_models)
PRESETS: dict[str, Preset] = {preset.name: preset for f in FAMILIES for preset in f.PRESETS}
MAX_SUGGESTIONS = 3


def find_preset(name: str) -> Preset:
    """Returns the preset of this name.

    Raises:
      ValueError: if there is none; the message has the nearest names.

    >>> find_preset("sgp19-table1-sgp-64")
    Traceback (most recent call last):
    ValueError: --preset must be the name of a preset, got 'sgp19-table1-sgp-64': did you mean \
sgp19-table1-sgp-4, sgp19-table1-sgp-16, sgp19-table1-sgp-8? `python -m experiments.presets` lists \
them.
    """
    if name in PRESETS:
        return PRESETS[name]
    nearest = difflib.get_close_matches(name, PRESETS, n=MAX_SUGGESTIONS)
    question = f"did you mean {', '.join(nearest)}? " if nearest else ""
    raise ValueError(
        f"--preset must be the name of a preset, got {name!r}: {question}`python -m "
        "experiments.presets` lists them."
    )
