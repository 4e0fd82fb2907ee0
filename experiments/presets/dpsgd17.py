"""DPSGD-17: CIFAR-10 with ResNet-20 on 7 and 10 GPUs, ResNet-56 on 10 and 112 (section 5).

The paper has curves and ratios, no table. Its local batch is that of the reference recipe of CNTK,
its learning rate tuned for each method and not given.
"""

from experiments.presets.preset import Paper, Preset

DPSGD_17 = Paper(
    "DPSGD-17",
    'Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NIPS 2017, '
    "arXiv:1705.09056",
)

RATE = 0.2
"""Per 256 images, of --learning-rate: CNTK's reference has 0.1 for its 128."""

CNTK = {
    "dataset": "cifar10",
    "batch_size_per_node": 128,
    "learning_rate": RATE,
    "epochs": 160,
    "lr_schedule": "step",
    "warmup_epochs": 0,
    "decay_epochs": (80, 120),
    "weight_decay": 1e-4,
    "shuffle": "global",
}
"""CNTK's reference for ResNet-20: 128 images, 0.1 for 80 epochs, 0.01 for 40, then 0.001. Its
reader shuffles all data in every pass, and gives each worker a part of every step."""

LARGEST = 112

METHODS = {
    "dpsgd": ("dpsgd", "D-PSGD on the ring"),
    "ar": ("allreduce", "AllReduce SGD"),
    "centralized": ("allreduce", "parameter server"),
    "easgd": ("easgd", "EASGD, period 4"),
}
CLUSTERS = {
    7: "one machine of 8 TITAN Xp, 7 of which compute; a GPU is a node",
    10: "10 EC2 p2.xlarge with a K80 each; a GPU is a node",
    LARGEST: "4 EC2 p2.16xlarge and 6 p2.8xlarge, of 16 and 8 K80; a GPU is a node",
}
SMALL_CLUSTERS = (7, 10)
FIGURES = {
    "dpsgd": {"speed": "up to 10x"},
    "ar": {"speed": "1x"},
    "centralized": {"speed": "1x or less"},
    "easgd": {"loss": "a curve"},
}
NOTES = (
    "Curves, not numbers: D-PSGD is up to 10 times as fast as AllReduce (which the paper calls "
    "CNTK) and a parameter server, on networks of low bandwidth or high latency (Figure 2).",
    "The learning rate was tuned for each method and is not given: that of CNTK's reference, 0.1 "
    "for 128 images, scaled with the batch, for all.",
    "Epochs, decays and weight decay are those of CNTK's reference recipe, as is the local batch.",
    "Weight decay is of all parameters here, also of BatchNorm's scales and biases; whether it was "
    "so in the paper is not said. Its curves show all epochs, not a best one.",
    "CNTK's momentum 0.9 is not Nesterov's, its random crops are of 80 % of an image.",
)

NOTES_OF_LARGEST = (
    "A curve, not numbers: over epochs, D-PSGD converges like centralized SGD (Figure 3).",
    "Which ResNet it is, the text does not say: ResNet-56 is assumed.",
    "The learning rate is not given: CNTK's, 0.1 for 128 images, times sqrt(112) for 112 nodes. "
    "Scaled with the batch it would be 11.2.",
    *NOTES[2:],
)


def cifar(model: str, nodes: int, row: str) -> Preset:
    """Returns a run of section 5.2."""
    algorithm, title = METHODS[row]
    depth = model.removeprefix("resnet")
    options = CNTK | {"model": model, "nodes": nodes, "algorithm": (algorithm,)}
    notes = NOTES
    figures = FIGURES[row]
    place = "section 5 and supplement"
    if nodes == LARGEST:
        # In all RATE / 2 times the square root of the number of nodes.
        options |= {"learning_rate": RATE / nodes**0.5}
        figures = {"loss": "a curve"}
        place = "section 5.2"
        notes = NOTES_OF_LARGEST
    if row == "easgd":
        options |= {"local_steps": 4}
        notes += (
            "The curve is in the supplement. Elasticity (0.9 / nodes) and period are those of the "
            "paper of EASGD.",
        )
    if row == "centralized":
        notes += ("A parameter server is AllReduce with another traffic: the same run here.",)
    if depth == "56" and nodes != LARGEST:
        notes += ("ResNet-56 is in the supplement: nodes and recipe are taken from ResNet-20.",)
    return Preset(
        name=f"dpsgd17-{model}-{row}-{nodes}",
        program="image",
        task=f"CIFAR-10, ResNet-{depth}",
        method=f"{title}, {nodes} nodes",
        options=options,
        paper=DPSGD_17,
        place=place,
        hardware=CLUSTERS[nodes],
        figures=figures,
        notes=notes,
    )


MINI = Preset(
    name="dpsgd17-mini",
    program="image",
    task="5,000 digits, small CNN",
    method="D-PSGD in both orders, AllReduce, EASGD, 8 nodes",
    options={
        "algorithm": ("dpsgd", "dpsgd-adapt-then-combine", "allreduce", "easgd"),
        "epochs": 8,
    },
    paper=DPSGD_17,
)

PRESETS = (
    *(cifar("resnet20", nodes, row) for nodes in SMALL_CLUSTERS for row in METHODS),
    *(cifar("resnet56", 10, row) for row in METHODS),
    *(cifar("resnet56", LARGEST, row) for row in ("dpsgd", "centralized")),
    MINI,
)
