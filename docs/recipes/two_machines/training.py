"""What both programs train: a model of bytes, on the pages of this site. Put your own here."""

from pathlib import Path

import jax
import numpy as np
import optax

CONTEXT, WIDTH, BATCH = 32, 64, 64
PAGES = sorted(Path(__file__).parents[2].rglob("*.md"))
TEXT = np.frombuffer(b"".join(page.read_bytes() for page in PAGES), np.uint8)
HELD_OUT = TEXT[-len(TEXT) // 10 :]  # nobody trains on these pages
TOKENS = BATCH  # of a step: each row has one byte to predict
EXAMPLES = len(TEXT) - len(HELD_OUT)  # of this machine: by these it counts


def make_params():
    sizes = {"embed": (256, WIDTH), "hidden": (CONTEXT * WIDTH, 8 * WIDTH), "out": (8 * WIDTH, 256)}
    keys = jax.random.split(jax.random.key(0), len(sizes))
    return {
        name: jax.random.normal(key, size) * size[0] ** -0.5
        for key, (name, size) in zip(keys, sizes.items(), strict=True)
    }


def loss_fn(params, rows):
    inputs = params["embed"][rows[:, :-1]].reshape(len(rows), -1)
    logits = jax.nn.gelu(inputs @ params["hidden"]) @ params["out"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, -1]).mean()
    return loss, loss


def read_rows(place, step):
    """Rows of one node in one step: others draw other ones."""
    return draw_rows(TEXT[:EXAMPLES], (place, step))


def read_held_out(place):
    """Rows of one node on which it does not train."""
    return draw_rows(HELD_OUT, place, 8 * BATCH)


def draw_rows(text, seed, count=BATCH):
    starts = np.random.default_rng(seed).integers(len(text) - CONTEXT, size=count)
    return np.stack([text[start : start + CONTEXT + 1] for start in starts]).astype(np.int32)
