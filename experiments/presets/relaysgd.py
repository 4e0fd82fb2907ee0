"""RelaySGD, Table 2: uneven CIFAR-10 over 16 nodes.

The recipe is from the public code of the authors, whose tuned rates are per method and alpha.
"""

from experiments.presets.preset import Paper, Preset

RELAYSGD = Paper(
    "RelaySGD",
    'Vogels et al., "RelaySum for Decentralized Deep Learning on Heterogeneous Data", '
    "NeurIPS 2021, arXiv:2110.04175",
)
NODES = 16
BATCH_SIZE = 32
PER_256 = 256 / (NODES * BATCH_SIZE)
"""The rate for 256 images, of --learning-rate, in the rate of a step, which the authors give."""

VGG = {
    "dataset": "cifar10",
    "model": "vgg11",
    "nodes": NODES,
    "batch_size_per_node": BATCH_SIZE,
    "epochs": 200,
    "lr_schedule": "step",
    "warmup_epochs": 5,
    "decay_epochs": (150, 180),
    "weight_decay": 1e-4,
    "seed": (1, 2, 3),
}
METHODS = {
    "ar": ("allreduce", "AllReduce"),
    "dpsgd": ("dpsgd-adapt-then-combine@ring", "D-PSGD on the ring"),
    "qg": ("dpsgd-adapt-then-combine@ring", "D-PSGD with quasi-global momentum on the ring"),
    "d2": ("d2", "D2 on the ring"),
    "sgp": ("sgp", "SGP, one peer"),
    "relay-chain": ("relay@chain", "RelaySGD on a chain"),
    "relay-tree": ("relay@tree", "RelaySGD on a binary tree"),
}
RESULTS = {
    ("ar", "sgd"): {1: (0.1, "87.0"), 0.1: (0.1, "87.0"), 0.01: (0.1, "87.0")},
    ("ar", "nesterov"): {1: (0.1, "90.2"), 0.1: (0.1, "90.2"), 0.01: (0.1, "90.2")},
    ("dpsgd", "sgd"): {1: (0.4, "87.4"), 0.1: (0.1, "79.9"), 0.01: (0.2, "53.9")},
    ("qg", "nesterov"): {1: (0.1, "89.5"), 0.1: (0.025, "84.8"), 0.01: (0.05, "63.3")},
    ("d2", "sgd"): {1: (0.2, "87.2"), 0.1: (0.2, "84.0"), 0.01: (0.1, "38.2")},
    ("d2", "nesterov"): {1: (0.05, "88.2"), 0.1: (0.05, "88.5"), 0.01: (0.0126, "61.0")},
    ("sgp", "sgd"): {1: (0.4, "87.4"), 0.1: (0.2, "86.7"), 0.01: (0.2, "86.7")},
    ("sgp", "nesterov"): {1: (0.1, "89.5"), 0.1: (0.1, "89.2"), 0.01: (0.025, "87.5")},
}
RESULTS |= {
    ("relay-chain", "sgd"): {1: (2.0, "87.3"), 0.1: (2.0, "87.2"), 0.01: (1.0, "86.5")},
    ("relay-chain", "nesterov"): {1: (0.5, "89.5"), 0.1: (0.5, "89.2"), 0.01: (0.125, "88.4")},
    ("relay-tree", "sgd"): {1: (1.2, "87.4"), 0.1: (0.6, "86.9"), 0.01: (0.3, "84.6")},
    ("relay-tree", "nesterov"): {1: (0.6, "90.2"), 0.1: (0.3, "89.5"), 0.01: (0.15, "89.1")},
}
"""Row and optimizer -> alpha -> the authors' rate of a step, and accuracy in per cent."""

TWO_ROUNDS = "The authors' SGP averages twice a step, ours once."
LAZY = "Ours runs on (W + I) / 2 of the ring, whose own matrix is at the border of what D2 stands."
ONE_TREE = "The authors send half of the model along each of two trees, ours all along one."
NOTES = (
    "Augmentation, warm-up from 1/256 of the batch's rate and the division by Dirichlet are ours.",
    f"SGP: {TWO_ROUNDS}",
    f"D2: {LAZY}",
    f"RelaySGD on a tree: {ONE_TREE}",
    "RelaySGD: until a model arrives the authors take the initial one, ours the node's own.",
    "The authors divide AllReduce's data at random: one figure for all alphas.",
)


def cifar(row: str, optimizer: str, alpha: float) -> Preset:
    """Returns an entry of the table."""
    algorithm, title = METHODS[row]
    rate, accuracy = RESULTS[row, optimizer][alpha]
    momentum = "-m" if optimizer == "nesterov" else ""
    options = {
        "algorithm": (algorithm,),
        "optimizer": optimizer,
        "learning_rate": rate * PER_256,
        "dirichlet_alpha": float(alpha),
    }
    return Preset(
        name=f"relaysgd-table2-{row}{momentum}-{alpha:g}",
        program="image",
        task=f"CIFAR-10, VGG-11, {NODES} nodes",
        method=f"{title}{' with momentum' if momentum else ''}, Dirichlet {alpha:g}",
        options=VGG | options | ({"momentum": "quasi-global"} if row == "qg" else {}),
        paper=RELAYSGD,
        place="Table 2",
        hardware="4 K80, 4 processes on each",
        figure=f"accuracy {accuracy}%",
        notes=NOTES,
    )


PRESETS = (
    *(cifar(*keys, alpha) for keys, columns in RESULTS.items() for alpha in columns),
    Preset(
        name="relaysgd-mini",
        program="image",
        task="5,000 digits, small CNN",
        method="AllReduce, D-PSGD and SGP, Dirichlet 0.1, 16 nodes",
        options={
            "algorithm": ("allreduce", "dpsgd-adapt-then-combine@ring", "sgp"),
            "nodes": NODES,
            "batch_size_per_node": 16,
            "epochs": 8,
            "optimizer": "sgd",
            "dirichlet_alpha": 0.1,
        },
        paper=RELAYSGD,
    ),
)
