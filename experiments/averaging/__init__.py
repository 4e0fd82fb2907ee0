"""How fast topologies average, without training."""
