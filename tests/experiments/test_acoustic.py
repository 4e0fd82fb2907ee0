"""The acoustic model, against PyTorch's LSTM and the paper's size."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.acoustic import AcousticLSTM, AcousticSize

TINY = AcousticSize(layers=2, cells=4, projection=3)
TINY_FEATURES = 3
TINY_STATES = 2


def fill(shape, number):
    """The rule for the weights and the inputs of the comparison."""
    return 0.5 * np.sin(number + np.arange(np.prod(shape)) ** 2).reshape(shape)


# Computed with PyTorch 2.13 in float64 by
#
#     lstm = torch.nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
#     projection = torch.nn.Linear(8, 3)
#     states = torch.nn.Linear(3, 2)
#     states(projection(lstm(fill((2, 5, 3), 100))[0]))
#
# where parameter number i of the three modules' `named_parameters()` is `fill(shape, i)`.
PYTORCH_LOGITS = np.reshape(
    [
        *(0.172939, 0.093664, 0.164977, 0.074522, 0.15867, 0.073054, 0.159761, 0.05669),
        *(0.173887, 0.039138, 0.172537, 0.105462, 0.165822, 0.08298, 0.15967, 0.061551),
        *(0.164331, 0.056899, 0.18202, 0.037706),
    ],
    (2, 5, 2),
)


def convert_cell(inputs, number):
    """PyTorch's parameters of one direction, `number` to `number + 3`, as those of flax."""
    cells = TINY.cells
    weights = {"i": fill((4 * cells, inputs), number), "h": fill((4 * cells, cells), number + 1)}
    bias = fill(4 * cells, number + 2) + fill(4 * cells, number + 3)
    parameters = {}
    for gate, name in enumerate("ifgo"):
        rows = slice(gate * cells, (gate + 1) * cells)
        parameters[f"i{name}"] = {"kernel": weights["i"][rows].T}
        parameters[f"h{name}"] = {"kernel": weights["h"][rows].T, "bias": bias[rows]}
    return parameters


def convert_dense(inputs, outputs, number):
    return {"kernel": fill((outputs, inputs), number).T, "bias": fill(outputs, number + 1)}


def test_forward_pass_is_that_of_pytorch():
    width = 2 * TINY.cells
    parameters = {
        "forward_0": convert_cell(TINY_FEATURES, 0),
        "backward_0": convert_cell(TINY_FEATURES, 4),
        "forward_1": convert_cell(width, 8),
        "backward_1": convert_cell(width, 12),
        "projection": convert_dense(width, TINY.projection, 16),
        "output": convert_dense(TINY.projection, TINY_STATES, 18),
    }
    parameters = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), parameters)
    frames = jnp.asarray(fill((2, 5, TINY_FEATURES), 100), jnp.float32)
    model = AcousticLSTM(TINY_STATES, TINY)
    logits = jax.jit(model.apply)({"params": parameters}, frames)
    np.testing.assert_allclose(logits, PYTORCH_LOGITS, atol=1e-5)
