"""Kauldron's trainer on nodes: its loop, sharding, metrics, evaluators and checkpoints."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

pytest.importorskip("kauldron")
pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("default")]

from absl import flags  # noqa: E402
from kauldron import kd  # noqa: E402
from kauldron.train.checkpoint_state import CheckpointState  # noqa: E402

from tests.trainers import kauldron_plain, kauldron_program  # noqa: E402

CONFIGS = {
    "sgp": kauldron_program.get_config,
    "outer": kauldron_program.get_outer_config,
}
STEPS = 20


@pytest.fixture(autouse=True)
def as_kauldron_starts():
    """Kauldron's main program parses flags."""
    flags.FLAGS.mark_as_parsed()


def make_trainer(cfg, folder, steps=STEPS):
    cfg.workdir = str(folder)
    cfg.num_train_steps = steps
    cfg.train_ds.batch_size = cfg.eval_ds.batch_size = 32
    cfg.log_metrics_every = cfg.log_summaries_every = 1  # one program
    cfg.checkpointer.save_interval_steps = STEPS // 2
    cfg.evals["eval"].num_batches = 4
    return kd.konfig.resolve(cfg)


def restore(trainer):
    like = CheckpointState(trainer.init_state(), trainer._chrono, iter(trainer.train_ds))
    return trainer.checkpointer.restore(like).train_state


def evaluate(trainer, state):
    result = trainer.evals["eval"].evaluate(state, 0).compute()
    return float(result.loss_values["losses/xent"])


@pytest.mark.parametrize("method", CONFIGS)
def test_kauldron(method, tmp_path, spread):
    get_config = CONFIGS[method]
    four = make_trainer(get_config(4), tmp_path / "four")
    before = evaluate(four, four.init_state())
    state, aux = four.train()
    assert int(state.step) == STEPS + 1
    kernel = state.params["blocks"]["Dense_0"]["kernel"]
    assert kernel.shape == (4, 4, 64, 64)
    assert kernel.sharding.spec == P("nodes", None, None, "devices")
    assert 0 < spread(state.params) < 0.5
    # Their metrics are of all nodes: of 32 examples of 16 signs. Their writer has them.
    assert aux.loss_states["xent"].count == aux.metric_states["accuracy"].count == 32 * 16
    assert aux.compute().loss_values["losses/xent"] < before - 0.2
    assert list((tmp_path / "four").glob("train/events*"))

    saved = restore(four)
    average = evaluate(four, saved)
    assert int(saved.step) == STEPS
    assert average < before - 0.2

    # Half of the nodes, with twice as many devices each.
    two = make_trainer(get_config(2), tmp_path / "two", STEPS + 2)
    kauldron_program.continue_as(four, two, size=2)
    halved = restore(two)
    assert halved.params["blocks"]["Dense_0"]["kernel"].shape == (2, 4, 64, 64)
    np.testing.assert_allclose(evaluate(two, halved), average, rtol=1e-4)
    state, aux = two.train()
    assert int(state.step) == STEPS + 3
    goes_on = float(aux.compute().loss_values["losses/xent"])

    # Their own program, unmodified; it sees the same batches as the two nodes.
    plain = make_trainer(kauldron_plain.get_config(), tmp_path / "plain", STEPS + 2)
    kauldron_program.continue_as(four, plain)
    np.testing.assert_allclose(evaluate(plain, restore(plain)), average, rtol=1e-4)
    state, aux = plain.train()
    assert int(state.step) == STEPS + 3
    assert state.params["blocks"]["Dense_0"]["kernel"].shape == (4, 64, 64)
    assert abs(aux.compute().loss_values["losses/xent"] - goes_on) < 0.3
