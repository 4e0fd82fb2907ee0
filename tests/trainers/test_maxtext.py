"""MaxText 0.2.5, unmodified, on nodes that gossip: training, its checkpoints, and going on."""

import itertools
import json
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

# pyright: reportMissingImports=false
maxtext = pytest.importorskip("maxtext")

with warnings.catch_warnings(action="ignore"):  # of packages that MaxText imports
    from absl import flags
    from flax import nnx
    from flax.core.spmd import logical_axis_rules
    from maxtext.input_pipeline import olmo_data
    from maxtext.trainers.pre_train import train
    from maxtext.utils import maxtext_utils, train_utils
    from maxtext.utils.sharding import get_input_data_sharding

    from tests.trainers import maxtext_program

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore")]
VOCABULARY, LENGTH, BATCH = 64, 32, 16  # of all nodes together
STEPS = 16


def write_tokens(folder, seed):
    """Sequences in which each token has two successors: the loss of a model can fall to log 2."""
    successors = np.random.default_rng(0).integers(VOCABULARY, size=(VOCABULARY, 2))
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(VOCABULARY, size=4096)]
    for _ in range(LENGTH - 1):
        tokens.append(successors[tokens[-1], rng.integers(2, size=4096)])
    path = folder / f"{seed}.npy"
    np.save(path, np.stack(tokens, axis=1).reshape(-1).astype("uint32"))
    index = olmo_data.build_index([(str(path), "")], LENGTH, tokenizer="")
    index.save(str(folder / f"{seed}.json"))


def make_argv(folder, name, steps=STEPS, **settings):
    """A command line of MaxText: base.yml, a tiny decoder that scans over four layers."""
    given = {
        "run_name": name,
        "steps": steps,
        "base_output_directory": folder,
        "metrics_file": folder / f"{name}.jsonl",
        "dataset_type": "olmo_grain",
        "olmo_index_path": folder / "1.json",
        "olmo_apply_ngram_filter": False,
        "grain_worker_count": 0,
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "vocab_size": VOCABULARY,
        "max_target_length": LENGTH,
        "per_device_batch_size": BATCH // jax.device_count(),
        "base_emb_dim": 32,
        "base_mlp_dim": 64,
        "base_num_decoder_layers": 4,
        "base_num_query_heads": 2,
        "base_num_kv_heads": 2,
        "head_dim": 16,
        "attention": "dot_product",
        "dtype": "float32",
        "learning_rate": 1e-2,
        "learning_rate_schedule_steps": 64,
        "sharding_tolerance": 1.0,
        "checkpoint_period": STEPS,
        "async_checkpointing": False,
        "enable_tensorboard": False,
        "enable_goodput_recording": False,
        "monitor_goodput": False,
        **settings,
    }
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    return ["", str(base), *(f"{key}={value}" for key, value in given.items())]


def run_nodes(argv, method):
    config, recorder = train.initialize(argv)
    return maxtext_program.train_loop(config, recorder, method)


def read_metrics(folder, name, key="learning/loss"):
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)[key] for line in lines]


def evaluate(folder, state=None, batches=8, **settings):
    """The loss on new sequences of a state, or of a checkpoint of MaxText, by MaxText."""
    settings |= {"eval_interval": 1, "olmo_index_path": folder / "2.json"}
    argv = make_argv(folder, "evaluation", **settings)
    config, recorder = train.initialize(argv)
    setup = train_utils.setup_train_loop(config, recorder)
    shardings, mesh, batches_of, restored = setup[2], setup[4], setup[9], setup[10]
    graph, found = nnx.split(restored)
    place = get_input_data_sharding(config, mesh)
    program, *_ = maxtext_utils.get_functional_eval_with_signature(
        train.eval_step, place, shardings, graph, config
    )
    total = weights = 0
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        program = jax.jit(program)
        for batch in itertools.islice(batches_of, batches):
            metrics = program(found if state is None else state, jax.device_put(batch, place))
            total += metrics["scalar"]["evaluation/total_loss"]
            weights += metrics["scalar"]["evaluation/total_weights"]
    return float(total / weights)


@pytest.fixture(scope="module", autouse=True)
def _as_maxtext_expects():
    flags.FLAGS([""])  # grain reads a flag


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("maxtext")
    write_tokens(folder, 1)
    write_tokens(folder, 2)
    return folder


def spread(state):
    """How far the nodes are apart, beside the size of the parameters."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state.params)]
    apart = sum(np.square(x - x.mean(0)).sum() for x in leaves)
    return float(np.sqrt(apart / sum(np.square(x).sum() for x in leaves)))


@pytest.mark.parametrize("method", ["sgp", "streaming"])
def test_nodes_train_save_resume_and_maxtext_goes_on_from_the_average(folder, method):
    four = {"ici_diloco_parallelism": 4, "ici_fsdp_parallelism": 2}
    step, state = run_nodes(make_argv(folder, method, **four), method)
    losses = read_metrics(folder, method)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 1.5
    assert 1e-4 < spread(state) < 0.2  # the nodes differ, and do not part
    specs = {leaf.sharding.spec for leaf in jax.tree.leaves((state.params, state.rest))}
    assert any("fsdp" in spec and "diloco" in spec for spec in specs)

    # MaxText reads the average as its own checkpoint, on a mesh without nodes.
    alone = {"ici_fsdp_parallelism": jax.device_count()}
    expected = evaluate(folder, step.average(state), **four)
    checkpoint = folder / method / "checkpoints" / str(STEPS - 1) / "items"
    restored = evaluate(folder, load_full_state_path=checkpoint, **alone)
    np.testing.assert_allclose(restored, expected, rtol=1e-4)

    # Another number of nodes, and other axes inside a node.
    two = {"ici_diloco_parallelism": 2, "ici_fsdp_parallelism": 4, "learning_rate": 1e-9}
    step, resumed = run_nodes(make_argv(folder, method, STEPS + 1, **two), method)
    assert resumed.step == STEPS + 1
    after = evaluate(folder, step.average(resumed), **two)
    np.testing.assert_allclose(after, expected, rtol=1e-2)

    # MaxText's own program goes on from the average.
    train.main(make_argv(folder, method, STEPS + 4, **alone))
    later = read_metrics(folder, method)[-4:]
    assert max(later) < losses[0] - 1.5
