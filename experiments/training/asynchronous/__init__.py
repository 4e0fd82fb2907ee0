"""Training by nodes that are programs of their own and wait for nobody."""

from experiments.training.asynchronous.job import run_asynchronously
from experiments.training.asynchronous.methods import ASYNCHRONOUS, is_asynchronous

__all__ = ["ASYNCHRONOUS", "is_asynchronous", "run_asynchronously"]
