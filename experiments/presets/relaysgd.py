"""RelaySGD, Table 2: uneven CIFAR-10 over 16 nodes, the rows whose algorithms are here.

RelaySGD, D2, gradient tracking and quasi-global momentum are not. The recipe is that of the public
code of the authors, whose tuned rates are per method and alpha.
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
    "sgp": ("sgp", "SGP, one peer"),
}
RESULTS = {
    ("ar", "sgd"): {1: (0.1, "87.0"), 0.1: (0.1, "87.0"), 0.01: (0.1, "87.0")},
    ("ar", "nesterov"): {1: (0.1, "90.2"), 0.1: (0.1, "90.2"), 0.01: (0.1, "90.2")},
    ("dpsgd", "sgd"): {1: (0.4, "87.4"), 0.1: (0.1, "79.9"), 0.01: (0.2, "53.9")},
    ("sgp", "sgd"): {1: (0.4, "87.4"), 0.1: (0.2, "86.7"), 0.01: (0.2, "86.7")},
    ("sgp", "nesterov"): {1: (0.1, "89.5"), 0.1: (0.1, "89.2"), 0.01: (0.025, "87.5")},
}
"""Row and optimizer -> alpha -> the authors' rate of a step, and accuracy in per cent."""

NOTES = (
    "Augmentation, warm-up from 1/256 of the batch's rate and the division by Dirichlet are ours.",
    "D-PSGD with local momentum is not in the table (there it has quasi-global momentum).",
)
TWO_ROUNDS = "The authors' SGP averages twice a step, ours once."
SHUFFLED = "The authors divide AllReduce's data at random: one figure for all alphas."


def cifar(row: str, optimizer: str, alpha: float) -> Preset:
    """Returns an entry of the table."""
    algorithm, title = METHODS[row]
    rate, accuracy = RESULTS[row, optimizer][alpha]
    momentum = "-m" if optimizer == "nesterov" else ""
    extra = {"ar": (SHUFFLED,), "sgp": (TWO_ROUNDS,)}.get(row, ())
    return Preset(
        name=f"relaysgd-table2-{row}{momentum}-{alpha:g}",
        program="image",
        task=f"CIFAR-10, VGG-11, {NODES} nodes",
        method=f"{title}{' with momentum' if momentum else ''}, Dirichlet {alpha:g}",
        options=VGG
        | {
            "algorithm": (algorithm,),
            "optimizer": optimizer,
            "learning_rate": rate * PER_256,
            "dirichlet_alpha": float(alpha),
        },
        paper=RELAYSGD,
        place="Table 2",
        hardware="4 K80, 4 processes on each",
        figures={"accuracy": f"{accuracy}%"},
        notes=NOTES + extra,
    )


MINI = Preset(
    name="relaysgd-mini",
    program="image",
    task="5,000 digits, small CNN",
    method="AllReduce, D-PSGD and SGP, Dirichlet 0.1, 16 nodes",
    options={
        "algorithm": tuple(algorithm for algorithm, _ in METHODS.values()),
        "nodes": NODES,
        "batch_size_per_node": 16,
        "epochs": 8,
        "optimizer": "sgd",
        "dirichlet_alpha": 0.1,
    },
    paper=RELAYSGD,
)

PRESETS = (
    *(cifar(*keys, alpha) for keys, columns in RESULTS.items() for alpha in columns),
    MINI,
)
