"""DPSGD-17: CIFAR-10 with ResNet-20 on 7 and 10 GPUs, and ResNet-56 (section 5).

The paper has curves and ratios, no table. Its local batch is that of the reference recipe of CNTK,
its learning rate tuned for each method and not given.
"""

from experiments.presets.preset import Paper, Preset

DPSGD_17 = Paper(
    "DPSGD-17",
    'Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NIPS 2017, '
    "arXiv:1705.09056",
)

CNTK = {
    "dataset": "cifar10",
    "batch_size_per_node": 128,
    "epochs": 160,
    "lr_schedule": "step",
    "warmup_epochs": 0,
    "decay_epochs": (80, 120),
    "weight_decay": 1e-4,
}
"""CNTK's reference for ResNet-20: 128 images, 0.1 for 80 epochs, 0.01 for 40, then 0.001."""

METHODS = {
    "dpsgd": ("dpsgd", "D-PSGD on the ring"),
    "ar": ("allreduce", "AllReduce SGD"),
    "centralized": ("allreduce", "parameter server"),
    "easgd": ("easgd", "EASGD, period 4"),
}
CLUSTERS = {
    7: "one machine of 8 TITAN Xp, 7 of which compute; a GPU is a node",
    10: "10 EC2 p2.xlarge with a K80 each; a GPU is a node",
}
FIGURES = {
    "dpsgd": {"speed": "up to 10x"},
    "ar": {"speed": "1x"},
    "centralized": {"speed": "1x or less"},
    "easgd": {"loss": "a curve"},
}
NOTES = (
    "Curves, not numbers: D-PSGD is up to 10 times as fast as AllReduce (which the paper calls "
    "CNTK) and a parameter server, on networks of low bandwidth or high latency (Figure 2).",
    "The learning rate was tuned for each method and is not given: 0.1 per 256 images, scaled "
    "with the batch, for all.",
    "Epochs, decays and weight decay are those of CNTK's reference recipe, as is the local batch.",
    "CNTK's momentum 0.9 is not Nesterov's, its random crops are of 80 % of an image.",
)


def cifar(model: str, nodes: int, row: str) -> Preset:
    """Returns a run of section 5.2."""
    algorithm, title = METHODS[row]
    depth = model.removeprefix("resnet")
    options = CNTK | {"model": model, "nodes": nodes, "algorithm": (algorithm,)}
    notes = NOTES
    if row == "easgd":
        options |= {"local_steps": 4}
        notes += (
            "The curve is in the supplement. Elasticity (0.9 / nodes) and period are those of the "
            "paper of EASGD.",
        )
    if row == "centralized":
        notes += ("A parameter server is AllReduce with another traffic: the same run here.",)
    if depth == "56":
        notes += ("ResNet-56 is in the supplement: nodes and recipe are taken from ResNet-20.",)
    return Preset(
        name=f"dpsgd17-{model}-{row}-{nodes}",
        program="image",
        task=f"CIFAR-10, ResNet-{depth}",
        method=f"{title}, {nodes} nodes",
        options=options,
        paper=DPSGD_17,
        place="section 5 and supplement",
        hardware=CLUSTERS[nodes],
        figures=FIGURES[row],
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
    *(cifar("resnet20", nodes, row) for nodes in CLUSTERS for row in METHODS),
    *(cifar("resnet56", 10, row) for row in METHODS),
    MINI,
)
