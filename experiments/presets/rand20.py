"""RAND-20: the acoustic model over 16 to 128 learners, total batch 8192 (Tables 2 and 3).

The paper refers to Zhang et al. 2019, "A Highly Efficient Distributed Deep Learning System For
Automatic Speech Recognition", arXiv:1907.05701, for learning rates.
"""

from experiments.presets.preset import Paper, Preset

RAND_20 = Paper(
    "RAND-20",
    'Zhang et al., "Improving Efficiency in Large-Scale Decentralized Distributed Training", '
    "ICASSP 2020, arXiv:2002.01119",
)
TOTAL_BATCH = 8192

ANNEALED = {
    "model": "paper",
    "epochs": 16,
    "optimizer": "sgd",
    "weight_decay": 0.0,
    "lr_schedule": "step",
    "decay_epochs": tuple(range(10, 16)),
    "decay_factor": 0.7071,
}
"""The rate falls by sqrt(2) at every epoch from the 10th on."""

LARGE_BATCH = ANNEALED | {"learning_rate": 1 / 32, "warmup_epochs": 10}
"""Up to 10 times the rate of one learner, 0.1, over 10 epochs: 1/32 per 256 windows is 1 in all."""

METHODS = {
    "ad": ("adpsgd@ring", "AD-PSGD on the ring"),
    "rand": ("rand-psgd", "RAND-PSGD"),
    "d1d": ("d1d-psgd", "D1D-PSGD"),
}
WORD_ERRORS = {
    "ad": {16: "7.6/13.2", 32: "7.9/13.6", 64: "8.1/14.0"},
    "rand": {16: "7.6/13.1", 32: "7.7/13.4", 64: "7.8/13.4"},
    "d1d": {16: "7.4/13.3", 32: "7.6/13.1", 64: "7.5/13.3", 96: "7.7/13.2", 128: "7.7/13.3"},
}
"""Row -> learners -> SWB/CH, in per cent."""
HOURS = {16: "5.88", 32: "3.60", 64: "2.28", 96: "2.10", 128: "1.98"}
"""Of D1D-PSGD, from Table 3, which has no other row."""

NOTES = (
    "The corpus, SWB2000, is licensed: give it, or other data, by --dataset and --data-dir.",
    "Word error rates are of the test sets SWB and CH.",
    "The 32,000 states, 40 FMLLR features and the i-vector of a speaker must be in that data; word "
    "errors need the paper's decoder and language model. Here: accuracy of windows and utterances.",
    "For rates the paper refers to its [4], whose text was not at hand: up to 10 times over 10 "
    "epochs, then 1/sqrt(2) at each; here from 1/32, and SGD without momentum.",
    "AD-PSGD is simulated: gradients of older models, one step on average.",
    "8192 windows over 96 learners are 85 each, rounded down; how the paper divides them is not "
    "said.",
)


def speech(row: str, learners: int) -> Preset:
    """Returns an entry of Table 2 or 3."""
    algorithm, title = METHODS[row]
    is_in_table_2 = learners in WORD_ERRORS["ad"]
    batch_size = TOTAL_BATCH // learners
    hours = f", hours {HOURS[learners]}" if row == "d1d" else ""
    options = {"algorithm": (algorithm,), "nodes": learners, "batch_size_per_node": batch_size}
    tables = "Tables 2 and 3" if row == "d1d" else "Table 2"
    return Preset(
        name=f"rand20-table{2 if is_in_table_2 else 3}-{row}-{learners}",
        program="speech",
        task="SWB2000, LSTM",
        method=f"{title}, {learners} learners, batch {batch_size * learners}",
        options=LARGE_BATCH | options,
        paper=RAND_20,
        place=tables if is_in_table_2 else "Table 3",
        hardware="IBM POWER9 servers of 6 V100 (a learner is a GPU), 100 Gbit/s InfiniBand",
        figure=f"WER {WORD_ERRORS[row][learners]}%{hours}",
        notes=NOTES,
        needs_data=True,
    )


PRESETS = (
    Preset(
        name="rand20-table2-single",
        program="speech",
        task="SWB2000, LSTM",
        method="one learner, batch 256",
        options=ANNEALED
        | {"algorithm": ("allreduce",), "nodes": 1, "batch_size_per_node": 256, "warmup_epochs": 0},
        paper=RAND_20,
        place="Table 2",
        hardware="one V100",
        figure="WER 7.5/13.0%",
        notes=NOTES,
        needs_data=True,
    ),
    *(speech(row, learners) for row in METHODS for learners in WORD_ERRORS[row]),
    Preset(
        name="rand20-mini",
        program="speech",
        task="spoken languages, mini LSTM",
        method="AD, RAND, D1D and AllReduce, 16 learners",
        options={
            "algorithm": ("adpsgd@ring", "rand-psgd", "d1d-psgd", "allreduce"),
            "nodes": 16,
            "batch_size_per_node": 32,
            "learning_rate": 0.2,
            "epochs": 4,
        },
        paper=RAND_20,
        notes=("Chosen here: Nesterov momentum, so that four epochs are enough, and a cosine.",),
        needs_data=True,
    ),
)
