"""SlowMo, Table 1: its four baselines on ImageNet, which need no outer momentum.

Its baselines on WMT'16 En-De over 8 nodes, SGP with BLEU 26.92 and AllReduce with 27.17, are not
here: size of the model, batch and length of these runs were not at hand.
"""

from experiments.presets.preset import Paper, Preset
from experiments.presets.sgp19 import GOYAL

SLOWMO = Paper(
    "SlowMo",
    'Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", '
    "ICLR 2020, arXiv:1910.00643",
)
BASELINES = {
    "ar": ("allreduce", 1, "AllReduce SGD", "76.00", "420"),
    "sgp": ("sgp", 1, "SGP, one peer", "75.15", "304"),
    "osgp": ("1-osgp", 1, "1-OSGP", "74.96", "271"),
    "local": ("sgp@complete", 12, "Local SGD, 12 steps", "69.94", "294"),
}
"""Row -> algorithm, steps between exchanges, title, accuracy in per cent, milliseconds a step."""

NOTES = (
    "The recipe is the protocol of Goyal et al., which the paper names; details are chosen here.",
    "Rows with SlowMo need an outer momentum, which is not here.",
)


def imagenet(row: str) -> Preset:
    """Returns a baseline of the table."""
    algorithm, local_steps, title, top1, milliseconds = BASELINES[row]
    return Preset(
        name=f"slowmo-table1-{row}-32",
        program="image",
        task="ImageNet, ResNet-50, 32 nodes",
        method=title,
        options=GOYAL | {"algorithm": (algorithm,), "nodes": 32, "local_steps": local_steps},
        paper=SLOWMO,
        place="Tables 1 and 2",
        hardware="32 servers of 8 V100 (a node is a server), 10 Gbit/s Ethernet",
        figures={"top-1": f"{top1}%", "ms per step": milliseconds},
        notes=NOTES,
    )


MINI = Preset(
    name="slowmo-mini",
    program="image",
    task="5,000 digits, small CNN",
    method="Local SGD, an average at every 12th step, 8 nodes",
    options={"algorithm": ("sgp@complete",), "local_steps": 12, "epochs": 8},
    paper=SLOWMO,
)

PRESETS = (*map(imagenet, BASELINES), MINI)
