"""The models that the experiments train."""

from functools import partial

from experiments.models.layers import decay_mask
from experiments.models.linear import Linear
from experiments.models.mlp import MLP
from experiments.models.resnet import ResNet, ResNetCifar
from experiments.models.small_cnn import Normalization, SmallCNN
from experiments.models.vgg import VGG11

__all__ = [
    "MLP",
    "MODELS",
    "VGG11",
    "Linear",
    "Normalization",
    "ResNet",
    "ResNetCifar",
    "SmallCNN",
    "decay_mask",
]

MODELS = {
    "small_cnn": SmallCNN,
    "linear": Linear,
    "mlp": MLP,
    "resnet20": partial(ResNetCifar, depth=20),
    "resnet56": partial(ResNetCifar, depth=56),
    "vgg11": VGG11,
    "resnet18": partial(ResNet, stages=(2, 2, 2, 2), bottleneck=False),
    "resnet50": ResNet,
}
"""The classifiers of images by name. Each takes `(classes, dtype, param_dtype, normalization)`;
those for CIFAR and ImageNet take `remat` too. "vgg11" needs a key for its dropout in training."""
