"""Language models, which the papers do not train: sizes that users do."""

from experiments.presets.preset import Preset

NANO = Preset(
    name="language-nano",
    program="language",
    task="Python's manual, nano Transformer",
    method="AllReduce, SGP and 1-OSGP, 8 nodes",
    options={"algorithm": ("allreduce", "sgp", "1-osgp"), "epochs": 2, "warmup_steps": 20},
    notes=("The recipe was chosen here: AdamW, warm-up and cosine.",),
)
GPT2_SMALL = Preset(
    name="language-gpt2-small",
    program="language",
    task="lm1b, GPT-2 small's shape",
    method="SGP, 8 nodes",
    options={
        "algorithm": ("sgp",),
        "dataset": "lm1b",
        "model": "gpt2-small",
        "vocabulary_size": 32_000,
        "sequence_length": 1024,
        "batch_size_per_node": 8,
        "accumulate": 8,
        "learning_rate": 6e-4,
        "adam_b2": 0.95,
        "warmup_steps": 2000,
        "epochs": 3,
        "precision": "mixed_bfloat16",
        "remat": True,
    },
    notes=("The recipe is common practice at this size, 0.5M tokens an update; of no paper here.",),
)

MULOCO = Preset(
    name="language-muloco",
    program="language",
    task="Python's manual, nano Transformer",
    method="MuLoCo, 8 nodes",
    options={
        "algorithm": ("local",),
        "optimizer": "muon",
        "muon_momentum": 0.9,
        "outer_every": 30,
        "outer_rate": 0.8,
        "outer_momentum": 0.8,
        "outer_nesterov": True,
        "epochs": 4,
        "warmup_steps": 20,
    },
    notes=(
        "After MuLoCo (arXiv:2505.23725): H = 30, rate 0.8 and momentum 0.8 for several workers.",
        "Model, data and learning rate were chosen here.",
    ),
)

PRESETS = (NANO, GPT2_SMALL, MULOCO)
