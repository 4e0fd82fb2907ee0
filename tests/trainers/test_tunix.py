"""Tunix's trainer on nodes: its loop, sharding, metrics, evaluation and checkpoints."""

import jax
import numpy as np
import pytest

pytest.importorskip("tunix")
pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]

from tests.trainers import tunix_plain, tunix_program  # noqa: E402

METHODS = {"sgp": tunix_program.make_sgp, "outer": tunix_program.make_outer}


def history(trainer, mode):
    return trainer.metrics_logger.get_metric_history("", "loss", mode)


@pytest.mark.parametrize("method", METHODS)
def test_tunix(method, tmp_path, spread):
    make_tx = METHODS[method]

    def train(name, steps, size):
        return tunix_program.main(tmp_path / name, steps, 12, size, make_tx)

    def saved(what):
        return sorted(int(path.name) for path in (tmp_path / "run" / what).glob("[0-9]*"))

    whole = train("whole", 24, 4)
    losses, evals = history(whole, "train"), history(whole, "eval")
    assert (len(losses), len(evals)) == (24, 3)
    assert losses[-1] < losses[0] - 0.1
    assert evals[-1] < evals[0] - 0.1
    params = whole.state.params
    assert 1e-4 < spread(params) < 0.2
    query = params["layers"][0]["attn"]["q_proj"]["w"]
    assert (query.shape, tuple(query.sharding.spec)) == ((4, 32, 4, 8), ("nodes", "fsdp"))
    assert list((tmp_path / "whole/metrics").glob("events*"))

    # Stopped and continued is the same run, bit for bit.
    train("run", 12, 4)
    four = train("run", 24, 4)
    assert saved("checkpoints") == saved("nodes") == [12, 24]
    jax.tree.map(np.testing.assert_array_equal, four.state.arrays, whole.state.arrays)
    np.testing.assert_array_equal(history(four, "train"), losses[12:])

    # Two nodes go on from the average of four, and Tunix's own program from that of two.
    two = train("run", 36, 2)
    assert jax.tree.leaves(two.state.params)[0].shape[0] == 2
    np.testing.assert_allclose(history(two, "eval")[0], evals[-1], rtol=1e-5)
    one = tunix_plain.main(tmp_path / "run", 48, 12)
    np.testing.assert_allclose(history(one, "eval")[0], history(two, "eval")[-1], rtol=1e-5)
    assert history(one, "eval")[-1] < history(two, "eval")[0] < evals[0] - 0.1
    assert len(history(two, "train")) == len(history(one, "train")) == 12
    assert saved("checkpoints") == [12, 24, 36, 48]
