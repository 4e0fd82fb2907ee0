"""Prints golden logits of the image models, computed with torch and torchvision in float64.

    python tests/experiments/golden/make_image_models.py

Only this program needs torch (made with torch 2.15.0, torchvision 0.29.2, on CPU): the tests take
`make_array` from here and compare with the values that this printed. ResNet-18 and -50 are
torchvision's; ResNet-20 is torchvision's basic block with shortcuts of option A; VGG-11 is built
of torch's layers. Names are translated to those of the flax models, and every array is filled by
`make_array`, so that both sides have the same weights.
"""

import importlib
import re
import zlib
from typing import Any

import numpy as np

IMAGES_SHAPES = {
    "resnet50": (2, 64, 64, 3),
    "resnet18": (2, 64, 64, 3),
    "resnet20": (2, 32, 32, 3),
    "vgg11": (2, 32, 32, 3),
}
CLASSES = {"resnet50": 1000, "resnet18": 1000, "resnet20": 10, "vgg11": 10}
VGG_CHANNELS = [[64], [128], [256, 256], [512, 512], [512, 512]]


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


def flax_path(name: str) -> str:
    """Translates the name of a torch parameter or buffer.

    >>> flax_path("layer2.0.downsample.1.running_var")
    'stage2_block1/shortcut_norm/var'
    """
    *modules, leaf = name.split(".")
    layer = ".".join(modules)
    block = re.match(r"layer(\d)\.(\d+)\.", layer)
    prefix = f"stage{block[1]}_block{int(block[2]) + 1}/" if block else ""
    layer = (
        layer[block.end() :]
        if block
        else {"conv1": "stem_conv", "bn1": "stem_norm"}.get(layer, layer)
    )
    layer = {"downsample.0": "shortcut_conv", "downsample.1": "shortcut_norm"}.get(layer, layer)
    is_norm = layer.startswith("bn") or layer.endswith("norm")
    layer = {"fc": "classifier"}.get(layer, layer).replace("bn", "norm").replace("__", "/")
    leaves = {"weight": "scale" if is_norm else "kernel", "running_mean": "mean"}
    return f"{prefix}{layer}/{leaves.get(leaf, leaf.replace('running_', ''))}"


def fill(torch: Any, model: Any) -> Any:
    """Sets every parameter and every running statistic by `make_array`; returns the model."""
    state = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            state[name] = tensor
            continue
        shape = tuple(tensor.shape)
        if tensor.dim() == 4:  # [out, in, height, width]
            shape = (*shape[2:], shape[1], shape[0])
        array = make_array(flax_path(name), shape if tensor.dim() != 2 else shape[::-1])
        array = array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T
        state[name] = torch.tensor(array.copy(), dtype=torch.float64)
    model = model.double()
    model.load_state_dict(state)
    return model


def make_resnet20(torch: Any, resnet: Any) -> Any:
    nn = torch.nn

    class Shortcut(nn.Module):
        def forward(self, x: Any) -> Any:
            half = x[:, :, ::2, ::2]
            return torch.cat([half, torch.zeros_like(half)], dim=1)

    layers = {"conv1": nn.Conv2d(3, 16, 3, padding=1, bias=False), "bn1": nn.BatchNorm2d(16)}
    layers["relu"] = nn.ReLU()
    for stage, features in enumerate((16, 32, 64), start=1):
        first = (
            resnet.BasicBlock(16, 16)
            if stage == 1
            else resnet.BasicBlock(features // 2, features, stride=2, downsample=Shortcut())
        )
        rest = [resnet.BasicBlock(features, features) for _ in range(2)]
        layers[f"layer{stage}"] = nn.Sequential(first, *rest)
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(64, 10)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def make_vgg11(torch: Any) -> Any:
    nn = torch.nn
    model = nn.Sequential()
    channels = 3
    for stage, widths in enumerate(VGG_CHANNELS, start=1):
        for index, width in enumerate(widths, start=1):
            conv = nn.Conv2d(channels, width, 3, padding=1)
            model.add_module(f"stage{stage}__conv{index}", conv)
            model.add_module(f"relu{stage}{index}", nn.ReLU())
            channels = width
        model.add_module(f"pool{stage}", nn.MaxPool2d(2))
    model.add_module("flatten", nn.Flatten())
    for name in ("dense1", "dense2"):
        model.add_module(name, nn.Linear(512, 512))
        model.add_module(f"relu_{name}", nn.ReLU())
    model.add_module("classifier", nn.Linear(512, 10))
    return model


def main() -> None:
    torch = importlib.import_module("torch")
    resnet = importlib.import_module("torchvision.models.resnet")
    models = {
        "resnet50": resnet.resnet50(),
        "resnet18": resnet.resnet18(),
        "resnet20": make_resnet20(torch, resnet),
        "vgg11": make_vgg11(torch),
    }
    for name, model in models.items():
        fill(torch, model)
        images = make_array("images", IMAGES_SHAPES[name]).transpose(0, 3, 1, 2)
        inputs = torch.tensor(images.copy(), dtype=torch.float64)
        columns = np.linspace(0, CLASSES[name] - 1, 4).astype(int)
        with torch.no_grad():
            for mode in ("eval", "train") if name != "vgg11" else ("eval",):
                logits = model.train(mode == "train")(inputs).numpy()
                print(name, mode, np.round(logits[:, columns], 6).tolist())


if __name__ == "__main__":
    main()
