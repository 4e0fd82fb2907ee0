"""Methods for data that differ between the nodes, a file each."""

from gossipjax.algorithms.uneven_data import (
    d2,
    gradient_tracking,
    mixed_momentum,
    quasi_global,
    relay,
)

__all__ = ["d2", "gradient_tracking", "mixed_momentum", "quasi_global", "relay"]
