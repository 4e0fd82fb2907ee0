"""Programs that import a trainer are imported by its test alone, as doctests import all modules."""

import jax
import numpy as np
import pytest

collect_ignore_glob = ["*_plain.py", "*_program.py"]


@pytest.fixture(scope="module", autouse=True)
def types_and_ranks_are_promoted():
    """The code of trainers does so, also in threads."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def spread():
    """`spread(params)`: how far nodes are from their mean, over how far the mean is from zero."""

    def measure(params):
        leaves = [np.asarray(x) for x in jax.tree.leaves(params)]
        rows = np.concatenate([x.reshape(len(x), -1) for x in leaves], 1)
        return np.linalg.norm(rows - rows.mean(0), axis=1).max() / np.linalg.norm(rows.mean(0))

    return measure
