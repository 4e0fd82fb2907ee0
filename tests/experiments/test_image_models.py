"""The image models: sizes, precision, training, and values against an independent implementation.

`EVALUATION` and `TRAINING` are four logits (at the first, the last and two classes in between) of
two images, in float64, of torch 2.15.0 and torchvision 0.29.2 on a CPU. ResNet-18 and -50 are
torchvision's, ResNet-20 its basic block with shortcuts of option A, VGG-11 torch's layers. The
weights, the running statistics and the images came from `make_array`, there as here; the program is
in the history of this repository, as tests/experiments/golden/make_image_models.py.
"""

import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.models import MODELS, VGG11, ResNet, decay_mask

EVALUATION = {
    "resnet50": [
        [-5567.899199, 2369.97762, -1993.829368, -448.099217],
        [-5395.16759, 2487.393711, -1968.502945, -644.136033],
    ],
    "resnet18": [
        [-56.250594, -4.505296, -59.158572, 11.973599],
        [-50.727868, -4.866749, -53.168109, 8.10332],
    ],
    "resnet20": [
        [-29.989078, -5.390341, -71.852519, 31.140197],
        [-28.335065, -4.352043, -70.217381, 29.93594],
    ],
    "vgg11": [[-1.120789, 3.245245, 1.687028, 0.252789], [-1.03192, 2.841836, 2.009032, 0.360219]],
}
# Of ResNet-20, whose BatchNorm is by the statistics of the two images.
TRAINING = [
    [-3.290031, 0.196144, -1.891186, -1.984421],
    [-3.041441, 0.204943, -1.333505, -2.101513],
]

SIZES = {"resnet50": 64, "resnet18": 64, "resnet20": 32, "vgg11": 32}
IMAGES_SHAPES = {name: (2, size, size, 3) for name, size in SIZES.items()}
CLASSES = {"resnet50": 1000, "resnet18": 1000, "resnet20": 10, "vgg11": 10}
CIFAR = (1, 32, 32, 3)
SMALL = {
    "basic": ResNet(classes=8, stages=(1, 1), bottleneck=False, width=8),
    "bottleneck": ResNet(classes=8, stages=(1, 1), width=8),
}


def make_array(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a float32 array that depends on its path and shape alone.

    `u`, uniform in [0, 1), comes from the raw 64-bit words of Philox keyed by the CRC-32 of the
    path, which no version of NumPy changes. Kernels are `(2u - 1) sqrt(6 / fan_in)`, scales and
    variances `0.5 + u`, biases and means `0.2u - 0.1`, images `2u - 1`.

    Args:
        path: flax's path without the collection, such as "stage1_block1/conv1/kernel".
        shape: flax's shape: kernels `[height, width, in, out]` and `[in, out]`.
    """
    words = np.random.Philox(key=zlib.crc32(path.encode())).random_raw(int(np.prod(shape)))
    u = (words >> np.uint64(11)).astype(np.float64).reshape(shape) / 2.0**53
    name = path.split("/")[-1]
    if name == "kernel":
        values = (2 * u - 1) * np.sqrt(6 / np.prod(shape[:-1]))
    elif name in ("scale", "var"):
        values = 0.5 + u
    elif name in ("bias", "mean"):
        values = 0.2 * u - 0.1
    else:
        values = 2 * u - 1
    return values.astype(np.float32)


def init_shapes(model, images_shape):
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(images_shape))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_takes_the_same_attributes(name):
    model = MODELS[name](7, jnp.bfloat16, jnp.float32, "batch")
    variables = init_shapes(model, (2, 28, 28, 1))
    logits = jax.eval_shape(model.apply, variables, jnp.zeros((2, 28, 28, 1)))
    assert (logits.shape, logits.dtype) == ((2, 7), jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    lines = f"{jax.make_jaxpr(model.apply)(variables, jnp.zeros((2, 28, 28, 1)))}".splitlines()
    products = [x for x in lines if re.search("= (conv_general_dilated|dot_general)", x)]
    assert products
    assert all("bf16" in line for line in products)


def make_golden_variables(name):
    """The model, with the weights of the golden values."""
    model = MODELS[name](classes=CLASSES[name])
    shapes = init_shapes(model, IMAGES_SHAPES[name])

    def fill(path, leaf):
        return make_array(jax.tree_util.keystr(path[1:], simple=True, separator="/"), leaf.shape)

    return model, jax.tree_util.tree_map_with_path(fill, shapes)


@pytest.mark.parametrize("name", EVALUATION)
def test_evaluates_as_an_independent_implementation(name):
    model, variables = make_golden_variables(name)
    images = make_array("images", IMAGES_SHAPES[name])
    with jax.default_matmul_precision("highest"):
        logits = np.asarray(jax.jit(model.apply)(variables, images))
    columns = np.linspace(0, CLASSES[name] - 1, 4).astype(int)
    scale = np.abs(EVALUATION[name]).max()
    np.testing.assert_allclose(logits[:, columns] / scale, EVALUATION[name] / scale, atol=2e-6)


def test_trains_as_an_independent_implementation():
    """In float64: means over as few as eight values amplify the rounding of float32 to 2e-4."""
    model, variables = make_golden_variables("resnet20")
    images = make_array("images", IMAGES_SHAPES["resnet20"])
    with jax.enable_x64(True):
        model = model.clone(dtype=jnp.float64)
        apply = jax.jit(lambda v, x: model.apply(v, x, train=True, mutable=["batch_stats"])[0])
        logits = np.asarray(apply(variables, images))
    np.testing.assert_allclose(logits[:, ::3], TRAINING, atol=2e-6)


def test_blocks_for_imagenet_start_as_their_shortcuts():
    """Goyal et al., section 5.1: the last scale of each block starts at 0, the others at 1."""
    for name, last in (("basic", "norm2"), ("bottleneck", "norm3")):
        variables = jax.jit(SMALL[name].init)(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"]):
            keys = [key.key for key in path]
            if keys[-1] == "scale":
                assert (leaf == float(keys[-2] != last)).all(), keys


def test_initial_distributions():
    model = ResNet(classes=100, stages=(1,), width=64)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))["params"]
    for kernel, deviation in (
        (params["stem_conv"]["kernel"], np.sqrt(2 / (7 * 7 * 64))),
        (params["stage1_block1"]["conv2"]["kernel"], np.sqrt(2 / (3 * 3 * 64))),
        (params["classifier"]["kernel"], 0.01),
    ):
        assert np.std(kernel) == pytest.approx(deviation, rel=0.05)
        assert np.abs(np.mean(kernel)) < 0.05 * deviation
        assert np.abs(kernel).max() > 3 * deviation  # not cut off
    assert not params["classifier"]["bias"].any()


def test_dropout_is_drawn_in_training_alone():
    model = VGG11(width=4)
    images = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
    variables = jax.jit(model.init)(jax.random.key(0), images)
    apply = jax.jit(model.apply, static_argnames="train")
    evaluated = apply(variables, images)
    first, same, other = (
        apply(variables, images, train=True, rngs={"dropout": jax.random.key(seed)})
        for seed in (0, 0, 1)
    )
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, evaluated)
    with pytest.raises(ValueError, match=r"key for dropout.*got none.*dropout=0"):
        model.apply(variables, images, train=True)
    without = jax.jit(model.clone(dropout=0.0).apply, static_argnames="train")
    np.testing.assert_allclose(without(variables, images, train=True), evaluated, atol=1e-6)


def test_decay_leaves_biases_and_scales_alone():
    """Those of all nodes, too, which have one dimension more."""
    shapes = init_shapes(SMALL["bottleneck"], CIFAR)["params"]
    params = jax.tree.map(lambda leaf: np.full((4, *leaf.shape), 2, np.float32), shapes)
    assert jax.tree.leaves(decay_mask(shapes)) == jax.tree.leaves(decay_mask(params))
    tx = optax.add_decayed_weights(0.5, mask=decay_mask)
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = tx.update(zeros, tx.init(params), params)

    def check(path, update, param):
        expected = 0.5 * param if path[-1].key == "kernel" else 0 * param
        np.testing.assert_array_equal(update, expected, err_msg=str(path))

    jax.tree_util.tree_map_with_path(check, updates, params)
