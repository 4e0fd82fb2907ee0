"""SGP-19: ImageNet (Tables 1, 3, 4, 5) and translation (section 6.2).

The recipes are in its section 6 and, in more detail, in appendix A.3 of SGP-18, an earlier version.
"""

from typing import Any

from experiments.presets.preset import Paper, Preset

SGP_19 = Paper(
    "SGP-19",
    'Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, '
    "arXiv:1811.10792",
)

GOYAL = {
    "dataset": "imagenet2012",
    "model": "resnet50",
    "batch_size_per_node": 256,
    "epochs": 90,
    "lr_schedule": "step",
    "no_decay_on_norm_and_bias": True,
    "shuffle": "global",
}
"""The protocol of Goyal et al.; the authors' code divides the data anew in every epoch. The rest
are the defaults: 0.1 per 256 images, warm-up over the first 1/18 of the run, 10x down at 1/3, 2/3
and 8/9; Nesterov momentum 0.9, weight decay 1e-4."""

ONE_PEER_32 = {"learning_rate": 0.0375, "decay_epochs": (40, 70, 85)}
"""Gossip with one peer over 32 nodes: 0.0375 per 256 images, later decays (SGP-18, A.3)."""

THREE_TIMES = {"epochs": 270, "warmup_epochs": 5, "decay_epochs": (90, 180, 240)}
"""Of Table 5: three times as long, "similar warm-up"."""

METHODS = {
    "ar": ("allreduce", "AllReduce SGD"),
    "dpsgd": ("dpsgd-adapt-then-combine@bipartite_exponential", "D-PSGD, one peer"),
    "adpsgd": ("adpsgd", "AD-PSGD, one peer"),
    "sgp": ("sgp", "SGP, one peer"),
    "1p": ("sgp", "SGP, one peer"),
    "2p": ("sgp@two_peer_exponential", "SGP, two peers"),
    "ar-1p": ("sgp@complete/one_peer_exponential", "all nodes for 30 epochs, then 1 peer"),
    "2p-1p": (
        "sgp@two_peer_exponential/one_peer_exponential",
        "2 peers for 30 epochs, then 1",
    ),
    "biased-1-osgp": ("biased-1-osgp", "overlap SGP, weight ignored"),
    "1-osgp": ("1-osgp", "SGP, messages one step late"),
}
"""Row of a table -> our name of the algorithm, and what it is."""

NOTES = (
    "BatchNorm is exempt from weight decay here, as in Goyal et al. Whether these runs did so is "
    "not said: the help of --weight_decay in the authors' code says so, but its optimizer decays "
    "all parameters.",
    "Whose BatchNorm statistics were used is not said: here each node keeps its own, and the "
    "accuracy of the average model is that with their mean.",
    "Our accuracy is that after the last epoch. SGP-18 reports the best of a run (Figure 1c); "
    "SGP-19 says for Table 5 that it is at the end, and does not say for the others.",
    "AD-PSGD is simulated: gradients of older models, one step on average.",
    "Rates: that of 32 nodes with one peer, and its decays, are of SGP-18, A.3. Not said are that "
    "of hybrids over 32 nodes, as of 2P-SGP, 0.1, and that of long runs: 0.1, as of 90 epochs.",
)


def imagenet(table: int, row: str, nodes: int, *figures: str, **changes: Any) -> Preset:
    """Returns a row of a table; `figures` are accuracy in per cent and hours, or train first."""
    algorithm, title = METHODS[row]
    forms = ("train {}%", "top-1 {}%", "hours {}")[-len(figures) :]
    if nodes == 32 and row in ("sgp", "1p", "dpsgd") and not changes:
        changes = ONE_PEER_32
    return Preset(
        name=f"sgp19-table{table}-{row}-{nodes}",
        program="image",
        task="ImageNet, ResNet-50",
        method=f"{title}, {nodes} nodes",
        options=GOYAL | {"algorithm": (algorithm,), "nodes": nodes} | changes,
        paper=SGP_19,
        place=f"Table {table}",
        hardware=f"{nodes} servers of 8 V100 (a node is a server), 10 Gbit/s Ethernet",
        figure=", ".join(map(str.format, forms, figures)),
        notes=NOTES,
    )


TABLE_1 = {
    "ar": {4: ("76.2", "22.0"), 8: ("76.4", "14.0"), 16: ("76.3", "8.5"), 32: ("76.2", "5.1")},
    "dpsgd": {4: ("76.4", "19.7"), 8: ("76.1", "9.7"), 16: ("75.9", "5.0"), 32: ("74.4", "2.6")},
    "sgp": {4: ("76.3", "11.8"), 8: ("76.4", "5.9"), 16: ("75.9", "3.2"), 32: ("75.0", "1.7")},
}
TABLE_3 = {
    "ar": {16: ("76.3", "8.5"), 32: ("76.2", "5.2")},
    "2p": {16: ("76.2", "5.1"), 32: ("75.7", "2.5")},
    "1p": {16: ("75.9", "3.2"), 32: ("75.0", "1.7")},
    "ar-1p": {16: ("76.2", "4.8"), 32: ("75.4", "2.8")},
    "2p-1p": {16: ("76.0", "3.5"), 32: ("75.1", "1.8")},
}
TABLE_4 = {
    "ar": ("76.9", "76.3", "8.5"),
    "dpsgd": ("75.6", "75.9", "4.9"),
    "adpsgd": ("74.7", "75.5", "2.9"),
    "sgp": ("75.6", "75.9", "3.2"),
    "biased-1-osgp": ("75.4", "75.3", "1.8"),
    "1-osgp": ("77.1", "75.7", "1.8"),
}
TABLE_5 = {
    "ar": ("76.9", "76.2", "5.1"),
    "adpsgd": ("80.3", "76.9", "4.7"),
    "sgp": ("80.0", "77.1", "4.6"),
    "1-osgp": ("81.8", "77.1", "2.7"),
}
"""Rows of Tables 1 and 3 -> nodes -> accuracy in per cent, and hours. Tables 4 and 5 have the
accuracy on the training set before."""

BATCH_TOKENS = 25_000
FILL = 0.89
"""The part of a batch that is tokens of targets and no padding, at the lengths of `TRANSFORMER`. On
52,674 English-German pairs, 17 of 37,000 different tokens a target, it was measured so, and
0.90 with all of them 1.5 times or twice as long; WMT's, which were not at hand, have about 31."""

TRANSFORMER = {
    "dataset": "wmt16_en_de",
    "model": "base",
    "vocabulary_size": 37_000,
    "bucket_lengths": (8, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64, 80, 96, 128),
    "nodes": 8,
    "batch_size_per_node": round(BATCH_TOKENS / 8 / FILL),
    "learning_rate": 7.0e-4,
    "warmup_steps": 4000,
    "shuffle": "global",
}
"""Vaswani et al.: (512 * 4000)**-0.5 at the end of the warm-up. The rest are the defaults: Adam
(0.9, 0.98, 1e-9), dropout 0.1, label smoothing 0.1; beam 4, length penalty 0.6."""

TOKENS = {  # of a batch over 8 nodes -> title, options
    "25k": ("25K", {"epochs": 18}),
    "400k": ("400K", {"accumulate": 16, "epochs": 40}),
}
BLEU = {
    "ar": "25.8 (14K updates), 26.9 (3 days)",
    "sgp": "26.4 (14K updates), 27.5 (3 days)",
}
SPEED = {("25k", "sgp"): "2x", ("400k", "sgp"): "1.5x"}
TRANSFORMER_NOTES = (
    "The speed is relative to AllReduce. 400K tokens are 16 steps of 25K for one update.",
    "Tokens are taken as those of targets without padding, which the paper does not say. "
    "--tokens-per-batch counts padding: it is 25K / 8 nodes, divided by the fill of "
    f"{FILL:.0%} of these --bucket-lengths, measured on 52,674 other English-German pairs.",
    "The length is not said in epochs. 25K tokens: 18, about 100,000 updates, as of Vaswani et "
    "al.; 400K: 40, about the 14,000 updates after which the paper gives BLEU. At 4.5 million "
    "pairs of about 31 tokens, 140 million tokens of targets an epoch.",
    "BLEU is that of the average model after the last update here; whether the paper's is of the "
    "last or the best checkpoint, or of a mean of several, is not said.",
    "The rate of 400K tokens is not said: as of 25K (Ott et al. raise it to 1e-3).",
    'The test set of wmt16_translate is newstest2016. The paper says only "test-set", and follows '
    "Vaswani et al., who use newstest2014: BLEU may not be comparable. sacrebleu computes it; how "
    "the paper split its text into words is not said.",
)


def transformer(size: str, row: str) -> Preset:
    """Returns a run of section 6.2."""
    title, options = TOKENS[size]
    bleu = f", BLEU {BLEU[row]}" if size == "400k" else ""
    return Preset(
        name=f"sgp19-transformer-{size}-{row}",
        program="translation",
        task="WMT'16 En-De, Transformer base",
        method=f"{'Adam-SGP' if row == 'sgp' else 'AllReduce-Adam'}, {title} tokens, 8 nodes",
        options=TRANSFORMER | options | {"algorithm": (METHODS[row][0],)},
        paper=SGP_19,
        place="section 6.2",
        hardware="8 machines, a V100 each, 10 Gbit/s Ethernet",
        figure=f"speed {SPEED.get((size, row), '1x')}{bleu}",
        notes=TRANSFORMER_NOTES,
    )


PRESETS = (
    *(
        imagenet(number, row, nodes, *figures)
        for number, table in ((1, TABLE_1), (3, TABLE_3))
        for row, columns in table.items()
        for nodes, figures in columns.items()
    ),
    *(imagenet(4, row, 16, *figures) for row, figures in TABLE_4.items()),
    *(
        imagenet(5, row, 32, *figures, **({} if row == "ar" else THREE_TIMES))
        for row, figures in TABLE_5.items()
    ),
    *(transformer(size, row) for size in TOKENS for row in ("ar", "sgp")),
    Preset(
        name="sgp19-mini",
        program="image",
        task="5,000 digits, small CNN",
        method="the methods of Tables 1, 3 and 4, 8 nodes",
        options={
            "algorithm": tuple(dict.fromkeys(algorithm for algorithm, _ in METHODS.values())),
            "epochs": 9,
            "lr_schedule": "step",
            "learning_rate": 0.03,
        },
        paper=SGP_19,
        notes=("The figures of the paper are of ImageNet: here only the order can be compared.",),
    ),
    Preset(
        name="sgp19-transformer-mini",
        program="translation",
        task="tab-separated pairs, mini Transformer",
        method="Adam-SGP and AllReduce-Adam, 4 nodes",
        options={"algorithm": ("sgp", "allreduce"), "epochs": 2, "bucket_lengths": (16, 32)},
        paper=SGP_19,
        place="section 6.2",
        notes=("Two epochs show that the loss falls alike; translations need ten times as many.",),
        needs_data=True,
    ),
)
