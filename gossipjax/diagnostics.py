"""Diagnostics of nodes: how far they are from their average. Inside a per-node function."""

from gossipjax.models import consensus_distance, layer_consensus_distance, total_mass
from gossipjax.renamed import old_names

__all__ = ["consensus_distance", "layer_consensus_distance", "total_mass"]
__getattr__ = old_names("diagnostics")
