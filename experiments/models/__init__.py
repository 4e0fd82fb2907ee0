"""The models that the experiments train."""

from experiments.models.linear import Linear
from experiments.models.small_cnn import Normalization, SmallCNN

__all__ = ["MODELS", "Linear", "Normalization", "SmallCNN"]

MODELS = {"small_cnn": SmallCNN, "linear": Linear}
"""The classifiers of images by name, all with the same attributes."""
