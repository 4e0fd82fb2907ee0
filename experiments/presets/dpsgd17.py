"""DPSGD-17: CIFAR-10 with ResNet-20 on 7 and 10 GPUs, ResNet-56 on 10 and 112 (section 5).

The paper has curves and ratios, no table. Its local batch is as in the reference recipe of CNTK,
its learning rate tuned for each method and not given.
"""

from experiments.presets.preset import Paper, Preset

DPSGD_17 = Paper(
    "DPSGD-17",
    'Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NIPS 2017, '
    "arXiv:1705.09056",
)
RATE = 0.2  # per 256 images, of --learning-rate: CNTK's reference has 0.1 for its 128
LARGEST = 112
CNTK = {
    "dataset": "cifar10",
    "batch_size_per_node": 128,
    "epochs": 160,
    "lr_schedule": "step",
    "warmup_epochs": 0,
    "decay_epochs": (80, 120),
    "weight_decay": 1e-4,
    "shuffle": "global",
}
"""CNTK's reference for ResNet-20: 128 images, 0.1 for 80 epochs, 0.01 for 40, then 0.001. Its
reader shuffles all data in every pass, and gives each worker a part of every step."""

METHODS = {  # -> algorithm, title, figure
    "dpsgd": ("dpsgd", "D-PSGD on the ring", "speed up to 10x"),
    "ar": ("allreduce", "AllReduce SGD", "speed 1x"),
    "centralized": ("allreduce", "parameter server", "speed 1x or less"),
    "easgd": ("easgd", "EASGD, period 4", "loss a curve"),
}
CLUSTERS = {
    7: "one machine of 8 TITAN Xp, 7 of which compute; a GPU is a node",
    10: "10 EC2 p2.xlarge with a K80 each; a GPU is a node",
    LARGEST: "4 EC2 p2.16xlarge and 6 p2.8xlarge, of 16 and 8 K80; a GPU is a node",
}
NOTES = (
    "Curves, not numbers: D-PSGD is up to 10 times as fast as AllReduce (which the paper calls "
    "CNTK) and a parameter server, on networks of low bandwidth or high latency (Figure 2).",
    "The learning rate was tuned for each method and is not given: that of CNTK's reference, 0.1 "
    "for 128 images, scaled with the batch, for all; for 112 nodes times sqrt(112).",
    "Epochs, decays and weight decay are those of CNTK's reference recipe, as is the local batch.",
    "Weight decay is of all parameters here, also of BatchNorm's scales and biases; whether it was "
    "so in the paper is not said. Its curves show all epochs, not a best one.",
    "CNTK's momentum 0.9 is not Nesterov's, its random crops are of 80 % of an image.",
    "EASGD's curve is in the supplement, its elasticity (0.9 / nodes) and period from its paper. A "
    "parameter server is AllReduce with another traffic: the same run here.",
    "ResNet-56 is in the supplement, with ResNet-20's nodes and recipe, and assumed on 112 nodes.",
)


def cifar(model: str, nodes: int, row: str) -> Preset:
    """Returns a run of section 5.2."""
    algorithm, title, figure = METHODS[row]
    is_largest = nodes == LARGEST
    # On 112 nodes it is in all RATE / 2 times the square root of their number.
    rate = RATE / nodes**0.5 if is_largest else RATE
    options = {"model": model, "nodes": nodes, "algorithm": (algorithm,), "learning_rate": rate}
    return Preset(
        name=f"dpsgd17-{model}-{row}-{nodes}",
        program="image",
        task=f"CIFAR-10, ResNet-{model.removeprefix('resnet')}",
        method=f"{title}, {nodes} nodes",
        options=CNTK | options | ({"local_steps": 4} if row == "easgd" else {}),
        paper=DPSGD_17,
        place="section 5.2" if is_largest else "section 5 and supplement",
        hardware=CLUSTERS[nodes],
        figure="loss a curve" if is_largest else figure,
        notes=NOTES,
    )


PRESETS = (
    *(cifar("resnet20", nodes, row) for nodes in (7, 10) for row in METHODS),
    *(cifar("resnet56", 10, row) for row in METHODS),
    *(cifar("resnet56", LARGEST, row) for row in ("dpsgd", "centralized")),
    Preset(
        name="dpsgd17-mini",
        program="image",
        task="5,000 digits, small CNN",
        method="D-PSGD in both orders, AllReduce, EASGD, 8 nodes",
        options={
            "algorithm": ("dpsgd", "dpsgd-adapt-then-combine", "allreduce", "easgd"),
            "epochs": 8,
        },
        paper=DPSGD_17,
    ),
)
