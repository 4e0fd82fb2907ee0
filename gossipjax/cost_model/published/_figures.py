"""Published figures of time, as data: none of them is ours.

- SGP-18: Assran et al., 2018, submission to ICLR 2019, Table 2.
- SGP-19: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
  arXiv:1811.10792, Tables 1 to 5. ResNet-50 on ImageNet, 256 images per node and step.
- SlowMo: Wang et al., ICLR 2020, arXiv:1910.00643, Table 2. The same task, 32 nodes.
- Streaming DiLoCo: Douillard et al., 2025, arXiv:2501.18512, Table 4: simulated by its authors.
"""

from typing import NamedTuple


class Hours(NamedTuple):
    """Hours of a training run.

    Attributes:
      table: of SGP-19.
      parts: what ran, and for how many epochs.
      nodes: N.
      hours: published.
    """

    table: int
    parts: tuple[tuple[str, int], ...]
    nodes: int
    hours: float


class Requirement(NamedTuple):
    """Bandwidths that reach `UTILIZATIONS`.

    Attributes:
      model: a name of `MODELS`.
      method: what ran.
      gbits: Gbit/s, one for each utilization.
    """

    model: str
    method: str
    gbits: tuple[float, ...]


class Model(NamedTuple):
    """A model of Streaming DiLoCo's simulation.

    Attributes:
      parameters: of the model.
      compute_seconds: of a step.
      layers: of the transformer.
    """

    parameters: float
    compute_seconds: float
    layers: int


PARAMETERS = 25.6e6  # of ResNet-50: "about 100 MB"
MINI_BATCHES_PER_SECOND = 4.384  # of one server (SGP-18)
IMAGES_PER_NODE = 256
IMAGES = 1.28e6  # of ImageNet

SGP18_NODES = (4, 8, 16, 32)
SGP18_SECONDS = {
    "AllReduce": (0.704, 0.896, 1.086, 1.308),
    "D-PSGD": (0.628, 0.618, 0.632, 0.657),
    "AD-PSGD": (0.361, 0.363, 0.374, 0.388),
    "SGP": (0.377, 0.377, 0.411, 0.426),
}

SGP19_HOURS = (
    *(
        Hours(1, ((name, 90),), nodes, hours)
        for name, row in {
            "AllReduce": (22.0, 14.0, 8.5, 5.1),
            "D-PSGD": (19.7, 9.7, 5.0, 2.6),
            "SGP": (11.8, 5.9, 3.2, 1.7),
        }.items()
        for nodes, hours in zip(SGP18_NODES, row, strict=True)
    ),
    Hours(2, (("AllReduce", 90),), 4, 8.8),
    Hours(2, (("SGP", 90),), 4, 8.2),
    Hours(2, (("AllReduce", 90),), 16, 2.5),
    Hours(2, (("SGP", 90),), 16, 2.2),
    Hours(3, (("AllReduce", 90),), 16, 8.5),
    Hours(3, (("AllReduce", 90),), 32, 5.2),
    Hours(3, (("SGP, two peers", 90),), 16, 5.1),
    Hours(3, (("SGP, two peers", 90),), 32, 2.5),
    Hours(3, (("SGP", 90),), 16, 3.2),
    Hours(3, (("SGP", 90),), 32, 1.7),
    Hours(3, (("AllReduce", 30), ("SGP", 60)), 16, 4.8),
    Hours(3, (("AllReduce", 30), ("SGP", 60)), 32, 2.8),
    Hours(3, (("SGP, two peers", 30), ("SGP", 60)), 16, 3.5),
    Hours(3, (("SGP, two peers", 30), ("SGP", 60)), 32, 1.8),
    Hours(4, (("AllReduce", 90),), 16, 8.5),
    Hours(4, (("D-PSGD", 90),), 16, 4.9),
    Hours(4, (("AD-PSGD", 90),), 16, 2.9),
    Hours(4, (("SGP", 90),), 16, 3.2),
    Hours(4, (("biased 1-OSGP", 90),), 16, 1.8),
    Hours(4, (("1-OSGP", 90),), 16, 1.8),
    Hours(5, (("AllReduce", 90),), 32, 5.1),
    Hours(5, (("AD-PSGD", 270),), 32, 4.7),
    Hours(5, (("SGP", 270),), 32, 4.6),
    Hours(5, (("1-OSGP", 270),), 32, 2.7),
)

SLOWMO_NODES = 32
SLOWMO_LOCAL_STEPS = 12
SLOWMO_EVERY = 48
SLOWMO_SECONDS = {
    "AllReduce": 0.420,
    "SGP": 0.304,
    "SGP with SlowMo": 0.302,
    "OSGP": 0.271,
    "Local SGD": 0.294,
}

UTILIZATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
DILOCO_EVERY = 100
LAYERS_PER_FRAGMENT = 3
MODELS = {
    "1B": Model(1e9, 0.1, 24),
    "10B": Model(10e9, 0.8, 48),
    "100B": Model(100e9, 4.9, 108),
}
STREAMING_DILOCO = (
    Requirement("1B", "data parallel", (86.8, 152.6, 184.2, 222.3, 569.0)),
    Requirement("1B", "DiLoCo", (1.4, 6.2, 13.3, 23.3, 86.8)),
    Requirement("1B", "streaming", (1.4, 5.2, 9.1, 16.0, 28.1)),
    Requirement("1B", "streaming, overlap", (1.4, 4.3, 6.2, 9.1, 11.0)),
    Requirement("1B", "streaming, overlap, 4 bits", (0.4, 0.9, 1.7, 2.0, 3.0)),
    Requirement("10B", "data parallel", (104.8, 222.3, 222.3, 268.3, 471.5)),
    Requirement("10B", "DiLoCo", (1.7, 7.5, 16.0, 33.9, 104.8)),
    Requirement("10B", "streaming", (1.7, 5.2, 9.1, 13.3, 19.3)),
    Requirement("10B", "streaming, overlap", (1.7, 3.6, 5.2, 6.2, 7.5)),
    Requirement("10B", "streaming, overlap, 4 bits", (0.4, 0.9, 1.4, 1.4, 1.7)),
    Requirement("100B", "data parallel", (184.2, 323.8, 390.7, 390.7, 471.5)),
    Requirement("100B", "DiLoCo", (3.0, 11.0, 23.3, 49.4, 184.2)),
    Requirement("100B", "streaming", (2.4, 6.2, 9.1, 11.0, 19.3)),
    Requirement("100B", "streaming, overlap", (1.7, 3.6, 4.3, 5.2, 5.2)),
    Requirement("100B", "streaming, overlap, 4 bits", (0.5, 0.9, 1.1, 1.1, 1.4)),
)
