"""All presets by name."""

import difflib

from experiments.presets import dpsgd17, language_models, rand20, relaysgd, sgp19, slowmo
from experiments.presets.preset import Preset

FAMILIES = (sgp19, dpsgd17, rand20, relaysgd, slowmo, language_models)
PRESETS: dict[str, Preset] = {preset.name: preset for f in FAMILIES for preset in f.PRESETS}


def find_preset(name: str) -> Preset:
    """Returns the preset of this name; raises `ValueError` with similar names without one."""
    if name in PRESETS:
        return PRESETS[name]
    nearest = difflib.get_close_matches(name, PRESETS, n=3)
    question = f"did you mean {', '.join(nearest)}? " if nearest else ""
    raise ValueError(
        f"--preset must be the name of a preset, got {name!r}: {question}`python -m "
        "experiments.presets` lists them."
    )
