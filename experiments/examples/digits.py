"""The digits of the examples: 4,000 to train on and 1,000 to test."""

import jax
import numpy as np

from experiments import data


def draw_batches(batch_size, steps):
    """Batches as a loader makes them; on several processes each draws its share of the examples."""
    digits = data.load("mnist5k")
    processes = jax.process_count()
    rows = np.arange(jax.process_index(), len(digits.train_labels), processes)
    for step in range(steps):
        drawn = np.random.default_rng((step, rows[0])).choice(rows, batch_size // processes)
        yield {"image": digits.train_images[drawn], "label": digits.train_labels[drawn]}


def test_batch():
    """All test digits."""
    digits = data.load("mnist5k")
    return {"image": digits.test_images, "label": digits.test_labels}
