"""The models that the experiments train.

In all of them `dtype` is the type that products are computed in, and `param_dtype` the type of the
parameters; logits, softmax and the running statistics of BatchNorm are float32 in any case. With
`remat` the backward pass computes the inside of blocks again instead of keeping it: about a third
more computation, and less memory. Parameters have the same names either way.
"""

from functools import partial

from experiments.models.layers import Normalization as Normalization
from experiments.models.layers import decay_mask as decay_mask
from experiments.models.resnet import ResNet, ResNetCifar
from experiments.models.small import MLP, Linear, SmallCNN
from experiments.models.vgg import VGG11

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
