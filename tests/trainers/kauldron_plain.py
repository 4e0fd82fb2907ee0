"""A program of Kauldron for one node, as its documents write one: scanned layers, text of 64 signs.

python -m kauldron.main --cfg=tests/trainers/kauldron_plain.py --cfg.workdir=/tmp/plain
"""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from kauldron import konfig, kontext

with konfig.imports():
    import optax
    from kauldron import kd

    from tests.trainers import kauldron_plain


def get_config():
    cfg = kd.train.Trainer()
    cfg.seed = 0
    cfg.train_ds = make_data(seed=1, size=4096)
    cfg.eval_ds = make_data(seed=2, size=512)
    cfg.model = kauldron_plain.Model(tokens="batch.tokens")
    cfg.sharding = kd.sharding.ShardingStrategy(
        params=kd.sharding.FSDPSharding(min_size_to_shard_mb=0)
    )
    cfg.optimizer = optax.adam(1e-2)
    cfg.train_losses = {
        "xent": kd.losses.SoftmaxCrossEntropyWithIntLabels(logits="preds", labels="batch.labels")
    }
    cfg.train_metrics = {"accuracy": kd.metrics.Accuracy(logits="preds", labels="batch.labels")}
    cfg.num_train_steps = 100
    cfg.log_metrics_every = 10
    cfg.checkpointer = kd.ckpts.Checkpointer(save_interval_steps=50)
    cfg.evals = {"eval": kd.evals.Evaluator(run=kd.evals.EveryNSteps(50), num_batches=8)}
    return cfg


def make_data(seed, size):
    text = kauldron_plain.Text(seed, size)
    return kd.data.py.DataSource(text, shuffle=True, seed=0, batch_size=64, num_workers=0)


class Block(nn.Module):
    """A residual layer that sees the sign before."""

    @nn.compact
    def __call__(self, x, _):
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        hidden = nn.gelu(nn.Dense(64)(jnp.concatenate([x, before], -1)))
        return x + nn.Dense(32)(hidden), None


class Model(nn.Module):
    """Four layers that are scanned: their parameters are `[4, ...]`."""

    tokens: kontext.Key = kontext.REQUIRED

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 32)(tokens)
        layers = nn.scan(Block, {"params": 0}, split_rngs={"params": True}, length=4)
        x, _ = layers(name="blocks")(x, None)
        return nn.Dense(64)(x)


@dataclasses.dataclass(frozen=True)
class Text:
    """Signs that the two signs before decide, nine times of ten."""

    seed: int
    size: int

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        rng = np.random.default_rng((self.seed, int(number)))
        text = list(rng.integers(64, size=2))
        for _ in range(15):
            follows = (3 * text[-1] + text[-2] // 16) % 64
            text.append(follows if rng.random() < 0.9 else rng.integers(64))
        text = np.asarray(text, np.int32)
        return {"tokens": text[:-1], "labels": text[1:, None]}
